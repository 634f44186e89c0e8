"""What is measured of every layer while a text is read: which states are chosen, by whom, and how far they look."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from latte.analysis.projections import CHUNK, LayerForm, Piece, Projected, layer_forms, read_pieces
from latte.analysis.reach import LatentReach, Reach, ScoreReach, two_way_reach
from latte.analysis.usage import LayerUsage, entropy_of


@dataclass(frozen=True)
class LayerMeasures:
    """One layer over one text. What concerns latents is None in a layer without, the window's where there is none."""

    form: LayerForm
    tokens: int
    usage: LayerUsage | None
    chosen: Tensor | None  # [H S] the share of tokens for which a state is the likeliest
    agreement: Tensor | None  # [H H] see `head_agreement`
    latent_reach: Reach | None  # [H L]
    score_reach: Reach | None  # [H] of the window, or of full softmax attention

    @property
    def name(self) -> str:
        return self.form.name

    def heads_reach(self) -> Reach:
        """[H] of all latents of a head together, each as much as it is used."""
        if self.latent_reach is None or self.usage is None:
            raise ValueError(f"{self.name} has no latents")
        reach, share = self.latent_reach, self.usage.latent_usage
        share = share / share.sum(dim=1, keepdim=True).clamp(min=1e-300)
        tails = (reach.tails * share.unsqueeze(-1)).sum(dim=1)
        return Reach(reach.farthest, (reach.mean * share).sum(dim=1), reach.lags, tails)

    def record(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        record: dict[str, Any] = {
            "layer": self.name,
            "tokens": self.tokens,
            "heads": self.form.num_heads,
            "latents": self.form.num_latents,
            "window": self.form.window,
        }
        if self.usage is not None and self.chosen is not None and self.agreement is not None:
            record |= self.usage.record()
            record |= {"usage": self.usage.usage.tolist(), "chosen": self.chosen.tolist()}
            record["agreement"] = self.agreement.tolist()
        if self.latent_reach is not None:
            record["latent_reach"] = reach_record(self.latent_reach)
        if self.score_reach is not None:
            record["score_reach"] = reach_record(self.score_reach)
        return record


def reach_record(reach: Reach) -> dict[str, Any]:
    return {
        "mean": reach.mean.tolist(),
        "within_50": reach.within(0.5).tolist(),
        "within_90": reach.within(0.9).tolist(),
        "lags": reach.lags.tolist(),
        "tails": reach.tails.tolist(),
    }


def measure(
    model: nn.Module, tokens: Tensor, *, chunk: int = CHUNK, progress: Callable[[int, int], None] | None = None
) -> list[LayerMeasures]:
    """Measure all layers over a text's tokens [T], read `chunk` at a time."""
    meters = Meters(model, len(tokens))
    for piece in read_pieces(model, tokens, chunk, progress):
        meters.add(piece)
    return meters.results()


class Meters:
    """The measures of all layers, fed with the pieces of one text of `total` tokens."""

    def __init__(self, model: nn.Module, total: int) -> None:
        self.layers = {form.name: _LayerMeter(form, total) for form in layer_forms(model)}

    def add(self, piece: Piece) -> None:
        for name, projected in piece.layers.items():
            self.layers[name].add(projected)

    def results(self) -> list[LayerMeasures]:
        return [meter.result() for meter in self.layers.values()]


class _LayerMeter:
    def __init__(self, form: LayerForm, total: int) -> None:
        self.form, self.tokens = form, 0
        self.states = None if form.num_latents is None else _StateSums(form)
        self.latents = LatentReach(total)
        self.two_way: Reach | None = None
        self.scores = ScoreReach(form, total)

    def add(self, projected: Projected) -> None:
        p = state_probabilities(projected)
        if p is not None and self.states is not None and projected.latent_key is not None:
            self.states.add(p)
            latents, keys = p[..., p.shape[2] - projected.latent_key.shape[2] :], wide(projected.latent_key)
            if self.form.causal:
                self.latents.add(latents, keys)
            else:
                self.two_way = two_way_reach(latents, keys)
        if projected.query is not None and projected.key is not None:
            uses = torch.ones_like(projected.query[..., 0]) if p is None else p[..., 0]
            self.scores.add(uses.to(projected.query.device), projected.query, projected.key)
        self.tokens += len(next(x for x in projected if x is not None))

    def result(self) -> LayerMeasures:
        usage = chosen = agreement = latents = None
        if self.states is not None:
            usage, chosen, agreement = self.states.result(self.form)
            latents = self.latents.result() if self.two_way is None else self.two_way
        scores = self.scores.result() if self.scores.start else None
        return LayerMeasures(self.form, self.tokens, usage, chosen, agreement, latents, scores)


class _StateSums:
    """Sums over tokens of p(l|t), of its entropy and of products of two heads' probabilities."""

    def __init__(self, form: LayerForm) -> None:
        heads, states = form.num_heads, form.num_states
        self.tokens = 0
        self.entropy = torch.zeros(heads, dtype=torch.float64)
        self.usage = torch.zeros(heads, states, dtype=torch.float64)
        self.chosen = torch.zeros(heads, states, dtype=torch.float64)
        self.joint = torch.zeros(heads * states, heads * states, dtype=torch.float64)

    def add(self, p: Tensor) -> None:
        self.tokens += len(p)
        self.entropy += entropy_of(p).sum(dim=0).cpu()
        self.usage += p.sum(dim=0).cpu()
        self.chosen += torch.zeros_like(p).scatter_(-1, p.argmax(dim=-1, keepdim=True), 1.0).sum(dim=0).cpu()
        flat = p.flatten(1)
        self.joint += (flat.T @ flat).cpu()

    def result(self, form: LayerForm) -> tuple[LayerUsage, Tensor, Tensor]:
        n, latents = self.tokens, form.num_latents
        if latents is None or not n:
            raise ValueError(f"no token has gone through the latents of {form.name}")
        usage = LayerUsage(form.name, latents, n, self.entropy / n, self.usage / n)
        joint = (self.joint / n).view(*self.usage.shape, *self.usage.shape)
        return usage, self.chosen / n, head_agreement(joint, usage)


def head_agreement(joint: Tensor, usage: LayerUsage) -> Tensor:
    """[H H] how much one head's choice of a state tells of another's, from the mean of p_a(l|t) p_b(m|t), [H S H S].

    It is the mutual information of the two choices, as a share of what the choice that knows less tells of the token:
    0 for heads that choose independently, whatever their latents are numbered; 1 for heads that divide the tokens in
    the same way, and with certainty. A head's agreement with itself says how certain its own choices are.
    """
    apart = usage.usage[:, :, None, None] * usage.usage[None, None]
    shared = (torch.special.xlogy(joint, joint) - torch.special.xlogy(joint, apart)).sum(dim=(1, 3)).clamp(min=0.0)
    most = torch.minimum(usage.information[:, None], usage.information[None])
    return torch.where(most > 1e-9, shared / most.clamp(min=1e-9), 0.0).clamp(max=1.0)


def state_probabilities(projected: Projected) -> Tensor | None:
    """p(l|t) as [T H S] in float64; None without latents."""
    logits = projected.latent_query
    return None if logits is None else torch.softmax(wide(logits), dim=-1)


def wide(x: Tensor) -> Tensor:
    """In float64, which devices of Apple have not."""
    return (x.cpu() if x.device.type == "mps" else x).double()
