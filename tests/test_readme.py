"""What the README shows is true: its code runs, its commands, targets, links and files exist."""

import re
import shlex
from pathlib import Path

import pytest

from latte.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def code_blocks(language: str) -> list[str]:
    """The contents of the fenced blocks of one language."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
    return [block for name, block in blocks if name == language]


def shell_commands(program: str) -> list[list[str]]:
    """Every line of the shell blocks that calls one program, as arguments without the program itself."""
    lines = "\n".join(code_blocks("sh")).splitlines()
    calls = [shlex.split(line, comments=True) for line in lines]
    return [call[1:] for call in calls if call and call[0] == program]


def tree_paths() -> list[str]:
    """The paths of the drawn file tree."""
    (tree,) = [block for block in code_blocks("") if "├──" in block]
    parents: list[str] = []
    paths = []
    for line in tree.splitlines():
        drawing, name = re.match(r"([│├└─ ]*)(\S+)", line).groups()
        depth = len(drawing) // 4
        parents = [*parents[:depth], name]
        paths.append("".join(parents))
    return paths


def test_python_blocks_run_in_order():
    blocks = code_blocks("python")
    assert len(blocks) >= 2
    exec(compile("\n".join(blocks), "README.md", "exec"), {})


def test_make_targets_exist():
    targets = {call[0] for call in shell_commands("make")} | set(re.findall(r"`make ([a-z-]+)`", README))
    assert {"demo", "test"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:.*## ", MAKEFILE, flags=re.MULTILINE), target


@pytest.mark.parametrize("arguments", shell_commands("latte"), ids=" ".join)
def test_latte_commands_are_understood(arguments, capsys):
    assert main([*arguments, "--help"]) == 0
    options = {word for word in arguments if word.startswith("--")}
    printed = capsys.readouterr().out
    assert all(option in printed for option in options)


@pytest.mark.parametrize("path", tree_paths())
def test_tree_shows_what_exists(path):
    assert (ROOT / path).is_dir()


def test_links_into_the_repository_lead_somewhere():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
