"""Text from files: plain, or JSON lines with a field of text, compressed or not."""

import bz2
import gzip
import io
import json
import lzma
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

COMPRESSED = (".xz", ".gz", ".bz2", ".zst")
JSON_LINES = (".jsonl", ".ndjson")


def read_documents(path: Path, field: str = "text") -> Iterator[str]:
    """The documents of a file: every line's `field` in JSON lines, otherwise the whole file as one."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    if is_json_lines(path):
        for number, row in read_rows(path):
            yield text_of(row, field, f"{path}, line {number}")
        return
    with open_file(path) as file, readable(str(path)):
        data = file.read()
    try:
        yield data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}; convert it first") from error


def is_json_lines(path: Path) -> bool:
    name = path.name.lower()
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return name.endswith(JSON_LINES)


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The lines of a file of JSON objects, numbered from 1; empty lines are left out."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    with open_file(path) as file:
        yield from parse_rows(file, str(path))


def parse_rows(file: IO[bytes], name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    lines = enumerate(file, start=1)
    while True:
        with readable(name):
            number, line = next(lines, (0, b""))
        if not number:
            return
        if line.strip():
            yield number, parse_row(line, f"{name}, line {number}")


@contextmanager
def readable(name: str) -> Iterator[None]:
    """What goes wrong within it, as a ValueError that names the file."""
    zstandard = sys.modules.get("zstandard")
    broken = (OSError, EOFError, lzma.LZMAError, zlib.error, *([zstandard.ZstdError] if zstandard else []))
    try:
        yield
    except broken as error:
        raise ValueError(f"{name} cannot be read or decompressed: {error}") from error


def parse_row(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:  # of JSON, or of UTF-8
        raise ValueError(f"{place} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place} is a {type(row).__name__}; every line must be an object with a field of text")
    return row


def text_of(row: dict[str, Any], field: str, place: str) -> str:
    if not isinstance(row.get(field), str):
        raise ValueError(
            f"{place} has no text in field {field!r}; its fields are {', '.join(map(repr, row)) or 'none'}"
        )
    return row[field]


def open_file(path: Path) -> IO[bytes]:
    """The bytes of a file, decompressed by its suffix."""
    match path.suffix.lower():
        case ".xz":
            return lzma.open(path)
        case ".gz":
            return io.BufferedReader(gzip.GzipFile(path))
        case ".bz2":
            return bz2.open(path)
        case ".zst":
            return open_zstandard(path)
        case _:
            return path.open("rb")


def open_zstandard(path: Path) -> IO[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise ValueError(f"{path}: .zst needs a package that is not installed; pip install zstandard") from error
    return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(path.open("rb"), closefd=True))  # pyright: ignore[reportArgumentType]
