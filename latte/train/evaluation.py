"""How good a model is at its task, what it writes, and which latents it uses: over all processes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from latte.analysis.usage import LayerUsage, UsageMeter, latent_layers, merge_usage
from latte.tasks.base import Batch, Example, Examples, Sums, Task, TaskData
from latte.train.distributed import gather_objects, is_sharded, rank, world_size
from latte.train.order import permute

CHOICE = 0  # the seed by which examples of an evaluation are chosen: the same ones every time


def evaluation_batches(examples: Examples, data: TaskData, count: int, batch_size: int) -> Iterator[tuple[Batch, bool]]:
    """This process's batches of `count` examples (0: all), and whether each counts.

    All processes get as many, for a sharded model runs in step: where there is none left, one is shown again.
    """
    total = len(examples)
    chosen = np.arange(total)
    if 0 < count < total:
        chosen = np.sort(permute(np.arange(count), total, CHOICE, 0))
    starts = list(range(0, len(chosen), batch_size))
    for first in range(0, len(starts), world_size()):
        place = first + rank()
        start = starts[place] if place < len(starts) else 0
        yield data.collate(fetch(examples, chosen[start : start + batch_size].tolist())), place < len(starts)


def fetch(examples: Examples, indices: Sequence[int]) -> Sequence[Example]:
    """Examples at once, where they know how to, as PyTorch's DataLoader asks them."""
    together = getattr(examples, "__getitems__", None)
    return [examples[index] for index in indices] if together is None else together(indices)


@torch.no_grad()
def evaluate(
    task: Task, data: TaskData, model: nn.Module, split: str, *, count: int, batch_size: int, device: torch.device
) -> tuple[dict[str, float], list[LayerUsage]]:
    """The task's metrics on a split, and the usage of latents in every layer that has them."""
    examples = getattr(data, split)
    totals: Sums = {}
    seen = False
    meter = UsageMeter(model) if latent_layers(model) else None
    with evaluating(model):
        for batch, counts in evaluation_batches(examples, data, count, batch_size):
            batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            with meter if meter is not None and counts else nullcontext():
                sums = task.measure(model, batch)
            if counts:
                seen = True
                totals = add(totals, sums)
    everywhere: Sums = {}
    for sums in gather_objects(totals):
        everywhere = add(everywhere, sums)
    means = {name: total / weight for name, (total, weight) in everywhere.items() if weight}
    return task.summarize(means), [] if meter is None else gather_usage(meter.layers() if seen else [])


def add(first: Sums, second: Sums) -> Sums:
    sums = dict(first)
    for name, (total, weight) in second.items():
        before = sums.get(name, (0.0, 0.0))
        sums[name] = (before[0] + total, before[1] + weight)
    return sums


def gather_usage(layers: Sequence[LayerUsage]) -> list[LayerUsage]:
    """Each layer's usage over all processes; one that had nothing to measure has none."""
    parts = [part for part in gather_objects(list(layers)) if part]
    return [merge_usage(layer) for layer in zip(*parts, strict=True)]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and random numbers that are given back: training goes on as if nobody had looked.

    What is compiled runs as it was written: shapes are others here, and compiled layers call no hooks.
    """
    training = model.training
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"):
        model.eval()
        try:
            yield
        finally:
            model.train(training)


@torch.no_grad()
def write_samples(data: TaskData, model: Any, tokens: int, device: torch.device) -> list[dict[str, str]]:
    """How the model continues the task's prompts, drawn with a seed of its own."""
    tokenizer = data.tokenizer
    if tokenizer is None or not tokens:
        return []
    texts = []
    with evaluating(model):
        torch.manual_seed(0)
        for prompt in data.prompts:
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(device)
            output = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=True,
                temperature=0.8, top_k=50, use_cache=True, pad_token_id=padding(tokenizer),
                synced_gpus=is_sharded(model),
            )  # fmt: skip
            text = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
            texts.append({"prompt": prompt, "text": text})
    return texts


def padding(tokenizer: Any) -> int:
    """One text has no padding, but `generate` wants to know it."""
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((token for token in known if token is not None), 0)


def usage_curves(layers: Sequence[LayerUsage]) -> dict[str, float]:
    """Curves per layer and head, by name."""
    curves = {}
    for layer in layers:
        shown = {"entropy": layer.entropy, "effective_latents": layer.effective_latents}
        if layer.window_share is not None:
            shown["window_share"] = layer.window_share
        for name, values in shown.items():
            for head, value in enumerate(values.tolist()):
                curves[f"{name}/{layer.name}/head{head}"] = value
    return curves


def collapsed_heads(layers: Sequence[LayerUsage]) -> set[tuple[str, int]]:
    return {(layer.name, head) for layer in layers for head, is_ in enumerate(layer.collapsed.tolist()) if is_}
