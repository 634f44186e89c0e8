"""What the documentation says of thresholds is true."""

import re

from latte.analysis.inspection import REPORT_BYTES, SHOWN
from latte.analysis.reach import SAMPLED_TOKENS, SAMPLES_PER_LAG
from latte.analysis.records import NEAREST
from latte.analysis.rows import LONGEST_MATRIX
from latte.analysis.usage import COLLAPSE_THRESHOLD, IDLE_THRESHOLD
from tests.pages import DOCS, read_page

PAGE = read_page("inspect.md")


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
