"""Calls every layer with its annotations checked at run time: `python call_everything.py`.

In a process of its own, since the hook that checks them must come before the first import and is not for Dynamo.
"""

import sys

import torch
from jaxtyping import install_import_hook

hook = install_import_hook("latte.layers", "beartype.beartype")

from latte import layers  # noqa: E402

B, T, S, C = 3, 5, 7, 26
FORMS = [
    {},
    {"window": 4},
    {"num_latents": None, "window": 4},
    {"num_latents": None},
    {"num_latents": None, "softcap": 2.0},
]


def call_attention(layer: layers.LatteAttention) -> None:
    """Fresh, from the state it left, masked, packed, with positions."""
    x, mask = torch.randn(B, T, C), torch.rand(B, T) > 0.3
    bounds = torch.tensor([0, 2, 2, T])
    state = layer.stream(x).state
    layer(x)
    layer.stream(x, state)
    layer.stream(x, state, mask)
    layer(x, mask)
    layer(x, positions=torch.arange(T)[None])
    layer(x, positions=torch.arange(T).expand(B, T))
    state = layer.stream(x[:1], cu_seqlens=bounds).state
    layer.stream(x[:1], state, mask[:1], bounds.int())


def main() -> None:
    for causal in (True, False):
        for form in FORMS:
            call_attention(layers.LatteAttention(C, 2, **form, head_dim=6, causal=causal))
        for mixer in ("conv", "rglru"):
            settings = {"window": 4, "mixer": mixer, "mixer_blocks": 13, "num_value_heads": 1, "head_dim": 6}
            call_attention(layers.LatteAttention(C, 2, **settings, causal=causal))
            call_attention(layers.LatteAttention(C, 2, None, **settings, causal=causal))
            mixed = layers.make_mixer(mixer, C, blocks=13, causal=causal)
            mixed.stream(torch.randn(B, T, C), mixed.stream(torch.randn(B, T, C)).state)
            mixed(torch.randn(B, T, C), torch.rand(B, T) > 0.3)
    for norm in ("rmsnorm", "layernorm"):
        block = layers.Block(layers.LatteAttention(C, 2, window=3, head_dim=6), layers.MLP(C, 11), norm=norm)
        block.stream(torch.randn(B, T, C), block.stream(torch.randn(B, T, C)).state)
        block(torch.randn(B, T, C), torch.rand(B, T) > 0.3)
    layers.GLU(C, 11)(torch.randn(B, T, C))
    layers.BlockDiagonal(C, 2)(torch.randn(B, T, C))
    cross = layers.CrossAttention(C, 2, source_size=11)
    state = cross.summarize(torch.randn(B, S, 11), torch.rand(B, S) > 0.3)
    cross(torch.randn(B, T, C), cross.summarize(torch.randn(B, S, 11), state=state))


def refuses_a_missing_axis() -> bool:
    """The hook is at work: it stops what no check of our own would name so."""
    try:
        layers.LatteAttention(C, 2)(torch.randn(T, C))
    except ValueError:
        return False
    except Exception as error:
        return "TypeCheckError" in type(error).__name__
    return False


if __name__ == "__main__":
    main()
    sys.exit(0 if refuses_a_missing_axis() else "annotations are not checked")
