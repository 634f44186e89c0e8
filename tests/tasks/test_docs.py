"""The examples of the documentation run, and its table is true."""

import re
from pathlib import Path

from latte.tasks import task_class
from latte.tasks.lra.table8 import TABLE_8

PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")


def test_examples_run_in_order():
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    exec(compile("\n".join(blocks), "tasks.md", "exec"), {})


def test_steps_are_those_of_the_plans():
    listed = dict(re.findall(r"^\| `(\w+)` \| 6 \|.*\| ([\d,]+) \|$", PAGE, flags=re.MULTILINE))
    assert {name: int(steps.replace(",", "")) for name, steps in listed.items()} == {
        name: task_class(name).plans["paper"].budget.steps for name in TABLE_8
    }
