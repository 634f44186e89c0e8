"""The weights that conversion adds, before training."""

import copy

import torch
from torch import nn

from latte.models.converted_attention import ConvertedAttention

PROBES = 256  # random inputs by which a norm's size is told
NEW_PARTS = ("latent_query", "latent_key", "mixer")


def begin_latents(attention: ConvertedAttention, norm: nn.Module, dtype: torch.dtype) -> None:
    """Give the new weights of a converted layer memory, on the CPU, and values, from PyTorch's global generator.

    `norm` is what attention reads. Pretrained norms multiply by anything from 0.1 to 30; keys and gates are drawn for
    the size that comes out, so that at first latents average over many tokens and gates are half open.
    """
    parts = [part for name in NEW_PARTS if (part := getattr(attention, name)) is not None]
    for part in parts:
        part.to_empty(device="cpu")
    attention.reset_parameters()
    attention.expect_inputs_of(output_size(norm, attention.hidden_size))
    for part in parts:
        for name, parameter in part.named_parameters():
            if not name.endswith("a_param"):  # decays near 1, which bfloat16 cannot tell apart
                parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def output_size(norm: nn.Module, width: int) -> float:
    """The root mean square of what a norm gives for random inputs."""
    norm = copy.deepcopy(norm).to("cpu", torch.float32)
    return norm(torch.randn(PROBES, width)).square().mean().sqrt().item() or 1.0


def new_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of a converted model that its source did not have."""
    return {name: weight for name, weight in model.named_parameters() if not set(NEW_PARTS).isdisjoint(name.split("."))}
