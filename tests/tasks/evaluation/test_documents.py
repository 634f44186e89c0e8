"""Text from files, and tokens from text."""

import bz2
import gzip
import json
import lzma

import pytest

from latte.tasks.evaluation import Encoder, read_documents
from tests.tasks.evaluation.small import byte_tokenizer

TEXTS = ["eins, zwei", "drei: ä\nö"]
LINES = "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in TEXTS).encode()


def compress_zst(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").compress(data)


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [("", bytes), (".xz", lzma.compress), (".gz", gzip.compress), (".bz2", bz2.compress), (".zst", compress_zst)],
)
def test_formats(suffix, compress, tmp_path):
    lines, plain = tmp_path / f"a.jsonl{suffix}", tmp_path / f"a.txt{suffix}"
    lines.write_bytes(compress(LINES))
    plain.write_bytes(compress(TEXTS[1].encode()))
    assert list(read_documents(lines)) == TEXTS
    assert list(read_documents(plain)) == TEXTS[1:]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n', "line 2 has no text in field 'text'; its fields are 'body'"),
        ("a.jsonl", b'{"text": 3}\n', "line 1 has no text"),
        ("a.jsonl", b"{'text'}\n", "line 1 is not JSON"),
        ("a.jsonl", b"[1]\n", "line 1 is a list"),
        ("a.jsonl.xz", b"not compressed", "cannot be read or decompressed"),
        ("a.jsonl.gz", b"not compressed", "cannot be read or decompressed"),
        ("a.txt.xz", b"not compressed", "cannot be read or decompressed"),
        ("a.jsonl.zst", b"not compressed", "cannot be read or decompressed"),
        ("a.txt", b"\xff\xfe", "not UTF-8"),
    ],
)
def test_bad_files(name, data, words, tmp_path):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ValueError, match=words):
        list(read_documents(path))


def test_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        list(read_documents(tmp_path / "a.txt"))


def test_what_begins_a_text():
    begins, does_not = byte_tokenizer(True), byte_tokenizer(False)
    assert Encoder(begins).bos == Encoder(does_not, "always").bos == 256
    assert Encoder(does_not).bos is Encoder(begins, "never").bos is None
    assert Encoder(does_not).prefix == 256
    assert Encoder(begins).encode("ab") == begins("ab", add_special_tokens=False)["input_ids"]
    assert Encoder(begins).begin([7]) == [256, 7]
    bare = byte_tokenizer(begins=False, special=False)
    assert Encoder(bare).bos is Encoder(bare).prefix is None
    with pytest.raises(ValueError, match="no token that begins"):
        Encoder(bare, "always")
