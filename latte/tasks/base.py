"""What a task is: examples with a seed, metrics, the model they need, and how long to train it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Example = Mapping[str, Tensor]
Batch = dict[str, Tensor]
Sums = dict[str, tuple[float, float]]  # of a metric: its sum and the weight that the sum is to be divided by
Head = Literal["causal-lm", "classification", "pair-classification"]
Schedule = Literal["constant", "linear", "cosine"]
Settings = TypeVar("Settings")


class Examples(Protocol):
    """A sequence of examples. Example i is the same each time, in every process: it depends on its index alone."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...


def stack(examples: Sequence[Example]) -> Batch:
    """A batch of examples of one shape."""
    return {name: torch.stack([example[name] for example in examples]) for name in examples[0]}


@dataclass(frozen=True)
class Budget:
    """How long to train, and at which rate. A batch is that of an optimiser's step, over all processes."""

    steps: int
    batch_size: int
    learning_rate: float
    schedule: Schedule = "cosine"
    warmup_steps: int = 0
    final_rate: float = 0.0  # what the schedule ends with, as a share of learning_rate
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    gradient_clip: float | None = 1.0


@dataclass(frozen=True)
class Plan:
    """A model and a budget that suit a task."""

    preset: str | None  # None: the plan is for a model that has weights already
    budget: Budget
    model: Mapping[str, Any] = field(default_factory=dict)  # words of LatteConfig that differ from the preset's
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the task, that differ from its defaults
    run: Mapping[str, Any] = field(default_factory=dict)  # other settings of training, such as what learns


@dataclass(frozen=True)
class TaskData:
    """Everything that training and evaluation take from a task."""

    train: Examples
    validation: Examples
    head: Head
    model: Mapping[str, Any]  # words of LatteConfig that the data fixes: vocab_size, num_labels, pad_token_id, …
    fingerprint: str  # changes whenever the examples do
    tokens_per_example: int
    test: Examples | None = None
    collate: Callable[[Sequence[Example]], Batch] = stack
    tokenizer: "PreTrainedTokenizerBase | None" = None
    prompts: Sequence[str] = ()  # what to continue for a look at the model as it learns
    facts: Mapping[str, Any] = field(default_factory=dict)  # to be shown and written down: counts, sources, hashes


class Task(ABC, Generic[Settings]):
    """One task with its settings, a frozen dataclass in which every field has a default and `help` in its metadata."""

    name: ClassVar[str]
    settings_class: ClassVar[type]
    plans: ClassVar[Mapping[str, Plan]]  # "default" suits a laptop or one GPU; "paper" is the paper's own
    best: ClassVar[tuple[str, Literal["min", "max"]]] = ("loss", "min")  # the metric that tells a better model

    def __init__(self, settings: Settings, *, seed: int = 0) -> None:
        self.settings, self.seed = settings, seed

    @abstractmethod
    def prepare(self, progress: Callable[[str, int, int], None] | None = None) -> TaskData:
        """Find, make or read the examples; `progress` is told what is being done, how much is done and of how much.

        Raises ValueError or OSError in one line where data is missing or wrong.
        """

    @abstractmethod
    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        """The metrics of one batch as sums, so that they can be added over batches and processes."""

    def summarize(self, means: Mapping[str, float]) -> dict[str, float]:
        """The metrics to report, from the means of what `measure` gave."""
        return dict(means)
