"""Text classification: is a film review, read byte by byte, for or against the film (IMDb)?"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from latte.tasks.base import Budget, Plan, TaskData
from latte.tasks.classes import Classification, Padding, TextExamples, Texts
from latte.tasks.generation import check_counts
from latte.tasks.lra.files import find_file, folder_of, is_on_hub, load_from_hub, read_json_lines
from latte.tasks.lra.options import padding_option
from latte.tasks.lra.table8 import paper_plan
from latte.tasks.store import fingerprint

COLUMNS = ("text", "label")


@dataclass(frozen=True)
class TextSettings:
    """Where reviews are, and how much of them is read."""

    data: str = field(
        default="imdb",
        metadata={
            "help": "Folder with {train,test}.jsonl, packed or not, with text and label; or the original aclImdb; "
            'or "hub:stanfordnlp/imdb".'
        },
    )
    length: int = field(default=4096, metadata={"help": "Bytes of a review that are read; the rest is cut off."})
    validation_examples: int = field(
        default=2_500, metadata={"help": "Reviews taken from those to train on, to look at during training."}
    )
    padding: Literal["batch", "length"] = padding_option()

    def __post_init__(self) -> None:
        check_counts(self, "length", "validation_examples")


Reviews = tuple[list[bytes], list[int]]


def read_reviews(data: str, split: str, length: int) -> Reviews:
    """Texts as bytes, cut to `length`, and their labels."""
    if is_on_hub(data):
        rows = load_from_hub(data, COLUMNS)
        if split not in rows:
            raise ValueError(f"{data} has no split {split!r}; it has {', '.join(map(repr, rows))}")
        return _collect(((f"{data}, {split}, row {number}", row) for number, row in enumerate(rows[split])), length)
    folder = folder_of(data)
    if (folder / split / "pos").is_dir():
        return _collect(_original(folder / split), length)
    path = find_file(folder, f"{split}.jsonl")
    return _collect(((f"{path}, line {number}", row) for number, row in read_json_lines(path, COLUMNS)), length)


def _original(folder: Path) -> Iterable[tuple[str, dict[str, Any]]]:
    """The reviews of the original distribution, a file each in neg and pos."""
    for label, name in enumerate(("neg", "pos")):
        for path in sorted((folder / name).glob("*.txt")):
            yield str(path), {"text": path.read_text(encoding="utf-8"), "label": label}


def _collect(rows: Iterable[tuple[str, dict[str, Any]]], length: int) -> Reviews:
    texts, labels = [], []
    for place, row in rows:
        text, label = row["text"], row["label"]
        if not isinstance(text, str) or not text:
            raise ValueError(f"{place}: text is {text!r}; it must be a text that is not empty")
        if label not in (0, 1):
            raise ValueError(f"{place}: label is {label!r}; it must be 0 or 1")
        texts.append(text.encode()[:length])
        labels.append(int(label))
    if not texts:
        raise ValueError("there are no reviews; name a file or folder that has some")
    return texts, labels


class TextClassification(Classification[TextSettings]):
    """Two classes: against (0) and for (1)."""

    name = "text"
    settings_class = TextSettings
    plans = {  # noqa: RUF012 - a ClassVar in the base class
        "default": Plan(
            preset="macchiato-tiny",
            budget=Budget(steps=5_000, batch_size=32, learning_rate=1e-3, warmup_steps=500, weight_decay=0.05),
            settings={"length": 1024},
        ),
        "paper": paper_plan("text"),
    }

    def prepare(self, progress: Callable[[str, int, int], None] | None = None) -> TaskData:
        settings = self.settings
        read: dict[str, tuple[Texts, np.ndarray]] = {}
        for done, split in enumerate(("train", "test")):
            if progress is not None:
                progress("reading reviews", done, 2)
            texts, labels = read_reviews(settings.data, split, settings.length)
            read[split] = Texts.of(texts), np.array(labels, np.uint8)
        texts, labels = read["train"]
        if settings.validation_examples >= len(texts):
            raise ValueError(
                f"validation_examples is {settings.validation_examples}, and there are {len(texts)} reviews: "
                "make it less"
            )
        order = np.random.default_rng(self.seed).permutation(len(texts))  # they come sorted by label
        train, validation = order[settings.validation_examples :], order[: settings.validation_examples]
        splits = {
            "train": TextExamples(texts, labels, train),
            "validation": TextExamples(texts, labels, validation),
            "test": TextExamples(*read["test"]),
        }
        contents = [array for texts, labels in read.values() for array in (texts.tokens, texts.offsets, labels)]
        return TaskData(
            train=splits["train"],
            validation=splits["validation"],
            test=splits["test"],
            head="classification",
            model={"vocab_size": 256, "num_labels": 2, "pad_token_id": 0},
            fingerprint=fingerprint(self.name, order, *contents),
            tokens_per_example=texts.mean_length,
            collate=Padding(settings.length, fixed=settings.padding == "length"),
            facts={"source": settings.data, **{name: len(split) for name, split in splits.items()}},
        )
