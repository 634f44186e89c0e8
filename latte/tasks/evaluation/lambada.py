"""LAMBADA: the last word of a passage, which needs the whole of it (Paperno et al. 2016)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latte.tasks.evaluation.batches import Example, score_examples
from latte.tasks.evaluation.documents import read_rows, text_of
from latte.tasks.evaluation.encoding import Encoder
from latte.tasks.evaluation.scoring import Scorer
from latte.tasks.evaluation.statistics import Estimate, mean


@dataclass(frozen=True)
class LambadaReport:
    accuracy: Estimate  # of greedy choice of all tokens of the word
    perplexity: Estimate  # of words: exp of their mean loss
    passages: int


def read_passages(path: Path) -> list[str]:
    """The passages of a file of JSON lines, each with a context and a last word in its field "text"."""
    passages = []
    for number, row in read_rows(path):
        place = f"{path}, line {number}"
        text = text_of(row, "text", place).strip()
        if " " not in text:
            raise ValueError(f"{place} has one word; a passage needs a context before its last word")
        passages.append(text)
    if not passages:
        raise ValueError(f"{path} has no passages; it must have lines of JSON with a field 'text'")
    return passages


def lambada(
    model: Any,
    encoder: Encoder,
    passages: Sequence[str],
    *,
    batch_tokens: int = 16384,
    progress: Callable[[int, int], None] | None = None,
) -> LambadaReport:
    """Accuracy and perplexity of the last words, each after the passage before it."""
    scorer = model if isinstance(model, Scorer) else Scorer(model)
    examples = [last_word(encoder, passage) for passage in passages]
    scores = score_examples(scorer, examples, batch_tokens, progress)
    loss = mean([score.loss for score in scores])
    return LambadaReport(mean([float(score.greedy) for score in scores]), loss.exp(), len(scores))


def last_word(encoder: Encoder, passage: str) -> Example:
    context, space, word = passage.rpartition(" ")
    before, after = encoder.encode_after(context, space + word)
    before = encoder.begin(before)
    return Example(before + after, len(before))
