"""SHA-256 of files, remembered for large ones while their size and time of change stay the same."""

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from latte.tasks.text.files import write_atomically

WORTH_REMEMBERING = 16 << 20
SETTLED_AFTER_S = 2.0  # a younger file may change again within the resolution of its time


class FileHashes:
    def __init__(self, folder: Path, progress: Callable[[str, int, int], None] | None = None) -> None:
        self.folder, self.progress = folder, progress

    def of(self, path: Path) -> str:
        status = path.stat()
        if status.st_size < WORTH_REMEMBERING:
            return self._compute(path, status.st_size)
        known = [str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ino]
        memo = self.folder / f"{hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]}.json"
        if memo.is_file():
            return json.loads(memo.read_text())["sha256"]
        digest = self._compute(path, status.st_size)
        if time.time() - status.st_mtime > SETTLED_AFTER_S:
            with suppress(PermissionError):  # a cache that cannot be written to may still be read
                self.folder.mkdir(parents=True, exist_ok=True)
                write_atomically(memo, json.dumps({"path": known[0], "sha256": digest}))
        return digest

    def _compute(self, path: Path, size: int) -> str:
        digest, done = hashlib.sha256(), 0
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
                done += len(chunk)
                if self.progress is not None and size >= WORTH_REMEMBERING:
                    self.progress(f"checking {path.name}", done, size)
        return digest.hexdigest()
