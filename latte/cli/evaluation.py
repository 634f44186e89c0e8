"""What `latte evaluate` does: load each model, measure it, and put the results side by side."""

import gc
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
import typer
from torch import Tensor

import latte
from latte.analysis.finite import not_finite_because
from latte.cli import generation
from latte.cli.evaluate import Settings
from latte.tasks import evaluation as measures
from latte.tasks.evaluation.blimp import Pair
from latte.tasks.evaluation.harness import require_harness
from latte.tasks.evaluation.haystack import make_prompt
from latte.tasks.evaluation.perplexity import check_lengths, perplexity_ratio
from latte.tasks.evaluation.plot import check_plot, plot_perplexity
from latte.tasks.evaluation.scoring import PROBE, text_config

__all__ = ["Measured", "check_plot", "document", "draw", "names", "ratios", "run"]

QUIET_SECONDS = 30  # between lines of progress that go to a file
SLIDING_SPANS = 2  # the text that a window slides over, in lengths of the longest


@dataclass
class Measured:
    """The results of one model."""

    name: str
    facts: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)
    texts: list[Tensor] | None = None
    perplexity: measures.PerplexityReport | None = None
    passkey: measures.PasskeyReport | None = None
    lambada: measures.LambadaReport | None = None
    blimp: measures.BlimpReport | None = None
    tasks: list[measures.TaskScore] | None = None
    speed: list[measures.SpeedResult] | None = None


@dataclass(frozen=True)
class Examples:
    """What was read from files before a model is loaded."""

    passages: list[str] | None
    pairs: list[Pair] | None


def run(model: str, against: str | None, settings: Settings) -> list[Measured]:
    """The results of the model, and of the one beside it; there is one in memory at a time."""
    if settings.tasks:
        require_harness()
    if settings.text:
        check_windows(settings)
    examples = read_examples(settings)
    models = [name for name in (model, against) if name is not None]
    for name in models:  # the first may take hours before the second is read
        generation.check_model(name)
    try:
        return [measure(name, settings, examples) for name in models]
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"out of memory: {' '.join(str(error).split())[:120]} …; use a smaller --batch-tokens or --chunk, "
            "shorter --lengths, or --dtype bfloat16"
        ) from error


def span_of(settings: Settings) -> int:
    """How many tokens of one text the longest windows need."""
    return max(settings.lengths) * (SLIDING_SPANS if settings.mode == "sliding" else 1)


def check_windows(settings: Settings) -> None:
    check_lengths(settings.lengths, settings.mode, settings.stride)
    if settings.max_tokens < span_of(settings):
        raise ValueError(
            f"--max-tokens {settings.max_tokens}: {settings.mode} windows of the longest length need at least "
            f"{span_of(settings)}"
        )


def read_examples(settings: Settings) -> Examples:
    passages = pairs = None
    if settings.lambada is not None:
        passages = measures.choose(measures.read_passages(settings.lambada), settings.limit, settings.seed)
    if settings.blimp is not None:
        pairs = measures.choose_pairs(measures.read_pairs(settings.blimp), settings.limit, settings.seed)
    return Examples(passages, pairs)


def measure(name: str, settings: Settings, examples: Examples) -> Measured:
    start = time.perf_counter()
    loaded = generation.load(name, settings.device, settings.dtype, settings.seed, note)
    set_attention(loaded.model, settings.attention)
    encoder = measures.Encoder(loaded.tokenizer, settings.bos)
    scorer = measures.Scorer(loaded.model, settings.chunk)
    measured = Measured(name, facts_of(loaded, encoder, scorer))
    warn_of_losses(name, scorer)
    measured.seconds["load"] = time.perf_counter() - start
    with_scorer = Measuring(measured, scorer, encoder, settings)
    with_scorer.prepare()
    if settings.text:
        with_scorer.measure_perplexity()
    if settings.passkey:
        with_scorer.measure_passkey()
    with_scorer.measure_examples(examples)
    if settings.tasks:
        with_scorer.measure_tasks(loaded)
    if settings.speed:
        with_scorer.measure_speed()
    if scorer.device.type == "cuda":
        measured.facts["peak_bytes"] = torch.cuda.max_memory_allocated()
    del loaded, scorer, with_scorer
    release()
    return measured


def warn_of_losses(name: str, scorer: measures.Scorer) -> None:
    """Say so before anything is measured if losses are not finite: an accuracy of NaN looks like any other."""
    tokens = torch.arange(PROBE, device=scorer.device)[None] % scorer.vocabulary
    if not scorer.losses(tokens).isfinite().all():
        note(f"warning: {name}: losses are not finite, and measures say nothing: {not_finite_because(scorer.model)}")


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def set_attention(model: Any, name: str | None) -> None:
    """Another implementation of softmax attention; without a name, one that honours the model's softcap."""
    config = text_config(model)
    if name is None:
        if not getattr(config, "attn_logit_softcapping", None) or config._attn_implementation != "sdpa":
            return
        note("PyTorch's attention leaves out the softcap of this model's scores: using eager attention")
        name = "eager"
    try:
        model.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        raise ValueError(f"--attention {name}: {error}") from error


def facts_of(loaded: generation.Loaded, encoder: measures.Encoder, scorer: measures.Scorer) -> dict[str, Any]:
    model = loaded.model
    return {
        "architecture": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "random_weights": loaded.random_weights,
        "device": torch.cuda.get_device_name() if scorer.device.type == "cuda" else str(scorer.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": getattr(text_config(model), "_attn_implementation", None),
        "bos": encoder.bos,
        "chunk": scorer.chunk,
    }


class Measuring:
    """Measures one model and keeps what it finds, and how long that took."""

    def __init__(
        self, measured: Measured, scorer: measures.Scorer, encoder: measures.Encoder, settings: Settings
    ) -> None:
        self.measured, self.scorer, self.encoder, self.settings = measured, scorer, encoder, settings
        self.haystack: list[int] | None = None

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.measured.seconds[name] = time.perf_counter() - start
        note(f"{self.measured.name}: {name} took {self.measured.seconds[name]:.1f} s")

    def prepare(self) -> None:
        """Read all texts, and try the shortest and the longest prompt: what does not fit shows before hours of work."""
        options = self.settings
        if options.passkey:
            if options.haystack is not None:
                most = max(options.max_tokens, *options.lengths)
                documents = map(self.encode, self.documents([options.haystack]))
                self.haystack = joined(documents, self.encoder.end, most)
            for length in (options.lengths[0], options.lengths[-1]):
                make_prompt(
                    self.encoder, length, options.depths[0], random=Random(options.seed),
                    distractors=options.distractors, haystack=self.haystack,
                )  # fmt: skip
        if options.text:
            with self.timed("tokenize"):
                self.measured.texts = self.read_texts()

    def measure_perplexity(self) -> None:
        options, texts = self.settings, self.measured.texts or []
        with self.timed("perplexity"):
            self.measured.perplexity = measures.perplexity(
                self.scorer, texts, options.lengths, mode=options.mode, stride=options.stride, bos=self.encoder.bos,
                buckets=options.buckets, spacing=options.spacing, batch_tokens=options.batch_tokens,
                progress=show_progress,
            )  # fmt: skip
        lost = [f"{r.length:,}" for r in self.measured.perplexity.lengths if not math.isfinite(r.loss.value)]
        if lost:
            why = not_finite_because(self.scorer.model)
            note(f"warning: {self.measured.name}: the loss at {', '.join(lost)} is not finite: {why}")

    def read_texts(self) -> list[Tensor]:
        options = self.settings
        documents = map(self.encode, self.documents(options.text))
        if options.join:
            documents = [joined(documents, self.encoder.end, options.max_tokens)]
        return measures.take_texts(documents, span_of(options), options.max_tokens)

    def documents(self, paths: list[Path]) -> Iterator[str]:
        return chain.from_iterable(measures.read_documents(path, self.settings.text_field) for path in paths)

    def encode(self, text: str) -> list[int]:
        tokens = self.encoder.encode(text)
        if tokens and max(tokens) >= self.scorer.vocabulary:
            known = self.scorer.vocabulary - 1
            raise ValueError(
                f"the tokenizer gives token {max(tokens)}, the model knows up to {known}: they do not match"
            )
        return tokens

    def measure_passkey(self) -> None:
        options = self.settings
        with self.timed("passkey"):
            self.measured.passkey = measures.passkey(
                self.scorer, self.encoder, options.lengths, depths=options.depths, trials=options.trials,
                distractors=options.distractors, seed=options.seed, haystack=self.haystack,
                batch_tokens=options.batch_tokens, progress=labelled("passkey prompts"),
            )  # fmt: skip

    def measure_examples(self, examples: Examples) -> None:
        size = self.settings.batch_tokens
        if examples.passages is not None:
            with self.timed("lambada"):
                self.measured.lambada = measures.lambada(
                    self.scorer, self.encoder, examples.passages, batch_tokens=size, progress=labelled("LAMBADA")
                )
        if examples.pairs is not None:
            with self.timed("blimp"):
                self.measured.blimp = measures.blimp(
                    self.scorer, self.encoder, examples.pairs, batch_tokens=size, progress=labelled("BLiMP sentences")
                )

    def measure_tasks(self, loaded: generation.Loaded) -> None:
        options = self.settings
        with self.timed("tasks"):
            self.measured.tasks = measures.harness(
                loaded.model, loaded.tokenizer, options.tasks, include_path=options.include_path,
                num_fewshot=options.num_fewshot, batch_size=max(1, options.batch_tokens // 2048), limit=options.limit,
                seed=options.seed,
            )  # fmt: skip

    def measure_speed(self) -> None:
        options = self.settings
        with self.timed("speed"):
            self.measured.speed = measures.decode_speed(
                self.scorer, options.lengths, batch=options.speed_batch, seed=options.seed,
                progress=labelled("lengths of context"),
            )  # fmt: skip


def joined(documents: Iterator[list[int]], end: int | None, most: int) -> list[int]:
    """One text of at most `most` tokens, with the token that ends a text between documents."""
    tokens: list[int] = []
    for document in documents:
        if tokens and end is not None:
            tokens.append(end)
        tokens += document
        if len(tokens) >= most:
            break
    return tokens[:most]


def note(message: str) -> None:
    typer.echo(f"latte: {message}", err=True)


class ProgressLine:
    """One line that counts; where nobody is looking, a line now and then."""

    def __init__(self) -> None:
        self.told = time.monotonic()

    def __call__(self, name: str, done: int, total: int) -> None:
        if sys.stderr.isatty():
            typer.echo(f"\rlatte: {name}: {done:,} of {total:,}", err=True, nl=done == total)
        elif time.monotonic() - self.told > QUIET_SECONDS:
            note(f"{name}: {done:,} of {total:,}")
            self.told = time.monotonic()


show_progress = ProgressLine()


def labelled(name: str) -> Callable[[int, int], None]:
    return lambda done, total: show_progress(name, done, total)


def same_text(results: list[Measured]) -> bool:
    """Whether two models were measured on the same tokens, so that their perplexities can be compared."""
    if len(results) != 2 or results[0].texts is None or results[1].texts is None:
        return False
    one, other = results[0].texts, results[1].texts
    return len(one) == len(other) and all(map(torch.equal, one, other))


def ratios(results: list[Measured]) -> list[measures.Estimate] | None:
    """Of perplexities, the model's over the other's, by length; None where they cannot be compared."""
    one, other = results[0].perplexity, results[-1].perplexity
    if one is None or other is None or not same_text(results):
        return None
    return [perplexity_ratio(a, b) for a, b in zip(one.lengths, other.lengths, strict=True)]


def document(results: list[Measured], settings: Settings) -> dict[str, Any]:
    """Everything as one JSON document."""
    compared = ratios(results)
    return plain(
        {
            "model": entry(results[0]),
            "against": entry(results[1]) if len(results) > 1 else None,
            "perplexity_ratio": None if compared is None else [asdict(ratio) for ratio in compared],
            "settings": asdict(settings),
            "versions": {
                "latte": latte.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }
    )


def entry(measured: Measured) -> dict[str, Any]:
    """A model's results; what was not measured is left out."""
    names = ("perplexity", "passkey", "lambada", "blimp")
    reports: dict[str, Any] = {
        name: asdict(getattr(measured, name)) for name in names if getattr(measured, name) is not None
    }
    for name in ("tasks", "speed"):
        if getattr(measured, name) is not None:
            reports[name] = [asdict(row) for row in getattr(measured, name)]
    return {"name": measured.name, **measured.facts, "seconds": measured.seconds, **reports}


def plain(tree: Any) -> Any:
    """With nothing that JSON cannot say: paths as words, and null for numbers that are not finite."""
    if isinstance(tree, dict):
        return {name: plain(value) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [plain(value) for value in tree]
    if isinstance(tree, float) and not math.isfinite(tree):
        return None
    return str(tree) if isinstance(tree, Path) else tree


def names(results: Sequence[Measured]) -> list[str]:
    """What tells the models apart: the last part of their paths, if that does."""
    last = [measured.name.rstrip("/").rpartition("/")[2] for measured in results]
    return last if len(set(last)) == len(last) else [measured.name for measured in results]


def draw(results: Sequence[Measured], path: Path) -> None:
    reports = zip(names(results), (measured.perplexity for measured in results), strict=True)
    plot_perplexity({name: report for name, report in reports if report is not None}, path)
