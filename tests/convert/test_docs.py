"""The tables of the documentation are true."""

import re
from dataclasses import fields

from latte.cli.app import app
from latte.models.families import FAMILIES, Family
from tests.convert import sources
from tests.pages import read_page

PAGES = {name: read_page(f"{name}.md") for name in ("convert", "convert-families")}


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
