"""Tokens on disk: memory-mapped shards, a table of documents, and a manifest that vouches for both."""

import hashlib
import json
import os
from array import array
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from latte.tasks.text.files import sync_folder, write_atomically

FORMAT = 1
SHARD_TOKENS = 1 << 27
MANIFEST = "manifest.json"
TABLE = "documents.npy"
WORDS = ("tokenizer", "sources", "documents", "tokens", "bytes", "dtype", "shards", "table")  # of a manifest
DOCUMENT = np.dtype([("end", "<i8"), ("bytes", "<i8"), ("digest", "<u8")])  # ends count all tokens before them


class ShardWriter:
    """Writes tokens into a folder of its own. Without `finish` there is no manifest, and the folder means nothing."""

    def __init__(self, folder: Path, dtype: np.dtype, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder, self.dtype, self.shard_tokens = folder, dtype, shard_tokens
        self.shards: list[dict[str, Any]] = []
        self.tokens = 0
        self._ends, self._bytes, self._digests = array("q"), array("q"), array("Q")
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()

    def write(self, tokens: np.ndarray) -> None:
        if self._file is None:
            self._hash = hashlib.sha256()
            self._file = (self.folder / f"tokens-{len(self.shards):05}.bin").open("wb")
            self.shards.append({"file": Path(self._file.name).name, "tokens": 0})
        data = tokens.astype(self.dtype, copy=False).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self.shards[-1]["tokens"] += len(tokens)
        self.tokens += len(tokens)

    def end_document(self, size: int, digest: int) -> None:
        """The document that was written since the last one ended had `size` bytes. No document lies in two shards."""
        self._ends.append(self.tokens)
        self._bytes.append(size)
        self._digests.append(digest)
        if self.shards[-1]["tokens"] >= self.shard_tokens:
            self.close()

    def close(self) -> None:
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        self.shards[-1]["sha256"] = self._hash.hexdigest()

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Write the table, and last of all the manifest."""
        self.close()
        table = np.empty(len(self._ends), DOCUMENT)
        table["end"], table["bytes"], table["digest"] = self._ends, self._bytes, self._digests
        with (self.folder / TABLE).open("wb") as file:
            np.save(file, table, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        manifest = {
            "format": FORMAT,
            **facts,
            "documents": len(table),
            "tokens": self.tokens,
            "bytes": int(table["bytes"].sum()),
            "dtype": self.dtype.str,
            "shards": self.shards,
            "table": {"file": TABLE, "sha256": file_sha256(self.folder / TABLE)},
        }
        write_atomically(self.folder / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False))
        sync_folder(self.folder)


class PreparedText:
    """Tokenised text in a folder. It opens in no time, and travels to other processes as its path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            read = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise self._damaged(f"there is no {MANIFEST}") from error
        except ValueError as error:
            raise self._damaged(f"{MANIFEST} is no JSON document") from error
        self.manifest: dict[str, Any] = read if isinstance(read, dict) else {}
        if self.manifest.get("format") != FORMAT:
            raise self._damaged(f"its format is {self.manifest.get('format')}, and this version reads {FORMAT}")
        if missing := [word for word in WORDS if word not in self.manifest]:
            raise self._damaged(f"{MANIFEST} has no {', '.join(missing)}")
        self.dtype = np.dtype(self.manifest["dtype"])
        self._check_sizes()

    def __reduce__(self) -> tuple[Any, ...]:
        return PreparedText, (self.folder,)

    def _damaged(self, what: str) -> ValueError:
        return ValueError(
            f"{self.folder}: this tokenised text is damaged, {what}; delete the folder to prepare it anew"
        )

    def _check_sizes(self) -> None:
        for shard in self.manifest["shards"]:
            path = self.folder / shard["file"]
            size, expected = path.stat().st_size if path.is_file() else 0, shard["tokens"] * self.dtype.itemsize
            if size != expected:
                raise self._damaged(f"{shard['file']} has {size} bytes in place of {expected}")

    def verify(self) -> None:
        """Compare every byte with the manifest."""
        for part in [*self.manifest["shards"], self.manifest["table"]]:
            if file_sha256(self.folder / part["file"]) != part["sha256"]:
                raise self._damaged(f"the SHA-256 of {part['file']} is not the manifest's")

    @property
    def tokens(self) -> int:
        return self.manifest["tokens"]

    @cached_property
    def documents(self) -> np.ndarray:
        try:
            table = np.load(self.folder / TABLE, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise self._damaged(f"{TABLE} cannot be read ({error})") from error
        if table.dtype != DOCUMENT or len(table) != self.manifest["documents"]:
            raise self._damaged(f"{TABLE} does not fit the manifest")
        return table

    @cached_property
    def shards(self) -> list[np.ndarray]:
        return [np.memmap(self.folder / shard["file"], self.dtype, mode="r") for shard in self.manifest["shards"]]

    @cached_property
    def bounds(self) -> np.ndarray:
        """Where each shard begins, counting tokens, and where the last one ends."""
        return np.cumsum([0, *(shard["tokens"] for shard in self.manifest["shards"])])


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
