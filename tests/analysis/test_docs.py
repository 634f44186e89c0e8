"""The examples of the documentation run, and what it says of thresholds is true."""

import re
from pathlib import Path

from latte.analysis.inspection import REPORT_BYTES, SHOWN
from latte.analysis.reach import SAMPLED_TOKENS, SAMPLES_PER_LAG
from latte.analysis.records import NEAREST
from latte.analysis.rows import LONGEST_MATRIX
from latte.analysis.usage import COLLAPSE_THRESHOLD, IDLE_THRESHOLD

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "inspect.md").read_text(encoding="utf-8")


def test_examples_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 4
    exec(compile("\n".join(blocks), "inspect.md", "exec"), {})


def test_numbers_are_those_of_the_code():
    said = " ".join(PAGE.split())
    assert f"above {COLLAPSE_THRESHOLD}" in said
    assert f"less than {100 * IDLE_THRESHOLD:g} %" in said
    assert f"{LONGEST_MATRIX:,} tokens" in said
    assert f"{SHOWN:,} tokens" in said
    assert f"{REPORT_BYTES // 2**20} MiB" in said
    assert (NEAREST, SAMPLES_PER_LAG, SAMPLED_TOKENS) == (8, 64, 512)
    assert "eight largest" in said
    assert "512 evenly spaced tokens" in said


def test_figures_are_there_and_small():
    figures = re.findall(r"!\[.*?\]\((assets/.*?)\)", PAGE, flags=re.DOTALL)
    assert len(figures) >= 4
    for figure in figures:
        assert (DOCS / figure).stat().st_size < 200_000, figure
