"""A task that takes no time, for tests of the engine: count upwards modulo a prime, from anywhere."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from latte.tasks.base import Batch, Budget, Plan, Sums, Task, TaskData
from latte.train import RunSettings, read_metrics

PRIME, LENGTH = 11, 9


@dataclass(frozen=True)
class CountingSettings:
    examples: int = field(default=29, metadata={"help": "How many."})
    held_out: int = field(default=7, metadata={"help": "How many to evaluate on."})


class Counting:
    def __init__(self, examples: int, first: int) -> None:
        self.examples, self.first = examples, first

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        start, step = (self.first + index) % PRIME, 1 + index % 3
        tokens = (start + step * torch.arange(LENGTH)) % PRIME
        return {"input_ids": tokens, "labels": tokens.clone()}


class CountingTask(Task[CountingSettings]):
    name = "counting"
    settings_class = CountingSettings
    plans = {  # noqa: RUF012
        "default": Plan("macchiato-tiny", Budget(steps=12, batch_size=4, learning_rate=1e-2)),
        "paper": Plan("latte-tiny", Budget(steps=24, batch_size=4, learning_rate=1e-3), settings={"examples": 31}),
    }

    def prepare(self, progress: Callable[[str, int, int], None] | None = None) -> TaskData:
        settings = self.settings
        return TaskData(
            train=Counting(settings.examples, self.seed),
            validation=Counting(settings.held_out, self.seed + 5),
            test=Counting(3, self.seed + 6),
            head="causal-lm",
            model={"vocab_size": PRIME},
            fingerprint=f"{settings}{self.seed}",
            tokens_per_example=LENGTH,
            facts={"examples": settings.examples},
        )

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        count = batch["labels"][:, 1:].numel()
        return {"loss": (float(model(**batch, return_logits=False).loss) * count, count)}

    def summarize(self, means: Any) -> dict[str, float]:
        return {**means, "perplexity": float(torch.tensor(means["loss"]).exp())}


SMALL = {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_heads": 2, "num_latents": 3, "window": 4,
    "mixer_blocks": 2,
}  # fmt: skip


def settings(output: Path, **given: Any) -> RunSettings:
    """A run of a few steps of a model that is as small as can be."""
    usual = {
        "steps": 12, "batch_size": 4, "learning_rate": 1e-2, "log_every": 1, "eval_every": 6, "save_every": 3,
        "track": ("none",), "device": "cpu", "seed": 3, "warmup_steps": 2,
    }  # fmt: skip
    words = {**SMALL, **given.pop("words", {})}
    return RunSettings(output=output, preset="macchiato-tiny", words=words, **(usual | given))


def task(**given: Any) -> CountingTask:
    return CountingTask(CountingSettings(**given))


def losses(output: Path, split: str = "train") -> dict[int, float]:
    """Each step's loss; a step that is there twice is an error."""
    records = [record for record in read_metrics(output / "metrics.jsonl") if record["split"] == split]
    found = {record["step"]: record["loss"] for record in records}
    assert len(found) == len(records)
    return found


def in_process(function: Callable[..., None], *arguments: Any) -> int | None:
    """Run a function in a process of its own; its exit code, negative for a signal.

    Processes are forked from one that has loaded everything and has computed nothing.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["latte.train.runs", "tests.train.tiny"])
    process = context.Process(target=enter, args=(function, *arguments))
    process.start()
    process.join(120)
    assert process.exitcode is not None
    return process.exitcode


def enter(function: Callable[..., None], *arguments: Any) -> None:
    torch.set_num_threads(1)
    function(*arguments)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
