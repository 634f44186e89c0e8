"""Many short texts: in batches of like length, padded on the right."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.tasks.evaluation.scoring import LOGIT_BYTES, Scorer


@dataclass(frozen=True)
class Example:
    """Tokens, of which those from `scored` on are to be predicted."""

    tokens: list[int]
    scored: int = 1


@dataclass(frozen=True)
class Score:
    loss: float  # −log p of all scored tokens
    greedy: bool  # whether each of them is the likeliest after what stands before it


def score_examples(
    scorer: Scorer,
    examples: Sequence[Example],
    batch_tokens: int = 16384,
    progress: Callable[[int, int], None] | None = None,
) -> list[Score]:
    """The scores of the examples, in their order."""
    check_examples(examples, scorer.vocabulary)
    batch_tokens = min(batch_tokens, scorer.head.rows or batch_tokens)
    scores: dict[int, Score] = {}
    for batch in batches_by_length(examples, batch_tokens):
        found = score_batch(scorer, [examples[index] for index in batch])
        scores.update(zip(batch, found, strict=True))
        if progress is not None:
            progress(len(scores), len(examples))
    return [scores[index] for index in range(len(examples))]


def check_examples(examples: Sequence[Example], vocabulary: int) -> None:
    for example in examples:
        if not 1 <= example.scored < len(example.tokens):
            raise ValueError(
                f"an example of {len(example.tokens)} tokens is scored from {example.scored}; there must be a token "
                "before the first that is scored, and one to score"
            )
        if max(example.tokens) >= vocabulary:
            raise ValueError(
                f"the tokenizer gives token {max(example.tokens)}, the model knows up to {vocabulary - 1}: "
                "they do not match"
            )


def batches_by_length(examples: Sequence[Example], batch_tokens: int) -> Iterator[list[int]]:
    """The longest first: what does not fit into memory shows at once."""
    order = sorted(range(len(examples)), key=lambda index: len(examples[index].tokens), reverse=True)
    start = 0
    while start < len(order):
        size = max(1, batch_tokens // len(examples[order[start]].tokens))
        yield order[start : start + size]
        start += size


@torch.no_grad()
def score_batch(scorer: Scorer, examples: Sequence[Example]) -> list[Score]:
    width = max(len(example.tokens) for example in examples)
    lengths = torch.tensor([len(example.tokens) for example in examples])
    tokens = torch.stack([F.pad(torch.tensor(x.tokens), (0, width - len(x.tokens))) for x in examples])
    places = torch.arange(width)
    mask = places < lengths[:, None]
    first = torch.tensor([example.scored for example in examples])
    wanted = (mask & (places >= first[:, None]))[:, 1:]  # of what the token before predicts
    features = scorer.padded_features(tokens.to(scorer.device), mask.long().to(scorer.device))
    rows, targets = features[:, :-1][wanted.to(scorer.device)], tokens[:, 1:][wanted].to(scorer.device)
    losses, hits = score_rows(scorer, rows, targets)
    owner = torch.arange(len(examples))[:, None].expand_as(wanted)[wanted]
    sums = torch.zeros(len(examples), dtype=torch.float64).index_add_(0, owner, losses.double().cpu())
    misses = torch.zeros(len(examples), dtype=torch.long).index_add_(0, owner, (~hits).long().cpu())
    return [Score(loss, miss == 0) for loss, miss in zip(sums.tolist(), misses.tolist(), strict=True)]


def score_rows(scorer: Scorer, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Losses of targets, and whether each is the likeliest token, some rows of logits at a time."""
    size = max(1, LOGIT_BYTES // (4 * scorer.vocabulary))
    losses, hits = [], []
    for part, wanted in zip(rows.split(size), targets.split(size), strict=True):
        logits = scorer.head.logits(part)
        losses.append(F.cross_entropy(logits, wanted, reduction="none"))
        hits.append(logits.argmax(-1) == wanted)
    return torch.cat(losses), torch.cat(hits)
