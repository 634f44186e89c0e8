"""BLiMP: of two sentences that differ in one thing, which is grammatical (Warstadt et al. 2020)."""

import lzma
import tarfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latte.tasks.evaluation.batches import Example, score_examples
from latte.tasks.evaluation.documents import parse_rows, read_rows, text_of
from latte.tasks.evaluation.encoding import Encoder
from latte.tasks.evaluation.scoring import Scorer
from latte.tasks.evaluation.statistics import Estimate, choose, mean

PART_OF = {"s-selection": "argument_structure"}
"""A term of the data that the paper, in its table of 12 phenomena, counts as one of another."""


@dataclass(frozen=True)
class Pair:
    good: str
    bad: str
    phenomenon: str  # one of 12, by the names of the data's linguistics_term
    paradigm: str  # one of 67


@dataclass(frozen=True)
class GroupAccuracy:
    name: str
    accuracy: Estimate
    pairs: int


@dataclass(frozen=True)
class BlimpReport:
    accuracy: Estimate
    pairs: int
    phenomena: list[GroupAccuracy]
    paradigms: list[GroupAccuracy]


def read_pairs(path: Path) -> list[Pair]:
    """The pairs of a folder or a tar archive (compressed or not) of JSON lines, or of one such file."""
    if not path.exists():
        raise ValueError(f"{path}: there is no such file or folder")
    pairs = []
    for place, row in rows_of(path):
        good, bad = (text_of(row, field, place) for field in ("sentence_good", "sentence_bad"))
        paradigm = str(row.get("UID", Path(place.partition(",")[0]).stem))
        term = str(row.get("linguistics_term", paradigm))
        pairs.append(Pair(good, bad, PART_OF.get(term, term), paradigm))
    if not pairs:
        raise ValueError(f"{path} has no pairs; it must hold .jsonl files with 'sentence_good' and 'sentence_bad'")
    return pairs


def rows_of(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if path.is_dir():
        files = sorted(path.rglob("*.jsonl"))
        yield from (row for file in files for row in rows_of(file))
    elif ".tar" in path.suffixes or path.suffix == ".tgz":
        yield from archived_rows(path)
    else:
        yield from ((f"{path}, line {number}", row) for number, row in read_rows(path))


def archived_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                file = archive.extractfile(member) if member.name.endswith(".jsonl") else None
                if file is None:
                    continue
                name = f"{path}:{member.name}"
                yield from ((f"{name}, line {number}", row) for number, row in parse_rows(file, name))
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError) as error:
        raise ValueError(f"{path} is no readable tar archive: {error}") from error


def choose_pairs(pairs: Sequence[Pair], limit: int | None, seed: int) -> list[Pair]:
    """At most `limit` pairs of every paradigm."""
    groups = defaultdict(list)
    for pair in pairs:
        groups[pair.paradigm].append(pair)
    return [pair for group in groups.values() for pair in choose(group, limit, seed)]


def blimp(
    model: Any,
    encoder: Encoder,
    pairs: Sequence[Pair],
    *,
    batch_tokens: int = 16384,
    progress: Callable[[int, int], None] | None = None,
) -> BlimpReport:
    """How often the grammatical sentence has the higher probability.

    A sentence follows the token that begins texts, or else the one that ends them. A tokenizer with neither leaves a
    sentence's first token without a probability.
    """
    scorer = model if isinstance(model, Scorer) else Scorer(model)
    prefix = [] if encoder.prefix is None else [encoder.prefix]
    sentences = [sentence for pair in pairs for sentence in (pair.good, pair.bad)]
    examples = [Example(prefix + encoder.encode(sentence)) for sentence in sentences]
    scores = score_examples(scorer, examples, batch_tokens, progress)
    right = [float(good.loss < bad.loss) for good, bad in zip(scores[::2], scores[1::2], strict=True)]
    return BlimpReport(
        mean(right),
        len(pairs),
        accuracies([pair.phenomenon for pair in pairs], right),
        accuracies([pair.paradigm for pair in pairs], right),
    )


def accuracies(names: Sequence[str], right: Sequence[float]) -> list[GroupAccuracy]:
    groups = defaultdict(list)
    for name, value in zip(names, right, strict=True):
        groups[name].append(value)
    return [GroupAccuracy(name, mean(values), len(values)) for name, values in sorted(groups.items())]
