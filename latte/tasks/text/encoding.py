"""Documents into tokens, in pieces that give the tokens of the whole, by several processes."""

import os
import pickle
import re
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from latte.tasks.text.reading import Chunk

if TYPE_CHECKING:  # processes that encode need not wait for what it imports
    from latte.tasks.text.vocabulary import Vocabulary

BATCH_BYTES = 1 << 20  # what a process encodes at a time, and where long documents are cut
AFTER_A_WORD = re.compile(rb"[A-Za-z0-9](?=[ \n])")
ANYWHERE = re.compile(rb"(?s).")
PROBES = ("a", "Zz9", "word", " it's", "7", "x1")
REST = ("", "b", " b", "\n b", "\nb", "9", ".", "'s", "\t", "\r\n.", "é", "中", "<")
PROBES_AFTER = [space + rest for space in (" ", "\n") for rest in REST]


class Piece(NamedTuple):
    data: bytes
    first: bool  # in its document
    last: bool


class Encoded(NamedTuple):
    tokens: np.ndarray
    lengths: list[int]  # of the pieces


def cuts_after_words(pipeline: Tokenizer) -> bool:
    """Whether a text may be cut between a letter or digit and a space or line break without changing its tokens.

    It may when normalising and splitting into words do not reach across such a place. Both are local, so a few probes
    tell; where a space becomes a part of the text's form, as in SentencePiece's manner, they do.
    """
    normalizer, splitter = pipeline.normalizer, pipeline.pre_tokenizer
    if splitter is None or any("\n" in token or " " in token for token in _added(pipeline)):
        return False

    def words(text: str) -> list[str]:
        return [word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text) if normalizer else text)]

    return all(words(before + after) == words(before) + words(after) for before in PROBES for after in PROBES_AFTER)


def _added(pipeline: Tokenizer) -> list[str]:
    return [
        token.content + " " * (token.lstrip or token.rstrip) for token in pipeline.get_added_tokens_decoder().values()
    ]


def pieces(documents: Iterable[Chunk], cut: re.Pattern[bytes] | None) -> Iterator[Piece]:
    """The documents, the long ones in pieces of about BATCH_BYTES that end where `cut` matches; None: in one piece."""
    held: list[bytes] = []
    size, wanted, first = 0, BATCH_BYTES, True
    for data, last in documents:
        held.append(data)
        size += len(data)
        if not last and (cut is None or size <= wanted):
            continue
        *ready, rest = split(b"".join(held), BATCH_BYTES, cut)
        for part in ready:
            yield Piece(part, first, False)
            first = False
        if last:
            if rest or not first:
                yield Piece(rest, first, True)
            rest, first = b"", True
        held, size = [rest], len(rest)
        wanted = max(BATCH_BYTES, 2 * size)  # where there is no place to cut, bytes are not searched again and again


def split(data: bytes, size: int, cut: re.Pattern[bytes] | None) -> Iterator[bytes]:
    start = 0
    while cut is not None and len(data) - start > size:
        place = cut.search(data, start + size)
        if place is None:
            break
        yield data[start : place.end()]
        start = place.end()
    yield data[start:]


def batches(stream: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in stream:
        batch.append(piece)
        size += len(piece.data)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class Encoder:
    """Tokens of pieces. A special token's name in a text is text: documents end where they end, not where they say."""

    def __init__(self, vocabulary: "Vocabulary") -> None:
        self.of_bytes, self.prefix, self.separator = vocabulary.of_bytes, vocabulary.prefix, vocabulary.separator
        self.dtype = np.dtype("<u2" if vocabulary.size <= 1 << 16 else "<u4")
        self.pipeline = vocabulary.pipeline
        self.cut = ANYWHERE if self.of_bytes else AFTER_A_WORD if cuts_after_words(self._tokenizer()) else None
        self._loaded: Tokenizer | None = None

    def _tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.from_str(self.pipeline)
        tokenizer.encode_special_tokens = True
        return tokenizer

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_loaded": None}

    def __call__(self, batch: list[Piece]) -> Encoded:
        parts: list[np.ndarray] = []
        lengths: list[int] = []
        for piece in batch:
            tokens = self._encode(piece.data)
            before = self.prefix if piece.first else ()
            after = (self.separator,) if piece.last else ()
            if before or after:
                tokens = np.concatenate([np.array(before, self.dtype), tokens, np.array(after, self.dtype)])
            parts.append(tokens)
            lengths.append(len(tokens))
        return Encoded(np.concatenate(parts), lengths)

    def _encode(self, data: bytes) -> np.ndarray:
        if self.of_bytes:
            return np.frombuffer(data, np.uint8).astype(self.dtype)
        self._loaded = self._loaded or self._tokenizer()
        (encoding,) = self._loaded.encode_batch_fast([data.decode()], add_special_tokens=False)  # fast: without offsets
        return np.array(encoding.ids, self.dtype)


def encode_all(
    encoder: Encoder, stream: Iterable[list[Piece]], processes: int
) -> Iterator[tuple[list[Piece], Encoded]]:
    """Batches with their tokens, in order. While processes encode, this one reads on, up to a few batches ahead."""
    if processes == 0:
        for batch in stream:
            yield batch, encoder(batch)
        return
    # The encoder goes by a file: what a process is started with goes through a pipe, and where that is full and the
    # process dies, starting it waits for ever.
    with TemporaryDirectory(prefix="latte-") as folder:
        path = Path(folder) / "encoder"
        path.write_bytes(pickle.dumps(encoder))
        yield from _encode_together(path, stream, processes)


def _encode_together(
    path: Path, stream: Iterable[list[Piece]], processes: int
) -> Iterator[tuple[list[Piece], Encoded]]:
    waiting: deque[tuple[list[Piece], Future[Encoded]]] = deque()
    pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=_start_worker, initargs=(path,))
    try:
        for batch in stream:
            waiting.append((batch, pool.submit(_encode_in_worker, batch)))
            if len(waiting) > 2 * processes + 1:
                batch, future = waiting.popleft()
                yield batch, future.result()
        for batch, future in waiting:
            yield batch, future.result()
    except BrokenProcessPool as error:
        for process in list((pool._processes or {}).values()):  # the pool misses one that was just being started
            process.kill()
        raise OSError(
            "a process that tokenises has died: memory may be short (fewer workers need less), or the script that "
            'started it lacks `if __name__ == "__main__":` (workers=1 starts none)'
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_encoder: Encoder | None = None


def _start_worker(path: Path) -> None:
    global _encoder
    _encoder = pickle.loads(path.read_bytes())
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that started us
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A pool's processes would wait for ever for work from one that was killed."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_in_worker(batch: list[Piece]) -> Encoded:
    if _encoder is None:
        raise RuntimeError("the worker was not started by _start_worker")
    return _encoder(batch)
