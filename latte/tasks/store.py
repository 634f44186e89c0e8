"""Arrays that are made once and then mapped from disk: all of them are there, or none."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import mkdtemp
from types import TracebackType
from typing import Any, Self

import numpy as np

MANIFEST = "manifest.json"


def fingerprint(*parts: Any) -> str:
    """A short name of what can be written as JSON, arrays by their content; it changes whenever the parts do."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            digest.update(f"{part.dtype.str}{part.shape}".encode())
            digest.update(np.ascontiguousarray(part).data)
        else:
            digest.update(json.dumps(part, sort_keys=True).encode())
    return digest.hexdigest()[:20]


def cache_folder(cache: str | None) -> Path:
    """Where made data is kept: the folder named, or latte's own in the user's cache."""
    if cache is not None:
        folder = Path(cache).expanduser()
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "latte" / "tasks"
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not nearest.is_dir():
        raise NotADirectoryError(f"cache is {folder}: {nearest} is a file; name another folder with --cache")
    return folder


class ArrayWriter:
    """A .npy file that grows at its end: its header has room for any number of rows."""

    def __init__(self, path: Path, dtype: np.typing.DTypeLike, row_shape: tuple[int, ...] = ()) -> None:
        self.dtype, self.row_shape, self.rows = np.dtype(dtype), row_shape, 0
        self._file = path.open("wb")
        self._write_header()
        self._data_from = self._file.tell()

    def append(self, rows: np.ndarray) -> None:
        """Write more rows."""
        if rows.shape[1:] != self.row_shape:
            raise ValueError(f"rows have shape {rows.shape[1:]}; this file's have {self.row_shape}")
        self._file.write(np.ascontiguousarray(rows, self.dtype).data)
        self.rows += len(rows)

    def close(self) -> None:
        """Write how many rows there are, and see all of it to the disk."""
        self._file.seek(0)
        self._write_header()
        if self._file.tell() != self._data_from:
            raise RuntimeError("the header of a .npy file has changed its size")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def discard(self) -> None:
        """Leave it as it is; it is of no use."""
        self._file.close()

    def _write_header(self) -> None:
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.rows, *self.row_shape)}
        np.lib.format.write_array_header_1_0(self._file, header)


class StoreWriter:
    """A store in the making, in a folder of its own beside the one that it becomes."""

    def __init__(self, folder: Path, description: Mapping[str, Any]) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder, self.description = folder, description
        self._making = Path(mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        self._writers: dict[str, ArrayWriter] = {}

    def append(self, name: str, rows: np.ndarray) -> None:
        """Write more rows of the array called `name`; the first ones settle its dtype and its shape."""
        if name not in self._writers:
            self._writers[name] = ArrayWriter(self._making / f"{name}.npy", rows.dtype, rows.shape[1:])
        self._writers[name].append(rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            for writer in self._writers.values():
                writer.discard()
            shutil.rmtree(self._making, ignore_errors=True)

    def _finish(self) -> None:
        for writer in self._writers.values():
            writer.close()
        sizes = {name: (self._making / f"{name}.npy").stat().st_size for name in self._writers}
        manifest = {"description": self.description, "bytes": sizes}
        with (self._making / MANIFEST).open("w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        try:
            self._making.rename(self.folder)
        except OSError:
            if not (self.folder / MANIFEST).exists():  # if it is there, another process was faster with the same
                raise


def open_store(folder: Path) -> dict[str, np.ndarray]:
    """The arrays in a folder, mapped; ValueError if they are not what its manifest says."""
    try:
        sizes = dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["bytes"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / MANIFEST} is damaged; delete {folder} to make it anew") from error
    arrays = {}
    for name, size in sizes.items():
        path = folder / f"{name}.npy"
        found = path.stat().st_size if path.exists() else None
        if found != size:
            raise ValueError(f"{path} has {found or 'no'} bytes where {size} were written; delete {folder}")
        try:
            arrays[name] = np.load(path, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}); delete {folder}") from error
    return arrays


def stored(
    cache: str | None, name: str, description: Mapping[str, Any], make: Callable[[StoreWriter], None]
) -> dict[str, np.ndarray]:
    """The arrays that `make` writes, from the cache if these are there already; `description` tells them apart."""
    folder = cache_folder(cache) / f"{name}-{fingerprint(description)}"
    if not (folder / MANIFEST).exists():
        with StoreWriter(folder, description) as writer:
            make(writer)
    return open_store(folder)
