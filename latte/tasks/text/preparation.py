"""Text is tokenised once: a folder in the cache, named after its contents, holds the result."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from latte.tasks.text.encoding import AFTER_A_WORD, Encoder, batches, encode_all, pieces
from latte.tasks.text.files import partial_name, sync_folder
from latte.tasks.text.hashes import FileHashes
from latte.tasks.text.reading import Chunk
from latte.tasks.text.shards import FORMAT, MANIFEST, PreparedText, ShardWriter
from latte.tasks.text.sources import Source
from latte.tasks.text.vocabulary import END_OF_TEXT, Vocabulary, bpe_size, load_vocabulary, train_bpe, wrapped
from latte.tasks.workers import available_cores

Progress = Callable[[str, int, int], None]
WORTH_A_PROCESS = 8 << 20  # bytes of sources, below which starting processes takes longer than it saves
BPE_VERSION = 2


def prepare_text(
    sources: Sequence[Source],
    vocabulary: Vocabulary,
    cache: Path,
    *,
    workers: int = 0,
    progress: Progress | None = None,
) -> PreparedText:
    """The tokens of the sources, from the cache where they are there already.

    Any number of processes may ask for the same text: one prepares it, the others wait. One that is killed leaves
    nothing that could be taken for a result. `workers` are processes; 0: one for each core where the text is worth it.
    """
    identities = [source.identity(FileHashes(cache / "hashes", progress)) for source in sources]
    folder = cache / f"text-{_key([FORMAT, vocabulary.sha256, *identities])}"
    facts = {
        "tokenizer": {"sha256": vocabulary.sha256, "size": vocabulary.size, "separator": vocabulary.separator},
        "sources": [
            {"name": source.name, "identity": identity} for source, identity in zip(sources, identities, strict=True)
        ],
    }

    def build(partial: Path) -> None:
        tokenize(sources, vocabulary, partial, facts, workers, progress)

    return PreparedText(_built_once(folder, MANIFEST, build, progress))


def trained_vocabulary(
    name: str, sources: Sequence[Source], cache: Path, separator: str | None, progress: Progress | None
) -> Vocabulary:
    """The vocabulary called `name`; a BPE is trained on the sources, once."""
    size = bpe_size(name)
    if size is None:
        return load_vocabulary(name, separator)
    identities = [source.identity(FileHashes(cache / "hashes", progress)) for source in sources]

    def build(partial: Path) -> None:
        stream = pieces(_read(sources, False, "training a BPE", progress), AFTER_A_WORD)
        texts = (piece.data.decode() for piece in stream)
        wrapped(train_bpe(texts, size), END_OF_TEXT).save_pretrained(partial)

    folder = cache / f"bpe-{_key([BPE_VERSION, size, *identities])}"
    _built_once(folder, "tokenizer.json", build, progress)
    return load_vocabulary(str(folder), separator)


def _key(parts: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _built_once(folder: Path, mark: str, build: Callable[[Path], None], progress: Progress | None) -> Path:
    """`folder`, made by `build` in one beside it and renamed when whole; `mark` is a file that each whole one has."""
    if (folder / mark).is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{folder.name}.lock"), progress):
        if (folder / mark).is_file():
            return folder
        for left in folder.parent.glob(f".{folder.name}.*"):  # of processes that were killed: the lock is ours now
            shutil.rmtree(left, ignore_errors=True)
        partial = partial_name(folder)
        partial.mkdir()
        try:
            build(partial)
            _publish(partial, folder, mark)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _publish(partial: Path, folder: Path, mark: str) -> None:
    sync_folder(partial)
    try:
        partial.rename(folder)
    except OSError:
        if not (folder / mark).is_file():  # where locks do not work, another process may have been faster
            raise
    sync_folder(folder.parent)


@contextmanager
def _locked(path: Path, progress: Progress | None) -> Iterator[None]:
    lock = FileLock(path)
    while True:
        try:
            lock.acquire(timeout=0.5)
            break
        except Timeout:
            if progress is not None:
                progress("waiting for another process that prepares the same text", 0, 0)
    try:
        yield
    finally:
        lock.release()


def _read(sources: Sequence[Source], as_bytes: bool, what: str, progress: Progress | None) -> Iterator[Chunk]:
    total, done = sum(source.size for source in sources), 0

    def tick(read: int) -> None:
        nonlocal done
        done += read
        if progress is not None:
            progress(what, min(done, total or done), total)

    for source in sources:
        yield from source.documents(as_bytes, tick)


def tokenize(
    sources: Sequence[Source],
    vocabulary: Vocabulary,
    folder: Path,
    facts: dict[str, Any],
    workers: int,
    progress: Progress | None,
) -> None:
    """Write the tokens of all documents that are not empty into `folder`."""
    encoder = Encoder(vocabulary)
    writer = ShardWriter(folder, encoder.dtype)
    stream = batches(pieces(_read(sources, encoder.of_bytes, "tokenizing", progress), encoder.cut))
    size, digest, words = 0, hashlib.blake2b(digest_size=8), 0
    for batch, encoded in encode_all(encoder, stream, _processes(workers, sources, encoder)):
        bounds = np.cumsum(encoded.lengths)[:-1]
        for piece, tokens in zip(batch, np.split(encoded.tokens, bounds), strict=True):
            writer.write(tokens)
            words += len(tokens) - piece.first * len(encoder.prefix) - piece.last
            size += len(piece.data)
            digest.update(piece.data)
            if piece.last:
                writer.end_document(size, int.from_bytes(digest.digest(), "little"))
                size, digest = 0, hashlib.blake2b(digest_size=8)
    if not words:
        writer.close()
        names = ", ".join(source.name for source in sources[:3])
        raise ValueError(f"{names}: there is not one token of text in it; name a text that is not empty")
    writer.finish(facts)


def _processes(workers: int, sources: Sequence[Source], encoder: Encoder) -> int:
    """How many to start besides this one."""
    if workers == 0:
        small = all(source.size for source in sources) and sum(source.size for source in sources) < WORTH_A_PROCESS
        workers = 1 if small or encoder.of_bytes else available_cores()
    return workers if workers > 1 else 0
