"""Gradient buffers of one walk."""

from dataclasses import fields

import torch
from torch import Tensor

from latte.ops.torch.walk import Stretch, Walk


class Gradients:
    """Buffers that stretches of tiles add to. Window keys and values are reached by several tiles, the rest by one."""

    def __init__(self, walk: Walk):
        self.walk = walk
        x, dtype = walk.inputs, walk.options.dtype
        self.q = None if x.q is None else torch.empty_like(x.q)
        self.k = None if x.k is None else torch.empty_like(x.k)
        self.window_q = None if x.window_q is None else torch.empty_like(x.window_q)
        self.keys = None if walk.keys is None else torch.zeros_like(walk.keys, dtype=dtype)
        self.values = torch.zeros_like(walk.values, dtype=dtype)

    def add_latents(self, at: Stretch, dq: Tensor, dk: Tensor) -> None:
        assert self.q is not None
        assert self.k is not None
        self.walk.store(self.q, dq, at)
        self.walk.store(self.k, dk, at)

    def add_window(self, at: Stretch, dq: Tensor, dkeys: Tensor) -> None:
        assert self.window_q is not None
        assert self.keys is not None
        self.walk.store(self.window_q, dq, at)
        self._add_spans(self.keys, dkeys, at)

    def add_span_values(self, at: Stretch, dv: Tensor) -> None:
        self._add_spans(self.values, dv, at)

    def add_values(self, at: Stretch, dv: Tensor) -> None:
        self._add(self.values, dv, at, at.start + self.walk.band.offset)

    def _add_spans(self, target: Tensor, spans: Tensor, at: Stretch) -> None:
        """Add what [R S X] holds for the windows of each tile: spans overlap, pieces as long as a tile do not."""
        first, _ = self.walk.span(at)
        for start in range(0, spans.shape[1], at.size):
            self._add(target, spans[:, start : start + at.size], at, first + start)

    def _add(self, target: Tensor, pieces: Tensor, at: Stretch, first: int) -> None:
        """Add [R P X] to P positions of each tile; the first tile's begin at `first`."""
        count = pieces.shape[1]
        pieces = pieces.unflatten(0, (at.tiles, self.walk.batch, target.shape[2])).permute(1, 0, 2, 4, 3)
        target[:, first : first + (at.tiles - 1) * at.size + count].unfold(1, count, at.size).add_(pieces)

    def finish(self, dlog_norm: Tensor | None, dmean: Tensor | None) -> dict[str, Tensor]:
        """All gradients by input name, those of the given state included; masked positions get 0.

        No two share memory, as a custom operation's results must not.
        """
        x, walk = self.walk.inputs, self.walk
        offset = walk.band.offset
        grads = {"q": self.q, "k": self.k, "window_q": self.window_q, "v": self.values[:, offset:]}
        if self.keys is not None:
            grads["window_k"] = self.keys[:, offset:]
        if walk.empty is not None:
            for grad in grads.values():
                if grad is not None:
                    grad.masked_fill_(walk.empty[..., None, None], 0.0)
        if x.past_keys is not None and self.keys is not None:
            grads["past_keys"], grads["past_values"] = self.keys[:, :offset].clone(), self.values[:, :offset].clone()
        if x.log_norm is not None and x.mean is not None and dlog_norm is not None and dmean is not None:
            grads["log_norm"] = dlog_norm.reshape(x.log_norm.shape)
            grads["mean"] = dmean.reshape(x.mean.shape).clone()  # without tokens it is the given gradient itself
        present = {field.name: getattr(x, field.name) for field in fields(x)}
        return {
            name: grad.to(present[name].dtype).contiguous()
            for name, grad in grads.items()
            if grad is not None and present[name] is not None
        }
