"""Passkey retrieval: a key hidden at some depth of a long text, asked for at its end."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from latte.tasks.evaluation.encoding import Encoder
from latte.tasks.evaluation.haystack import Prompt, make_prompt
from latte.tasks.evaluation.scoring import IGNORED, Scorer
from latte.tasks.evaluation.statistics import Estimate, mean

EXTRA_TOKENS = 2  # that free generation may use for a space or a quotation mark


@dataclass(frozen=True)
class PasskeyCell:
    """At one length and depth. Chance is 0 for `exact` and 1 / candidates for the other two."""

    length: int
    depth: float
    exact: Estimate  # greedy generation writes the key
    first: Estimate  # the key is likelier than every distractor
    probability: Estimate  # of the key among key and distractors
    trials: int


@dataclass(frozen=True)
class PasskeyReport:
    candidates: int
    cells: list[PasskeyCell]


@dataclass(frozen=True)
class Trial:
    exact: bool
    first: bool
    probability: float


def passkey(
    model: Any,
    encoder: Encoder,
    lengths: Sequence[int],
    *,
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    trials: int = 8,
    distractors: int = 7,
    seed: int = 0,
    haystack: Sequence[int] | None = None,
    batch_tokens: int = 32768,
    chunk: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PasskeyReport:
    """How well a model finds keys, by length and depth; prompts depend on seed, length, depth and trial alone."""
    if min(trials, distractors) < 1:
        raise ValueError(f"there are {trials} trials and {distractors} distractors; each must be at least 1")
    scorer = model if isinstance(model, Scorer) else Scorer(model, chunk)
    cells, total = [], len(lengths) * len(depths) * trials
    for length in lengths:
        for depth in depths:
            prompts = [
                make_prompt(encoder, length, depth, random=Random(f"{seed} {length} {depth} {trial}"),
                            distractors=distractors, haystack=haystack)
                for trial in range(trials)
            ]  # fmt: skip
            found: list[Trial] = []
            for batch in batches(prompts, max(1, batch_tokens // length)):
                found += run_batch(scorer, encoder, batch)
                if progress is not None:
                    progress(len(cells) * trials + len(found), total)
            cells.append(summarize(length, depth, found))
    return PasskeyReport(1 + distractors, cells)


def batches(prompts: Sequence[Prompt], size: int) -> Iterator[list[Prompt]]:
    """Prompts of one number of tokens, which differs where their longest answers do."""
    by_length: dict[int, list[Prompt]] = {}
    for prompt in prompts:
        by_length.setdefault(len(prompt.tokens), []).append(prompt)
    for alike in by_length.values():
        yield from (alike[start : start + size] for start in range(0, len(alike), size))


@torch.no_grad()
def run_batch(scorer: Scorer, encoder: Encoder, prompts: Sequence[Prompt]) -> list[Trial]:
    """Read each prompt once, but for its last token; then score every answer, and write one, from there."""
    tokens = torch.tensor([prompt.tokens for prompt in prompts], device=scorer.device)
    if int(tokens.max()) >= scorer.vocabulary:
        raise ValueError(
            f"the tokenizer gives token {int(tokens.max())}, the model knows up to {scorer.vocabulary - 1}"
        )
    cache = scorer.read(tokens[:, :-1])
    last = tokens[:, -1:]
    candidates = range(len(prompts[0].answers))
    columns = [answer_losses(scorer, last, [p.answers[i] for p in prompts], deepcopy(cache)) for i in candidates]
    losses = torch.stack(columns, dim=1)  # [B candidates]
    probabilities = (-losses).softmax(dim=1)[:, 0].tolist()
    firsts = (losses[:, 1:] > losses[:, :1]).all(dim=1).tolist()
    written = write(scorer, last, cache, EXTRA_TOKENS + max(len(p.answers[0]) for p in prompts))
    exacts = [says(encoder.decode(row), prompt.key) for row, prompt in zip(written, prompts, strict=True)]
    return [Trial(*trial) for trial in zip(exacts, firsts, probabilities, strict=True)]


def answer_losses(scorer: Scorer, last: Tensor, answers: Sequence[list[int]], cache: Any) -> Tensor:
    """−log p of each row's answer after its prompt."""
    width = max(map(len, answers))
    targets = torch.tensor([a + [IGNORED] * (width - len(a)) for a in answers], device=last.device)
    inputs = torch.cat([last, targets[:, :-1].clamp(min=0)], dim=1)  # what stands after an answer is not looked at
    return scorer.continued_losses(inputs, targets, cache).double().sum(dim=1).cpu()


def write(scorer: Scorer, token: Tensor, cache: Any, count: int) -> list[list[int]]:
    """The likeliest tokens, one after another."""
    written = []
    for _ in range(count):
        logits, cache = scorer.step(token, cache)
        token = logits.argmax(dim=-1, keepdim=True)
        written.append(token)
    return torch.cat(written, dim=1).tolist()


def says(text: str, key: str) -> bool:
    """Whether a text begins with the key and with no longer number."""
    text = text.lstrip(" \n\t\"'*`:")
    return text.startswith(key) and not text[len(key) : len(key) + 1].isdigit()


def summarize(length: int, depth: float, trials: Sequence[Trial]) -> PasskeyCell:
    exact, first = (mean([float(getattr(t, name)) for t in trials]) for name in ("exact", "first"))
    return PasskeyCell(length, depth, exact, first, mean([t.probability for t in trials]), len(trials))
