"""ListOps: what is the value of a nested expression of MIN, MAX, MED and SM, hundreds of tokens long?"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from latte.tasks.base import Budget, Plan, TaskData
from latte.tasks.classes import Classification, Padding, TextExamples, Texts
from latte.tasks.generation import block_generator, check_counts, number_of_blocks, wanted_of_block
from latte.tasks.lra.expressions import (
    END,
    FIRST_DIGIT,
    FIRST_OPERATOR,
    OPERATORS,
    TOKENS,
    Expressions,
    Shape,
    make_expressions,
)
from latte.tasks.lra.files import check_columns, find_file, folder_of, read_lines, source_of
from latte.tasks.lra.options import cache_option, padding_option, workers_option
from latte.tasks.lra.table8 import paper_plan
from latte.tasks.store import StoreWriter, fingerprint, stored
from latte.tasks.workers import Progress, map_blocks, steps_of

VERSION = 1  # of the generator
BLOCK = 500
RELEASE = {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}


@dataclass(frozen=True)
class ListOpsSettings:
    """Where expressions come from, or what they look like and how many there are."""

    data: str | None = field(
        default=None,
        metadata={"help": "Folder of the official release with basic_{train,val,test}.tsv; made here if left out."},
    )
    length: int = field(default=2000, metadata={"help": "Expressions are shorter than this, in tokens."})
    min_length: int = field(default=500, metadata={"help": "Expressions are longer than this."})
    max_depth: int = field(default=10, metadata={"help": "Greatest depth of an expression."})
    max_args: int = field(default=10, metadata={"help": "Most arguments of an operator."})
    examples: int = field(default=96_000, metadata={"help": "Expressions to train on."})
    validation_examples: int = field(default=2_000, metadata={"help": "Expressions to look at during training."})
    test_examples: int = field(default=2_000, metadata={"help": "Expressions for the final figures."})
    padding: Literal["batch", "length"] = padding_option()
    cache: str | None = cache_option()
    workers: int = workers_option()

    def __post_init__(self) -> None:
        check_counts(self, "length", "min_length", "examples", "validation_examples", "test_examples")
        check_counts(self, "max_depth", "max_args", least=2)
        if self.length < self.min_length + 2:
            raise ValueError(f"length is {self.length} and min_length {self.min_length}; nothing is between them")
        longest = _longest(self.max_depth, self.max_args)
        if longest <= self.min_length:
            raise ValueError(
                f"min_length is {self.min_length}, and expressions with max_depth {self.max_depth} and max_args "
                f"{self.max_args} have {longest} tokens at most: lower min_length"
            )

    @property
    def counts(self) -> dict[str, int]:
        """Examples of each split."""
        return {"train": self.examples, "validation": self.validation_examples, "test": self.test_examples}


def _longest(max_depth: int, max_args: int) -> int:
    operators = sum(max_args**depth for depth in range(max_depth - 1))
    return 2 * operators + max_args ** (max_depth - 1)


def expression_block(settings: ListOpsSettings, seed: int, split: str, block: int) -> Expressions:
    """One block of a split, made here; of the last, as much as is wanted."""
    shape = Shape(settings.min_length, settings.length, settings.max_depth, settings.max_args)
    wanted = wanted_of_block(settings.counts[split], block, BLOCK)
    return make_expressions(block_generator(seed, split, block), wanted, shape)


def write_expressions(
    settings: ListOpsSettings, seed: int, writer: StoreWriter, progress: Progress | None = None
) -> None:
    """Make all splits, block by block."""
    for split, examples in settings.counts.items():
        count = number_of_blocks(examples, BLOCK)
        tell = progress and steps_of(progress, f"making ListOps, {split}", count)
        for made in map_blocks(partial(expression_block, settings, seed, split), count, settings.workers, tell):
            _append(writer, split, made.tokens, made.offsets, made.values)


def _append(writer: StoreWriter, split: str, tokens: np.ndarray, offsets: np.ndarray, values: np.ndarray) -> None:
    writer.append(f"{split}_tokens", tokens)
    writer.append(f"{split}_lengths", np.diff(offsets).astype(np.int32))
    writer.append(f"{split}_labels", values.astype(np.uint8))


# An expression as bytes: operators of one letter each, and the brackets and spaces that say nothing left out.
_LETTERS = dict(zip((operator.encode() for operator in OPERATORS), (b"m", b"M", b"d", b"s"), strict=True))
_NUMBERS = np.zeros(256, np.uint8)
_NUMBERS[list(b"0123456789")] = np.arange(FIRST_DIGIT, FIRST_DIGIT + 10)
_NUMBERS[list(b"".join(_LETTERS.values()))] = np.arange(FIRST_OPERATOR, FIRST_OPERATOR + len(OPERATORS))
_NUMBERS[ord("]")] = END


def parse_expression(source: bytes) -> np.ndarray:
    """Token numbers of an expression as the official release writes it: "( ( ( [MAX 3 ) 4 ) ] )"."""
    letters = source
    for operator, letter in _LETTERS.items():
        letters = letters.replace(operator, letter)
    letters = letters.translate(None, b"() ")
    numbers = _NUMBERS[np.frombuffer(letters, np.uint8)]
    if not len(numbers) or not numbers.all():
        raise ValueError(f"{source[:60]!r} is no expression of {', '.join(TOKENS[1:])}")
    return numbers


def read_expressions(path: Path, length: int, writer: StoreWriter, split: str) -> None:
    """Copy a file of the official release, a table with the columns Source and Target; long expressions are cut."""
    lines = read_lines(path)
    header = next(lines, (0, b""))[1].decode(errors="replace").split("\t")
    check_columns(str(path), header, ("Source", "Target"))
    source, target = header.index("Source"), header.index("Target")
    rows = 0
    for number, line in lines:
        columns = line.split(b"\t")
        try:
            tokens, value = parse_expression(columns[source])[:length], int(columns[target])
        except (ValueError, IndexError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if not 0 <= value <= 9:
            raise ValueError(f"{path}, line {number}: Target is {value}; it must be a digit")
        _append(writer, split, tokens, np.array([0, len(tokens)]), np.array([value]))
        rows += 1
    if not rows:
        raise ValueError(f"{path} has no expressions")


class ListOps(Classification[ListOpsSettings]):
    """Ten classes: the digit that an expression comes to."""

    name = "listops"
    settings_class = ListOpsSettings
    plans = {  # noqa: RUF012 - a ClassVar in the base class
        "default": Plan(
            preset="macchiato-tiny",
            budget=Budget(steps=5_000, batch_size=32, learning_rate=1e-3, warmup_steps=500, weight_decay=0.01),
            settings={"length": 500, "min_length": 100, "examples": 50_000},
        ),
        "paper": paper_plan("listops"),
    }

    def prepare(self, progress: Callable[[str, int, int], None] | None = None) -> TaskData:
        settings = self.settings
        if settings.data is None:
            description = {"generator": VERSION, "seed": self.seed, "shape": self._shape(), "counts": settings.counts}
            arrays = stored(
                settings.cache,
                self.name,
                description,
                lambda writer: write_expressions(settings, self.seed, writer, progress),
            )
        else:
            arrays, description = self._read(settings.data)
        splits = {split: _examples(arrays, split) for split in RELEASE}
        return TaskData(
            train=splits["train"],
            validation=splits["validation"],
            test=splits["test"],
            head="classification",
            model={"vocab_size": len(TOKENS), "num_labels": 10, "pad_token_id": 0},
            fingerprint=fingerprint(self.name, description),
            tokens_per_example=splits["train"].texts.mean_length,
            collate=Padding(settings.length, fixed=settings.padding == "length"),
            facts={"source": settings.data or "made here", **{name: len(split) for name, split in splits.items()}},
        )

    def _shape(self) -> dict[str, int]:
        names = ("min_length", "length", "max_depth", "max_args")
        return {name: value for name, value in asdict(self.settings).items() if name in names}

    def _read(self, data: str) -> tuple[dict[str, np.ndarray], dict[str, object]]:
        paths = {split: find_file(folder_of(data), name) for split, name in RELEASE.items()}
        description = {"files": source_of(*paths.values()), "length": self.settings.length, "reader": VERSION}

        def read(writer: StoreWriter) -> None:
            for split, path in paths.items():
                read_expressions(path, self.settings.length, writer, split)

        return stored(self.settings.cache, self.name, description, read), description


def _examples(arrays: dict[str, np.ndarray], split: str) -> TextExamples:
    offsets = np.concatenate([[0], np.cumsum(arrays[f"{split}_lengths"], dtype=np.int64)])
    return TextExamples(Texts(arrays[f"{split}_tokens"], offsets), arrays[f"{split}_labels"])
