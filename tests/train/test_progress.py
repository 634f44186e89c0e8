"""What a person sees while a run goes on."""

import sys
from io import StringIO

import pytest
from rich.console import Console

from latte.train.progress import Bar, Lines, describe, duration, make_display

NUMBERS = {"loss": 2.34567, "tokens_per_second": 12345.6, "memory_bytes": 3 * 2**30, "other": 1}


def test_numbers_in_few_words():
    assert describe(NUMBERS) == "loss 2.3457  12,346 tokens/s  3.00 GiB"
    assert describe({"loss": 1.0}) == "loss 1.0000"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (125, "2:05"), (3723, "1:02:03")])
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_lines(capsys):
    display = Lines()
    for done in range(3):
        display.prepare("reading", done, 3)
    display.begin("lm", 100, 20)
    display.show(NUMBERS)
    display.advance(60)
    display.show(NUMBERS)
    display.end()
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert lines[0] == "latte: reading …"  # once, not at every step
    assert lines[1].startswith("latte: step 20 of 100  loss 2.3457")
    assert lines[2].startswith("latte: step 60 of 100")
    assert lines[2].endswith("0:00 left")
    assert len(lines) == 3


def test_bar():
    display = Bar()
    written = StringIO()
    display._console = Console(file=written, force_terminal=True, width=120)
    display.prepare("reading", 0, 2)
    display.prepare("reading", 2, 2)
    display.begin("lm", 100, 20)
    display.advance(50)
    display.show(NUMBERS)
    display.note("a [line] to be read")
    display.end()
    display.end()
    text = written.getvalue()
    assert all(word in text for word in ("reading", "50/100", "loss 2.3457", "a [line] to be read"))


def test_a_bar_is_for_terminals(monkeypatch):
    assert isinstance(make_display(), Lines)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert isinstance(make_display(), Bar)
