"""The `latte` command as a person or a script meets it: help, version, exit codes, one line for bad input."""

import subprocess
import sys
from pathlib import Path

import pytest

import latte
from latte.cli import main

COMMAND = Path(sys.executable).with_name("latte")


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed, which must be nothing on stdout and one line on stderr."""
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("latte: error: ")
    assert printed.err.count("\n") == 1
    assert printed.err.endswith("\n")
    return printed.err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["demo"],
        ["generate"],
        ["train"],
        ["convert"],
        ["evaluate"],
        ["inspect"],
        ["reproduce"],
        ["bench"],
        ["bench", "ops"],
        ["bench", "decode"],
        ["bench", "model"],
    ],
    ids=" ".join,
)
def test_every_command_has_help(arguments, capsys):
    assert main([*arguments, "--help"]) == 0
    printed = capsys.readouterr()
    assert "Usage: latte" in printed.out
    assert printed.err == ""


@pytest.mark.parametrize(
    ("arguments", "listed"),
    [
        ([], ["demo", "train", "generate", "convert", "evaluate", "inspect", "bench", "reproduce"]),
        (["bench"], ["ops", "decode", "model"]),
    ],
)
def test_without_a_command_help_lists_the_commands(arguments, listed, capsys):
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in listed)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"latte {latte.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["brew"], ["brew"]),
        (["dmeo"], ["dmeo", "'demo'"]),
        (["bench", "opps"], ["opps", "'ops'"]),
        (["demo", "--quik"], ["--quik", "--quick"]),
        (["demo", "espresso"], ["espresso"]),
        (["bench", "ops", "--device", "tpu"], ["--device", "tpu", "cpu", "cuda"]),
        (["bench", "ops", "--output"], ["--output"]),
    ],
)
def test_bad_usage_gives_one_line_with_the_value_and_the_remedy(arguments, named, capsys):
    assert main(arguments) == 2
    line = error_line(capsys)
    assert all(word in line for word in named), line


def test_value_error_from_below_gives_one_line(monkeypatch, capsys):
    def refuse(*_, **__):
        raise ValueError("window is 0\n  but must be at least 1")

    monkeypatch.setattr("latte.cli.demonstration.demonstrate", refuse)
    assert main(["demo", "--quick"]) == 2
    assert error_line(capsys) == "latte: error: window is 0 but must be at least 1\n"


@pytest.mark.parametrize(
    ("error", "words"),
    [(EOFError("No data left in file"), "cut short: No data left"), (MemoryError("116 TiB"), "full: 116 TiB")],
)
def test_ends_of_files_and_of_memory_are_said(error, words, monkeypatch, capsys):
    """Typer alone would end with 130 and without a word where a file ends too soon."""

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr("latte.cli.demonstration.demonstrate", refuse)
    assert main(["demo", "--quick"]) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_a_defect_is_not_hidden(monkeypatch):
    def break_down(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr("latte.cli.demonstration.demonstrate", break_down)
    with pytest.raises(ZeroDivisionError):
        main(["demo", "--quick"])


def test_interrupt_exits_with_130(monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("latte.cli.demonstration.demonstrate", interrupt)
    assert main(["demo", "--quick"]) == 130


def test_installed_command_exits_with_the_code():
    result = subprocess.run([COMMAND, "brew"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("latte: error: ")


def test_help_does_not_wait_for_torch():
    script = "import sys; from latte.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
