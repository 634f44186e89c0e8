"""Multi-query associative recall (Arora et al. 2023, "Zoology"): keys with values, and later the keys alone."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from latte.tasks.answers import IGNORED, find_answers
from latte.tasks.base import Batch, Budget, Plan, Sums, Task, TaskData
from latte.tasks.generation import BLOCK, block_generator, blocks, check_counts, distinct
from latte.tasks.store import fingerprint

VERSION = 2  # of the generator: goes up when the same settings give other examples
FILLER = 0
FIGURE_5 = ((128, 8), (256, 16), (512, 32), (512, 64))  # lengths and pairs at which models are compared


@dataclass(frozen=True)
class MQARSettings:
    """What the sequences look like, and how many there are."""

    length: int = field(default=64, metadata={"help": "Tokens in a sequence."})
    pairs: tuple[int, ...] = field(
        default=(4, 8), metadata={"help": "Keys with a value in a sequence; several numbers are mixed in equal parts."}
    )
    vocab_size: int = field(default=128, metadata={"help": "Tokens in all: one is filler, half are keys, half values."})
    gap: Literal["power", "uniform"] = field(
        default="power", metadata={"help": "How the places of queries are drawn: mostly early, or evenly."}
    )
    power: float = field(
        default=0.01, metadata={"help": "a of the power law: the weight of place g is g^(a−1), even at a = 1."}
    )
    examples: int = field(default=100_000, metadata={"help": "Sequences to train on."})
    validation_examples: int = field(default=1_000, metadata={"help": "Sequences to look at during training."})
    test_examples: int = field(default=10_000, metadata={"help": "Sequences for the final figures."})

    def __post_init__(self) -> None:
        check_counts(self, "length", "examples", "validation_examples", "test_examples")
        if not self.pairs or min(self.pairs) < 1 or len(set(self.pairs)) < len(self.pairs):
            raise ValueError(f"pairs is {self.pairs}; give one or more different numbers, each at least 1")
        if self.length % 2:
            raise ValueError(f"length is {self.length}; it must be even: keys and values come in twos")
        if 4 * max(self.pairs) > self.length:
            raise ValueError(
                f"pairs is {max(self.pairs)} and length {self.length}; a pair takes four tokens, two to be stated and "
                f"two to be queried: make length at least {4 * max(self.pairs)}"
            )
        if max(self.pairs) > self.vocab_size // 2 - 1:
            raise ValueError(
                f"pairs is {max(self.pairs)} and vocab_size {self.vocab_size}, which leaves "
                f"{max(self.vocab_size // 2 - 1, 0)} keys: make vocab_size at least {2 * max(self.pairs) + 2}"
            )
        if not 0 < self.power < inf:
            raise ValueError(f"power is {self.power}; it must be above 0 and finite")


class RecallExamples:
    """Sequences key value key value …, then queries: each key once more, after which its value is to be predicted.

    The rest is filler, and so is what a model reads in an answer's place: answers that later queries could see would
    tell which values are still to come, and a model could learn to guess among those instead.
    Example i has the (i mod n)-th of the n numbers of pairs.
    """

    def __init__(self, settings: MQARSettings, seed: int, split: str, examples: int) -> None:
        self.tokens = np.empty((examples, settings.length), np.int16 if settings.vocab_size < 2**15 else np.int32)
        self.answers = np.empty((examples, settings.length), np.bool_)
        kinds = len(settings.pairs)
        for kind, pairs in enumerate(settings.pairs):
            tokens, answers = self.tokens[kind::kinds], self.answers[kind::kinds]
            for block, wanted in blocks(len(tokens)):
                rows = slice(block * BLOCK, block * BLOCK + wanted)
                made = recall_block(settings, pairs, block_generator(seed, split, pairs, block))
                tokens[rows], answers[rows] = made[0][:wanted], made[1][:wanted]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        tokens = torch.from_numpy(self.tokens[index].astype(np.int64))
        answers = torch.from_numpy(self.answers[index])
        return {"input_ids": tokens.masked_fill(answers, FILLER), "labels": tokens.masked_fill(~answers, IGNORED)}


def recall_block(settings: MQARSettings, pairs: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a block of sequences [BLOCK, length], answers included, and which of them are answers.

    As in Zoology, a query takes two of the tokens after the pairs, and the places of queries are drawn without
    replacement with the weights of the gap law, for one key after the other.
    """
    values_from = settings.vocab_size // 2
    keys = 1 + distinct(generator, BLOCK, values_from - 1, pairs)
    values = values_from + distinct(generator, BLOCK, settings.vocab_size - values_from, pairs)
    stated = 2 * pairs
    places = (settings.length - stated) // 2
    power = settings.power if settings.gap == "power" else 1.0
    # The largest of log-weights with Gumbel noise, in order, are a draw without replacement.
    scores = (power - 1) * np.log(np.arange(1, places + 1)) + generator.gumbel(size=(BLOCK, places))
    queries = stated + 2 * np.argsort(-scores, axis=1)[:, :pairs]
    tokens = np.full((BLOCK, settings.length), FILLER)
    tokens[:, 0:stated:2], tokens[:, 1:stated:2] = keys, values
    np.put_along_axis(tokens, queries, keys, axis=1)
    np.put_along_axis(tokens, queries + 1, values, axis=1)
    answers = np.zeros(tokens.shape, np.bool_)
    np.put_along_axis(answers, queries + 1, True, axis=1)
    return tokens, answers


def _figure_plan(length: int, pairs: int) -> Plan:
    """Zoology's budget at a length: 64 passes over 100,000 sequences; its rates are searched from 1e-4 to 1e-2.

    The paper gives the window (128) and the numbers of examples alone. Latents are its Table 6's, 256 over 8 heads. A
    convolution has a value's token see its key from the start, where RG-LRU's memory is long before it is trained.
    """
    batch = max(64, min(512, 65_536 // length))
    steps = 64 * 100_000 // batch
    return Plan(
        preset="latte-conv-swa++",
        budget=Budget(steps, batch, learning_rate=1e-3, schedule="cosine", warmup_steps=steps // 10, weight_decay=0.1),
        model={"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "num_latents": 32},
        settings={"length": length, "pairs": (pairs,), "vocab_size": 8192},
    )


class MQAR(Task[MQARSettings]):
    """Does a model find again what it was told? Accuracy at the queries, in all and by number of pairs."""

    name = "mqar"
    settings_class = MQARSettings
    best = ("accuracy", "max")
    plans = {  # noqa: RUF012 - a ClassVar in the base class
        "default": Plan(
            preset="macchiato-tiny",
            budget=Budget(steps=2_000, batch_size=64, learning_rate=3e-3, warmup_steps=100, weight_decay=0.1),
            model={"num_hidden_layers": 2, "num_heads": 8, "window": 16, "mixer": "conv"},
            settings={"examples": 50_000},
        ),
        "paper": _figure_plan(512, 64),
        **{f"paper-{length}x{pairs}": _figure_plan(length, pairs) for length, pairs in FIGURE_5},
    }

    def prepare(self, progress: Callable[[str, int, int], None] | None = None) -> TaskData:
        settings = self.settings
        counts = {
            "train": settings.examples,
            "validation": settings.validation_examples,
            "test": settings.test_examples,
        }
        made = {}
        for done, (split, examples) in enumerate(counts.items()):
            if progress is not None:
                progress("making sequences to recall", done, len(counts))
            made[split] = RecallExamples(settings, self.seed, split, examples)
        return TaskData(
            train=made["train"],
            validation=made["validation"],
            test=made["test"],
            head="causal-lm",
            model={"vocab_size": settings.vocab_size},
            fingerprint=fingerprint(self.name, VERSION, self.seed, asdict(settings)),
            tokens_per_example=settings.length,
            facts={"chance": 1 / (settings.vocab_size - settings.vocab_size // 2), **counts},
        )

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        found = find_answers(model, batch)
        pairs = (batch["labels"] != IGNORED).sum(dim=1)[found.rows]
        by_pairs = {f"accuracy_{number}_pairs": found.sums(pairs == number) for number in sorted(self.settings.pairs)}
        return found.totals() | by_pairs
