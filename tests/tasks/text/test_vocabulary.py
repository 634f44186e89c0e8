"""Tokenizers of every kind, and what they make of a document."""

import random
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from latte.tasks.text import byte_tokenizer
from latte.tasks.text.encoding import Encoder, Piece
from latte.tasks.text.vocabulary import bpe_size, cut_words, is_byte_tokenizer, load_vocabulary, train_bpe
from tests.tasks.text.samples import make_text

BYTES = byte_tokenizer()


@settings(deadline=None)
@given(st.text())
@example("the end: <|endoftext|>.")
def test_byte_tokens_are_the_bytes_of_any_text(text: str) -> None:
    tokens = BYTES(text)["input_ids"]
    assert tokens == list(text.encode())
    assert BYTES.decode(tokens) == text


def test_a_saved_byte_tokenizer_takes_any_text(tmp_path: Path) -> None:
    BYTES.save_pretrained(tmp_path)
    text = "the end: <|endoftext|>."
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == list(text.encode())


@settings(deadline=None)
@given(st.binary())
def test_any_bytes_become_tokens_and_come_back(data: bytes) -> None:
    encoded = Encoder(load_vocabulary("bytes"))([Piece(data, True, True)])
    *tokens, end = encoded.tokens.tolist()
    assert bytes(tokens) == data
    assert end == BYTES.eos_token_id == 256
    assert BYTES.decode(tokens) == data.decode(errors="replace")


def test_the_byte_tokenizer_is_saved_and_loaded_like_any_other(tmp_path: Path) -> None:
    BYTES.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "don't  do\tthat ,\n é 中 \U0001f600 <s>"
    assert len(loaded) == 257
    assert loaded(text)["input_ids"] == list(text.encode())
    assert loaded.decode([*text.encode(), 256], skip_special_tokens=True) == text
    assert loaded.decode([200]) == "\N{REPLACEMENT CHARACTER}"
    assert loaded.eos_token_id == 256


def test_the_byte_tokenizer_is_known_when_it_is_loaded(bpe_folder: Path, tmp_path: Path) -> None:
    BYTES.save_pretrained(tmp_path / "bytes")
    alike = byte_tokenizer()
    alike.add_tokens(["word"])  # which is then one token, and not its bytes
    alike.save_pretrained(tmp_path / "alike")
    folders = (tmp_path / "bytes", tmp_path / "alike", bpe_folder)
    assert [is_byte_tokenizer(AutoTokenizer.from_pretrained(folder)) for folder in folders] == [True, False, False]


def test_a_folder_a_file_beside_its_settings_and_a_file_alone_are_the_same(bpe_folder: Path, tmp_path: Path) -> None:
    alone = tmp_path / "some.json"
    alone.write_bytes((bpe_folder / "tokenizer.json").read_bytes())
    found = [load_vocabulary(str(path)) for path in (bpe_folder, bpe_folder / "tokenizer.json", alone)]
    assert len({vocabulary.sha256 for vocabulary in found}) == 1
    assert {vocabulary.separator for vocabulary in found} == {0}
    assert {vocabulary.size for vocabulary in found} == {700}


def words_tokenizer() -> Tokenizer:
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "cup": 2, "stop": 7}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return words


def test_a_tokenizer_without_an_end_needs_one(tmp_path: Path) -> None:
    path = tmp_path / "words.json"
    words_tokenizer().save(str(path))
    with pytest.raises(ValueError, match=r"words\.json: it names no end-of-text token; name one .* separator"):
        load_vocabulary(str(path))
    with pytest.raises(ValueError, match=r"separator is 'end'; the tokenizer .*words\.json has no such token"):
        load_vocabulary(str(path), "end")
    vocabulary = load_vocabulary(str(path), "stop")
    assert (vocabulary.separator, vocabulary.size) == (7, 8)  # 7 is the highest, though there are only four


def test_truncation_padding_and_a_beginning_that_the_tokenizer_asks_for(tmp_path: Path) -> None:
    words = words_tokenizer()
    words.enable_truncation(2)
    words.enable_padding(length=9)
    words.post_processor = processors.TemplateProcessing(single="cup $A", special_tokens=[("cup", 2)])
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="cup", eos_token="stop").save_pretrained(tmp_path)
    encoder = Encoder(load_vocabulary(str(tmp_path)))
    pieces = [Piece(b"a a a a", True, False), Piece(b" a x", False, True), Piece(b"a", True, True)]
    encoded = encoder(pieces)
    assert encoded.tokens.tolist() == [2, 1, 1, 1, 1, 1, 0, 7, 2, 1, 7]
    assert encoded.lengths == [5, 3, 3]


def test_names_of_special_tokens_in_a_text_are_text(bpe_folder: Path) -> None:
    vocabulary = load_vocabulary(str(bpe_folder))
    tokens = Encoder(vocabulary)([Piece(b"a<|endoftext|>b", True, True)]).tokens
    assert (tokens == vocabulary.separator).nonzero()[0].tolist() == [len(tokens) - 1]
    assert vocabulary.tokenizer.decode(tokens[:-1].tolist()) == "a<|endoftext|>b"


def test_a_trained_bpe_is_of_the_wanted_size_and_the_same_each_time() -> None:
    texts = [make_text(5000, seed) for seed in range(4)]
    first, second = train_bpe(iter(texts), 400), train_bpe(iter(texts), 400)
    assert first.to_str() == second.to_str()
    assert first.get_vocab_size() == 400
    odd = "\x00 \U0001f600 never seen"
    assert first.decode(first.encode(odd).ids) == odd


def test_a_bpe_is_trained_on_a_line_without_spaces() -> None:
    """As of a genome, or a file that was made small: it took hours for a few million letters."""
    line = "".join(random.Random(0).choices("ACGT", k=400_000))
    begun = time.process_time()
    trained = train_bpe(iter([line, " " * 400_000]), 300)
    assert time.process_time() - begun < 20  # in one piece it takes minutes
    assert trained.decode(trained.encode(line[:3000]).ids) == line[:3000]
    assert list(cut_words(["a b\n", "", "x" * 2500 + " y"])) == ["a b\n", "", "x" * 1000, "x" * 1000, "x" * 500 + " y"]


def test_large_vocabularies_take_four_bytes_a_token() -> None:
    words = Tokenizer(models.WordLevel({"end": 0, "far": 70_000}, unk_token="end"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    wide = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end")
    vocabulary = load_vocabulary_of(wide)
    encoded = Encoder(vocabulary)([Piece(b"far far", True, True)])
    assert encoded.tokens.dtype == np.uint32
    assert encoded.tokens.tolist() == [70_000, 70_000, 0]


def load_vocabulary_of(tokenizer: PreTrainedTokenizerFast):
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return load_vocabulary(folder)


@pytest.mark.parametrize("name", ["bpe:", "bpe:many", "bpe:256", "bpe:-3"])
def test_sizes_of_a_bpe_that_make_no_sense(name: str) -> None:
    with pytest.raises(ValueError, match="write 'bpe:N' with N > 257"):
        bpe_size(name)
    with pytest.raises(ValueError, match="N of at most 16,777,216"):
        bpe_size("bpe:999999999")
    assert bpe_size("gpt2") is None
    assert bpe_size("bpe:8_192") == 8192


def test_tokenizers_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "bad.json").write_text('{"model": 1}')
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="there is no such file or folder"):
        load_vocabulary(str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match="there is no such file or folder"):
        load_vocabulary("none/tokenizer.json")
    with pytest.raises(ValueError, match=r"bad\.json: it is no tokenizer\.json"):
        load_vocabulary(str(tmp_path / "bad.json"))
    with pytest.raises(ValueError, match="empty: the folder holds no tokenizer"):
        load_vocabulary(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="someone/none: the hub gives none"):
        load_vocabulary("someone/none")


def test_normalizers_that_write_at_the_beginning_forbid_cutting() -> None:
    words = words_tokenizer()
    words.normalizer = normalizers.Prepend("_")
    assert Encoder(load_vocabulary_of(PreTrainedTokenizerFast(tokenizer_object=words, eos_token="stop"))).cut is None
