"""The examples of the page on evaluation run, and its commands are right."""

import re

from typer.testing import CliRunner

from latte.cli.app import app
from tests.pages import read_page, run_examples

PAGE = read_page("evaluate.md")


def test_examples_run_in_order(capsys):
    run_examples("evaluate.md")
    assert len(capsys.readouterr().out.splitlines()) > 10


def test_every_option_it_names_exists():
    offered = CliRunner().invoke(app, ["evaluate", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE))
    assert len(named) > 20
    assert named <= set(re.findall(r"--[a-z][a-z-]+", offered)), "the page names an option that the command lacks"
