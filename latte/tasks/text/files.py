"""Files and folders that are there whole or not at all."""

import os
import secrets
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    partial = partial_name(path)
    try:
        with partial.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def partial_name(path: Path) -> Path:
    """A name beside `path` that nobody else takes: hidden, and beginning with the name that it is to have."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last, as fsync does for a file's bytes; Windows needs no such thing."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
