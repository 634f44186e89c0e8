"""Long documents in pieces have the tokens of the whole, in one process and in several."""

import re
import subprocess
import sys
from collections import deque
from itertools import cycle
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from latte.tasks.text import encoding
from latte.tasks.text.encoding import (
    AFTER_A_WORD,
    ANYWHERE,
    Encoder,
    Piece,
    batches,
    cuts_after_words,
    encode_all,
    pieces,
)
from latte.tasks.text.vocabulary import load_vocabulary
from tests.tasks.text.samples import make_text

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITTERS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama-3": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA_3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "bert": pre_tokenizers.BertPreTokenizer(),
}


def with_splitter(splitter: pre_tokenizers.PreTokenizer | None) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    if splitter is not None:
        tokenizer.pre_tokenizer = splitter
    return tokenizer


@pytest.mark.parametrize("name", SPLITTERS)
def test_words_of_these_tokenizers_end_before_white_space(name: str) -> None:
    assert cuts_after_words(with_splitter(SPLITTERS[name]))


@pytest.mark.parametrize(
    "splitter",
    [
        None,
        pre_tokenizers.Metaspace(),
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        pre_tokenizers.Split(Regex(r"\w+\s*"), "isolated"),
    ],
)
def test_words_of_others_may_not(splitter: pre_tokenizers.PreTokenizer | None) -> None:
    assert not cuts_after_words(with_splitter(splitter))


def test_tokens_and_normalizers_that_reach_across_white_space_forbid_cutting() -> None:
    strips = with_splitter(SPLITTERS["gpt-2"])
    strips.normalizer = normalizers.Strip()
    assert not cuts_after_words(strips)
    adds = with_splitter(SPLITTERS["gpt-2"])
    adds.add_tokens(["two words"])
    assert not cuts_after_words(adds)


@pytest.mark.parametrize("name", ["gpt-2", "llama-3"])
@settings(deadline=None)
@given(st.text(alphabet="ab9é中'_.,\n\r\t \u00a0\u2003\u0301s", max_size=40))
@example("a b\n c  d \n\n9 's a\r\n")
def test_words_of_a_cut_text_are_the_words_of_the_whole(name: str, text: str) -> None:
    """Cut at every place where a cut is allowed."""
    splitter = SPLITTERS[name]
    places = [match.end() for match in AFTER_A_WORD.finditer(text.encode())]
    parts = np.split(np.frombuffer(text.encode(), np.uint8), places)
    words = [word for part in parts for word, _ in splitter.pre_tokenize_str(part.tobytes().decode())]
    assert words == [word for word, _ in splitter.pre_tokenize_str(text)]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.binary(max_size=30), min_size=1, max_size=4), max_size=6),
    st.sampled_from([AFTER_A_WORD, ANYWHERE, re.compile(rb"[ab]"), None]),
)
def test_pieces_are_the_documents(documents: list[list[bytes]], cut: re.Pattern[bytes] | None) -> None:
    chunks = [(chunk, i == len(document) - 1) for document in documents for i, chunk in enumerate(document)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "BATCH_BYTES", 5)
        found = list(pieces(chunks, cut))
        assert [piece for batch in batches(found) for piece in batch] == found
    expected = [b"".join(document) for document in documents if any(document)]
    joined: list[bytes] = []
    for piece in found:
        assert piece.first == (not joined or joined[-1].endswith(b"END"))
        joined = [*joined, b""] if piece.first else joined
        joined[-1] += piece.data + b"END" * piece.last
    assert joined == [document + b"END" for document in expected]
    if cut is ANYWHERE:
        assert all(len(piece.data) <= 6 for piece in found)


def whole(folder: Path, text: str) -> list[int]:
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids


def test_a_long_document_in_pieces_has_the_tokens_of_the_whole(
    bpe_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "BATCH_BYTES", 300)
    texts = [make_text(40_000, seed) for seed in (5, 6)]
    encoder = Encoder(load_vocabulary(str(bpe_folder)))
    stream = list(batches(pieces([(text.encode(), True) for text in texts], encoder.cut)))
    assert len(stream) > 20
    tokens = np.concatenate([encoded.tokens for _, encoded in encode_all(encoder, stream, 0)])
    assert tokens.tolist() == [*whole(bpe_folder, texts[0]), 0, *whole(bpe_folder, texts[1]), 0]


def test_processes_give_what_one_gives_and_their_death_is_noticed(bpe_folder: Path) -> None:
    encoder = Encoder(load_vocabulary(str(bpe_folder)))
    stream = [[Piece(make_text(3000, seed).encode(), True, True)] for seed in range(9)]
    together = encode_all(encoder, cycle(stream), 2)
    for (batch, expected), (same, actual) in zip(encode_all(encoder, stream, 0), together, strict=False):
        assert same == batch
        assert actual.lengths == expected.lengths
        np.testing.assert_array_equal(actual.tokens, expected.tokens)
    for process in active_children():
        process.kill()
    with pytest.raises(OSError, match="a process that tokenises has died"):
        deque(together)


def test_a_script_that_starts_itself_again_is_told_so(bpe_folder: Path, tmp_path: Path) -> None:
    """Its processes die before they have read what they are started with, which is more than a pipe holds."""
    script = tmp_path / "script.py"
    script.write_text(
        "from dataclasses import replace\n"
        "from latte.tasks.text.encoding import Encoder, Piece, encode_all\n"
        "from latte.tasks.text.vocabulary import load_vocabulary\n"
        f"vocabulary = load_vocabulary({str(bpe_folder)!r})\n"
        "encoder = Encoder(replace(vocabulary, pipeline=vocabulary.pipeline + ' ' * 2**20))\n"
        "list(encode_all(encoder, [[Piece(b'some text', True, True)]] * 9, 2))\n"
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "OSError: a process that tokenises has died" in ended.stderr
