"""Writing a folder as a whole: it is there, complete, or it is not."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

PARTIAL, FORMER = "partial", "former"


def check_free(out: Path, source: Path, overwrite: bool) -> None:
    """Raise ValueError if `out` cannot be written without losing something, or at all."""
    if out.resolve() == source.resolve() or source.resolve().is_relative_to(out.resolve()):
        raise ValueError(f"OUT {out}: the source is there; name another folder")
    if out.exists() and not out.is_dir():
        raise ValueError(f"OUT {out}: it is a file; name a folder")
    if not (above := nearest_folder(out)).is_dir():
        raise ValueError(f"OUT {out}: {above} is a file, so nothing can be in it; name another folder")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not overwrite:
        raise ValueError(f"OUT {out}: the folder has something in it; name another, or use --overwrite")
    if not (out / "config.json").is_file():
        raise ValueError(f"OUT {out}: the folder holds no model, so --overwrite will not replace it; name another")


def check_space(out: Path, size: int) -> None:
    """Raise ValueError if the disk has no room for `size` bytes."""
    free = shutil.disk_usage(nearest_folder(out)).free
    if size > free:
        raise ValueError(f"OUT {out}: the model takes {size / 1e9:.2f} GB, and the disk has {free / 1e9:.2f} GB left")


def nearest_folder(out: Path) -> Path:
    """The first of those above `out` that there is."""
    place = out.resolve().parent
    while not place.exists():
        place = place.parent
    return place


def put_back(out: Path, note: Callable[[str], None]) -> None:
    """Give `out` its model again where a process was killed that had moved it aside and put nothing in its place."""
    out = out.resolve()
    for former in _left(out, FORMER):
        vacant = not out.exists() or (out.is_dir() and not any(out.iterdir()))
        if vacant and (former / "config.json").is_file():
            former.rename(out)
            note(f"{out} has its former model again: a conversion was killed when it had just moved it aside")


def remove_leftovers(out: Path) -> None:
    """Remove what processes that were killed, and are gone, had written of `out` or were to remove."""
    out = out.resolve()
    for path in (*_left(out, PARTIAL), *_left(out, FORMER)):
        shutil.rmtree(path, ignore_errors=True)


def _left(out: Path, word: str) -> list[Path]:
    """The folders beside `out` of that kind whose processes are gone."""
    name = re.compile(re.escape(f".{out.name}.{word}-") + r"([1-9]\d*)")
    found = []
    for path in out.parent.iterdir() if out.parent.is_dir() else ():
        match = name.fullmatch(path.name)
        if match is not None and not path.is_symlink() and not _is_running(int(match[1])):
            found.append(path)
    return found


def _is_running(process: int) -> bool:
    """Whether it is another process that there is now; a container may give all of them the same number."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's
        return True
    return process != os.getpid()


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A new folder beside `out`, which takes its name when the body is done and is removed when it fails.

    Where `out` is a link, it is about the folder that the link names.
    """
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    partial, former = (out.with_name(f".{out.name}.{word}-{os.getpid()}") for word in (PARTIAL, FORMER))
    partial.mkdir()
    try:
        yield partial
        for path in (*partial.rglob("*"), partial):
            _flush(path)
        if out.exists():
            out.rename(former)
        partial.rename(out)
        _flush(out.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        if former.exists() and not out.exists():
            former.rename(out)
        raise
    if former.exists():
        former.rename(partial)  # so that no half of it is ever put back
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def saving() -> Iterator[None]:
    """Say of Safetensors' errors that they are of writing, as they look like those of a broken source."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"the weights cannot be written ({error}); make room, or name another OUT") from error


def _flush(path: Path) -> None:
    """Have the disk hold what was written."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
