"""Layers whose activations are computed again in the backward pass."""

from typing import Any

from transformers import PreTrainedModel


def recompute_layers(model: PreTrainedModel, options: dict[str, Any] | None = None) -> None:
    """Checkpoint the layers of any model; `options` go to `torch.utils.checkpoint.checkpoint`."""
    # Transformers 5.23 renamed it, and warns of the old name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)
