"""Tiles of one call: how tokens are cut, loaded in the accumulation dtype and written back."""

from dataclasses import dataclass

import torch
from torch import Tensor

from latte.ops.torch.band import Band, band_weights
from latte.ops.torch.latents import TILE, LatentTile, latent_tile, plan_tiles


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call. Latents (q, k, log_norm, mean), window (window_q, window_k) and past may be absent."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor
    window_q: Tensor | None
    window_k: Tensor | None
    mask: Tensor | None
    log_norm: Tensor | None
    mean: Tensor | None
    past_keys: Tensor | None
    past_values: Tensor | None
    past_valid: Tensor | None


@dataclass(frozen=True)
class Options:
    window: int
    scale: float
    softcap: float
    undirected: bool
    causal: bool
    dtype: torch.dtype


class Walk:
    """Tiles of one call, loaded on demand in the accumulation dtype with masked positions emptied."""

    def __init__(self, inputs: Inputs, options: Options):
        self.inputs, self.options = inputs, options
        self.batch, self.tokens, self.value_heads, self.width = inputs.v.shape
        queries = inputs.q if inputs.q is not None else inputs.window_q
        assert queries is not None
        self.heads = queries.shape[2]
        self.groups = self.heads // self.value_heads
        self.rows = self.batch * self.value_heads
        self.empty = None if inputs.mask is None else ~inputs.mask
        self._lay_out_window()

    def _lay_out_window(self) -> None:
        """Keys, values and validity with the past's positions in front."""
        x = self.inputs
        self.keys, self.values, self.blocked = x.window_k, x.v, self.empty
        offset = 0
        if x.window_k is not None and x.past_keys is not None:
            assert x.past_values is not None
            assert x.past_valid is not None
            offset = x.past_keys.shape[1]
            self.keys = torch.cat([x.past_keys, x.window_k], dim=1)
            self.values = torch.cat([x.past_values, x.v], dim=1)
            now = torch.zeros_like(x.v[:, :, 0, 0], dtype=torch.bool) if self.empty is None else self.empty
            self.blocked = torch.cat([~x.past_valid, now], dim=1)
        self.band = Band(self.options.window, offset, offset + self.tokens, self.options.causal)
        self._hidden: dict[tuple[int, int, int], Tensor] = {}  # the last mask: most tiles share it

    def load(self, x: Tensor, start: int, end: int, empty: Tensor | None = None, fill: float = 0.0) -> Tensor:
        """Tokens start..end of [B T heads X] as [N G C X] (G = 1 for value heads)."""
        tile = x[:, start:end]
        if empty is not None:
            tile = tile.masked_fill(empty[:, start:end, None, None], fill)
        tile = tile.to(self.options.dtype).transpose(1, 2)
        return tile.reshape(self.rows, x.shape[2] // self.value_heads, end - start, x.shape[3])

    def load_values(self, x: Tensor, start: int, end: int, empty: Tensor | None) -> Tensor:
        return self.load(x, start, end, empty)[:, 0]

    def store(self, target: Tensor, tile: Tensor, start: int, end: int) -> None:
        """Write a tile [N G C X] (or [N C X] for value heads) to tokens start..end of [B T heads X]."""
        tile = tile.view(self.batch, target.shape[2], end - start, target.shape[3]).transpose(1, 2)
        target[:, start:end].copy_(tile)

    def hidden(self, start: int, end: int) -> Tensor:
        first, last = self.band.span(start, end)
        shape = (end - start, start - first, last - first)
        if shape not in self._hidden:
            self._hidden = {shape: self.band.hidden(start, end, self.inputs.v.device).unsqueeze(0)}
        hidden = self._hidden[shape]
        if self.blocked is None:
            return hidden
        per_batch = hidden | self.blocked[:, None, first:last]
        return per_batch.repeat_interleave(self.value_heads, dim=0)

    def state(self) -> tuple[Tensor, Tensor]:
        """The latents' state before the first token as [N G L] and [N G L D]."""
        x = self.inputs
        latents = 0 if x.k is None else x.k.shape[3]
        if x.log_norm is None or x.mean is None:
            log_norm = x.v.new_full((self.rows, self.groups, latents), -torch.inf, dtype=self.options.dtype)
            return log_norm, x.v.new_zeros((*log_norm.shape, self.width), dtype=self.options.dtype)
        shape = (self.rows, self.groups, latents)
        log_norm, mean = x.log_norm.to(self.options.dtype), x.mean.to(self.options.dtype)
        return log_norm.reshape(shape), mean.reshape(*shape, self.width)

    def plan(self) -> list[list[tuple[int, int]]]:
        k = self.inputs.k
        if k is None or self.rows == 0 or self.tokens == 1:  # one token never leaps
            return [[(start, min(start + TILE, self.tokens))] for start in range(0, self.tokens, TILE)]
        k = k.to(self.options.dtype)
        if self.empty is not None:
            k = k.masked_fill(self.empty[..., None, None], -torch.inf)
        return plan_tiles(k, self.state()[0].view(self.batch, self.heads, -1))

    def latents(self, start: int, end: int, log_norm: Tensor) -> tuple[LatentTile, Tensor]:
        x = self.inputs
        assert x.q is not None
        assert x.k is not None
        q = self.load(x.q, start, end, self.empty)
        k = self.load(x.k, start, end, self.empty, -torch.inf)
        return latent_tile(q, k, log_norm, self.options.undirected)

    def window_weights(self, start: int, end: int) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor], slice]:
        """Window weights [N G C S], the cap's slope, (scaled q, keys) and the columns that are the tile itself."""
        assert self.inputs.window_q is not None
        assert self.keys is not None
        first, last = self.band.span(start, end)
        q = self.load(self.inputs.window_q, start, end, self.empty) * self.options.scale
        keys = self.load_values(self.keys, first, last, self.blocked)
        weights, slope = band_weights(q, keys, self.hidden(start, end), self.options.softcap)
        here = start + self.band.offset - first
        return weights, slope, (q, keys), slice(here, here + end - start)

    def near_values(self, start: int, end: int) -> Tensor:
        """The values [N S D] that the windows of tokens start..end reach."""
        return self.load_values(self.values, *self.band.span(start, end), self.blocked)

    def unstack(self, log_norm: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        """The latents' state as [B H L] and [B H L D], in memory of its own."""
        shape = (self.batch, self.heads, log_norm.shape[-1])
        return log_norm.reshape(shape).clone(), mean.reshape(*shape, self.width).clone()
