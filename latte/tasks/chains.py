"""Causal chains: a small language in which a document states what causes what, and then asks for effects.

    b > k ; f ~ b ; k > f ; … _ _ … b +1 _ ; b +2 _ ;

"b > k" is a rule: b causes k. "f ~ b" is a coincidence, which says nothing. "b +2 _" asks for the effect of the effect
of b, which is f: the answer is the label of the blank, and never seen. One step is direct, more are chained.

The rules of a document are one ring, in which every symbol causes one other and is caused by one: there is no first
cause or last effect, and by what is stated about a symbol alone its effects of two or more steps are any of the others,
all equally likely. Chance is 1 / (rules − 1) at one step, and at more 1 / (rules − 2) for whoever looks up that one.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from latte.tasks.answers import IGNORED, find_answers
from latte.tasks.base import Batch, Budget, Plan, Sums, Task, TaskData
from latte.tasks.generation import BLOCK, SPLITS, block_generator, blocks, check_counts, distinct
from latte.tasks.store import fingerprint

VERSION = 1  # of the generator: goes up when the same settings give other examples
BLANK, CAUSES, COINCIDES, STOP = 0, 1, 2, 3
FIRST_DEPTH = 4  # the token of one step; that of two follows, and after those of all depths the symbols


@dataclass(frozen=True)
class ChainsSettings:
    """What the documents look like, and how many there are."""

    symbols: int = field(default=32, metadata={"help": "Symbols of the language, of which a document uses some."})
    rules: int = field(default=8, metadata={"help": "Rules in a document, and symbols: each causes one other."})
    coincidences: int = field(default=4, metadata={"help": "Statements in a document that cause nothing."})
    depth: int = field(default=3, metadata={"help": "Most steps from a cause to the effect that is asked for."})
    questions: int = field(default=6, metadata={"help": "Questions in a document, no two of them the same."})
    gap: int = field(default=0, metadata={"help": "Blank tokens between statements and questions."})
    examples: int = field(default=100_000, metadata={"help": "Documents to train on."})
    validation_examples: int = field(default=1_000, metadata={"help": "Documents to look at during training."})
    test_examples: int = field(default=10_000, metadata={"help": "Documents for the final figures."})

    def __post_init__(self) -> None:
        check_counts(self, "depth", "questions", "examples", "validation_examples", "test_examples")
        check_counts(self, "coincidences", "gap", least=0)
        if self.rules < 2 * self.depth + 1:
            raise ValueError(
                f"rules is {self.rules} and depth {self.depth}; in a ring of fewer than {2 * self.depth + 1} an effect "
                "is nearer to its cause the other way round: state more rules, or ask less deep"
            )
        if self.symbols < self.rules:
            raise ValueError(f"symbols is {self.symbols} and rules {self.rules}; each rule needs a symbol of its own")
        if self.questions > self.rules * self.depth:
            raise ValueError(
                f"questions is {self.questions}; {self.rules} rules and depth {self.depth} allow for "
                f"{self.rules * self.depth} different ones"
            )

    @property
    def length(self) -> int:
        """Tokens in a document."""
        return 4 * (self.rules + self.coincidences) + self.gap + 4 * self.questions

    @property
    def first_symbol(self) -> int:
        """The number of the first symbol's token."""
        return FIRST_DEPTH + self.depth

    @property
    def vocab_size(self) -> int:
        """Tokens in all."""
        return self.first_symbol + self.symbols


class Documents:
    """Documents with blanks for answers, and the answers as labels."""

    def __init__(self, settings: ChainsSettings, seed: int, split: str, examples: int) -> None:
        self.tokens = np.empty((examples, settings.length), np.int32)
        self.answers = np.empty((examples, settings.questions), np.int32)
        for block, wanted in blocks(examples):
            rows = slice(block * BLOCK, block * BLOCK + wanted)
            made = document_block(settings, block_generator(seed, split, block))
            self.tokens[rows], self.answers[rows] = made[0][:wanted], made[1][:wanted]
        self._blanks = torch.from_numpy(blanks(settings))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        tokens = torch.from_numpy(self.tokens[index].astype(np.int64))
        labels = torch.full_like(tokens, IGNORED)
        labels[self._blanks] = torch.from_numpy(self.answers[index].astype(np.int64))
        return {"input_ids": tokens, "labels": labels}


def blanks(settings: ChainsSettings) -> np.ndarray:
    """Where the answers of a document belong."""
    return settings.length - 4 * settings.questions + 4 * np.arange(settings.questions) + 2


def document_block(settings: ChainsSettings, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a block of documents [BLOCK, length], and their answers [BLOCK, questions]."""
    ring = settings.first_symbol + distinct(generator, BLOCK, settings.symbols, settings.rules)
    statements = np.concatenate([_rules(ring), _coincidences(settings, ring, generator)], axis=1)
    order = generator.permuted(np.tile(np.arange(statements.shape[1]), (BLOCK, 1)), axis=1)
    statements = np.take_along_axis(statements, order[:, :, None], axis=1)
    asked = distinct(generator, BLOCK, settings.rules * settings.depth, settings.questions)
    start, steps = asked % settings.rules, 1 + asked // settings.rules
    cause = np.take_along_axis(ring, start, axis=1)
    answers = np.take_along_axis(ring, (start + steps) % settings.rules, axis=1)
    blank, stop = np.full_like(cause, BLANK), np.full_like(cause, STOP)
    questions = np.stack([cause, FIRST_DEPTH + steps - 1, blank, stop], axis=2)
    gap = np.full((BLOCK, settings.gap), BLANK)
    return np.concatenate([statements.reshape(BLOCK, -1), gap, questions.reshape(BLOCK, -1)], axis=1), answers


def _rules(ring: np.ndarray) -> np.ndarray:
    """Each symbol causes the next [BLOCK, rules, 4]."""
    return np.stack([ring, np.full_like(ring, CAUSES), np.roll(ring, -1, axis=1), np.full_like(ring, STOP)], axis=2)


def _coincidences(settings: ChainsSettings, ring: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Two symbols, of which the first does not cause the second [BLOCK, coincidences, 4]."""
    shape = (BLOCK, settings.coincidences)
    first = generator.integers(0, settings.rules, shape)
    second = (first + generator.integers(2, settings.rules, shape)) % settings.rules
    left, right = np.take_along_axis(ring, first, axis=1), np.take_along_axis(ring, second, axis=1)
    return np.stack([left, np.full(shape, COINCIDES), right, np.full(shape, STOP)], axis=2)


class CausalChains(Task[ChainsSettings]):
    """Does a model follow causes to their effects? Accuracy by the number of steps."""

    name = "chains"
    settings_class = ChainsSettings
    best = ("accuracy", "max")
    plans = {  # noqa: RUF012 - a ClassVar in the base class
        "default": Plan(
            preset="macchiato-tiny",
            budget=Budget(steps=5_000, batch_size=64, learning_rate=1e-3, warmup_steps=250, weight_decay=0.1),
            model={"window": 32},
        ),
    }

    def prepare(self, progress: Callable[[str, int, int], None] | None = None) -> TaskData:
        settings = self.settings
        counts = dict(
            zip(SPLITS, (settings.examples, settings.validation_examples, settings.test_examples), strict=True)
        )
        made = {}
        for done, (split, examples) in enumerate(counts.items()):
            if progress is not None:
                progress("writing chains of causes", done, len(counts))
            made[split] = Documents(settings, self.seed, split, examples)
        chance = {"direct": 1 / (settings.rules - 1), "chained": 1 / (settings.rules - 2)}
        return TaskData(
            train=made["train"],
            validation=made["validation"],
            test=made["test"],
            head="causal-lm",
            model={"vocab_size": settings.vocab_size},
            fingerprint=fingerprint(self.name, VERSION, self.seed, asdict(settings)),
            tokens_per_example=settings.length,
            facts={"chance": chance, **counts},
        )

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        found = find_answers(model, batch)
        steps = batch["input_ids"][found.rows, found.places - 1] - FIRST_DEPTH + 1
        by_steps = {f"accuracy_{number}_steps": found.sums(steps == number) for number in self._depths}
        return found.totals() | {"direct": found.sums(steps == 1), "chained": found.sums(steps > 1)} | by_steps

    @property
    def _depths(self) -> range:
        return range(1, self.settings.depth + 1)
