"""The table of the documentation is true."""

import re

from latte.tasks import task_class
from latte.tasks.lra.table8 import TABLE_8
from tests.pages import read_page

PAGE = read_page("tasks.md")


def test_steps_are_those_of_the_plans():
    listed = dict(re.findall(r"^\| `(\w+)` \| 6 \|.*\| ([\d,]+) \|$", PAGE, flags=re.MULTILINE))
    assert {name: int(steps.replace(",", "")) for name, steps in listed.items()} == {
        name: task_class(name).plans["paper"].budget.steps for name in TABLE_8
    }
