"""`latte demo`: what it prints, the report it writes, and the model it leaves."""

import json
import re
from contextlib import redirect_stderr, redirect_stdout
from html import unescape
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pytest

from latte.cli import main


class Shown(NamedTuple):
    """What one run of the demo left behind."""

    story: dict
    err: str
    path: Path
    report: str


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "report.html"
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        assert main(["demo", "--quick", "--json", "--output", str(path)]) == 0
    return Shown(json.loads(out.getvalue()), err.getvalue(), path, path.read_text(encoding="utf-8"))


def test_report_has_every_part(shown):
    assert re.findall(r"<h2>(.*?)</h2>", shown.report) == [
        "It learns",
        "It writes",
        "Constant time and memory",
        "Its latents",
    ]
    outside, _, inside = shown.report.partition("<iframe")
    assert outside.count("<svg") == 2
    assert "prefers-color-scheme: dark" in outside
    page = unescape(inside)
    assert "<!doctype html>" in page.lower()
    assert "model.layers.3.attention" in page


def test_report_loads_nothing_from_elsewhere(shown):
    outside, _, _ = shown.report.partition("<iframe")  # the page within is tested on its own
    assert not re.search(r"https?://|<script|<link|<img|@import|url\(", outside)


def test_numbers_are_those_of_the_run(shown):
    story, folder = shown.story, shown.path.with_suffix("")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    validation = [record for record in records if record["split"] == "validation"]
    assert story["lesson"]["validation"] == [[record["tokens"], record["loss"]] for record in validation]
    assert story["lesson"]["bits_per_byte"] == validation[-1]["bits_per_byte"]
    assert f"{story['lesson']['bits_per_byte']:.2f} bits per byte" in shown.report
    assert story["lesson"]["steps"] == 12
    assert story["writing"]["state_bytes_before"] == story["writing"]["state_bytes_after"]
    macchiato, transformer = story["costs"]
    assert len(set(macchiato["cache_bytes"])) == 1
    assert transformer["cache_bytes"] == sorted(set(transformer["cache_bytes"]))
    assert min(macchiato["milliseconds"] + transformer["milliseconds"]) > 0


def test_the_model_goes_on(shown, capsys):
    assert main(["generate", shown.story["model"], "--prompt", "import", "--max-new-tokens", "3", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 3


def test_progress_goes_to_stderr(shown):
    assert "step 12" in shown.err
    assert str(shown.path) in shown.err


def test_the_story_is_printed(shown, capsys):
    from latte.analysis.report import Costs, Lesson, Story, Writing
    from latte.cli.demo import print_story

    story = shown.story
    costs = [Costs(**costs) for costs in story["costs"]]
    print_story(
        Story(Lesson(**story["lesson"]), Writing(**story["writing"]), story["contexts"], costs, story["setting"])
    )
    printed = capsys.readouterr().out
    assert "macchiato-tiny" in printed
    assert f"{costs[1].cache_bytes[-1]:,}" in printed
    assert story["setting"] in printed


def test_output_in_a_missing_directory_is_refused_before_any_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("latte.cli.demonstration.demonstrate", lambda *_, **__: pytest.fail("work began"))
    path = tmp_path / "nowhere" / "report.html"
    assert main(["demo", "--output", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_it_takes_the_place_of_no_other_run(shown, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("latte.cli.demonstration.run", lambda *_, **__: (_ for _ in ()).throw(ValueError("began")))
    document = json.loads((shown.path.with_suffix("") / "run.json").read_text())
    (tmp_path / "mine").mkdir()
    others = {"steps": 12}, {"learning_rate": 0.5}
    for words, said in zip(others, ("began", "no demonstration's"), strict=True):
        (tmp_path / "mine" / "run.json").write_text(json.dumps(document | {"run": document["run"] | words}))
        assert main(["demo", "--output", str(tmp_path / "mine.html")]) == 2
        assert said in capsys.readouterr().err.splitlines()[-1]
    (tmp_path / "mine" / "run.json").write_text('{"task": "mqar"}')
    assert main(["demo", "--output", str(tmp_path / "mine.html")]) == 2
    assert "no demonstration's" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "report"])
def test_output_that_is_no_file_to_be_is_refused(name, tmp_path, capsys):
    assert main(["demo", "--output", str(tmp_path / name) if name else str(tmp_path)]) == 2
    assert "--output" in capsys.readouterr().err


def test_without_accelerate_the_error_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("latte.cli.demo.find_spec", lambda name: None)
    assert main(["demo", "--quick", "--output", str(tmp_path / "report.html")]) == 2
    assert "pip install 'latte-attention[train]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
