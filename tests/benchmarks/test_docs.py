"""The documentation: tables and plot come from the results, and the examples run."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import docs
from benchmarks.rows import Report, Row

ROOT = Path(__file__).parents[2]
OPS = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")


def sample(device: str, quick: bool = False) -> dict:
    """A document as a run would write it, with figures that mean nothing."""
    rows = [
        Row("Time per token", {
            "op": op, "by": by, "pass": what, "batch": 1, "tokens": tokens, "wall_ms": 0.5,
            "ns_per_token": slope * tokens,
        })
        for op, by, slope in (("Latte", "latte", 0.5), ("softmax attention", "SDPA FlashAttention", 1.0))
        for what in ("forward", "forward+backward")
        for tokens in (1024, 4096)
    ]  # fmt: skip
    rows.append(Row("Targets", {"what": "a | b", "value": 12.5}, "≥ 10×", "ok"))
    flex = {"op": "window", "by": "FlexAttention, compiled", "pass": "forward", "batch": 2, "tokens": 4096}
    rows.append(Row("32,768 tokens", flex | {"head_dim": 64, "wall_ms": 1.0, "device_ms": None}))
    rows.append(Row("32,768 tokens", flex | {"head_dim": 96, "wall_ms": 9.0, "device_ms": 9.0}))
    rows.append(Row("Time per token", {"op": "window", "by": "x", "pass": "forward"}, status="skipped", note="absent"))
    return Report({"threads": 2}, rows).document("the command", "cpu", quick) | {
        "device": device, "date": "2026-01-02", "machine": {"cpu": "a CPU", "cores": 2, "system": "x"},
    }  # fmt: skip


def write(folder: Path, name: str, document: dict) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(document), encoding="utf-8")
    return folder


def test_page_without_results_says_so(tmp_path):
    assert docs.main(tmp_path / "none", tmp_path) == 0
    page = (tmp_path / "benchmarks.md").read_text(encoding="utf-8")
    assert page.count("There are no results yet.") == 2
    assert "svg" not in page
    assert not (tmp_path / docs.PLOT).exists()


def test_page_and_plot_of_a_sample(tmp_path):
    results = write(tmp_path / "results", "cpu-ops.json", sample("cpu"))
    docs.main(results, tmp_path)
    page = (tmp_path / "benchmarks.md").read_text(encoding="utf-8")
    for words in ("2026-01-02", "a CPU, 2 cores", "the command", "| Latte | latte | forward | 1 | 1,024 | 0.5 |"):
        assert words in page
    assert "| a \\| b | 12.5 | ≥ 10× | ok |" in page
    assert page.count("There are no results yet.") == 1
    assert str(docs.PLOT) in page
    plot = (tmp_path / docs.PLOT).read_text(encoding="utf-8")
    assert ElementTree.fromstring(plot).tag.endswith("svg")
    assert all(words in plot for words in ("Latte", "softmax attention (SDPA FlashAttention)", "tokens in a sequence"))


def test_remarks_of_a_file_are_shown(tmp_path):
    remarked = sample("cpu") | {"remarks": ["one row was taken out", "another peer is faster"]}
    docs.main(write(tmp_path / "results", "cpu-ops.json", remarked), tmp_path)
    page = (tmp_path / "benchmarks.md").read_text(encoding="utf-8")
    assert "- one row was taken out\n- another peer is faster\n" in page


def test_curves_have_every_contender():
    lines = docs.curves(sample("cuda"), "forward")
    assert lines == {
        "Latte": [(1024, 512.0), (4096, 2048.0)],
        "softmax attention (SDPA FlashAttention)": [(1024, 1024.0), (4096, 4096.0)],
        "window (FlexAttention, compiled)": [(4096, pytest.approx(1e6 / 8192))],
    }
    assert len(docs.curves(sample("cuda"), "forward+backward")) == 2


@pytest.mark.parametrize(("tokens", "text"), [(1024, "1K"), (65536, "64K"), (1048576, "1M")])
def test_lengths_as_text(tokens, text):
    assert docs.length(tokens) == text


def test_the_same_results_give_the_same_files(tmp_path):
    results = write(tmp_path / "results", "h200-ops.json", sample("cuda"))
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        docs.main(results, tmp_path / folder)
    for name in ("benchmarks.md", docs.PLOT):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_quick_runs_are_no_results(tmp_path):
    results = write(tmp_path / "results", "cpu-ops.json", sample("cpu", quick=True))
    with pytest.raises(ValueError, match="--quick"):
        docs.main(results, tmp_path)


def test_the_page_is_that_of_the_results(tmp_path):
    """If this fails: run `make docs`, or python benchmarks/docs.py, and commit what it writes."""
    docs.main(docs=tmp_path)
    written = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert (tmp_path / "benchmarks.md").read_text(encoding="utf-8") == written
    assert (tmp_path / docs.PLOT).exists() == (ROOT / "docs" / docs.PLOT).exists()


def test_examples_run_in_order(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```$", OPS, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 6
    exec(compile("\n".join(blocks), "docs/ops.md", "exec"), {})
    printed = capsys.readouterr().out.strip()
    assert f"print(error)  # {printed}\n" in OPS


def test_every_public_op_is_described():
    import latte

    for name in latte.__all__:
        if name.endswith("State"):
            assert f"`{name}(" in OPS
        else:
            assert f"### {name}\n" in OPS
            assert f"{name}(" in OPS.partition(f"### {name}\n")[2].partition("###")[0]
