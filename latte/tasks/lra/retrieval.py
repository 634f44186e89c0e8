"""Retrieval: does one of two papers cite the other (AAN)? Both are read byte by byte, by one model."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from latte.tasks.base import Budget, Plan, TaskData
from latte.tasks.classes import Classification, Padding, PairExamples, Texts
from latte.tasks.generation import SPLITS, check_counts
from latte.tasks.lra.files import find_file, folder_of, is_on_hub, load_from_hub, read_lines, source_of
from latte.tasks.lra.options import cache_option, padding_option
from latte.tasks.lra.table8 import paper_plan
from latte.tasks.store import StoreWriter, fingerprint, stored
from latte.tasks.workers import Progress

VERSION = 1  # of the reader
COLUMNS = ("label", "id1", "id2", "text1", "text2")
RELEASE = {"train": "new_aan_pairs.train.tsv", "validation": "new_aan_pairs.eval.tsv", "test": "new_aan_pairs.test.tsv"}
SHORT = {"train": "train.tsv", "validation": "eval.tsv", "test": "test.tsv"}


@dataclass(frozen=True)
class RetrievalSettings:
    """Where pairs of papers are, and how much of them is read."""

    data: str = field(
        default="aan",
        metadata={
            "help": "Folder with new_aan_pairs.{train,eval,test}.tsv of the official release, or hub:owner/name."
        },
    )
    length: int = field(default=4000, metadata={"help": "Bytes of a paper that are read; the rest is cut off."})
    padding: Literal["batch", "length"] = padding_option()
    cache: str | None = cache_option()

    def __post_init__(self) -> None:
        check_counts(self, "length")


class PairWriter:
    """Pairs written to a store, each paper but once: it is in hundreds of pairs."""

    def __init__(self, writer: StoreWriter, length: int) -> None:
        self.writer, self.length = writer, length
        self._numbers: dict[bytes, int] = {}

    def add(self, split: str, place: str, label: str, first: bytes, second: bytes) -> None:
        """One pair; `place` is where it comes from."""
        if label not in ("0", "1", "0.0", "1.0"):
            raise ValueError(f"{place}: label is {label!r}; it must be 0 or 1")
        numbers = np.array([[self._number(text, place) for text in (first, second)]], np.int32)
        self.writer.append(f"{split}_pairs", numbers)
        self.writer.append(f"{split}_labels", np.array([float(label)], np.uint8))

    def _number(self, text: bytes, place: str) -> int:
        text = text[: self.length]
        if not text:
            raise ValueError(f"{place}: a text is empty")
        if text not in self._numbers:
            self._numbers[text] = len(self._numbers)
            self.writer.append("tokens", np.frombuffer(text, np.uint8))
            self.writer.append("lengths", np.array([len(text)], np.int32))
        return self._numbers[text]


def read_pairs(paths: dict[str, Path], length: int, writer: StoreWriter, progress: Progress | None = None) -> None:
    """Copy files of the official release: label, two ids and two texts on each line, with tabs between them."""
    pairs = PairWriter(writer, length)
    for done, (split, path) in enumerate(paths.items()):
        if progress is not None:
            progress(f"reading pairs, {split}", done, len(paths))
        number = 0
        for number, line in read_lines(path):
            columns = line.split(b"\t")
            if len(columns) != len(COLUMNS):
                raise ValueError(
                    f"{path}, line {number} has {len(columns)} columns; {', '.join(COLUMNS)} are wanted, tabs between"
                )
            pairs.add(split, f"{path}, line {number}", columns[0].decode(errors="replace"), *columns[3:])
        if number == 0:
            raise ValueError(f"{path} is empty")


def read_hub_pairs(data: str, length: int, writer: StoreWriter, progress: Progress | None = None) -> None:
    """Copy the splits train, validation and test of a dataset with label, text1 and text2."""
    pairs, found = PairWriter(writer, length), load_from_hub(data, ("label", "text1", "text2"))
    if missing := [split for split in SPLITS if split not in found]:
        raise ValueError(f"{data} has no split {', '.join(missing)}; it has {', '.join(found)}")
    for done, split in enumerate(SPLITS):
        if progress is not None:
            progress(f"reading pairs, {split}", done, len(SPLITS))
        for number, row in enumerate(found[split]):
            place = f"{data}, {split}, row {number}"
            pairs.add(split, place, str(row["label"]), row["text1"].encode(), row["text2"].encode())


class Retrieval(Classification[RetrievalSettings]):
    """Two classes: related (1) or not (0)."""

    name = "retrieval"
    settings_class = RetrievalSettings
    plans = {  # noqa: RUF012 - a ClassVar in the base class
        "default": Plan(
            preset="macchiato-tiny",
            budget=Budget(steps=5_000, batch_size=32, learning_rate=1e-3, warmup_steps=500, weight_decay=0.01),
            settings={"length": 1024},
        ),
        "paper": paper_plan("retrieval"),
    }

    def prepare(self, progress: Callable[[str, int, int], None] | None = None) -> TaskData:
        settings = self.settings
        description: dict[str, object] = {"length": settings.length, "reader": VERSION}
        if is_on_hub(settings.data):
            description["hub"] = settings.data
            read = partial(read_hub_pairs, settings.data, settings.length, progress=progress)
        else:
            folder = folder_of(settings.data)
            paths = {split: find_file(folder, name, SHORT[split]) for split, name in RELEASE.items()}
            description["files"] = source_of(*paths.values())
            read = partial(read_pairs, paths, settings.length, progress=progress)
        arrays = stored(settings.cache, self.name, description, read)
        texts = Texts(arrays["tokens"], np.concatenate([[0], np.cumsum(arrays["lengths"], dtype=np.int64)]))
        splits = {split: PairExamples(texts, arrays[f"{split}_pairs"], arrays[f"{split}_labels"]) for split in SPLITS}
        return TaskData(
            train=splits["train"],
            validation=splits["validation"],
            test=splits["test"],
            head="pair-classification",
            model={"vocab_size": 256, "num_labels": 2, "pad_token_id": 0},
            fingerprint=fingerprint(self.name, *arrays.values()),
            tokens_per_example=2 * texts.mean_length,
            collate=Padding(settings.length, fixed=settings.padding == "length"),
            facts={
                "source": settings.data,
                "papers": len(texts),
                **{name: len(split) for name, split in splits.items()},
            },
        )
