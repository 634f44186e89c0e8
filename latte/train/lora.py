"""LoRA beside the projections of converted layers, by PEFT: apart in training and in checkpoints, merged in models.

What is saved as a model has its own names and no trace of LoRA. A checkpoint has besides a file of both parts, the
weights as they were and what was learnt, for a sum cannot be taken apart again bit by bit.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from latte.train.attention import converted_attention, family_of

FILE = "lora.safetensors"
ADAPTER, BASE = "default", "base_layer"
SCALE = 2  # alpha / rank


def check_peft() -> None:
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise ValueError("trainable has lora, which needs PEFT: pip install peft") from error


def add_lora(model: PreTrainedModel, rank: int, seed: int, checkpoint: Path | None) -> None:
    """Add LoRA to a model, with random weights or those of a checkpoint; what learnt before goes on learning."""
    from peft import LoraConfig, inject_adapter_in_model

    layers = converted_attention(model)
    if not layers:
        raise ValueError("trainable has lora, which is for converted models, and this one is not; leave it out")
    family = family_of(model)
    names = [f"{name}.{part}" for name in layers for part in (family.query, family.key, family.value, family.output)]
    learning = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if both := [name for name in learning if name.rpartition(".")[0] in names]:
        raise ValueError(f"trainable has lora, but {both[0]} itself learns too; leave one of them out")
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=SCALE * rank, target_modules=names, lora_dropout=0.0)
    inject_adapter_in_model(config, model, ADAPTER)
    for weight in learning.values():
        weight.requires_grad_(True)
    for name, weight in model.named_parameters():
        if is_added(name):
            weight.data = weight.data.float()  # it has the dtype of what it stands beside
    if checkpoint is not None:
        added = {name: tensor for name, tensor in load_file(checkpoint / FILE).items() if is_added(name)}
        model.load_state_dict(added, strict=False)


def is_added(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def has_lora(model: nn.Module) -> bool:
    return any(is_added(name) for name, _ in model.named_parameters())


def put_back_bases(model: nn.Module, checkpoint: Path) -> None:
    """Give a model that a checkpoint has merged the weights that LoRA stands beside."""
    weights = dict(model.named_parameters())
    for name, tensor in load_file(checkpoint / FILE).items():
        if not is_added(name):
            weights[plain_name(name)].data = tensor.to(torch.float32)


def plain_name(name: str) -> str:
    return name.replace(f".{BASE}.", ".")


def merge(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a model without LoRA: W + scale · B A in place of W, A and B."""
    merged = {}
    for name, tensor in weights.items():
        if is_added(name):
            continue
        layer = name.removesuffix(f".{BASE}.weight")
        if layer != name:
            a, b = (weights[f"{layer}.lora_{part}.{ADAPTER}.weight"] for part in "AB")
            tensor = tensor.float() + SCALE * (b @ a)
        merged[plain_name(name)] = tensor
    return merged


def save_apart(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write both parts, for `put_back_bases` and `add_lora`."""
    parts = {name: tensor for name, tensor in weights.items() if is_added(name) or name.endswith(f".{BASE}.weight")}
    save_file(parts, folder / FILE)
