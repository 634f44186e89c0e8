"""Tiles of one call: how tokens are cut, loaded in the accumulation dtype and written back.

Tiles that are alike and follow each other are a stretch: all of it is worked on at once, as much as fits the cache.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from latte.ops.torch.band import Band, band_weights
from latte.ops.torch.latents import TILE, KeyTiles, LatentTiles, key_tiles, latent_tiles, plan_tiles, stack

CPU_STRETCH = 2**19  # scores, values and keys: the few buffers of a stretch stay near the cache
GPU_STRETCH = 2**23  # there it is launches that count


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


class Stretch(NamedTuple):
    """Tiles of `size` tokens, one after another."""

    start: int
    size: int
    tiles: int = 1

    @property
    def end(self) -> int:
        return self.start + self.size * self.tiles

    @property
    def first_tile(self) -> tuple[int, int]:
        return self.start, self.start + self.size


class Walk:
    """Stretches of one call, loaded on demand in the accumulation dtype with masked positions emptied."""

    def __init__(self, inputs: Inputs, options: Options):
        self.inputs, self.options = inputs, options
        self.batch, self.tokens, self.value_heads, self.width = inputs.v.shape
        queries = inputs.q if inputs.q is not None else inputs.window_q
        assert queries is not None
        self.heads = queries.shape[2]
        self.groups = self.heads // self.value_heads
        self.rows = self.batch * self.value_heads
        self.empty = None if inputs.mask is None else ~inputs.mask
        self._buffers: dict[str, Tensor] = {}
        self._past: dict[int, Tensor] = {}
        self._lay_out_window()

    def room(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A buffer to be filled again and again: fresh memory costs more than sums."""
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = self.inputs.v.new_empty(size, dtype=self.options.dtype)
        return self._buffers[name][:size].view(shape)

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
        self._limit: dict[tuple[int, int, int], Tensor] = {}  # the last one: most tiles share it

    def load(self, x: Tensor, at: Stretch, empty: Tensor | None = None, fill: float = 0.0) -> Tensor:
        """A stretch of [B T heads X] as [R G C X] (G = 1 for value heads)."""
        part = self._part(x, at.start, at.end, empty, fill).unflatten(1, (at.tiles, at.size))
        return part.permute(1, 0, 3, 2, 4).reshape(self._shape(x, at))

    def load_values(self, x: Tensor, at: Stretch, empty: Tensor | None) -> Tensor:
        return self.load(x, at, empty)[:, 0]

    def load_span(self, x: Tensor, at: Stretch, name: str) -> Tensor:
        """What the windows of each tile reach of [B positions Hv X], as [R S X]; in the buffer of that name."""
        first, last = self.span(at)
        width = self.band.reach(*at.first_tile)[1]
        part = self._part(x, first, last, self.blocked, 0.0).unfold(1, width, at.size)  # [B tiles Hv X S]
        spans = self.room(name, (at.tiles, self.batch, self.value_heads, width, x.shape[3]))
        return spans.copy_(part.permute(1, 0, 2, 4, 3)).view(at.tiles * self.rows, width, x.shape[3])

    def _part(self, x: Tensor, start: int, end: int, empty: Tensor | None, fill: float) -> Tensor:
        part = x[:, start:end]
        if empty is not None:
            part = part.masked_fill(empty[:, start:end, None, None], fill)
        return part.to(self.options.dtype)

    def _shape(self, x: Tensor, at: Stretch) -> tuple[int, int, int, int]:
        return at.tiles * self.rows, x.shape[2] // self.value_heads, at.size, x.shape[3]

    def store(self, target: Tensor, tiles: Tensor, at: Stretch) -> None:
        """Write [R G C X] to its tokens of [B T heads X]."""
        tiles = tiles.view(at.tiles, self.batch, target.shape[2], at.size, target.shape[3]).permute(1, 0, 3, 2, 4)
        target[:, at.start : at.end].unflatten(1, (at.tiles, at.size)).copy_(tiles)

    def past(self, size: int) -> Tensor:
        """[C C] 1 where s ≤ t, else 0."""
        if size not in self._past:
            ones = self.inputs.v.new_ones((size, size), dtype=self.options.dtype)
            self._past = {size: ones.tril_()}
        return self._past[size]

    def span(self, at: Stretch) -> tuple[int, int]:
        """The positions, past included, that the windows of a stretch reach."""
        return self.band.span(at.start, at.end)

    def limit(self, at: Stretch) -> Tensor:
        """[R or 1, C, S] −inf where a position lies outside a token's window or is not real, else inf."""
        key = (at.size, *self.band.reach(*at.first_tile))
        if key not in self._limit:
            hidden = self.band.hidden(*at.first_tile, self.inputs.v.device).unsqueeze(0)
            limit = self.inputs.v.new_full(hidden.shape, torch.inf, dtype=self.options.dtype)
            self._limit = {key: limit.masked_fill_(hidden, -torch.inf)}
        limit = self._limit[key]
        if self.blocked is None:
            return limit
        first, last = self.span(at)
        blocked = self.blocked[:, first:last].unfold(1, limit.shape[2], at.size).transpose(0, 1)  # [tiles B S]
        limits = limit.masked_fill(blocked.flatten(0, 1).unsqueeze(1), -torch.inf)
        return limits.repeat_interleave(self.value_heads, dim=0)

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

    def plan(self) -> list[list[Stretch]]:
        """All tokens: entries of one stretch, or of single tiles where a normaliser leaps."""
        k = self.inputs.k
        if k is None or self.rows == 0 or self.tokens == 1:  # one token never leaps
            return [[stretch] for stretch in self.stretches()]
        k = k.to(self.options.dtype)
        if self.empty is not None:
            k = k.masked_fill(self.empty[..., None, None], -torch.inf)
        return self._join(plan_tiles(k, self.state()[0].view(self.batch, self.heads, -1)))

    def stretches(self) -> list[Stretch]:
        """All tokens, whatever the keys are."""
        tiles = [[(start, min(start + TILE, self.tokens))] for start in range(0, self.tokens, TILE)]
        return [stretch for (stretch,) in self._join(tiles)]

    def _join(self, plan: list[list[tuple[int, int]]]) -> list[list[Stretch]]:
        """Whole tiles whose windows reach equally far, joined to stretches."""
        reach = TILE if self.inputs.window_q is None else min(self.band.length, TILE + self.options.window - 1)
        latents = 0 if self.inputs.k is None else self.inputs.k.shape[3]
        elements = self.batch * self.heads * TILE * (reach + self.width + 2 * latents)
        most = (CPU_STRETCH if self.inputs.v.device.type == "cpu" else GPU_STRETCH) // max(1, elements)
        entries: list[list[Stretch]] = []
        for tiles in plan:
            (start, end), *more = tiles
            if entries and not more and self._continues(entries[-1], start, end, most):
                entries[-1] = [entries[-1][0]._replace(tiles=entries[-1][0].tiles + 1)]
            else:
                entries.append([Stretch(start, end - start) for start, end in tiles])
        return entries

    def _continues(self, entry: list[Stretch], start: int, end: int, most: int) -> bool:
        (stretch, *more) = entry
        same = stretch.size == end - start and self.band.reach(*stretch.first_tile) == self.band.reach(start, end)
        return same and not more and stretch.tiles < most

    def load_keys(self, at: Stretch, log_norm: Tensor) -> KeyTiles:
        assert self.inputs.k is not None
        return key_tiles(self.load(self.inputs.k, at, self.empty, -torch.inf), log_norm, at.tiles)

    def load_latents(self, at: Stretch, keys: KeyTiles) -> LatentTiles:
        assert self.inputs.q is not None
        return latent_tiles(self.load(self.inputs.q, at, self.empty), keys, self.options.undirected)

    def window_weights(self, at: Stretch) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor], slice]:
        """Window weights [R G C S], the cap's slope, (scaled q, keys) and the columns that are the tile itself."""
        assert self.inputs.window_q is not None
        assert self.keys is not None
        q = self.load(self.inputs.window_q, at, self.empty) * self.options.scale
        keys = self.load_span(self.keys, at, "keys")
        weights, slope = band_weights(
            q, keys, self.limit(at), self.options.softcap, self.room, may_be_empty=self.blocked is not None
        )
        here, _ = self.band.reach(*at.first_tile)
        return weights, slope, (q, keys), slice(here, here + at.size)

    def products(self, dy: Tensor, at: Stretch) -> Tensor:
        """dy_t·v_s [R G C S] of the positions that windows reach, in the place of the scores."""
        values = self.load_span(self.values, at, "values").transpose(1, 2)
        products = self.room("scores", (*dy.shape[:3], values.shape[2]))
        torch.bmm(stack(dy), values, out=stack(products))
        return products

    def unstack(self, log_norm: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        """The latents' state as [B H L] and [B H L D], in memory of its own."""
        shape = (self.batch, self.heads, log_norm.shape[-1])
        return log_norm.reshape(shape).clone(), mean.reshape(*shape, self.width).clone()
