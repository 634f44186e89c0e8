"""Perplexity at several lengths of context, on the same text at each."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from latte.tasks.evaluation.positions import PositionBucket, PositionSums, Spacing
from latte.tasks.evaluation.scoring import Scorer
from latte.tasks.evaluation.statistics import Estimate, mean_over_groups

Mode = Literal["whole", "sliding"]
Progress = Callable[[str, int, int], None]  # what is done, how much of it, and of how much


@dataclass(frozen=True)
class LengthResult:
    """At one length. `sums` and `counts` are of the losses of documents, or of windows if there is one document."""

    length: int
    loss: Estimate
    perplexity: Estimate
    tokens: int
    windows: int
    documents: int
    sums: list[float] = field(repr=False)
    counts: list[int] = field(repr=False)


@dataclass(frozen=True)
class PerplexityReport:
    mode: Mode
    lengths: list[LengthResult]
    positions: list[PositionBucket]  # of the longest length, in whole mode


@dataclass(frozen=True)
class Window:
    """`length` tokens of a text from `start`; those from `scored` on count, where 0 is the window's own first."""

    document: int
    start: int
    scored: int


def perplexity(
    model: Any,
    texts: Sequence[Tensor],
    lengths: Sequence[int],
    *,
    mode: Mode = "whole",
    stride: int | None = None,
    bos: int | None = None,
    buckets: int = 24,
    spacing: Spacing = "log",
    batch_tokens: int = 32768,
    chunk: int | None = None,
    progress: Progress | None = None,
) -> PerplexityReport:
    """exp of the mean loss of a text's tokens when the model sees at most `length` of them.

    `texts` are tokens, each of at least the longest length: see `take_texts`. "whole" cuts a text into windows that do
    not overlap and counts all of their tokens but the first. "sliding" moves a window by `stride` (half of the length
    unless given) and counts what the windows before have not: each token has at least length − stride before it.
    A token `bos` takes the place of each window's first.
    """
    check_lengths(lengths, mode, stride)
    scorer = model if isinstance(model, Scorer) else Scorer(model, chunk)
    results, positions = [], []
    for length in sorted(set(lengths)):
        windows = list(cut(texts, length, mode, stride))
        last = mode == "whole" and length == max(lengths)
        groups = groups_of(windows)
        by_position = PositionSums(length, buckets, spacing, 1 + max(groups)) if last else None
        told = None if progress is None else label(progress, f"perplexity at {length:,}")
        sums = score_windows(scorer, texts, windows, groups, length, bos, batch_tokens, by_position, told)
        results.append(summarize(length, windows, groups, sums))
        if by_position is not None:
            positions = by_position.buckets()
    return PerplexityReport(mode, results, positions)


def label(progress: Progress, name: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(name, done, total)


def check_lengths(lengths: Sequence[int], mode: Mode, stride: int | None) -> None:
    if not lengths or min(lengths) < 2:
        raise ValueError(f"the lengths are {list(lengths)}; each must be at least 2: one token that another predicts")
    if stride is not None and mode == "whole":
        raise ValueError(f"the stride is {stride}, but whole windows do not overlap; choose the mode 'sliding'")
    if stride is not None and not 1 <= stride < min(lengths):
        raise ValueError(f"the stride is {stride}; it must be at least 1 and less than the length {min(lengths)}")


def take_texts(documents: Iterable[Sequence[int]], span: int, most: int) -> list[Tensor]:
    """The beginnings of documents, each a multiple of `span` long, together at most `most` tokens.

    A document that is shorter is left out. Every other gives `span` tokens before any gives more, and reading stops
    when there are enough.
    """
    if most < span:
        raise ValueError(f"at most {most:,} tokens are wanted, but one text alone has {span:,}; ask for more")
    wanted, kept, longest = most // span, [], 0
    for document in documents:
        longest = max(longest, len(document))
        if len(document) >= span:
            kept.append(torch.tensor(document[: wanted * span], dtype=torch.long))
        if len(kept) == wanted:
            break
    if not kept:
        raise ValueError(
            f"no document has {span:,} tokens, the longest has {longest:,}; use shorter lengths, longer text, "
            "or join the documents"
        )
    shares = [0] * len(kept)
    while sum(shares) < wanted:
        open_ones = [i for i, text in enumerate(kept) if len(text) >= (shares[i] + 1) * span]
        if not open_ones:
            break
        for index in open_ones[: wanted - sum(shares)]:
            shares[index] += 1
    return [text[: share * span] for text, share in zip(kept, shares, strict=True)]


def cut(texts: Sequence[Tensor], length: int, mode: Mode, stride: int | None) -> Iterator[Window]:
    for document, text in enumerate(texts):
        if len(text) < length:
            raise ValueError(f"text {document} has {len(text):,} tokens, fewer than the length {length:,}")
        if mode == "whole":
            yield from (Window(document, start, 1) for start in range(0, len(text) - length + 1, length))
            continue
        seen, start = 1, 0
        while seen < len(text):
            start = min(start, len(text) - length)
            yield Window(document, start, seen - start)
            seen = start + length
            start += stride or length // 2


def score_windows(
    scorer: Scorer,
    texts: Sequence[Tensor],
    windows: Sequence[Window],
    groups: Sequence[int],
    length: int,
    bos: int | None,
    batch_tokens: int,
    by_position: PositionSums | None,
    progress: Callable[[int, int], None] | None,
) -> list[float]:
    """The sum of losses of every window."""
    size = max(1, batch_tokens // length)
    sums: list[float] = []
    for first in range(0, len(windows), size):
        batch = windows[first : first + size]
        tokens = torch.stack([texts[w.document][w.start : w.start + length] for w in batch])
        if bos is not None:
            tokens[:, 0] = bos
        losses = scorer.losses(tokens.to(scorer.device)).double().cpu()
        if by_position is not None:
            by_position.add(losses, torch.tensor(groups[first : first + size]))
        sums += [float(row[w.scored - 1 :].sum()) for row, w in zip(losses, batch, strict=True)]
        if progress is not None:
            progress(len(sums) * length, len(windows) * length)
    return sums


def groups_of(windows: Sequence[Window]) -> list[int]:
    """What is independent of what: documents, or windows where there is one document alone."""
    documents = [window.document for window in windows]
    return documents if len(set(documents)) > 1 else list(range(len(windows)))


def summarize(length: int, windows: Sequence[Window], groups: Sequence[int], losses: Sequence[float]) -> LengthResult:
    sums, counts = [0.0] * (1 + max(groups)), [0] * (1 + max(groups))
    for window, group, loss in zip(windows, groups, losses, strict=True):
        sums[group] += loss
        counts[group] += length - window.scored
    loss = mean_over_groups(sums, counts)
    documents = len({window.document for window in windows})
    return LengthResult(length, loss, loss.exp(), sum(counts), len(windows), documents, sums, counts)


def perplexity_ratio(one: LengthResult, other: LengthResult) -> Estimate:
    """The perplexity of one over that of the other on the same text; the error is that of differences on each text."""
    if (one.length, one.counts) != (other.length, other.counts):
        raise ValueError(
            f"the results at {one.length} and {other.length} are not of the same text and cannot be compared"
        )
    return mean_over_groups([a - b for a, b in zip(one.sums, other.sums, strict=True)], one.counts).exp()
