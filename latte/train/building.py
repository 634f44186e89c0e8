"""A run's model, and the arguments of the engine."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedModel,
    TrainingArguments,
)

from latte.models import (
    LatteConfig,
    LatteForCausalLM,
    LatteForPairClassification,
    LatteForSequenceClassification,
    loading,
)
from latte.models.recomputation import recompute_layers
from latte.tasks.base import Head, TaskData
from latte.train.distributed import world_size
from latte.train.lora import FILE as LORA_FILE
from latte.train.lora import put_back_bases
from latte.train.settings import RunSettings
from latte.train.trainable import choose_trainable, narrow_frozen

CLASSES: dict[Head, type[PreTrainedModel]] = {
    "causal-lm": LatteForCausalLM,
    "classification": LatteForSequenceClassification,
    "pair-classification": LatteForPairClassification,
}

NEW_PARTS = ("classifier", "pair_classifier", "class_token")
"""What a classifier has beside a language model, by the beginnings of names."""


def make_model(settings: RunSettings, data: TaskData, checkpoint: Path | None) -> PreTrainedModel:
    """A preset with random weights, or a folder's model; where a run goes on, its checkpoint's."""
    if checkpoint is not None or settings.model is not None:
        model = load_model(checkpoint or settings.model, settings, data)  # pyright: ignore[reportArgumentType]
    else:
        torch.manual_seed(settings.seed)
        model = CLASSES[data.head](make_config(settings, model_words(settings, data)))
    if checkpoint is not None and (checkpoint / LORA_FILE).is_file():
        put_back_bases(model, checkpoint)
    if settings.checkpoint_layers:
        recompute_layers(model)
    choose_trainable(model, settings.trainable)
    if settings.precision == "bf16":
        narrow_frozen(model, settings.frozen_dtype)
    return model


def model_words(settings: RunSettings, data: TaskData) -> dict[str, Any]:
    """The words that replace a preset's: the data's and the user's, which must agree."""
    for word, needed in data.model.items():
        given = settings.words.get(word, needed)
        if word == "vocab_size" and given < needed:
            raise ValueError(f"vocab_size is {given}, but the data has {needed} tokens; leave it out or make it larger")
        if word != "vocab_size" and given != needed:
            raise ValueError(f"{word} is {given!r}, but the data needs {needed!r}; leave it out")
    return {**data.model, **settings.words}


def check_words(settings: RunSettings) -> None:
    """Raise ValueError for a preset that there is not, or words that make no model, before any work is done."""
    if settings.model is None:
        make_config(settings, settings.words)
    elif not (settings.model / "config.json").is_file():
        raise ValueError(
            f"model is {settings.model}, which has no config.json; name a folder that save_pretrained has written"
        )
    elif settings.words:
        raise ValueError(
            f"words of the model are set ({', '.join(settings.words)}), but {settings.model} has its own; leave one out"
        )


def make_config(settings: RunSettings, words: Mapping[str, Any]) -> LatteConfig:
    if settings.preset is None:
        raise ValueError("no model is named, and the budget is for one that has weights; name its folder with --model")
    try:
        return LatteConfig.from_preset(settings.preset, **words)
    except StrictDataclassError as error:  # its message says it twice; the cause says what was expected
        raise ValueError(f"the words of the model make none: {error.__cause__ or error}") from error
    except (AttributeError, TypeError) as error:  # of words that Transformers takes as they are, such as dtype
        given = ", ".join(f"{word}={value!r}" for word, value in words.items())
        raise ValueError(f"the words of the model make none: {error}; they are {given}") from error


def load_model(folder: Path, settings: RunSettings, data: TaskData) -> PreTrainedModel:
    """Weights in float32, whatever the folder has: small steps would be lost in fewer bits."""
    whose = f"model is {folder}"
    config = loading.load_config(folder, whose)
    if data.head != "causal-lm" or settings.model is None:
        check_inputs(config, data, whose)
        new = NEW_PARTS if folder == settings.model else ()  # a language model has none of them
        labels = {name: value for name, value in data.model.items() if name == "num_labels"}
        return loading.load_model(CLASSES[data.head], folder, whose, new=new, dtype=torch.float32, **labels)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"model is {folder}, a {config.model_type!r} model, which does not predict the next token")
    if config.vocab_size < data.model.get("vocab_size", 0):
        raise ValueError(
            f"model is {folder} with {config.vocab_size} tokens, the data has {data.model['vocab_size']}; "
            "prepare the data with the model's own tokenizer"
        )
    return loading.load_model(AutoModelForCausalLM, folder, whose, dtype=torch.float32)


def check_inputs(config: Any, data: TaskData, whose: str) -> None:
    """Raise ValueError unless a saved model reads what the data is made of; its classifier may be a new one."""
    tokens = data.model.get("vocab_size", 0)
    if config.vocab_size < tokens:
        raise ValueError(f"{whose}, which knows {config.vocab_size} tokens, but the data has {tokens}; name another")
    kind, needed = getattr(config, "input_kind", "tokens"), data.model.get("input_kind", "tokens")
    if kind != needed:
        raise ValueError(f"{whose}, which reads {kind}, but the data has {needed}; name another model")


def compile_layers(model: nn.Module) -> None:
    """Compile each layer of the model's stacks in place: layers are alike, so one compilation serves them all."""
    stacks: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{stack}.") for stack in stacks)
        if isinstance(module, nn.ModuleList) and not inside:
            stacks.append(name)
            for layer in module:
                layer.compile()


def make_arguments(settings: RunSettings, device: torch.device) -> TrainingArguments:
    """What Trainer is told; making them also makes processes that were launched together know each other."""
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # sharding is done here, by --parallel
    arguments = TrainingArguments(
        output_dir=str(settings.output),
        max_steps=settings.steps,
        max_grad_norm=settings.gradient_clip,
        bf16=settings.precision == "bf16",
        fp16=settings.precision == "fp16",
        seed=settings.seed,
        use_cpu=device.type == "cpu",
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        ddp_timeout=7200,
        dataloader_num_workers=reader_count(settings, device),
        ignore_data_skip=True,  # the order of examples begins where the run does
        logging_nan_inf_filter=False,  # it would wait for the loss of every micro batch
        eval_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        remove_unused_columns=False,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # several GPUs are for several processes
    micro = micro_batch_size(settings)
    arguments.per_device_train_batch_size = micro
    arguments.gradient_accumulation_steps = settings.batch_size // (micro * world_size())
    return arguments


def micro_batch_size(settings: RunSettings) -> int:
    """Examples that a process takes at once; raises ValueError where the batch cannot be cut so."""
    processes = world_size()
    if settings.batch_size % processes:
        raise ValueError(f"batch_size is {settings.batch_size}; it must be a multiple of the {processes} processes")
    share = settings.batch_size // processes
    micro = min(settings.micro_batch_size or share, share)
    if share % micro:
        raise ValueError(
            f"micro_batch_size is {micro}; it must divide the {share} examples that a process has of a batch of "
            f"{settings.batch_size}"
        )
    return micro


def reader_count(settings: RunSettings, device: torch.device) -> int:
    if settings.readers is not None:
        return settings.readers
    return min(4, os.cpu_count() or 1) if device.type == "cuda" else 0


def find_device(settings: RunSettings) -> torch.device:
    """Where this process computes."""
    found = torch.cuda.is_available()
    if settings.device == "cuda" and not found:
        raise ValueError("--device cuda: PyTorch finds no CUDA device on this machine; use --device cpu")
    if settings.device == "cpu" or not found:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def count_parameters(model: nn.Module) -> dict[str, int]:
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return {"all": sum(size for size, _ in sizes), "trainable": sum(size for size, learns in sizes if learns)}
