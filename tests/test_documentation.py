"""What holds for every page of the documentation: its examples run, its links lead somewhere, and it is listed."""

import re
import unicodedata

import pytest

from tests.pages import DOCS, read_page, run_examples

PAGES = sorted(path.name for path in DOCS.glob("*.md"))
EXAMPLES = {  # and how many there are at least
    "classification.md": 4, "convert-families.md": 1, "convert.md": 6, "evaluate.md": 1, "how-it-works.md": 10,
    "inspect.md": 4, "language-modelling.md": 1, "layers.md": 7, "models.md": 8, "ops.md": 6, "seq2seq.md": 4,
    "tasks.md": 3, "training.md": 2,
}  # fmt: skip
LOOKED_AT = {"ops.md", "evaluate.md", "how-it-works.md"}  # what these print or draw is checked where they are run


def anchors(name: str) -> set[str]:
    """Names of a page's headings in addresses, as Markdown makes them."""
    page = re.sub(r"^```.*?^```$", "", read_page(name), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", page, flags=re.MULTILINE)
    plain = (unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode() for heading in headings)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in plain}


def test_no_page_has_fewer_examples():
    counted = {name: read_page(name).count("\n```python\n") for name in PAGES}
    assert {name for name, count in counted.items() if count} == EXAMPLES.keys()
    assert {name: counted[name] for name, least in EXAMPLES.items() if counted[name] < least} == {}


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - LOOKED_AT))
def test_examples_run_in_order(name, tmp_path, monkeypatch):
    import matplotlib

    matplotlib.use("svg")
    monkeypatch.chdir(tmp_path)
    run_examples(name)


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\(([^)\s]+)\)", read_page(name)):
        if re.match(r"https?://", target):
            continue
        file, _, anchor = target.partition("#")
        assert (DOCS / (file or name)).exists(), target
        if anchor:
            assert anchor in anchors(file or name), target


def test_every_page_is_in_the_contents():
    listed = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    assert [name for name in PAGES if f": {name}\n" not in listed] == []
