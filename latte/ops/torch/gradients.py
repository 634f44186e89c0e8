"""Gradient buffers of one walk over tiles."""

from dataclasses import fields

import torch
from torch import Tensor

from latte.ops.torch.walk import Walk


class Gradients:
    """Buffers that tiles add to. Window keys and values are reached by several tiles, the rest by one."""

    def __init__(self, walk: Walk):
        self.walk = walk
        x, dtype = walk.inputs, walk.options.dtype
        self.q = None if x.q is None else torch.empty_like(x.q)
        self.k = None if x.k is None else torch.empty_like(x.k)
        self.window_q = None if x.window_q is None else torch.empty_like(x.window_q)
        self.keys = None if walk.keys is None else torch.zeros_like(walk.keys, dtype=dtype)
        self.values = torch.zeros_like(walk.values, dtype=dtype)

    def add_latents(self, start: int, end: int, dq: Tensor, dk: Tensor) -> None:
        assert self.q is not None
        assert self.k is not None
        self.walk.store(self.q, dq, start, end)
        self.walk.store(self.k, dk, start, end)

    def add_window(self, start: int, end: int, dq: Tensor, dkeys: Tensor) -> None:
        assert self.window_q is not None
        assert self.keys is not None
        self.walk.store(self.window_q, dq, start, end)
        self._add(self.keys, dkeys, *self.walk.band.span(start, end))

    def add_span_values(self, start: int, end: int, dv: Tensor) -> None:
        self._add(self.values, dv, *self.walk.band.span(start, end))

    def add_values(self, start: int, end: int, dv: Tensor) -> None:
        offset = self.walk.band.offset
        self._add(self.values, dv, start + offset, end + offset)

    def _add(self, target: Tensor, tile: Tensor, first: int, last: int) -> None:
        heads, width = target.shape[2:]
        target[:, first:last] += tile.view(self.walk.batch, heads, last - first, width).transpose(1, 2)

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
