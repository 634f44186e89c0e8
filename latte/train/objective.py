"""What training makes small: a part of its own, so that another can stand in its place."""

from typing import Protocol

import torch
from torch import Tensor, nn

from latte.tasks.base import Batch, Head

IGNORED = -100  # the label of a token that does not count


class Objective(Protocol):
    """A loss that is a mean over items, of which a step's micro batches and processes each compute a part.

    The parts of a step add up to its loss: `loss` divides by the items of the whole step. One that has several terms
    may have an attribute `parts`, the terms of the last batch by name, which are written down.
    """

    def items(self, batch: Batch) -> Tensor:
        """How many items this batch has: a scalar on the batch's device."""
        ...

    def loss(self, model: nn.Module, batch: Batch, items: Tensor) -> Tensor:
        """The batch's part of the loss of a step that has `items` in all."""
        ...


class NextToken:
    """Cross entropy of a language model's labels: the mean over labelled tokens."""

    def items(self, batch: Batch) -> Tensor:
        labels = batch["shift_labels"] if "shift_labels" in batch else batch["labels"][..., 1:]
        return (labels != IGNORED).sum()

    def loss(self, model: nn.Module, batch: Batch, items: Tensor) -> Tensor:
        return model(**batch, num_items_in_batch=items, use_cache=False).loss


class Classification:
    """A classifier's own loss: the mean over examples."""

    def items(self, batch: Batch) -> Tensor:
        labels = batch["labels"]
        return torch.full((), len(labels), device=labels.device)  # a kernel: torch.tensor would make the host wait

    def loss(self, model: nn.Module, batch: Batch, items: Tensor) -> Tensor:
        return model(**batch).loss * (len(batch["labels"]) / items)


def objective_for(head: Head) -> Objective:
    return NextToken() if head == "causal-lm" else Classification()
