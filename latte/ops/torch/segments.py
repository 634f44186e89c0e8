"""The RG-LRU's inputs, segment by segment, with the sequences that begin and end in each."""

from bisect import bisect_left
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.ops.checks import sequence_bounds
from latte.ops.packing import spans
from latte.ops.states import accumulation_dtype

CPU_SEGMENT = 2**19  # elements: the few buffers of a segment stay in the cache
GPU_SEGMENT = 2**24  # there it is launches that count


def segment_length(batch: int, width: int, device: torch.device) -> int:
    """How many tokens are worked on at a time."""
    return max(16, (CPU_SEGMENT if device.type == "cpu" else GPU_SEGMENT) // max(1, batch * width))


def decay_rate(a_param: Tensor) -> Tensor:
    """8 softplus(Λ), kept finite so that rate · 0 = 0."""
    return (8.0 * F.softplus(a_param)).clamp_(max=1e30)


class Events(NamedTuple):
    """One token of each of some sequences, in the order of tokens."""

    row: Tensor
    token: Tensor
    sequence: Tensor
    tokens: list[int]

    @classmethod
    def sort(cls, row: Tensor, token: Tensor) -> "Events":
        order = token.argsort(stable=True)
        token = token[order]
        return cls(row[order], token, order, token.tolist())

    def between(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Row, token counted from `start` and sequence of the events in [start, stop)."""
        inside = slice(bisect_left(self.tokens, start), bisect_left(self.tokens, stop))
        return self.row[inside], self.token[inside] - start, self.sequence[inside]


class Starts(NamedTuple):
    """The sequences whose first real token lies in a segment."""

    row: Tensor
    token: Tensor  # counted from the segment's start
    sequence: Tensor
    h: Tensor  # the state before, 0 where there is none
    unseen: Tensor  # where there is none


class Walk:
    """The inputs of a call, cut into segments."""

    def __init__(
        self,
        x: Tensor,
        a_gate: Tensor,
        x_gate: Tensor,
        a_param: Tensor,
        mask: Tensor | None,
        state: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> None:
        self.inputs, self.mask = (x, a_gate, x_gate), mask
        self.dtype = accumulation_dtype(x, a_gate, x_gate, a_param)
        self.rate = decay_rate(a_param.to(self.dtype))
        batch, tokens, width = x.shape
        if cu_seqlens is not None:
            sequence_bounds(cu_seqlens, tokens)
        sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.state = x.new_full((sequences, width), -torch.inf, dtype=self.dtype) if state is None else state
        found = spans(mask, cu_seqlens, batch, tokens, x.device)
        self._first, self._last = Events.sort(found.row, found.first), Events.sort(found.row, found.last)

    def segments(self) -> list[tuple[int, int]]:
        """The bounds of the segments."""
        batch, tokens, width = self.inputs[0].shape
        length = segment_length(batch, width, self.rate.device)
        return [(start, min(start + length, tokens)) for start in range(0, tokens, length)]

    def starts(self, start: int, stop: int) -> Starts:
        """The sequences that begin in [start, stop)."""
        row, token, sequence = self._first.between(start, stop)
        h = self.state[sequence]
        unseen = h == -torch.inf
        return Starts(row, token, sequence, h.masked_fill_(unseen, 0.0), unseen)

    def ends(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Row, token (from the segment's start) and sequence of the last positions in [start, stop)."""
        return self._last.between(start, stop)

    def buffers(self, count: int) -> tuple[Tensor, ...]:
        """Room for a segment and one token more, to be filled again and again: fresh memory costs more than sums."""
        batch, tokens, width = self.inputs[0].shape
        length = min(tokens, segment_length(batch, width, self.rate.device)) + 1
        return tuple(self.rate.new_empty((count, batch, length, width)).unbind())

    def load(self, part: Tensor, start: int, stop: int, masked: float, out: Tensor) -> Tensor:
        """A segment of an input in the accumulation dtype, with `masked` at masked positions; in `out` if need be."""
        segment = part[:, start:stop]
        if self.mask is None and segment.dtype == self.dtype:
            return segment
        out.copy_(segment)
        return out if self.mask is None else out.masked_fill_(~self.mask[:, start:stop, None], masked)

    def decay(self, start: int, stop: int, starts: Starts, r: Tensor, a: Tensor, multiplier: Tensor) -> None:
        """Fill in r = σ(a_gate), a and the multiplier sqrt(1 − a²); a may be where r is if r is not needed."""
        torch.sigmoid(self.load(self.inputs[1], start, stop, -torch.inf, out=r), out=r)
        log_a = torch.mul(r, -self.rate, out=multiplier)
        first = starts.row, starts.token
        log_a[first] = log_a[first].masked_fill_(starts.unseen, -torch.inf)
        torch.exp(log_a, out=a)
        log_a.mul_(2.0).expm1_().neg_().sqrt_()

    def gradient(self, dy: Tensor, dfinal: Tensor, start: int, stop: int, out: Tensor) -> Tensor:
        """What flows into h of a segment directly: from y, and from the states where sequences end."""
        out.copy_(dy[:, start:stop])
        if self.mask is not None:
            out.masked_fill_(~self.mask[:, start:stop, None], 0.0)
        row, token, sequence = self.ends(start, stop)
        out[row, token] += dfinal[sequence]
        return out
