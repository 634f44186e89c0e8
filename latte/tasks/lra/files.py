"""Reading data from files, whichever way they are packed, and from the hub."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from latte.tasks.text.reading import COMPRESSIONS, lines, unpacked

HUB = "hub:"  # what begins the name of a dataset on the Hugging Face hub
PACKINGS = ("", *COMPRESSIONS)


def is_on_hub(data: str) -> bool:
    """Whether data is to come from the hub."""
    return data.startswith(HUB)


def load_from_hub(data: str, columns: Sequence[str]) -> Mapping[str, Any]:
    """The splits of a dataset, which is named "hub:owner/name", and must have some columns."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(f"data is {data!r}; for the hub install datasets: pip install datasets") from None
    splits: Any = load_dataset(data.removeprefix(HUB))
    for split, rows in splits.items():
        check_columns(f"{data}, split {split!r}", rows.column_names, columns)
    return splits


def check_columns(source: str, found: Sequence[str], wanted: Sequence[str]) -> None:
    """Raise ValueError, naming the columns that are there, unless all that are wanted are."""
    if missing := [name for name in wanted if name not in found]:
        raise ValueError(
            f"{source} has no column {', '.join(map(repr, missing))}; it has {', '.join(map(repr, found)) or 'none'}"
        )


def folder_of(data: str) -> Path:
    """`data` as a folder or file that is there."""
    path = Path(data).expanduser()
    if not path.exists():
        raise ValueError(f'data is {data!r}: no such file or folder; name one, or "hub:owner/name"')
    return path


def find_file(folder: Path, *names: str) -> Path:
    """The first of these files that is there, packed or not; ValueError with what is there instead."""
    candidates = [folder / f"{name}{packing}" for name in names for packing in PACKINGS]
    for path in candidates:
        if path.is_file():
            return path
    there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    listed = ", ".join(there[:8]) + (", …" if len(there) > 8 else "")
    raise ValueError(f"{folder} has no {' or '.join(names)}; it has {listed or 'nothing'}")


def read_bytes(path: Path) -> bytes:
    """What is in a file, unpacked as its name says."""
    return b"".join(unpacked(path))


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers, from 1 on, without their ends; ValueError where the packing is broken."""
    number = 0
    try:
        for number, line in enumerate(lines(unpacked(path)), start=1):
            yield number, line.rstrip(b"\r")
    except OSError as error:
        raise ValueError(f"{path} is damaged after line {number}: {error.__cause__ or error}") from error


def read_json_lines(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file with one on each line, with its number; all have some columns."""
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: no JSON ({error})") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: a {type(row).__name__}, where an object is wanted")
        check_columns(f"{path}, line {number}", list(row), columns)
        yield number, row


def source_of(*paths: Path) -> list[dict[str, Any]]:
    """What tells files apart from others, and from themselves before they were changed."""
    facts = ((path.resolve(), path.stat()) for path in paths)
    return [{"path": str(path), "bytes": stat.st_size, "changed": stat.st_mtime_ns} for path, stat in facts]
