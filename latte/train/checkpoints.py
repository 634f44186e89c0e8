"""Checkpoints on disk: written whole or not at all, checked before they are used, pruned.

A checkpoint is a folder `step-N`. It is made under another name; its manifest, with the size and hash of every file,
is written last; then it is renamed. What a crash leaves behind has the other name and is never looked at.
"""

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

MANIFEST = "manifest.json"
PARTIAL = ".partial-"
DAMAGED = "damaged-"
FORMAT = 1


class DamagedCheckpoint(ValueError):  # noqa: N818 - it names what it is about
    """Says which checkpoint, and what is wrong with it."""


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int


class Checkpoints:
    """The checkpoints in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def all(self) -> list[Checkpoint]:
        """Those that were written to the end, oldest first; whether their files still are as written is not checked."""
        found = [
            Checkpoint(path, int(path.name.removeprefix("step-")))
            for path in self.folder.glob("step-*")
            if path.name.removeprefix("step-").isdecimal() and path.is_dir()
        ]
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def write(self, step: int, fill: Callable[[Path], None]) -> Checkpoint:
        """Make the checkpoint of `step`; `fill` writes its files into the folder it is given."""
        final = self.folder / f"step-{step:08d}"
        partial = self.folder / f"{PARTIAL}{final.name}-{os.getpid()}"
        try:
            partial.mkdir(parents=True)
            fill(partial)
            write_manifest(partial, step)
            replace_folder(partial, final)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise self._cannot_save(step, error) from error
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return Checkpoint(final, step)

    def _cannot_save(self, step: int, error: Exception) -> OSError:
        whole = self.all()
        last = f"the last whole one is {whole[-1].path}" if whole else "there is none before it"
        return OSError(
            f"the checkpoint of step {step} cannot be written to {self.folder}: {reason_of(error)}; {last}. "
            "Make room, then go on with --resume"
        )

    def newest(
        self, note: Callable[[str], None], read: Callable[[Checkpoint], object] = lambda _: None
    ) -> Checkpoint | None:
        """The newest one that is as it was written; those after it are set aside, and `note` is told.

        `read` raises DamagedCheckpoint where the files, as they were written, make no checkpoint of their step.
        None where there is no checkpoint at all; raises DamagedCheckpoint where all there are are damaged.
        """
        checkpoints, faults = self.all()[::-1], []
        for checkpoint in checkpoints:
            try:
                verify(checkpoint)
                read(checkpoint)
            except DamagedCheckpoint as fault:
                faults.append((checkpoint, fault))
                continue
            for damaged, fault in faults:
                aside = self._set_aside(damaged)
                note(f"{fault}; going back to {checkpoint.path.name}, and the damaged one is now {aside.name}")
            return checkpoint
        if faults:
            raise DamagedCheckpoint(
                f"no checkpoint in {self.folder} can be used: {'; '.join(str(fault) for _, fault in faults)}"
            )
        return None

    def _set_aside(self, checkpoint: Checkpoint) -> Path:
        aside = self.folder / (DAMAGED + checkpoint.path.name)
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.path.rename(aside)
        return aside

    def prune(self, keep: int, spare: Collection[int] = ()) -> None:
        """Remove all but the newest `keep` and those of the steps in `spare`."""
        for checkpoint in self.all()[:-keep]:
            if checkpoint.step not in spare:
                remove(checkpoint.path)

    def sweep(self) -> None:
        """Remove what crashes have left behind."""
        for path in self.folder.glob(f"{PARTIAL}*"):
            shutil.rmtree(path)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """What cannot be written as an OSError that names it. Of safetensors, which does its own writing, it is none."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OSError(f"{path} cannot be written: {reason_of(error)}") from error


def reason_of(error: Exception) -> str:
    """Without the number and the name, where the system has given them."""
    return getattr(error, "strerror", None) or str(error)


def write_manifest(folder: Path, step: int) -> None:
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        sync(path)
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": digest(path)}
    write_json(folder / MANIFEST, {"format": FORMAT, "step": step, "files": files})
    sync(folder)


def verify(checkpoint: Checkpoint) -> None:
    """Raise DamagedCheckpoint unless every file is as the manifest says."""
    name, path = checkpoint.path.name, checkpoint.path / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        files = [(file, int(facts["bytes"]), facts["sha256"]) for file, facts in manifest["files"].items()]
        format_, step = manifest["format"], manifest["step"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{name} is damaged: its {MANIFEST} cannot be read") from error
    if format_ != FORMAT:
        raise DamagedCheckpoint(f"{name} has format {format_}; this version of latte reads {FORMAT}")
    if step != checkpoint.step:
        raise DamagedCheckpoint(f"{name} is damaged: its {MANIFEST} is of step {step}")
    if not files:
        raise DamagedCheckpoint(f"{name} is damaged: its {MANIFEST} names no files")
    for file, length, sha256 in files:
        where = checkpoint.path / file
        size = where.stat().st_size if where.is_file() else None
        if size != length:
            found = "missing" if size is None else f"{size:,} bytes"
            raise DamagedCheckpoint(f"{name} is damaged: {file} is {found}, {length:,} bytes were written")
        if digest(where) != sha256:
            raise DamagedCheckpoint(f"{name} is damaged: {file} is not what was written (its sha256 differs)")


def replace_folder(new: Path, final: Path) -> None:
    """Rename `new` to `final`; what stood there before is removed after."""
    old = None
    if final.exists():
        old = final.with_name(f"{PARTIAL}old-{final.name}-{os.getpid()}")
        final.rename(old)
    new.rename(final)
    sync(final.parent)
    if old is not None:
        shutil.rmtree(old)


def remove(folder: Path) -> None:
    """Remove a folder so that no half of it is ever taken for a whole: it loses its name first."""
    doomed = folder.with_name(f"{PARTIAL}old-{folder.name}-{os.getpid()}")
    folder.rename(doomed)
    shutil.rmtree(doomed)


def point_to(link: Path, target: Path) -> None:
    """Make `link` a symbolic link to `target`, at once."""
    new = link.with_name(f"{PARTIAL}{link.name}-{os.getpid()}")
    with suppress(FileNotFoundError):
        new.unlink()
    new.symlink_to(os.path.relpath(target, link.parent))
    new.replace(link)


def write_json(path: Path, document: Any) -> None:
    """Write a JSON file whole or not at all."""
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=True) + "\n"
    write_text(path, text)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    partial = path.with_name(f"{PARTIAL}{path.name}-{os.getpid()}")
    try:
        with naming(path):
            with partial.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            partial.unlink()
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
