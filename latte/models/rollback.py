"""Taking tokens back: assisted decoding reads a draft and keeps only its first tokens.

A state cannot forget, so the way back is forward again from an older state: a recording keeps one, and the layer's
inputs since. As a sequence may be cut anywhere, what comes out is what would have come without the draft.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from latte.layers import AttentionOutput, AttentionState, count_tokens
from latte.layers.attention_state import Rotary

LIMIT = 128  # at least so many tokens can be taken back


class Step(NamedTuple):
    """The input of an attention layer: what `LatteAttention.stream` takes besides the state."""

    x: Tensor
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    rotary: Rotary | None = None

    def between(self, start: int, stop: int) -> "Step":
        """The tokens from `start` up to `stop`."""
        mask = None if self.mask is None else self.mask[:, start:stop]
        cos_sin = None if self.rotary is None else (self.rotary[0][:, start:stop], self.rotary[1][:, start:stop])
        return Step(self.x[:, start:stop], mask, None, cos_sin)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Step":
        """Replace what has a row for each sequence; rotary positions may have one row for all."""
        shared = self.rotary is None or self.rotary[0].shape[0] == 1 != self.x.shape[0]
        rotary = self.rotary if shared else map_tensors(function, self.rotary)
        return Step(function(self.x), map_tensors(function, self.mask), None, rotary)


Stream = Callable[[Step, AttentionState | None], AttentionOutput]


class Stretch:
    """A state and the steps that came after it."""

    def __init__(self, start: AttentionState | None) -> None:
        self.start = start
        self.steps: list[Step] = []

    @property
    def tokens(self) -> int:
        return sum(step.x.shape[1] for step in self.steps)

    def shorten(self, tokens: int) -> None:
        """Drop the last `tokens` tokens."""
        while tokens:
            step = self.steps.pop()
            left = step.x.shape[1] - tokens
            if left > 0:
                self.steps.append(step.between(0, left))
            tokens = max(-left, 0)

    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor that has a row for each sequence."""
        self.start = map_tensors(function, self.start)
        self.steps = [step.map(function) for step in self.steps]


class Recording:
    """The last tokens of a layer in two stretches: when the newer one is long enough, the older one is dropped."""

    def __init__(self, state: AttentionState | None) -> None:
        self.stretches = [Stretch(state)]
        self.cut = False

    def advance(self, stream: Stream, state: AttentionState | None, step: Step) -> AttentionOutput:
        """What `stream(step, state)` gives, remembering the step; after a cut, from what was left of the past."""
        if step.cu_seqlens is not None:
            raise ValueError("packed sequences cannot be taken back; give cu_seqlens to a cache that does not record")
        if self.cut:
            state = self._replay(stream)
        tokens = step.x.shape[1]
        if tokens > LIMIT:
            head, state = stream(step.between(0, tokens - LIMIT), state)
            self.stretches = [Stretch(state)]
            step = step.between(tokens - LIMIT, tokens)
            tail, state = self._record(stream, state, step)
            return AttentionOutput(torch.cat([head, tail], dim=1), state)
        return self._record(stream, state, step)

    def take_back(self, tokens: int) -> None:
        """Forget the last `tokens` tokens, and how to go back any further."""
        while len(self.stretches) > 1 and tokens >= self.stretches[-1].tokens:
            tokens -= self.stretches.pop().tokens
        kept = self.stretches[-1]
        if tokens > kept.tokens:
            raise ValueError(
                f"{tokens} more tokens are to be taken back than were recorded; at most {LIMIT} are certain"
            )
        kept.shorten(tokens)
        self.stretches = [kept]
        self.cut = True

    @property
    def position(self) -> Tensor | None:
        """The number of real tokens that a cut has left, for each row; None if none."""
        (kept,) = self.stretches
        before = None if kept.start is None else kept.start.position
        for step in kept.steps:
            batch, tokens = step.x.shape[:2]
            before = count_tokens(batch, tokens, step.x.device, before=before, mask=step.mask)
        return before

    def settle(self, state: AttentionState | None) -> None:
        """Forget how to go back behind `state`."""
        self.stretches = [Stretch(state)]

    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        for stretch in self.stretches:
            stretch.map(function)

    def _record(self, stream: Stream, state: AttentionState | None, step: Step) -> AttentionOutput:
        if self.stretches[-1].tokens >= LIMIT:
            self.stretches = [self.stretches[-1], Stretch(state)]
        self.stretches[-1].steps.append(step)
        return stream(step, state)

    def _replay(self, stream: Stream) -> AttentionState | None:
        """The state after the steps that a cut has left."""
        (kept,) = self.stretches
        state = kept.start
        for step in kept.steps:
            state = stream(step, state).state
        self.settle(state)
        self.cut = False
        return state


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same (named) tuples with every tensor replaced; None stays."""
    if tree is None:
        return None
    if isinstance(tree, Tensor):
        return function(tree)
    parts = [map_tensors(function, part) for part in tree]
    return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
