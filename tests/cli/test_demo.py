"""`latte demo`: what it prints and the report it writes."""

import json
import re
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import NamedTuple

import pytest

from latte.cli import main


class Shown(NamedTuple):
    """What one run of the demo left behind."""

    out: str
    err: str
    report: str


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "report.html"
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        assert main(["demo", "--quick", "--output", str(path)]) == 0
    return Shown(out.getvalue(), err.getvalue(), path.read_text(encoding="utf-8"))


def test_report_has_every_part(shown):
    report = shown.report
    assert re.findall(r"<h2>(.*?)</h2>", report) == [
        "Attention is a probability",
        "Cut = whole",
        "Linear time",
        "Constant memory",
    ]
    assert report.count("<svg") == 4  # three heat maps and a curve
    assert "prefers-color-scheme: dark" in report


def test_report_loads_nothing_from_elsewhere(shown):
    assert not re.search(r"https?://|<script|<link|<img|@import|url\(", shown.report)


def test_results_go_to_stdout_and_progress_to_stderr(shown):
    assert "rows sum to 1" in shown.out
    assert "Macchiato" in shown.out
    assert "report.html" not in shown.out
    assert "report.html" in shown.err


def test_json_is_one_document_that_tells_the_truth(tmp_path, capsys):
    path = tmp_path / "report.html"
    assert main(["demo", "--quick", "--json", "--output", str(path)]) == 0
    tour = json.loads(capsys.readouterr().out)
    assert tour["report"] == str(path)
    assert {reading["name"] for reading in tour["readings"]} == {"Latte", "Window", "Macchiato"}
    for reading in tour["readings"]:
        assert all(sum(row) == pytest.approx(1, abs=1e-5) for row in reading["weights"])
    assert all(cut["largest_difference"] < 1e-5 for cut in tour["cuts"])
    short, long = (step for step in tour["steps"] if step["name"] == "Latte")
    assert short["context"] < long["context"]
    assert short["state_bytes"] == long["state_bytes"]


def test_output_in_a_missing_directory_is_refused_before_any_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("latte.analysis.tour.take_tour", lambda **_: pytest.fail("work began"))
    path = tmp_path / "nowhere" / "report.html"
    assert main(["demo", "--output", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_output_that_is_a_directory_is_refused(tmp_path, capsys):
    assert main(["demo", "--output", str(tmp_path)]) == 2
    assert "--output" in capsys.readouterr().err
