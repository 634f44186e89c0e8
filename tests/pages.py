"""The documentation's pages, for tests that what they show is true."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def read_page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def run_examples(name: str) -> None:
    """Run the Python blocks of a page in order, as a reader would who copies them one below the other."""
    blocks = re.findall(r"^```python\n(.*?)^```$", read_page(name), flags=re.DOTALL | re.MULTILINE)
    assert blocks, f"{name} has no examples"
    exec(compile("\n".join(blocks), name, "exec"), {})
