"""Where text comes from: files by name, folder or glob, Hugging Face datasets, the Python standard library."""

import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from platform import python_version
from typing import Any, Protocol

from latte.tasks.text.hashes import FileHashes
from latte.tasks.text.reading import COMPRESSIONS, Chunk, Tick, check_field, file_kind, read_file, text_bytes

FOLDER_SUFFIXES = (".txt", ".text", ".md", ".rst", ".jsonl", ".ndjson", ".json", ".parquet")
SAVED_DATASET = ("dataset_dict.json", "dataset_info.json")
LIBRARY_WITHOUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Source(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int:
        """Bytes to be read; 0: nobody knows."""
        ...

    def identity(self, hashes: FileHashes) -> str:
        """Changes whenever the documents do."""
        ...

    def documents(self, as_bytes: bool, tick: Tick) -> Iterator[Chunk]: ...


@dataclass(frozen=True)
class FileSource:
    path: Path
    name: str
    size: int
    changed: int  # when, in ns
    text_field: str

    def identity(self, hashes: FileHashes) -> str:
        kind = file_kind(self.path)
        field = "" if kind == "text" else self.text_field
        compression = self.path.suffix if self.path.suffix in COMPRESSIONS else ""
        return f"{kind}{compression}:{field}:{hashes.of(self.path)}"

    def documents(self, as_bytes: bool, tick: Tick) -> Iterator[Chunk]:
        yield from read_file(self.path, self.text_field, as_bytes, tick)
        status = self.path.stat()
        if (status.st_size, status.st_mtime_ns) != (self.size, self.changed):
            raise OSError(f"{self.name}: the file changed while it was read; try again when it is complete")


@dataclass(frozen=True)
class SavedDataset:
    """A folder that `datasets.save_to_disk` has written."""

    path: Path
    name: str
    size: int
    text_field: str
    split: str

    def identity(self, hashes: FileHashes) -> str:
        files = sorted(file for file in self.path.rglob("*") if file.is_file())
        contents = [f"{file.relative_to(self.path).as_posix()}:{hashes.of(file)}" for file in files]
        return f"dataset:{self.text_field}:{self.split}:" + hashlib.sha256("\n".join(contents).encode()).hexdigest()

    def documents(self, as_bytes: bool, tick: Tick) -> Iterator[Chunk]:
        dataset = _datasets().load_from_disk(str(self.path))
        if isinstance(dataset, dict):
            if self.split not in dataset:
                found = ", ".join(map(repr, dataset))
                raise ValueError(f"{self.name}: there is no split {self.split!r} among {found}; name another one")
            dataset = dataset[self.split]
        check_field(self.name, self.text_field, dataset.column_names)
        rows = max(len(dataset), 1)
        for chunk in _rows(dataset.select_columns([self.text_field]), self.name, self.text_field):
            yield chunk
            tick(self.size // rows)


@dataclass(frozen=True)
class HubDataset:
    """A dataset of the hub, read as a stream: nothing of it is kept but its tokens."""

    name: str
    text_field: str
    split: str
    subset: str | None
    size: int = 0

    def identity(self, hashes: FileHashes) -> str:
        from huggingface_hub import dataset_info

        try:
            revision = dataset_info(self.name).sha
        except Exception as error:  # whatever the network and the hub come up with
            why = " ".join(str(error).split())[:160]
            raise OSError(
                f"{self.name}: no such file or folder here, and no dataset that the hub gives ({why}); check the name"
            ) from error
        return f"hub:{self.name}:{self.subset}:{self.split}:{self.text_field}:{revision}"

    def documents(self, as_bytes: bool, tick: Tick) -> Iterator[Chunk]:
        dataset = _datasets().load_dataset(self.name, self.subset, split=self.split, streaming=True)
        if dataset.column_names is not None:
            check_field(self.name, self.text_field, dataset.column_names)
            dataset = dataset.select_columns([self.text_field])
        for data, last in _rows(dataset, self.name, self.text_field):
            yield data, last
            tick(len(data))


def _rows(dataset: Any, name: str, text_field: str) -> Iterator[Chunk]:
    for number, row in enumerate(dataset):
        where = f"{name}, row {number}"
        check_field(where, text_field, row)
        yield text_bytes(where, text_field, row[text_field]), True


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError("reading Hugging Face datasets needs the package: pip install datasets") from error
    return datasets


def find_sources(names: Sequence[str], text_field: str, split: str, subset: str | None = None) -> list[Source]:
    """What the names stand for, in their order, and within a folder or glob in the order of paths."""
    return [source for name in names for source in _find(name, text_field, split, subset)]


def _find(name: str, text_field: str, split: str, subset: str | None) -> list[Source]:
    path = Path(name).expanduser()
    if path.is_file():
        return [_file(path, name, text_field)]
    if path.is_dir() and any((path / file).is_file() for file in SAVED_DATASET):
        size = sum(file.stat().st_size for file in path.rglob("*.arrow"))
        return [SavedDataset(path, name, size, text_field, split)]
    if path.is_dir():
        return [_file(file, str(file), text_field) for file in _files_in(path)]
    if has_magic(name):
        found = sorted(Path(file) for file in glob(str(path), recursive=True) if Path(file).is_file())  # noqa: PTH207
        if not found:
            raise FileNotFoundError(f"{name}: no file matches; check the pattern, and quote it for the shell")
        return [_file(file, str(file), text_field) for file in found]
    if _may_be_on_the_hub(path, name):
        return [HubDataset(name, text_field, split, subset)]
    raise FileNotFoundError(f"{name}: there is no such file or folder; check the path")


def _may_be_on_the_hub(path: Path, name: str) -> bool:
    local = path.is_absolute() or name.startswith((".", "~")) or name.endswith("/")
    return not local and name.count("/") <= 1 and path.suffix not in (*FOLDER_SUFFIXES, *COMPRESSIONS)


def _file(path: Path, name: str, text_field: str) -> FileSource:
    status = path.stat()
    if status.st_size == 0:
        raise ValueError(f"{name}: the file is empty; name one with text")
    return FileSource(path, name, status.st_size, status.st_mtime_ns, text_field)


def _files_in(folder: Path) -> list[Path]:
    """Files of kinds that hold text, down to any depth; hidden ones and empty ones are left out."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and not _hidden(file.relative_to(folder))]
    suitable = [file for file in files if _suffix(file) in FOLDER_SUFFIXES and file.stat().st_size]
    if not suitable:
        kinds = ", ".join(kind or "without a suffix" for kind, _ in Counter(map(_suffix, files)).most_common(5))
        raise ValueError(
            f"{folder}: no text in this folder ({kinds or 'it is empty'}); files may end in "
            f"{' '.join(FOLDER_SUFFIXES)}, or be named by a glob such as '{folder}/**/*.py'"
        )
    return suitable


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def standard_library() -> list[Source]:
    """The source of this Python's standard library without its tests: a text that every machine has."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in LIBRARY_WITHOUT]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    named = sorted((file.relative_to(root).as_posix(), file) for file in files if file.stat().st_size)
    if not named:
        raise FileNotFoundError(f"{root}: this Python has no source of its standard library; name a text with data")
    return [_file(file, f"Python {python_version()}: {name}", text_field="") for name, file in named]
