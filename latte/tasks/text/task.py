"""The language-modelling task: windows of text, and how well the next token is foretold."""

import hashlib
import json
import math
from collections.abc import Mapping
from platform import python_version
from typing import Any, ClassVar

import torch
from torch import nn

from latte.models import LatteForCausalLM
from latte.tasks.base import Batch, Budget, Plan, Sums, Task, TaskData
from latte.tasks.store import cache_folder
from latte.tasks.text.preparation import Progress, prepare_text, trained_vocabulary
from latte.tasks.text.settings import LanguageModellingSettings
from latte.tasks.text.shards import PreparedText
from latte.tasks.text.sources import find_sources, standard_library
from latte.tasks.text.vocabulary import Vocabulary
from latte.tasks.text.windows import NO_LABEL, Spans, TokenStream, Windows, all_documents, hold_out

LIBRARY_PROMPTS = ("def __init__(self, ", "import os\nimport ", "class ")
PROMPT_TOKENS = 24

# Section 5.2's 8 B tokens, in windows of 1024 (A.1) and batches of 64 (Table 6). Table 6's own 200 K steps of 512
# tokens would be 6.6 B. It names no betas; these are AdamW's own.
PAPER_BUDGET = Budget(
    steps=122_070,
    batch_size=64,
    learning_rate=5e-4,
    schedule="linear",
    warmup_steps=4000,
    weight_decay=0.01,
    beta2=0.999,
)

# Table 7: 1.6 B tokens of SlimPajama, of which this is a sample of 6 B, for a converted Gemma 2 of 2.6 B parameters. It
# names no optimiser; decay, betas and clipping are our own. Its window and latents are the defaults of conversion.
CONVERSION_BUDGET = Budget(
    steps=100_000,
    batch_size=4,
    learning_rate=6e-4,
    schedule="cosine",
    warmup_steps=2000,
)
SLIM_PAJAMA = "DKYoon/SlimPajama-6B"


class LanguageModelling(Task[LanguageModellingSettings]):
    name = "lm"
    settings_class = LanguageModellingSettings
    plans: ClassVar[Mapping[str, Plan]] = {
        "default": Plan("macchiato-tiny", Budget(steps=300, batch_size=16, learning_rate=3e-3, warmup_steps=30)),
        "paper": Plan(
            "latte-r-swa++",
            PAPER_BUDGET,
            settings={
                "data": ("Skylion007/openwebtext",), "tokenizer": "gpt2", "context": 1024, "held_out": 0.0005,
            },
        ),
        "convert": Plan(
            None,
            CONVERSION_BUDGET,
            settings={"data": (SLIM_PAJAMA,), "context": 4096},
            run={"trainable": "latents"},
        ),
    }  # fmt: skip
    best = ("loss", "min")

    def __init__(self, settings: LanguageModellingSettings | None = None, *, seed: int = 0) -> None:
        super().__init__(settings or LanguageModellingSettings(), seed=seed)
        self._bytes_per_token: float | None = None

    def prepare(self, progress: Progress | None = None) -> TaskData:
        chosen, cache = self.settings, cache_folder(self.settings.cache)
        fields = chosen.text_field, chosen.split, chosen.subset
        sources = find_sources(chosen.data, *fields) if chosen.data else standard_library()
        vocabulary = trained_vocabulary(chosen.tokenizer, sources, cache, chosen.separator, progress)
        text = prepare_text(sources, vocabulary, cache, workers=chosen.workers, progress=progress)
        if chosen.validation:
            others = find_sources(chosen.validation, chosen.text_field, chosen.validation_split, chosen.subset)
            validation_text = prepare_text(others, vocabulary, cache, workers=chosen.workers, progress=progress)
            train, validation = all_documents(text), all_documents(validation_text)
        else:
            validation_text = text
            train, validation = hold_out(text, chosen.held_out, self.seed)
        if chosen.verify:
            for prepared in {text.folder: text, validation_text.folder: validation_text}.values():
                prepared.verify()
        data = self._data(vocabulary, text, train, validation_text, validation)
        # A token to begin with has no bytes, and where documents are separate none is foretold.
        unasked = len(vocabulary.prefix) * len(validation.ends) if chosen.documents == "separate" else 0
        self._bytes_per_token = validation.size / (validation.tokens - unasked)
        return data

    def _data(
        self, vocabulary: Vocabulary, text: PreparedText, train: Spans, validation_text: PreparedText, validation: Spans
    ) -> TaskData:
        return TaskData(
            train=self._windows(text, train, vocabulary, "training"),
            validation=self._windows(validation_text, validation, vocabulary, "validation"),
            head="causal-lm",
            model=model_words(vocabulary),
            fingerprint=self._fingerprint(text, validation_text, vocabulary),
            tokens_per_example=self.settings.context,
            tokenizer=vocabulary.tokenizer,
            prompts=self._prompts(vocabulary, TokenStream(validation_text, validation)),
            facts={
                "data": self.settings.data or (f"the standard library of Python {python_version()}",),
                "tokenizer": self.settings.tokenizer,
                **facts(text, train, validation_text, validation, vocabulary),
            },
        )

    def _windows(self, text: PreparedText, spans: Spans, vocabulary: Vocabulary, part: str) -> Windows:
        begin = vocabulary.prefix[0] if vocabulary.prefix else None
        stream, separate = TokenStream(text, spans), self.settings.documents == "separate"
        windows = Windows(stream, self.settings.context, separate, begin)
        if not len(windows):
            more = "held_out, or name a validation text" if part == "validation" else "the text"
            shorter = f"choose at most {spans.tokens}, or " if spans.tokens > 1 else ""
            raise ValueError(
                f"context is {self.settings.context}, longer than the {part} text of {spans.tokens} tokens; "
                f"{shorter}enlarge {more}"
            )
        return windows

    def _fingerprint(self, text: PreparedText, validation_text: PreparedText, vocabulary: Vocabulary) -> str:
        chosen = self.settings
        split = None if chosen.validation else [self.seed, chosen.held_out]
        contents = [
            [part["sha256"] for part in (*prepared.manifest["shards"], prepared.manifest["table"])]
            for prepared in (text, validation_text)
        ]
        what = [contents, text.manifest["tokenizer"]["sha256"], chosen.context, chosen.documents, split]
        what += ["windows begin", *vocabulary.prefix] if vocabulary.prefix else []
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()

    def _prompts(self, vocabulary: Vocabulary, stream: TokenStream) -> tuple[str, ...]:
        """The settings' own, or the first words of three documents that are not learnt."""
        if self.settings.prompts or not self.settings.data:
            return self.settings.prompts or LIBRARY_PROMPTS
        begins = [int(start) for start in stream.document_starts[:3]]
        texts = [vocabulary.text(stream.tokens(start, min(start + PROMPT_TOKENS, len(stream)))) for start in begins]
        return tuple(text for text in texts if text.strip())

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        """The loss in nats, over the tokens that are foretold."""
        fused = any(isinstance(part, LatteForCausalLM) for part in model.modules())
        options: dict[str, Any] = {"return_logits": False} if fused else {}
        with torch.no_grad():
            loss = model(**batch, use_cache=False, **options).loss
        count = int((batch["labels"][:, 1:] != NO_LABEL).sum())
        return {"loss": (float(loss) * count if count else 0.0, float(count))}

    def summarize(self, means: Mapping[str, float]) -> dict[str, float]:
        loss = means["loss"]
        summary = dict(means) | {"perplexity": math.inf if loss > 700 else math.exp(loss)}
        if self._bytes_per_token is not None:
            summary["bits_per_byte"] = loss / math.log(2) / self._bytes_per_token
        return summary


def model_words(vocabulary: Vocabulary) -> dict[str, Any]:
    """No padding token: windows are full, and a model's row for one would not learn."""
    words: dict[str, Any] = {"vocab_size": vocabulary.size, "eos_token_id": vocabulary.separator}
    return words | ({"bos_token_id": vocabulary.prefix[0]} if vocabulary.prefix else {})


def facts(
    text: PreparedText, train: Spans, validation_text: PreparedText, validation: Spans, vocabulary: Vocabulary
) -> dict[str, Any]:
    return {
        "vocabulary": vocabulary.size,
        "tokenizer_sha256": vocabulary.sha256,
        "train_documents": len(train.ends),
        "train_tokens": train.tokens,
        "train_bytes": round(train.size),
        "validation_documents": len(validation.ends),
        "validation_tokens": validation.tokens,
        "validation_bytes": round(validation.size),
        "bytes_per_token": validation.size / validation.tokens,
        "prepared": str(text.folder),
        "prepared_validation": str(validation_text.folder),
    }
