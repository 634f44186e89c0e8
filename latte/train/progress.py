"""A run as a person sees it: a bar on a terminal, lines elsewhere, nothing where nobody looks."""

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """Shows nothing."""

    def begin(self, what: str, total: int, done: int = 0) -> None:
        """Something that takes `total` steps begins, of which `done` are done."""

    def advance(self, done: int) -> None: ...

    def prepare(self, what: str, done: int, total: int) -> None:
        """Data is being made ready."""

    def show(self, values: Mapping[str, Any]) -> None:
        """The latest numbers of training."""

    def note(self, message: str) -> None:
        """A line to be read."""

    def end(self) -> None: ...


class Lines(Display):
    """Plain lines on stderr, for logs."""

    def __init__(self) -> None:
        self._total = 0
        self._done = self._first = 0
        self._start = 0.0
        self._preparing = ""

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self._total, self._done, self._first, self._start = total, done, done, time.monotonic()

    def advance(self, done: int) -> None:
        self._done = done

    def prepare(self, what: str, done: int, total: int) -> None:
        if what != self._preparing:
            self._preparing = what
            self.note(f"{what} …")

    def show(self, values: Mapping[str, Any]) -> None:
        self.note(f"step {self._done:,} of {self._total:,}  {describe(values)}  {self._left()}")

    def _left(self) -> str:
        done = self._done - self._first
        if not done:
            return ""
        seconds = (time.monotonic() - self._start) / done * (self._total - self._done)
        return f"{duration(seconds)} left"

    def note(self, message: str) -> None:
        print(f"latte: {message}", file=sys.stderr, flush=True)  # noqa: T201


class Bar(Display):
    """A bar with the latest numbers beside it."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._progress: Progress | None = None
        self._task: Any = None
        self._what = ""

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self.end()
        self._what = what
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self._console,
            refresh_per_second=4,
        )
        self._progress.start()
        self._task = self._progress.add_task(what, total=total, completed=done, numbers="")

    def advance(self, done: int) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=done)

    def prepare(self, what: str, done: int, total: int) -> None:
        if self._progress is None or self._what != what:
            self.begin(what, total)
        self.advance(done)
        if done >= total:
            self.end()

    def show(self, values: Mapping[str, Any]) -> None:
        if self._progress is not None:
            self._progress.update(self._task, numbers=describe(values))

    def note(self, message: str) -> None:
        self._console.print(f"latte: {message}", highlight=False, markup=False, soft_wrap=True)

    def end(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def make_display() -> Display:
    return Bar() if sys.stderr.isatty() else Lines()


def describe(values: Mapping[str, Any]) -> str:
    """Loss, speed and memory in a few words."""
    words = [f"loss {values['loss']:.4f}"]
    if "tokens_per_second" in values:
        words.append(f"{values['tokens_per_second']:,.0f} tokens/s")
    if "memory_bytes" in values:
        words.append(f"{values['memory_bytes'] / 2**30:.2f} GiB")
    return "  ".join(words)


def duration(seconds: float) -> str:
    """1:02:03, or 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
