"""Examples with a class, the padding that makes batches of them, and their accuracy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from latte.tasks.base import Batch, Example, Sums, Task

MULTIPLE = 64  # a batch's length is rounded up to one, so that few lengths occur
Settings = TypeVar("Settings")


class Texts:
    """Texts of different lengths as token numbers, all in one array, of which text i is from offset i to i + 1."""

    def __init__(self, tokens: np.ndarray, offsets: np.ndarray) -> None:
        self.tokens, self.offsets = tokens, offsets

    @classmethod
    def of(cls, texts: Sequence[bytes]) -> "Texts":
        """Texts whose token numbers are their bytes."""
        offsets = np.concatenate([[0], np.cumsum([len(text) for text in texts], dtype=np.int64)])
        return cls(np.frombuffer(b"".join(texts), np.uint8), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int, /) -> Tensor:
        tokens = self.tokens[self.offsets[index] : self.offsets[index + 1]]
        return torch.from_numpy(tokens.astype(np.int64))

    @property
    def mean_length(self) -> int:
        """How many tokens a text has, rounded up."""
        return -(-int(self.offsets[-1]) // max(len(self), 1))


@dataclass(frozen=True)
class TextExamples:
    """Texts with a class each; `order` chooses some of them, all if it is left out."""

    texts: Texts
    labels: np.ndarray
    order: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.labels if self.order is None else self.order)

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        index = _place(index, len(self), self.order)
        return {"input_ids": self.texts[index], "labels": torch.tensor(int(self.labels[index]))}


@dataclass(frozen=True)
class PairExamples:
    """Pairs of texts with a class each; `pairs` [n, 2] says which texts."""

    texts: Texts
    pairs: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        index = _place(index, len(self), None)
        first, second = map(int, self.pairs[index])
        return {
            "input_ids": self.texts[first],
            "input_ids_b": self.texts[second],
            "labels": torch.tensor(int(self.labels[index])),
        }


@dataclass(frozen=True)
class ImageExamples:
    """Images [n, height, width] of one channel with a class each, read row by row."""

    pixels: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        index = _place(index, len(self), None)
        pixels = torch.from_numpy(self.pixels[index].astype(np.int64).reshape(-1))
        return {"pixel_values": pixels, "labels": torch.tensor(int(self.labels[index]))}


def _place(index: int, length: int, order: np.ndarray | None) -> int:
    """Where example `index` of so many is kept; the end of the sequence is an IndexError, as iteration expects."""
    if not -length <= index < length:
        raise IndexError(f"example {index} of {length}")
    return index % length if order is None else int(order[index])


@dataclass(frozen=True)
class Padding:
    """Batches of texts of different lengths: padded at the end, with a mask that is 1 at their own tokens.

    They are as long as their longest text, rounded up, and at most `length`; with `fixed` always `length`.
    """

    length: int
    fixed: bool = False
    pad_token_id: int = 0

    def __call__(self, examples: Sequence[Example]) -> Batch:
        batch: Batch = {}
        for name in examples[0]:
            tensors = [example[name] for example in examples]
            if name.startswith("input_ids"):
                padded, mask = self.pad(tensors)
                batch |= {name: padded, name.replace("input_ids", "attention_mask"): mask}
            else:
                batch[name] = torch.stack(tensors)
        return batch

    def pad(self, texts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Token numbers [B T] and their mask."""
        lengths = torch.tensor([len(text) for text in texts])
        longest = int(lengths.max())
        if longest > self.length:
            raise ValueError(f"a text has {longest} tokens; they must be cut to {self.length}")
        size = self.length if self.fixed else min(-(-longest // MULTIPLE) * MULTIPLE, self.length)
        padded = torch.full((len(texts), size), self.pad_token_id)
        for row, text in zip(padded, texts, strict=True):
            row[: len(text)] = text
        return padded, (torch.arange(size) < lengths[:, None]).long()


class Classification(Task[Settings]):
    """A task whose examples have one class each."""

    best: ClassVar[tuple[str, Literal["min", "max"]]] = ("accuracy", "max")

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        inputs: dict[str, Any] = {name: tensor for name, tensor in batch.items() if name != "labels"}
        labels = batch["labels"]
        logits = model(**inputs).logits.float()
        loss = F.cross_entropy(logits, labels, reduction="sum")
        correct = (logits.argmax(dim=-1) == labels).sum()
        return {"loss": (float(loss), float(len(labels))), "accuracy": (float(correct), float(len(labels)))}
