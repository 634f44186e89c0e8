"""Calls every operation with its annotations checked at run time: `python call_everything.py`.

In a process of its own, since the hook that checks them must come before the first import and is not for Dynamo.
"""

import sys

import torch
from jaxtyping import install_import_hook

hook = install_import_hook("latte.ops", "beartype.beartype")

from latte import ops  # noqa: E402

B, T, H, HV, L, D, E, W, K = 2, 5, 6, 3, 7, 11, 13, 17, 4  # distinct: a swapped axis cannot pass


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def latte_inputs(batch: int, extra: int = 0) -> tuple[torch.Tensor, ...]:
    return normal(batch, T, H, L + extra), normal(batch, T, H, L), normal(batch, T, HV, D)


def window_inputs(batch: int) -> tuple[torch.Tensor, ...]:
    return normal(batch, T, H, E), normal(batch, T, HV, E)


def call(function, *inputs: torch.Tensor, shared: tuple[torch.Tensor, ...] = (), **options) -> None:
    """Fresh, from the state it left, masked, and packed; `shared` inputs have no batch."""
    batch = inputs[0].shape[0]
    for backend in ("reference", "torch"):
        output = function(*inputs, *shared, **options, backend=backend)
        function(*inputs, *shared, **options, state=output.state, backend=backend)
        mask = torch.rand(batch, T) > 0.3
        function(*inputs, *shared, **options, mask=mask, backend=backend)
        for dtype in (torch.int32, torch.int64):
            packed = [x[:1] for x in inputs]
            function(*packed, *shared, **options, cu_seqlens=torch.tensor([0, 2, 2, T], dtype=dtype), backend=backend)


def main() -> None:
    q, k, v = latte_inputs(B)
    mixed, _, _ = latte_inputs(B, extra=1)
    window_q, window_k = window_inputs(B)
    mask, packed = torch.rand(B, T) > 0.3, torch.tensor([0, 2, T])
    for causal in (True, False):
        call(ops.latte_attention, q, k, v, causal=causal)
        for feature_map in ("elu+1", "exp", "relu", torch.nn.functional.softplus):
            call(ops.linear_attention, q, k, v, causal=causal, feature_map=feature_map)
        call(ops.window_attention, window_q, window_k, v, window=4, scale=0.5, softcap=2.0, causal=causal)
        call(ops.macchiato_attention, mixed, k, v, window_q, window_k, window=4, causal=causal)
        ops.attention_weights(q, k, causal=causal, mask=mask)
        ops.attention_weights(q, k, feature_map="relu", causal=causal)
        ops.attention_weights(None, None, window_q, window_k, causal=causal)
        ops.attention_weights(mixed, k, window_q, window_k, causal=causal)
        ops.attention_weights(mixed[:1], k[:1], window_q[:1], window_k[:1], cu_seqlens=packed)
    call(ops.rglru, normal(B, T, W), normal(B, T, W), normal(B, T, W), shared=(normal(W),))
    call(ops.short_conv, normal(B, T, W), shared=(normal(W, K),))
    call(ops.short_conv, normal(B, T, W), shared=(normal(W, K), normal(W)))
    for reduction in ("mean", "sum", "none"):
        for backend in ("reference", "torch"):
            targets = torch.tensor([1, -100, 0], dtype=torch.int64 if reduction == "mean" else torch.int32)
            ops.linear_cross_entropy(normal(3, W), normal(K, W), targets, reduction=reduction, backend=backend)
    ops.linear_cross_entropy(normal(3, W), normal(K, W), targets, num_items=torch.tensor(7), softcap=2.0)


def refuses_a_swapped_axis() -> bool:
    """The hook is at work: it stops what no check of our own would name so."""
    q, k, v = latte_inputs(B)
    try:
        ops.latte_attention(q, k.transpose(1, 2), v)
    except ValueError:
        return False
    except Exception as error:
        return "TypeCheckError" in type(error).__name__
    return False


if __name__ == "__main__":
    main()
    sys.exit(0 if refuses_a_swapped_axis() else "annotations are not checked")
