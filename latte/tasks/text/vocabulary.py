"""Tokenizers: bytes, a file or folder, a name on the hub, or a BPE trained on the text itself."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"
USUAL_SEPARATORS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
BYTES = 256
MOST = 2**24  # entries of a BPE: room for all is taken at once, and its library ends the process where it gets none
LONG_WORD = re.compile(r"\S{1000}|\s{1000}")
UNLIMITED = int(1e30)  # what Transformers takes for no limit


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, and what a document becomes: `prefix`, its tokens, `separator`."""

    tokenizer: PreTrainedTokenizerBase
    pipeline: str  # the tokenizer of the `tokenizers` library, as JSON
    size: int
    prefix: tuple[int, ...]
    separator: int
    of_bytes: bool

    @property
    def sha256(self) -> str:
        what = json.dumps([self.pipeline, self.prefix, self.separator, self.of_bytes])
        return hashlib.sha256(what.encode()).hexdigest()

    def text(self, tokens: Iterable[int]) -> str:
        """What the tokens before the first separator say, without half characters at the end."""
        said = takewhile(lambda token: token != self.separator, map(int, tokens))
        text = self.tokenizer.decode(list(said), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text).rstrip("\N{REPLACEMENT CHARACTER}")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Token b is byte b, for any text; token 256 ends a document."""
    vocabulary = {letter: byte for byte, letter in enumerate(byte_letters())}
    pipeline = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pipeline.decoder = decoders.ByteLevel()
    return wrapped(pipeline, END_OF_TEXT, split_special_tokens=True)  # in a text it is thirteen bytes like others


def is_byte_tokenizer(tokenizer: Any) -> bool:
    """Whether it is `byte_tokenizer()`, saved and loaded: the tokens of a text are its bytes, UTF-8 or not."""
    backend, ours = getattr(tokenizer, "backend_tokenizer", None), byte_tokenizer()
    same = isinstance(backend, Tokenizer) and backend.to_str() == ours.backend_tokenizer.to_str()
    return same and tokenizer.split_special_tokens


def byte_letters() -> list[str]:
    """The letter that stands for each byte in byte-level vocabularies: itself if printable, else one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(BYTES, 2 * BYTES))
    return [chr(byte if byte in printable else next(others)) for byte in range(BYTES)]


def wrapped(pipeline: Tokenizer, separator: str | None, **options: bool) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=pipeline, eos_token=separator, clean_up_tokenization_spaces=False, model_max_length=UNLIMITED,
        **options,
    )  # fmt: skip


def bpe_size(name: str) -> int | None:
    """N of 'bpe:N'; None for other names."""
    if not name.startswith("bpe:"):
        return None
    match = re.fullmatch(r"bpe:(\d[\d_]*)", name)
    size = int(match[1]) if match else 0
    if size <= BYTES:
        raise ValueError(f"tokenizer is {name!r}; write 'bpe:N' with N > {BYTES + 1}, such as bpe:8192")
    if size > MOST:
        raise ValueError(f"tokenizer is {name!r}; write 'bpe:N' with N of at most {MOST:,}, such as bpe:8192")
    return size


def train_bpe(texts: Iterable[str], size: int) -> Tokenizer:
    """A byte-level BPE in GPT-2's manner, whose first entries are all bytes: there is no text that it cannot encode."""
    pipeline = Tokenizer(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pipeline.train_from_iterator(cut_words(texts), trainer)
    return pipeline


def cut_words(texts: Iterable[str]) -> Iterator[str]:
    """The same texts, cut within words that are very long: training takes the square of a word's length."""
    for text in texts:
        start = 0
        for word in LONG_WORD.finditer(text):
            yield text[start : word.end()]
            start = word.end()
        yield text[start:]


def load_vocabulary(name: str, separator: str | None = None) -> Vocabulary:
    """The vocabulary of 'bytes', a tokenizer.json, a folder with one, or a name on the hub."""
    tokenizer = byte_tokenizer() if name == "bytes" else load_tokenizer(name)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ValueError(f"tokenizer {name}: it has no tokenizer.json, and Python alone is too slow; convert it first")
    pipeline = Tokenizer.from_str(backend.to_str())
    pipeline.no_truncation()
    pipeline.no_padding()
    end = separator_token(name, tokenizer, separator)
    highest = max(pipeline.get_vocab(with_added_tokens=True).values())
    return Vocabulary(
        tokenizer=tokenizer,
        pipeline=pipeline.to_str(),
        size=max(len(tokenizer), highest + 1),
        prefix=begin_tokens(tokenizer),
        separator=end,
        of_bytes=name == "bytes",
    )


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    path = Path(name).expanduser()
    if path.is_file():
        return load_tokenizer_file(path)
    local = path.is_dir() or path.is_absolute() or name.startswith((".", "~")) or path.suffix == ".json"
    if local and not path.is_dir():
        raise FileNotFoundError(f"tokenizer {name}: there is no such file or folder; check the path")
    try:
        return AutoTokenizer.from_pretrained(path if local else name)
    except (OSError, ValueError, KeyError) as error:
        why = " ".join(str(error).split())[:160]
        where = "the folder holds no tokenizer that Transformers can load" if local else "the hub gives none"
        raise ValueError(
            f"tokenizer {name}: {where} ({why}); use 'bytes', 'bpe:N', a tokenizer.json, a folder, or a hub name"
        ) from error


def load_tokenizer_file(path: Path) -> PreTrainedTokenizerBase:
    """A tokenizer.json; what stands beside it in a tokenizer_config.json counts too."""
    if path.name == "tokenizer.json" and (path.parent / "tokenizer_config.json").is_file():
        return AutoTokenizer.from_pretrained(path.parent)
    try:
        pipeline = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"tokenizer {path}: it is no tokenizer.json ({error}); name a file of that form") from error
    known = pipeline.get_vocab(with_added_tokens=True)
    return wrapped(pipeline, next((token for token in USUAL_SEPARATORS if token in known), None))


def separator_token(name: str, tokenizer: PreTrainedTokenizerBase, separator: str | None) -> int:
    if separator is not None:
        known = tokenizer.get_vocab()
        if separator not in known:
            raise ValueError(
                f"separator is {separator!r}; the tokenizer {name} has no such token, name one that it has"
            )
        return known[separator]
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise ValueError(f"tokenizer {name}: it names no end-of-text token; name one of its tokens with separator")
    return end


def begin_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The token before each text, for tokenizers that put one there by themselves."""
    begin = tokenizer.bos_token_id
    return (begin,) if isinstance(begin, int) and tokenizer("a")["input_ids"][:1] == [begin] else ()
