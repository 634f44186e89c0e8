"""What `latte generate` does: load a model, read a prompt in chunks, write what comes next."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedConfig,
)
from transformers.generation.streamers import BaseStreamer

from latte.analysis.finite import not_finite_because
from latte.models import PRESETS, LatteConfig, LatteForCausalLM
from latte.models.cache import cache_bytes
from latte.models.loading import load_config, load_model
from latte.tasks.text.vocabulary import is_byte_tokenizer

BYTES = 256
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


class ByteTokenizer:
    """A token for each byte: for models that came without a tokenizer."""

    def encode(self, data: bytes) -> list[int]:
        return list(data)

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode(errors="replace")


class OnlyBytes(LogitsProcessor):
    """No token that stands for no byte."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores[:, BYTES:] = -torch.inf
        return scores


class OnlyNumbers(LogitsProcessor):
    """Raises ValueError for scores by which no token can be chosen."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if not (scores < torch.inf).all():  # tokens that are left out have -inf
            raise ValueError(
                f"the logits after {input_ids.shape[1]} tokens are not finite, so that no token can be chosen: "
                f"{not_finite_because(self.model)}"
            )
        return scores


@dataclass(frozen=True)
class Loaded:
    model: Any
    tokenizer: Any
    random_weights: bool = False

    @property
    def of_bytes(self) -> bool:
        return isinstance(self.tokenizer, ByteTokenizer)

    @property
    def reads_bytes(self) -> bool:
        """Whether tokens are bytes as they are; a tokenizer that was saved says besides which token ends a text."""
        return self.of_bytes or is_byte_tokenizer(self.tokenizer)


@dataclass(frozen=True)
class Reading:
    """The prompt, and the cache after all of it but the last token, which the first step of generation reads."""

    tokens: Tensor  # [1 T]
    cache: Any
    read: int
    seconds: float
    state_bytes: int


@dataclass(frozen=True)
class Continuation:
    tokens: list[int]
    text: str
    seconds: float
    rate: float  # tokens per second, from the first to the last
    state_bytes: int


def load(name: str, device: str, dtype: str, seed: int, note: Callable[[str], None]) -> Loaded:
    """A checkpoint's model, or a preset's with random weights; `note` is told what a person should know."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no CUDA device on this machine; use --device cpu")
    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    path = Path(name)
    torch.manual_seed(seed)
    if name in PRESETS and not path.is_dir():
        note(f"{name} is a preset: its weights are random, and so is what it writes")
        config = LatteConfig.from_preset(name)
        kind = ("bfloat16" if place == "cuda" else "float32") if dtype == "auto" else dtype
        model: Any = LatteForCausalLM(config)
        model = model.to(place, getattr(torch, kind))
    else:
        model = load_checkpoint(name, path, dtype, note).to(place)
        leave_to_us(model.generation_config)
    return Loaded(model.eval(), find_tokenizer(name, path, model.config.vocab_size, note), name in PRESETS)


def leave_to_us(settings: GenerationConfig) -> None:
    """Of what a folder says of generating, drop what is this command's: it writes one text, from a cache of its own."""
    settings.num_beams = settings.num_return_sequences = 1
    settings.cache_implementation = None


def load_checkpoint(name: str, path: Path, dtype: str, note: Callable[[str], None]) -> Any:
    check_settings(name, path)
    return load_model(AutoModelForCausalLM, name, f"MODEL {name}", note=note, dtype=dtype)


def check_model(name: str) -> None:
    """Raise ValueError where `load` would, as far as names and settings tell, without reading weights."""
    if name not in PRESETS or Path(name).is_dir():
        check_settings(name, Path(name))


def check_settings(name: str, path: Path) -> None:
    config = find_config(name, path)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"MODEL {name}: a {config.model_type!r} model does not predict the next token")
    if config.is_encoder_decoder:
        raise ValueError(f"MODEL {name}: an encoder-decoder writes a target for a source, and does not continue a text")


def find_config(name: str, path: Path) -> PreTrainedConfig:
    """The settings of a model in a folder or on the hub."""
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"MODEL {name}: the folder has no config.json; name one that save_pretrained has written")
    if path.is_file():
        raise ValueError(f"MODEL {name}: it is a file; name a folder that save_pretrained or latte convert has written")
    if not path.is_dir() and (path.is_absolute() or name.startswith(".")):
        raise ValueError(f"MODEL {name}: there is no such folder")
    near = get_close_matches(name, PRESETS, cutoff=0.8)
    if near and "/" not in name and not path.is_dir():  # a typing error need not wait for the hub
        raise ValueError(f"MODEL {name}: there is no such preset; did you mean {near[0]!r}?")
    if path.is_dir():
        return load_config(name, f"MODEL {name}")
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError, StrictDataclassError) as error:
        known = f"presets are {', '.join(PRESETS)}"
        why = " ".join(str(error).split())[:160]
        raise ValueError(f"MODEL {name}: no folder, preset or model that the hub gives ({why} …); {known}") from error


def find_tokenizer(name: str, path: Path, vocabulary: int, note: Callable[[str], None]) -> Any:
    """The model's own tokenizer; bytes where there is none."""
    has_files = any((path / file).is_file() for file in TOKENIZER_FILES)
    if has_files if path.is_dir() else name not in PRESETS:
        try:
            return AutoTokenizer.from_pretrained(name)
        except Exception as error:  # of broken files nothing more special is raised
            raise ValueError(f"MODEL {name}: its tokenizer cannot be read: {error!r}; save it there again") from error
    if vocabulary < BYTES:
        raise ValueError(
            f"MODEL {name}: it has no tokenizer, and its vocabulary of {vocabulary} is too small for bytes; "
            f"save a tokenizer in its folder, or use a vocabulary of at least {BYTES}"
        )
    note(f"{name} has no tokenizer: every byte is a token")
    return ByteTokenizer()


def encode(loaded: Loaded, data: bytes) -> Tensor:
    """The prompt's tokens, [1 T]."""
    if loaded.reads_bytes:
        tokens = list(data)
    else:
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"the text is not UTF-8: {error}; convert it first") from error
        tokens = loaded.tokenizer(text)["input_ids"]
    if not tokens:
        raise ValueError("the text to continue is empty; give it at least one token")
    highest = loaded.model.config.vocab_size - 1
    if max(tokens) > highest:
        raise ValueError(f"the tokenizer gives token {max(tokens)}, the model knows up to {highest}: they do not match")
    return torch.tensor([tokens], device=loaded.model.device)


@torch.no_grad()
def read(loaded: Loaded, tokens: Tensor, chunk: int, progress: Callable[[int, int], None] | None) -> Reading:
    """Read all but the last token, `chunk` at a time: memory is that of a chunk, however long the prompt is."""
    cache, done, total = None, 0, tokens.shape[1] - 1
    start = time.perf_counter()
    while done < total:
        part = tokens[:, done : min(done + chunk, total)]
        cache = loaded.model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
        done += part.shape[1]
        if progress is not None:
            wait(loaded.model.device)
            progress(done, total)
    wait(loaded.model.device)
    return Reading(tokens, cache, total, time.perf_counter() - start if total else 0.0, cache_bytes(cache))


class Writer(BaseStreamer):
    """Shows text as soon as its bytes are whole, and notes when tokens came."""

    def __init__(self, tokenizer: Any, show: Callable[[str], None] | None) -> None:
        self.tokenizer, self.show = tokenizer, show
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.text = ""
        self.prompted = False
        self.before, self.shown = 0, 0  # text is decoded from `before`, and shown up to `shown`

    def put(self, value: Tensor) -> None:
        if not self.prompted:  # the first value is the prompt
            self.prompted = True
            return
        self.tokens += value.flatten().tolist()
        self.times.append(time.perf_counter())
        self._write()

    def end(self) -> None:
        self._write(last=True)

    def _write(self, last: bool = False) -> None:
        """A token's text may depend on the one before it: decode both, and cut off what was shown."""
        known = self._decode(self.tokens[self.before : self.shown])
        text = self._decode(self.tokens[self.before :])
        if len(text) <= len(known) or (text.endswith("\N{REPLACEMENT CHARACTER}") and not last):
            return
        piece = text[len(known) :]
        self.before, self.shown = self.shown, len(self.tokens)
        self.text += piece
        if self.show is not None:
            self.show(piece)

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def continue_text(
    loaded: Loaded,
    reading: Reading,
    count: int,
    choice: dict[str, Any],
    seed: int,
    show: Callable[[str], None] | None,
) -> Continuation:
    writer = Writer(loaded.tokenizer, show)
    processors = LogitsProcessorList([OnlyNumbers(loaded.model), *([OnlyBytes()] if loaded.of_bytes else [])])
    torch.manual_seed(seed)
    start = time.perf_counter()
    output = loaded.model.generate(
        input_ids=reading.tokens, attention_mask=torch.ones_like(reading.tokens), past_key_values=reading.cache,
        max_new_tokens=count, streamer=writer, logits_processor=processors, return_dict_in_generate=True, **choice,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    between = writer.times[-1] - writer.times[0] if len(writer.times) > 1 else seconds
    rate = max(len(writer.times) - 1, 1) / between
    return Continuation(writer.tokens, writer.text, seconds, rate, cache_bytes(output.past_key_values))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def document(name: str, loaded: Loaded, reading: Reading, written: Continuation) -> dict[str, Any]:
    return {
        "model": name,
        "random_weights": loaded.random_weights,
        "device": str(loaded.model.device),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "prompt_tokens": reading.tokens.shape[1],
        "tokens": written.tokens,
        "text": written.text,
        "prefill_seconds": reading.seconds,
        "prefill_tokens_per_s": reading.read / reading.seconds if reading.seconds else None,
        "decode_seconds": written.seconds,
        "decode_tokens_per_s": written.rate,
        "state_bytes": written.state_bytes,
        "state_bytes_after_prompt": reading.state_bytes,
    }
