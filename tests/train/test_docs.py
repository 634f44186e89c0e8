"""The examples of the documentation run, and what it names is there."""

import re
from pathlib import Path

from latte.cli.train import TASKS
from latte.train import RunSettings

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
COMMAND = {"budget", "set", "config", "resume", "show", "json", "help", "data", "tokenizer", "context", "prompt"}
LAUNCHERS = {"nproc-per-node", "num_processes"}


def test_examples_run_in_order():
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    exec(compile("\n".join(blocks), "training.md", "exec"), {})


def test_options_are_there():
    named = set(re.findall(r"--([a-z][a-z0-9_-]+)", PAGE)) - COMMAND - LAUNCHERS
    assert len(named) > 15
    assert {name.replace("-", "_") for name in named} <= set(RunSettings.__dataclass_fields__)


def test_tasks_are_there():
    assert set(re.findall(r"latte train ([a-z]+)", PAGE)) <= TASKS.keys()
