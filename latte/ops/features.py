"""Positive feature maps of linear attention, as logarithms."""

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from latte.ops.states import accumulation_dtype

FeatureMap = Literal["elu+1", "exp", "relu"] | Callable[[Tensor], Tensor]


def log_features(feature_map: FeatureMap, x: Float[Tensor, "B T H X"], name: str = "x") -> Float[Tensor, "B T H L"]:
    """log φ(x), −inf where φ(x) is not positive; gradients are those of φ at positive features and 0 elsewhere."""
    x = x.to(accumulation_dtype(x))
    match feature_map:
        case "exp":
            return x
        case "elu+1":
            return torch.where(x > 0, torch.log1p(x.clamp(min=0)), x.clamp(max=0))
        case "relu":
            return _safe_log(x)
    if not callable(feature_map):
        raise ValueError(f'feature_map is {feature_map!r}; it must be "elu+1", "exp", "relu" or a callable')
    features = feature_map(x)
    if not isinstance(features, Tensor) or features.ndim != 4 or features.shape[:3] != x.shape[:3]:
        got = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise ValueError(f"feature_map({name}) gives {got}; it must give [B, T, H, L] = {[*x.shape[:3], 'L']}")
    return _safe_log(features.to(x.dtype))


def _safe_log(features: Tensor) -> Tensor:
    positive = features > 0
    return torch.where(positive, torch.log(torch.where(positive, features, 1.0)), -torch.inf)
