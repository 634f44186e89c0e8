"""The explanation is true: its code runs and agrees with the ops, and draws the picture that it shows."""

from tests.pages import DOCS, run_examples

PAGE = "how-it-works.md"


def test_code_runs_and_draws_the_picture(tmp_path, monkeypatch):
    import matplotlib

    matplotlib.use("svg")
    monkeypatch.chdir(tmp_path)
    run_examples(PAGE)
    shown = (DOCS / "assets" / "weights.svg").read_text(encoding="utf-8")
    drawn = (tmp_path / "weights.svg").read_text(encoding="utf-8")
    assert drawn.count("<image") == shown.count("<image") == 4
