"""The documentation: tables and plot come from the results, and the examples run."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import docs, plots
from benchmarks.rows import Report, Row
from tests.pages import read_page, run_examples

ROOT = Path(__file__).parents[2]
OPS = read_page("ops.md")


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


def model_sample() -> dict:
    """A document of whole models, with figures that mean nothing."""
    rows = [
        Row(table, {"model": model, "by": by, "context": context, "batch": 1, "ms_per_step": 2.0, "tokens_per_s": 5.0})
        for table, names in (
            ("Training", ("latte-r-swa++", "transformer++")),
            ("Forward, larger shapes", ("Latte-R-SWA++ 2.6B", "Transformer++ 2.6B", "Latte-R-SWA++ 400M")),
            ("One more token", ("latte-r-swa++", "transformer++")),
        )
        for model in names
        for by in ("latte" if "latte" in model.lower() else "SDPA FlashAttention",)
        for context in (1024, 4096)
    ]
    rows.append(Row("Training", {"model": "x", "by": "latte", "context": 1024}, status="skipped", note="out of time"))
    return sample("cuda") | {"rows": [row.as_dict() for row in rows]}


def test_models_have_sections_and_pictures_once_they_are_measured(tmp_path):
    docs.main(write(tmp_path / "results", "h200-model.json", model_sample()), tmp_path)
    page = (tmp_path / "benchmarks.md").read_text(encoding="utf-8")
    assert "## Training and forward, on an NVIDIA H200\n" in page
    assert "## One more token, on a CPU\n" not in page
    for path in (plots.STEP, plots.TRAINING, plots.FIGURE):
        assert f"]({path})" in page
        assert ElementTree.parse(tmp_path / path).getroot().tag.endswith("svg")
    figure = (tmp_path / plots.FIGURE).read_text(encoding="utf-8")
    assert all(words in figure for words in ("2.6B parameters", "400M parameters", "Latte-R-SWA++"))


def test_without_models_the_page_does_not_speak_of_them(tmp_path):
    docs.main(write(tmp_path / "results", "cpu-ops.json", sample("cpu")), tmp_path)
    assert "Whole models" not in (tmp_path / "benchmarks.md").read_text(encoding="utf-8")
    assert not (tmp_path / plots.FIGURE).exists()


def test_lines_of_models():
    found = {"Training and forward, on a CPU": model_sample()}
    assert plots.by_context(found, "Training", "tokens_per_s") == {
        "a CPU": {
            "latte-r-swa++": [(1024, 5.0), (4096, 5.0)],
            "transformer++ (SDPA FlashAttention)": [(1024, 5.0), (4096, 5.0)],
        }
    }
    assert {size: set(lines) for size, lines in plots.by_size(found).items()} == {
        "2.6B parameters": {"Latte-R-SWA++", "Transformer++"},
        "400M parameters": {"Latte-R-SWA++"},
    }
    assert set(plots.one_more_token(found)) == {"a CPU, batch 1"}


def test_remarks_of_a_file_are_shown(tmp_path):
    remarked = sample("cpu") | {"remarks": ["one row was taken out", "another peer is faster"]}
    docs.main(write(tmp_path / "results", "cpu-ops.json", remarked), tmp_path)
    page = (tmp_path / "benchmarks.md").read_text(encoding="utf-8")
    assert "- one row was taken out\n- another peer is faster\n" in page


def test_curves_have_every_contender():
    lines = plots.curves(sample("cuda"), "forward")
    assert lines == {
        "Latte": [(1024, 512.0), (4096, 2048.0)],
        "softmax attention (SDPA FlashAttention)": [(1024, 1024.0), (4096, 4096.0)],
        "window (FlexAttention, compiled)": [(4096, pytest.approx(1e6 / 8192))],
    }
    assert len(plots.curves(sample("cuda"), "forward+backward")) == 2


@pytest.mark.parametrize(("tokens", "text"), [(1024, "1K"), (65536, "64K"), (1048576, "1M")])
def test_lengths_as_text(tokens, text):
    assert plots.length(tokens) == text


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
    run_examples("ops.md")
    printed = capsys.readouterr().out.strip()
    assert f"print(error)  # {printed}\n" in OPS


def test_every_public_op_is_described():
    from latte import ops

    for name in ops.__all__:
        if name.endswith("State"):
            assert f"`{name}(" in OPS
        elif not name.endswith("Output"):
            assert f"### {name}\n" in OPS
            assert f"{name}(" in OPS.partition(f"### {name}\n")[2].partition("###")[0]
