"""A latent in the role of the attention sink, by least squares: no training.

Heads of pretrained transformers put much of their weight on the first token of a text, whatever comes. Once that token
is outside the window, a latent can stand for it: its key singles out the first token, and the logits of p(l|t) say how
much of it each token wants.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

MARGIN = 10.0  # of the first token's key over those of nearly all others: e^10 of them weigh as much as it does
NEARLY_ALL = 0.999
MOST = 60.0  # of the first token's key over the others' mean, where the margin would ask for more
SHRINKAGE = 0.1  # of the covariance towards a multiple of the identity, in parts of its mean variance
RIDGE = 0.03  # in parts of the inputs' mean square
BELOW = 6.0  # nats by which the other latents begin below the window and the sink, so that they disturb neither


class Sink(NamedTuple):
    """What a layer's first latent is to be, and how all latents of each head are chosen."""

    weight: Float[Tensor, "H choices C"]  # of the logits of p(·|t): the window, the sink, the other latents
    bias: Float[Tensor, "H choices"]
    key: Float[Tensor, " C"] | None  # the sink's, the same for all heads; None where latents keep their own


def fit_sink(
    x: Float[Tensor, "B T C"],
    odds: Float[Tensor, "B T H"],
    real: Bool[Tensor, "B T"],
    window: int,
    latents: int,
) -> Sink:
    """The sink of a layer whose latents read `x`.

    `odds` are the source's log-odds of the first token over the window, which count where that is outside the window.
    """
    late = real.clone()
    late[:, :window] = False
    weight, bias = ridge(x[late], odds[late])
    first, heads = x[:, 0], odds.shape[-1]
    real = real.clone()
    real[:, 0] = False
    weights, biases = x.new_zeros(heads, latents + 1, x.shape[-1]), x.new_zeros(heads, latents + 1)
    weights[:, 1], biases[:, 1] = weight.T, bias
    usual = odds[late].mean(dim=0).clamp(max=0)
    biases[:, 2:] = (usual - BELOW).unsqueeze(1)
    return Sink(weights, biases, discriminant(first, x[real]))


def only_window(heads: int, latents: int, width: int, share: float) -> Sink:
    """For layers that have lost nothing: p(0|t) is `share` for every token."""
    bias = torch.zeros(heads, latents + 1)
    bias[:, 0] = math.log(latents * share / (1 - share))
    return Sink(torch.zeros(heads, latents + 1, width), bias, None)


def ridge(x: Float[Tensor, "N C"], y: Float[Tensor, "N H"]) -> tuple[Float[Tensor, "C H"], Float[Tensor, " H"]]:
    """Weights and biases of the linear map from x to y with least squares, weights being held small."""
    x = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
    gram = x.T @ x
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    solution = torch.linalg.solve(gram, x.T @ y)
    return solution[:-1], solution[-1]


def discriminant(first: Float[Tensor, "B C"], others: Float[Tensor, "N C"]) -> Float[Tensor, " C"]:
    """A key that tells texts' first tokens from all others, as sharply as `MARGIN` and `MOST` say."""
    centre = others.mean(dim=0)
    centred = others - centre
    covariance = centred.T @ centred / len(others)
    covariance.diagonal().add_(SHRINKAGE * covariance.diagonal().mean())
    key = torch.linalg.solve(covariance, first.mean(dim=0) - centre)
    peak, rest = (first @ key).mean(), others @ key
    over = peak - rest.kthvalue(max(1, int(NEARLY_ALL * len(rest)))).values
    most = MOST / (peak - rest.mean())
    return key * (torch.minimum(MARGIN / over, most) if over > 0 else most)
