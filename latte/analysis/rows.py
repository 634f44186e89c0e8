"""Implied attention: the exact p(s|t) of chosen tokens, one row at a time, and where it comes from."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from latte.analysis.projections import CHUNK, LayerForm, Projected, layer_forms, read_pieces
from latte.ops import attention_weights

LONGEST_MATRIX = 4096
"""Tokens up to which a whole matrix p(s|t) is made: its size is their square, per head."""


@dataclass(frozen=True)
class LayerTrace:
    """What one layer's attention over a text of T tokens was made of: linear in T."""

    form: LayerForm
    parts: Projected

    @property
    def tokens(self) -> int:
        return len(next(x for x in self.parts if x is not None))


class Attended(NamedTuple):
    """A token that another attends to, by one head."""

    position: int
    weight: float  # p(s|t)
    local: float  # the part of it that goes through the window, or through softmax attention
    latents: list[float]  # the part that goes through each latent; all parts sum to the weight


@dataclass(frozen=True)
class AttentionRow:
    """p(s|t) of one query token t, exactly, for every head: Σ_l p(l|t) p(s|l,t), with the window as state 0."""

    trace: LayerTrace
    token: int
    states: Tensor | None  # [H S] p(l|t); None without latents
    weights: Tensor  # [H T'] p(s|t) in float64, of all s that t may see: rows sum to 1
    local_begin: int  # the first position that the window, or softmax attention, covers
    local: Tensor | None  # [H W] its part of p(s|t) from there on; None where there is none

    @property
    def local_share(self) -> Tensor:
        """[H] how much of p(s|t) goes through the window; 1 for softmax attention."""
        return torch.zeros_like(self.weights[:, 0]) if self.local is None else self.local.sum(dim=1)

    def through(self, positions: Tensor) -> Tensor:
        """[H N L] the parts of p(s|t) of N positions that go through each latent."""
        keys = self.trace.parts.latent_key
        if self.states is None or keys is None:
            return self.weights.new_zeros((len(self.weights), len(positions), 0))
        seen = visible(keys, self.trace.form, self.token)
        norm = torch.logsumexp(seen.double(), dim=0)
        p = self.states[:, self.states.shape[1] - keys.shape[2] :]
        return torch.exp(seen[positions].double() - norm).transpose(0, 1) * p[:, None]

    def top(self, head: int, count: int = 10) -> list[Attended]:
        """The tokens that a head attends to most, largest weight first."""
        weights, positions = self.weights[head].topk(min(count, self.weights.shape[1]))
        latents = self.through(positions)[head]
        rows = zip(positions.tolist(), weights.tolist(), latents.tolist(), strict=True)
        return [Attended(place, weight, self._local(head, place), parts) for place, weight, parts in rows]

    def _local(self, head: int, position: int) -> float:
        column = position - self.local_begin
        return 0.0 if self.local is None or not 0 <= column < self.local.shape[1] else float(self.local[head, column])


def trace(
    model: nn.Module,
    tokens: Tensor,
    layers: Collection[str] | None = None,
    *,
    chunk: int = CHUNK,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, LayerTrace]:
    """Read a text's tokens [T] and keep what the named layers, or all, attended with: linear in T for each."""
    forms = {form.name: form for form in layer_forms(model)}
    wanted = list(forms) if layers is None else list(layers)
    if unknown := [name for name in wanted if name not in forms]:
        raise ValueError(f"layer {unknown[0]!r} is none of the model's attention layers, which are {', '.join(forms)}")
    pieces: dict[str, list[Projected]] = {name: [] for name in wanted}
    for piece in read_pieces(model, tokens, chunk, progress):
        for name, kept in pieces.items():
            kept.append(piece.layers[name])
    return {name: LayerTrace(forms[name], join(kept)) for name, kept in pieces.items()}


def join(pieces: list[Projected]) -> Projected:
    """The projections of consecutive pieces of a text as those of one."""
    return Projected(*(None if parts[0] is None else torch.cat(parts) for parts in zip(*pieces, strict=True)))


def attention_row(trace: LayerTrace, token: int) -> AttentionRow:
    """The exact p(s|t) of query token t (negative counts from the end), for all heads, in memory linear in the text."""
    if not -trace.tokens <= token < trace.tokens:
        raise ValueError(f"token is {token}; the text has tokens 0 to {trace.tokens - 1}")
    token %= trace.tokens
    form, parts = trace.form, trace.parts
    states = None if parts.latent_query is None else torch.softmax(parts.latent_query[token].double(), dim=-1)
    length = token + 1 if form.causal else trace.tokens
    like = next(x for x in parts if x is not None)
    weights = torch.zeros(form.num_heads, length, dtype=torch.float64, device=like.device)
    begin, local = 0, None
    if parts.query is not None and parts.key is not None:
        begin, local = score_weights(form, parts.query[token], visible(parts.key, form, token), token)
        local = local if states is None else local * states[:, :1]
        weights[:, begin : begin + local.shape[1]] += local
    if states is not None and parts.latent_key is not None:
        keys = visible(parts.latent_key, form, token)
        p = states[:, states.shape[1] - keys.shape[2] :]
        for latent in range(keys.shape[2]):
            weights += p[:, latent, None] * torch.softmax(keys[..., latent].double().T, dim=-1)
    return AttentionRow(trace, token, states, weights, begin, local)


def attention_matrix(trace: LayerTrace) -> Tensor:
    """The whole p(s|t) of a short text, [H T T]."""
    tokens, form, parts = trace.tokens, trace.form, trace.parts
    if tokens > LONGEST_MATRIX:
        raise ValueError(
            f"the text has {tokens} tokens, a matrix of their square for every head; shorten it to {LONGEST_MATRIX}, "
            "or look at single rows with attention_row"
        )
    inputs = [None if x is None else x[None] for x in parts]
    window = tokens if form.window is None else form.window
    return attention_weights(
        *inputs, window=window, scale=form.scale, softcap=form.softcap, causal=form.causal
    )[0]  # fmt: skip


def visible(keys: Tensor, form: LayerForm, token: int) -> Tensor:
    """The keys of positions that a token may see."""
    return keys[: token + 1] if form.causal else keys


class Scores(NamedTuple):
    """One token's softmax weights over consecutive positions, of which the first is `begin`."""

    begin: int
    weights: Tensor  # [H W] in float64


def score_weights(form: LayerForm, query: Tensor, keys: Tensor, own: int) -> Scores:
    """softmax_s(cap(scale · q·k_s)) over the keys [S Hv E] that a query [H E] may see; its own is number `own`."""
    begin = 0 if form.window is None else max(0, own - form.window + 1)
    stop = len(keys) if form.window is None else min(len(keys), own + form.window)
    exact = torch.promote_types(query.dtype, torch.float32)
    groups = query.to(exact).view(keys.shape[1], -1, query.shape[-1])  # heads that share a key
    scale = query.shape[-1] ** -0.5 if form.scale is None else form.scale
    scores = torch.einsum("kge,ske->kgs", groups, keys[begin:stop].to(exact)).flatten(0, 1).double() * scale
    if form.softcap is not None:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    return Scores(begin, torch.softmax(scores, dim=-1))
