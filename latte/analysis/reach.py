"""How far back attention looks: distances t − s under p(s|l,t), in linear time and without a row of T weights kept.

The weight of all that lies d tokens back or farther needs no sum over tokens: with Z_t = log Σ_{s≤t} exp(k_s) it is
exp(Z_{t−d} − Z_t). The mean distance is t less a running weighted mean of positions, which merges as values do.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from latte.analysis.projections import LayerForm
from latte.analysis.rows import score_weights

SAMPLES_PER_LAG = 64
SAMPLED_TOKENS = 512
LAGS = tuple(2**power for power in range(31))


@dataclass(frozen=True)
class Reach:
    """The distances of what some choices (heads, or heads and latents) look at; token t looks at itself at 0.

    Averages over the tokens of a text, each weighted by how much it uses the choice.
    """

    farthest: int  # the largest distance there is
    mean: Tensor  # [...] the mean distance
    lags: Tensor  # [N] distances: 1, 2, 4, … up to the farthest
    tails: Tensor  # [... N] the weight of all that is as far as a lag, or farther

    def within(self, share: float) -> Tensor:
        """[...] the distance within which `share` of the weight lies, interpolated between powers of two."""
        if not 0 < share < 1:
            raise ValueError(f"share is {share}; it must be between 0 and 1")
        lags, tails = self._ends()
        places = torch.log2(1 + lags.to(tails.dtype))
        left = 1 - share
        after = (tails > left).sum(dim=-1, keepdim=True)  # the first with no more than that left; tails never increase
        high, low = (tails.gather(-1, index).squeeze(-1) for index in (after - 1, after))
        start, end = places[after - 1].squeeze(-1), places[after].squeeze(-1)
        along = (high - left) / (high - low)
        return (torch.exp2(start + along * (end - start)) - 1).clamp(max=float(self.farthest))

    def profile(self) -> Tensor:
        """[... N+1] the weight at distance 0, then from each lag up to before the next; sums to 1."""
        tails = self._ends()[1]
        return tails[..., :-1] - tails[..., 1:]

    def _ends(self) -> tuple[Tensor, Tensor]:
        """Lags and tails with their ends: all weight is at 0 or farther, none beyond the farthest."""
        lags = torch.cat([self.lags.new_zeros(1), self.lags, self.lags.new_tensor([self.farthest + 1])])
        first = self.mean.unsqueeze(-1)
        return lags, torch.cat([torch.ones_like(first), self.tails, torch.zeros_like(first)], dim=-1)


class LatentReach:
    """Distances of causal latents, piece by piece; its memory does not grow with the text.

    Up to a lag of 64 every token counts; beyond, every (lag / 64)-th.
    """

    def __init__(self, total: int) -> None:
        self.total, self.tokens = total, 0
        self.norm: Tensor | None = None  # [H L] log Σ exp(k_s) so far
        self.places: Tensor | None = None  # [H L] log Σ exp(k_s) (s + 1)
        self.uses: Tensor | None = None  # [H L] Σ_t p(l|t), and the same times the mean distance
        self.distances: Tensor | None = None
        self.lags: list[_Lag] = []

    def add(self, p: Tensor, keys: Tensor) -> None:
        """The next tokens: p(l|t) of the latents and their key logits, both [T H L] in float64."""
        place = self.tokens + torch.arange(1, len(keys) + 1, dtype=keys.dtype, device=keys.device)
        norms = _advance(self.norm, keys)
        places = _advance(self.places, keys + place.log()[:, None, None])
        distance = (place[:, None, None] - torch.exp(places - norms)).clamp(min=0.0)
        uses, distances = p.sum(dim=0), (p * distance).sum(dim=0)
        if self.uses is None or self.distances is None:
            self.uses, self.distances = torch.zeros_like(uses), torch.zeros_like(uses)
            self.lags = [_Lag(lag, uses) for lag in LAGS if lag < self.total]
        self.uses, self.distances = self.uses + uses, self.distances + distances
        self.norm, self.places = norms[-1], places[-1]
        for lag in self.lags:
            lag.add(self.tokens, p, norms)
        self.tokens += len(keys)

    def result(self) -> Reach:
        if self.uses is None or self.distances is None:
            raise ValueError("no token was measured; there are no distances")
        tails = [lag.weights / lag.uses.clamp(min=1e-300) for lag in self.lags]
        return _reach(
            self.tokens - 1, self.distances / self.uses.clamp(min=1e-300), [lag.lag for lag in self.lags], tails
        )


class _Lag:
    """The weight that lies `lag` tokens back or farther, for every `stride`-th token."""

    def __init__(self, lag: int, like: Tensor) -> None:
        self.lag, self.stride = lag, max(1, lag // SAMPLES_PER_LAG)
        self.past = like.new_full((lag // self.stride, *like.shape), -torch.inf)  # Z before the first token
        self.uses, self.weights = torch.zeros_like(like), torch.zeros_like(like)

    def add(self, start: int, p: Tensor, norms: Tensor) -> None:
        first = -start % self.stride
        p, norms = p[first :: self.stride], norms[first :: self.stride]
        known = torch.cat([self.past, norms])
        self.uses = self.uses + p.sum(dim=0)
        self.weights = self.weights + (p * torch.exp(known[: len(norms)] - norms)).sum(dim=0)
        self.past = known[len(norms) :]


def _advance(before: Tensor | None, logits: Tensor) -> Tensor:
    """log Σ_{s≤t} exp(logits_s) for each t of a piece, whose past has summed up to `before`."""
    if before is None:
        return torch.logcumsumexp(logits, dim=0)
    return torch.logcumsumexp(torch.cat([before[None], logits]), dim=0)[1:]


def two_way_reach(p: Tensor, keys: Tensor) -> Reach:
    """Distances |t − s| of latents that see the whole text; p and key logits are [T H L] in float64."""
    tokens = len(keys)
    weights = torch.softmax(keys, dim=0)
    place = torch.arange(tokens, dtype=keys.dtype, device=keys.device)[:, None, None]
    below, moment = weights.cumsum(dim=0), (weights * place).cumsum(dim=0)
    distance = place * (2 * below - below[-1]) + moment[-1] - 2 * moment
    uses = p.sum(dim=0).clamp(min=1e-300)
    edge = torch.zeros_like(below[:1])
    sums = torch.cat([edge, below])  # [T+1]: the weight of the first n tokens
    lags, tails = [lag for lag in LAGS if lag < tokens], []
    steps = torch.arange(tokens, device=keys.device)
    for lag in lags:
        before = sums[(steps - lag + 1).clamp(min=0)]
        after = sums[-1] - sums[(steps + lag).clamp(max=tokens)]
        tails.append((p * (before + after)).sum(dim=0) / uses)
    return _reach(tokens - 1, (p * distance).sum(dim=0) / uses, lags, tails)


class ScoreReach:
    """Distances of softmax attention, windowed or full, over evenly spaced tokens of a text.

    Full attention keeps the keys of the whole text, a window those it covers.
    """

    def __init__(self, form: LayerForm, total: int, samples: int = SAMPLED_TOKENS) -> None:
        self.form, self.stride, self.start = form, max(1, total // samples), 0
        self.farthest = total - 1 if form.window is None else min(total, form.window) - 1
        self.keys: Tensor | None = None
        self.lags = torch.tensor([lag for lag in LAGS if lag <= self.farthest], dtype=torch.long)
        self.uses = self.distances = self.weights = None

    def add(self, uses: Tensor, query: Tensor, key: Tensor) -> None:
        """The next tokens: how much each uses this attention [T H], its queries [T H E] and keys [T Hv E]."""
        first = self.start if self.keys is None else self.start - len(self.keys)
        keys = key if self.keys is None else torch.cat([self.keys, key])
        for offset in range(-self.start % self.stride, len(query), self.stride):
            stop = len(keys) if not self.form.causal else len(keys) - len(query) + offset + 1
            begin, row = score_weights(self.form, query[offset], keys[:stop], self.start + offset - first)
            self._count(uses[offset].double(), row, (self.start + offset - first - begin))
        kept = len(keys) if self.form.window is None else self.form.window - 1
        self.keys = keys[max(0, len(keys) - kept) :]
        self.start += len(query)

    def _count(self, uses: Tensor, row: Tensor, own: int) -> None:
        """One token's weights over keys in a row, of which number `own` is its own."""
        distance = (own - torch.arange(row.shape[1], device=row.device)).abs()
        far = distance[:, None] >= self.lags.to(row.device)
        new = (uses, uses * (row @ distance.double()), uses[:, None] * (row @ far.double()))
        old = (self.uses, self.distances, self.weights)
        self.uses, self.distances, self.weights = (b if a is None else a + b for a, b in zip(old, new, strict=True))

    def result(self) -> Reach:
        if self.uses is None or self.distances is None or self.weights is None:
            raise ValueError("no token was measured; there are no distances")
        uses = self.uses.clamp(min=1e-300)
        return Reach(self.farthest, (self.distances / uses).cpu(), self.lags, (self.weights / uses[:, None]).cpu())


def _reach(farthest: int, mean: Tensor, lags: list[int], tails: list[Tensor]) -> Reach:
    """Tails never increase; where fewer tokens were asked for the larger lag, an average might, by chance."""
    stacked = torch.stack(tails, dim=-1).cummin(dim=-1).values if tails else mean.new_zeros((*mean.shape, 0))
    return Reach(farthest, mean.cpu(), torch.tensor(lags, dtype=torch.long), stacked.cpu())
