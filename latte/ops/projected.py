"""Latte Macchiato with the projections before it: from a layer's input to its heads' outputs in one operation.

What a layer computes of several tokens, in the plainest case: no state comes in and none is asked for, projections have
no biases. On a GPU it moves less memory than its steps do one after the other; elsewhere it is these steps.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from latte.ops import checks
from latte.ops.arguments import HeadSizes
from latte.ops.attention import macchiato_attention
from latte.ops.beside import beside
from latte.ops.rotary import apply_rotary, check_pairs


class MacchiatoWeights(NamedTuple):
    """What x is projected by, and what the latents' logits are made of; a head's rows lie side by side."""

    query: Float[Tensor, "H*E C"]
    key: Float[Tensor, "Hv*E C"]
    value: Float[Tensor, "Hv*D C"]
    latent_query: Float[Tensor, "H*choices C"]
    latent_key: Float[Tensor, "H*L C"]


def projected_macchiato(
    x: Float[Tensor, "B T C"],
    mixed: Float[Tensor, "B T C"],
    weights: MacchiatoWeights,
    rotary: tuple[Float[Tensor, "_ T half"], Float[Tensor, "_ T half"]] | None,
    sizes: HeadSizes,
    *,
    window: int = 128,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = True,
    mask: Bool[Tensor, "B T"] | None = None,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
    backend: str = "auto",
) -> Float[Tensor, "B T H D"]:
    """`macchiato_attention` of x's queries, keys and values and of the latents' logits of `mixed`.

    `rotary` is cos and sin by which queries and keys are turned, or None. Options, mask and packing are those of
    `macchiato_attention`. Under autocast products are taken in its dtype, as those of layers are. Where x is empty,
    `scale` is not positive or gradients of `rotary` are wanted, its steps run one after the other on a GPU too.
    """
    _check(x, mixed, weights, sizes)
    for angles in rotary or ():
        check_pairs(angles, sizes.key_width)
        rows = 1 if angles.shape[0] == 1 else x.shape[0]
        checks.check_shape("rotary", angles, "B T half", (rows, x.shape[1], None))
    checks.check_window(window)
    checks.check_scores(scale, softcap)
    checks.check_mask(mask, x.shape[0], x.shape[1])
    checks.check_cu_seqlens(cu_seqlens, x.shape[0])
    checks.check_same_device(
        x=x, mixed=mixed, **weights._asdict(), mask=mask, cu_seqlens=cu_seqlens,
        **dict(zip(("cos", "sin"), rotary or (), strict=False)),
    )  # fmt: skip
    factor: float = sizes.key_width**-0.5 if scale is None else scale
    fixed = rotary is None or not any(angles.requires_grad for angles in rotary)
    if checks.backend_for(backend, x.device) == "triton" and x.numel() > 0 and factor > 0 and fixed:
        from latte.ops.triton.projected import attend_projected

        query, key, value, latent_query, latent_key = weights
        if rotary is not None:
            query, key = pairs_together(query, sizes.heads), pairs_together(key, sizes.value_heads)
        scores, logits = beside((query, key, value)), beside((latent_key, latent_query))
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, mixed, scores, logits = (z.to(dtype) for z in (x, mixed, scores, logits))
        with checks.no_autocast(x.device):
            return attend_projected(
                x, mixed, scores, logits, *(rotary or (None, None)), mask, cu_seqlens, sizes,
                window=window, scale=factor, softcap=softcap or 0.0, causal=causal,
            )  # fmt: skip
    return _one_by_one(
        x, mixed, weights, rotary, sizes, window=window, scale=scale, softcap=softcap, causal=causal, mask=mask,
        cu_seqlens=cu_seqlens, backend=backend,
    )  # fmt: skip


def pairs_together(weight: Tensor, heads: int) -> Tensor:
    """Rows of a head in the order 0, E/2, 1, E/2 + 1, …: channels that turn together lie together.

    Scores stay what they are if queries and keys have the same order.
    """
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def _one_by_one(x, mixed, weights, rotary, sizes, **options) -> Tensor:
    q, k, v = (F.linear(x, weight) for weight in weights[:3])
    q, k = (z.unflatten(2, (-1, sizes.key_width)) for z in (q, k))
    if rotary is not None:
        q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
    latent_q = F.linear(mixed, weights.latent_query).unflatten(2, (sizes.heads, -1))
    latent_k = F.linear(mixed, weights.latent_key).unflatten(2, (sizes.heads, -1))
    return macchiato_attention(latent_q, latent_k, v.unflatten(2, (-1, sizes.width)), q, k, **options).y


def _check(x: Tensor, mixed: Tensor, weights: MacchiatoWeights, sizes: HeadSizes) -> None:
    checks.check_shape("x", x, "B T C", (None, None, None))
    checks.check_shape("mixed", mixed, "B T C", (*x.shape[:2], None))
    for name, size in sizes._asdict().items():
        checks.check_positive("sizes", size, name)
    checks.check_grouping(sizes.heads, sizes.value_heads, "query", "value")
    names = ("query", "key", "value", "latent_key", "latent_query")
    for name, rows in zip(names, (*sizes.scores, *sizes.logits), strict=True):
        source = mixed if name.startswith("latent") else x
        checks.check_shape(name, getattr(weights, name), "rows C", (rows, source.shape[2]))
