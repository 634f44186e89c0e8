"""Teachers: a converted model's own source, which takes no memory, or any language model of the same vocabulary."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from latte.convert import restore
from latte.models import LatteConvertedForCausalLM
from latte.models.loading import load_config, load_model
from latte.tasks.base import TaskData
from latte.train.divergence import Prediction, capped
from latte.train.settings import RunSettings
from latte.train.trainable import narrow_frozen

PROBE = 8  # tokens by which a model's logits are told


def check_distillation(settings: RunSettings) -> None:
    """Raise ValueError for settings that contradict each other, before anything is loaded."""
    lessons = settings.distill_logits or settings.distill_layers
    if settings.teacher == "none" and lessons:
        raise ValueError("distill_logits or distill_layers is set, but there is no teacher; add --teacher source")
    if settings.teacher == "none" and settings.loss_weight != 1:
        raise ValueError(
            f"loss_weight is {settings.loss_weight}, and without a teacher there is no other loss to weigh it against; "
            "leave it out, or add --teacher source"
        )
    if settings.teacher != "none" and not lessons:
        raise ValueError(
            f"teacher is {settings.teacher}, and nothing is learnt from it; add --distill-logits or --distill-layers"
        )
    if settings.teacher != "none" and settings.parallel == "fsdp":
        raise ValueError("teacher is set and parallel is fsdp: a teacher needs whole models; use --parallel ddp")
    if settings.teacher not in ("none", "source") and not (Path(settings.teacher) / "config.json").is_file():
        raise ValueError(
            f"teacher is {settings.teacher}, which has no config.json; it must be source, a folder or none"
        )


def computing(settings: RunSettings, device: torch.device) -> torch.autocast:
    """Autocast to the precision of the run."""
    return torch.autocast(device.type, product_dtype(settings), enabled=settings.precision != "fp32")


def product_dtype(settings: RunSettings) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(settings.precision, torch.float32)


def make_teacher(
    settings: RunSettings, model: PreTrainedModel, data: TaskData, device: torch.device
) -> PreTrainedModel:
    """The teacher of a model that is on its device and has no LoRA yet; raises ValueError for one that does not fit."""
    if settings.teacher == "source":
        teacher = restore_source(settings, model)
    else:
        teacher = load_teacher(Path(settings.teacher), settings, model, data)
    teacher.to(device).requires_grad_(False).eval()  # pyright: ignore[reportArgumentType] - typed for quantized models
    return teacher


def restore_source(settings: RunSettings, model: PreTrainedModel) -> PreTrainedModel:
    """The source, with the model's own tensors; of weights that learn it has copies, as they were before training."""
    if not isinstance(model, LatteConvertedForCausalLM) or settings.model is None:
        raise ValueError("teacher is source, but the model is not a converted one; name a folder, or convert it first")
    teacher = restore(model)
    weights = dict(teacher.named_parameters())
    moving = [name for name, weight in model.named_parameters() if weight.requires_grad and name in weights]
    for name, tensor in read_tensors(settings.model, moving).items():
        weights[name].data = tensor.to(weights[name])
    return teacher


def read_tensors(folder: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Some tensors of a saved model."""
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index.is_file() else {}
    tensors = {}
    for name in names:
        with safe_open(folder / places.get(name, "model.safetensors"), framework="pt") as file:
            tensors[name] = file.get_tensor(name)
    return tensors


def load_teacher(folder: Path, settings: RunSettings, model: PreTrainedModel, data: TaskData) -> PreTrainedModel:
    whose = f"teacher is {folder}"
    config = load_config(folder, whose)
    if config.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"teacher is {folder} with {config.vocab_size} tokens, the model has {model.config.vocab_size}; "
            "it must have the same vocabulary"
        )
    tokenizer = AutoTokenizer.from_pretrained(folder) if (folder / "tokenizer_config.json").is_file() else None
    if tokenizer and data.tokenizer and tokenizer.get_vocab() != data.tokenizer.get_vocab():
        raise ValueError(f"teacher is {folder}, whose tokens are others than the data's; name one of the same family")
    capped_scores = getattr(config, "attn_logit_softcapping", None) is not None  # which PyTorch's attention has not
    options: dict[str, Any] = {"attn_implementation": "eager"} if capped_scores else {}
    teacher = load_model(AutoModelForCausalLM, folder, whose, dtype=torch.float32, **options).requires_grad_(False)
    if settings.precision == "bf16":
        narrow_frozen(teacher, "bf16")
    return teacher


def prediction(model: PreTrainedModel, hidden: Tensor) -> Prediction:
    """What the logits of the model are made of, given the last hidden states [B T C]."""
    config = model.config
    softcap = getattr(config, "logits_softcap", None) or getattr(config, "final_logit_softcapping", None)
    head: Any = model.get_output_embeddings()
    return Prediction(hidden.flatten(0, -2), head.weight, softcap)


@torch.no_grad()
def check_head(model: PreTrainedModel, whose: str) -> None:
    """Raise ValueError unless a model's logits are what `prediction` says: some scale them, or add a bias."""
    tokens = torch.arange(PROBE, device=model.device).unsqueeze(0) % model.config.vocab_size
    training = model.training
    model.eval()
    logits = model(tokens, use_cache=False).logits[0].float()
    hidden, weight, softcap = prediction(model, model.base_model(tokens, use_cache=False).last_hidden_state)
    model.train(training)
    expected = capped(hidden.float() @ weight.float().T, softcap)
    if (logits - expected).norm() > 0.05 * expected.norm():
        kind = model.config.model_type
        raise ValueError(
            f"distill_logits is set, but the logits of {whose}, a {kind!r} model, are not its head's alone"
        )
