"""What the documentation names is there."""

import re

from latte.cli.train import TASKS
from latte.train import RunSettings
from tests.pages import read_page

PAGE = read_page("training.md")
COMMAND = {"budget", "set", "config", "resume", "show", "json", "help", "data", "tokenizer", "context", "prompt"}
LAUNCHERS = {"nproc-per-node", "num_processes"}


def test_options_are_there():
    named = set(re.findall(r"--([a-z][a-z0-9_-]+)", PAGE)) - COMMAND - LAUNCHERS
    assert len(named) > 15
    assert {name.replace("-", "_") for name in named} <= set(RunSettings.__dataclass_fields__)


def test_tasks_are_there():
    assert set(re.findall(r"latte train ([a-z]+)", PAGE)) <= TASKS.keys()
