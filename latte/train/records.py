"""What a run writes down as it goes: metrics.jsonl, and the trackers that were asked for."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from latte.train.checkpoints import naming, write_text

Values = Mapping[str, Any]


class Tracker(Protocol):
    """Where curves are shown."""

    def write(self, step: int, split: str, values: Mapping[str, float]) -> None: ...

    def write_text(self, step: int, name: str, text: str) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """A JSON object a line: `step`, `split`, what was measured, `tokens` and `seconds` so far."""

    def __init__(self, path: Path, after: int | None) -> None:
        """Go on after step `after`: lines of later steps, what was measured at the end, and lines that are no record,
        as one that a crash has cut, are removed. None begins."""
        if after is None:
            write_text(path, "")
        elif path.exists():
            write_text(path, "".join(keep_until(path, after)))
        self._path, self._file = path, path.open("ab", buffering=0)  # nothing waits to be written when all is closed

    def write(self, record: Values) -> None:
        """Append a line; what is no finite number is null."""
        values = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        line = memoryview((json.dumps(values, ensure_ascii=False) + "\n").encode())
        with naming(self._path):
            while line:
                line = line[self._file.write(line) :]

    def sync(self) -> None:
        """Wait until all is on the disk."""
        with naming(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def keep_until(path: Path, step: int) -> list[str]:
    kept = []
    for line in whole_lines(path):
        try:
            record = json.loads(line)
            past = record["step"] <= step and record["split"] != "test"
        except (ValueError, TypeError, KeyError):
            continue  # damaged, or not written by a run
        if past:
            kept.append(line.decode())
    return kept


def whole_lines(path: Path) -> list[bytes]:
    """Lines that were written to their end. A record's texts may have other ends of lines in them, and a crash may
    have cut the last line within a letter."""
    return [line + b"\n" for line in path.read_bytes().split(b"\n")[:-1]]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; a last line that is being written is left out."""
    return [json.loads(line) for line in whole_lines(path)]


class TensorBoard:
    def __init__(self, folder: Path, after: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=None if after is None else after + 1)

    def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"{split}/{name}", value, step)

    def write_text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, text, step)

    def close(self) -> None:
        self._writer.close()


class WandbLike:
    """Weights & Biases, or trackio, which has the same functions."""

    def __init__(self, module: str, folder: Path, config: Values) -> None:
        self._module = import_module(module)
        where = {"dir": str(folder)} if module == "wandb" else {}
        self._module.init(project="latte", name=folder.name, config=dict(config), **where)

    def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
        self._module.log({f"{split}/{name}": value for name, value in values.items()}, step=step)

    def write_text(self, step: int, name: str, text: str) -> None:
        """Texts are in metrics.jsonl."""

    def close(self) -> None:
        self._module.finish()


def check_trackers(names: Sequence[str]) -> None:
    """Raise ValueError for one that was asked for and is not installed. TensorBoard is asked for by default."""
    for name in names:
        if name not in ("none", "tensorboard") and find_spec(name) is None:
            raise ValueError(f"track is {name}, which is not installed: pip install {name}")


def open_trackers(
    names: Sequence[str], folder: Path, after: int | None, config: Values, note: Callable[[str], None]
) -> list[Tracker]:
    """Those that were asked for. TensorBoard is asked for by default: where it is missing, `note` is told."""
    check_trackers(names)
    trackers: list[Tracker] = []
    for name in names:
        if name == "none":
            continue
        if name == "tensorboard" and find_spec(name) is None:
            note("no TensorBoard curves: it is not installed (pip install tensorboard); metrics.jsonl has them")
            continue
        trackers.append(TensorBoard(folder, after) if name == "tensorboard" else WandbLike(name, folder, config))
    return trackers


class Records:
    """Everything that is written down, in one place."""

    def __init__(self, metrics: MetricsFile | None, trackers: Sequence[Tracker]) -> None:
        self._metrics, self._trackers = metrics, trackers

    def write(self, step: int, split: str, values: Values, **more: Any) -> None:
        """Numbers go to the trackers; all goes to metrics.jsonl."""
        if self._metrics is not None:
            self._metrics.write({"step": step, "split": split, **values, **more})
        numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        for tracker in self._trackers:
            tracker.write(step, split, numbers)

    def write_usage(self, step: int, layers: Sequence[Values], curves: Mapping[str, float]) -> None:
        """Usage of latents: a record of all layers, and a curve per layer and head."""
        if self._metrics is not None:
            self._metrics.write({"step": step, "split": "usage", "layers": list(layers)})
        for tracker in self._trackers:
            tracker.write(step, "usage", curves)

    def write_texts(self, step: int, split: str, texts: Sequence[Mapping[str, str]]) -> None:
        if self._metrics is not None:
            self._metrics.write({"step": step, "split": split, "texts": list(texts)})
        for tracker in self._trackers:
            for number, text in enumerate(texts):
                tracker.write_text(step, f"{split}/{number}", "\n\n".join(text.values()))

    def sync(self) -> None:
        if self._metrics is not None:
            self._metrics.sync()

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
        for tracker in self._trackers:
            tracker.close()
