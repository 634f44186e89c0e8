"""Windows of one length over the tokens of some documents."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from latte.tasks.base import Example
from latte.tasks.text.shards import PreparedText

NO_LABEL = -100


@dataclass(frozen=True)
class Spans:
    """Documents, or parts of some, by where they begin and end among all tokens of a text."""

    starts: np.ndarray
    ends: np.ndarray
    size: float  # bytes of text in them

    @property
    def tokens(self) -> int:
        return int((self.ends - self.starts).sum())


def all_documents(text: PreparedText) -> Spans:
    ends = np.array(text.documents["end"])
    return Spans(np.concatenate([[0], ends[:-1]]), ends, int(text.documents["bytes"].sum()))


def hold_out(text: PreparedText, share: float, seed: int) -> tuple[Spans, Spans]:
    """Training and validation documents. A document's side depends on its contents and the seed, so that equal ones
    are on one side. There is at least one on each, if any differ; of a single document, the end is held out."""
    whole = all_documents(text)
    if len(whole.ends) == 1:
        total = int(whole.ends[0])
        held_tokens = max(1, round(share * total))
        size = whole.size * held_tokens / total
        cut = np.array([total - held_tokens])
        return Spans(whole.starts, cut, whole.size - size), Spans(cut, whole.ends, size)
    lots = draw(np.asarray(text.documents["digest"]), seed)
    held = ((lots < share) | (lots == lots.min())) & (lots != lots.max())
    sizes = np.asarray(text.documents["bytes"])
    train, validation = (Spans(whole.starts[side], whole.ends[side], int(sizes[side].sum())) for side in (~held, held))
    return train, validation


def draw(digests: np.ndarray, seed: int) -> np.ndarray:
    """A number from 0 to 1 for each digest: SplitMix64's mixing of digest and seed."""
    with np.errstate(over="ignore"):
        x = digests.astype(np.uint64) + np.uint64(seed % 2**64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return x / 2.0**64


class TokenStream:
    """The tokens of spans, one after another, read from the shards where they lie."""

    def __init__(self, text: PreparedText, spans: Spans) -> None:
        self.text = text
        lengths = spans.ends - spans.starts
        ends = np.cumsum(lengths)
        self.document_starts = ends - lengths
        self.length = int(lengths.sum())
        shards = np.searchsorted(text.bounds, spans.starts, side="right") - 1
        apart = np.ones(len(lengths), bool)
        apart[1:] = (spans.starts[1:] != spans.ends[:-1]) | (shards[1:] != shards[:-1])
        self._run_starts = self.document_starts[apart]  # a run is what lies in one place: few, where little is held out
        self._run_shards = shards[apart]
        self._run_offsets = spans.starts[apart] - text.bounds[self._run_shards]

    def __len__(self) -> int:
        return self.length

    def tokens(self, start: int, end: int) -> np.ndarray:
        out = np.empty(end - start, np.int64)
        self.read(start, out)
        return out

    def read(self, start: int, out: np.ndarray) -> None:
        """Fill `out` with the tokens from `start` on."""
        run = int(np.searchsorted(self._run_starts, start, side="right")) - 1
        filled = 0
        while filled < len(out):
            run_end = self._run_starts[run + 1] if run + 1 < len(self._run_starts) else self.length
            count = min(len(out) - filled, int(run_end) - start)
            offset = int(self._run_offsets[run]) + start - int(self._run_starts[run])
            out[filled : filled + count] = self.text.shards[self._run_shards[run]][offset : offset + count]
            filled, start, run = filled + count, start + count, run + 1


class Windows:
    """Window i is tokens i × context to (i + 1) × context of a stream; what is left at its end belongs to none.

    Labels are the tokens themselves: models look one ahead. Where documents are `separate`, positions begin anew with
    each, and no label asks for a document's first token, which nothing before it foretells. A token to `begin` with
    takes the place of each window's first one: models that know texts to begin so are lost without it.
    """

    def __init__(self, stream: TokenStream, context: int, separate: bool, begin: int | None = None) -> None:
        self.stream, self.context, self.separate, self.begin = stream, context, separate, begin

    def __len__(self) -> int:
        return len(self.stream) // self.context

    def __getitem__(self, index: int) -> Example:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        """Several windows at once, as rows of one array: what PyTorch's DataLoader asks for."""
        tokens = np.empty((len(indices), self.context), np.int64)
        for row, index in zip(tokens, indices, strict=True):
            if not 0 <= index < len(self):
                raise IndexError(f"window {index} of {len(self)}")
            self.stream.read(index * self.context, row)
        if self.begin is not None:
            tokens[:, 0] = self.begin
        rows = torch.from_numpy(tokens)
        if not self.separate:
            return [{"input_ids": row, "labels": row} for row in rows]
        return [self._separated(row, index) for row, index in zip(rows, indices, strict=True)]

    def _separated(self, tokens: torch.Tensor, index: int) -> Example:
        begin = index * self.context
        starts = self.stream.document_starts
        first, last = np.searchsorted(starts, [begin + 1, begin + self.context])
        inside = starts[first:last] - begin
        origins = np.zeros(self.context, np.int64)
        origins[inside] = inside
        positions = np.arange(self.context) - np.maximum.accumulate(origins)
        labels = tokens.clone()
        labels[inside] = NO_LABEL
        return {"input_ids": tokens, "labels": labels, "position_ids": torch.from_numpy(positions)}
