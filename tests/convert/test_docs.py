"""The examples of the documentation run, and its tables are true."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from latte.cli.app import app
from latte.models.families import FAMILIES, Family
from tests.convert import sources

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {name: (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("convert", "convert-families")}


@pytest.mark.parametrize("page", PAGES)
def test_examples_run_in_order(page):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGES[page], flags=re.DOTALL | re.MULTILINE)
    assert blocks
    exec(compile("\n".join(blocks), f"{page}.md", "exec"), {})


def test_every_option_is_listed():
    command = next(command for command in app.registered_commands if command.name == "convert")
    parameters = command.callback.__annotations__
    options = {f"--{name.replace('_', '-')}" for name in parameters if name not in ("source", "out", "return")}
    assert options == set(re.findall(r"^\| `(--[a-z-]+)` \|", PAGES["convert"], flags=re.MULTILINE))


def test_every_field_of_a_family_is_listed():
    table = re.findall(r"^\| (`.+?) \| .* \| (.*) \|$", PAGES["convert-families"], flags=re.MULTILINE)
    listed = {name for names, _ in table for name in re.findall(r"`(\w+)`", names)}
    assert listed == {field.name for field in fields(Family)}


def test_every_family_is_named_and_tested():
    assert FAMILIES.keys() == sources.FAMILIES.keys()
    for family in FAMILIES.values():
        assert family.name.removesuffix(" (text)") in PAGES["convert"]
