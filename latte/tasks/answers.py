"""How a language model does at the answers of a text: the labelled tokens, each predicted from those before."""

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from latte.tasks.base import Batch, Sums

IGNORED = -100  # the label of a token that is no answer


class Answers(NamedTuple):
    """Every labelled token of a batch."""

    rows: Tensor  # which example it belongs to
    places: Tensor  # where in the example it stands
    losses: Tensor
    correct: Tensor  # whether the likeliest token is the right one

    def sums(self, chosen: Tensor | None = None) -> tuple[float, float]:
        """Correct answers and answers, of all of them or of the chosen ones."""
        correct = self.correct if chosen is None else self.correct[chosen]
        return float(correct.sum()), float(correct.numel())

    def totals(self) -> Sums:
        """Loss and accuracy over all of them."""
        return {"loss": (float(self.losses.sum()), float(self.losses.numel())), "accuracy": self.sums()}


def find_answers(model: nn.Module, batch: Batch) -> Answers:
    """Score the labelled tokens; logits are computed at the places where some row of the batch has one."""
    labels = batch["labels"]
    answered = labels[:, 1:] != IGNORED
    keep = answered.any(dim=0).nonzero().squeeze(1)  # the token before each answer
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False, logits_to_keep=keep).logits
    rows, columns = answered[:, keep].nonzero(as_tuple=True)
    places = keep[columns] + 1
    targets = labels[rows, places]
    scores = logits[rows, columns].float()
    losses = F.cross_entropy(scores, targets, reduction="none")
    return Answers(rows, places, losses, scores.argmax(dim=-1) == targets)
