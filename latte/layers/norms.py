"""Normalisation of each token's channels."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from latte.layers.checks import check_choice, check_count

NORMS = ("rmsnorm", "layernorm")


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight, in float32 inside and in x's dtype outside."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        check_count("hidden_size", hidden_size)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Float[Tensor, "*batch C"]) -> Float[Tensor, "*batch C"]:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class LayerNorm(nn.Module):
    """(x − mean(x)) / sqrt(var(x) + eps) · weight + bias, in float32 inside and in x's dtype outside."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        check_count("hidden_size", hidden_size)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Float[Tensor, "*batch C"]) -> Float[Tensor, "*batch C"]:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), bias, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, bias={self.bias is not None}"


def make_norm(name: str, hidden_size: int, eps: float = 1e-6) -> RMSNorm | LayerNorm:
    """The norm called "rmsnorm" or "layernorm"."""
    check_choice("norm", name, NORMS)
    return RMSNorm(hidden_size, eps) if name == "rmsnorm" else LayerNorm(hidden_size, eps)
