"""What comes out of files is what was put in, whatever the packaging; what is wrong is said in one line."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latte.tasks.text import reading
from latte.tasks.text.hashes import FileHashes
from latte.tasks.text.sources import find_sources, standard_library

DOCUMENTS = ["first\ntext ", "zweiter Text: über 中文", "", "x" * 200_000]


def zst(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zst,
}


def contents(*names: str | Path, field: str = "text", split: str = "train", as_bytes: bool = False) -> list[bytes]:
    """All documents, put together again."""
    found, begun = [], b""
    for source in find_sources([str(name) for name in names], field, split):
        for data, last in source.documents(as_bytes, lambda _: None):
            begun += data
            if last:
                found.append(begun)
                begun = b""
    return found


def json_lines(documents: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({"title": 1, field: text}) + "\n" for text in documents).encode()


@pytest.mark.parametrize("suffix", PACKERS)
def test_packed_files_hold_what_was_packed(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"a.jsonl{suffix}").write_bytes(PACKERS[suffix](json_lines(DOCUMENTS, "body")))
    (tmp_path / f"b.txt{suffix}").write_bytes(PACKERS[suffix](DOCUMENTS[1].encode()))
    assert contents(tmp_path / f"a.jsonl{suffix}", field="body") == [text.encode() for text in DOCUMENTS]
    assert contents(tmp_path / f"b.txt{suffix}") == [DOCUMENTS[1].encode()]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2", ".zst"])
def test_archives_of_several_streams_are_read_to_the_end(tmp_path: Path, suffix: str) -> None:
    pack = PACKERS[suffix]
    (tmp_path / f"a.txt{suffix}").write_bytes(pack(b"one ") + pack(b"two ") + bytes(8) + pack(b"three"))
    assert contents(tmp_path / f"a.txt{suffix}") == [b"one two three"]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "noise"])
def test_damaged_archives_are_named(tmp_path: Path, suffix: str, damage: str) -> None:
    packed = PACKERS[suffix](json_lines([f"text {i * i}" for i in range(3000)]))
    broken = packed[:-20] if damage == "cut" else b"no archive at all"
    (tmp_path / f"a.jsonl{suffix}").write_bytes(broken)
    with pytest.raises(OSError, match=rf"a\.jsonl{suffix}: the {suffix} archive is damaged or cut short .*; fetch"):
        contents(tmp_path / f"a.jsonl{suffix}")


@settings(deadline=None)
@given(st.lists(st.binary(max_size=7), max_size=9), st.integers(1, 5))
def test_lines_do_not_depend_on_chunks(parts: list[bytes], size: int) -> None:
    data = b"\n".join(part.replace(b"\n", b"") for part in parts)
    chunks = [data[i : i + size] for i in range(0, len(data), size)]
    expected = data.split(b"\n")
    assert list(reading.lines(chunks)) == (expected if expected[-1] else expected[:-1])


@pytest.mark.parametrize("position", [0, 65_535, 65_537, 131_071])
def test_bytes_that_are_no_utf8_are_found_where_they_are(tmp_path: Path, position: int) -> None:
    data = ("é" * 70_000).encode()
    position -= position % 2
    path = tmp_path / "a.txt"
    path.write_bytes(data[:position] + b"\xff" + data[position:])
    with pytest.raises(ValueError, match=rf"a\.txt: byte {position} is not UTF-8 .*convert the file .* 'bytes'"):
        contents(path)
    assert contents(path, as_bytes=True) == [path.read_bytes()]


def test_text_that_ends_within_a_character_is_no_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("caf\u00e9".encode()[:-1])
    with pytest.raises(ValueError, match="byte 3 is not UTF-8"):
        contents(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"title": "x", "body": "y"}', r"line 2: there is no 'text' among 'title', 'body'; name .* text_field"),
        (b'{"text": 3}', "line 2: 'text' is a int; it must be a string"),
        (b'{"text": null}', "line 2: 'text' is a NoneType"),
        (b'["text"]', "line 2: it is a list; it must be an object"),
        (b'{"text": "x"', "line 2: it is no JSON document .*each line must be one"),
        (b'{"text": "\xff"}', "line 2: it is not UTF-8"),
        (b'{"text": "\\ud800"}', "line 2: 'text' has half a surrogate pair at 0"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"a\.jsonl, {message}"):
        contents(tmp_path / "a.jsonl")


def test_folders_and_globs_are_read_in_the_order_of_paths(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/b.txt.gz", ".hidden/c.txt", "c.bin", "d.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(name.encode()) if path.suffix == ".gz" else name.encode())
    (tmp_path / "empty.txt").touch()
    assert contents(tmp_path) == [b"a/b.txt.gz", b"a/z.md", b"b.txt"]
    assert contents(f"{tmp_path}/*.py", f"{tmp_path}/**/*.md") == [b"d.py", b"a/z.md"]


def test_names_that_lead_nowhere_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.bin").write_bytes(b"x")
    for name in ("missing.txt", "./missing", "a/b/c", str(tmp_path / "missing"), "books/missing.jsonl.xz"):
        with pytest.raises(FileNotFoundError, match="there is no such file or folder; check the path"):
            contents(name)
    with pytest.raises(FileNotFoundError, match=r"\*\.txt\.xz: no file matches"):
        contents("*.txt.xz")
    with pytest.raises(ValueError, match=r"empty\.txt: the file is empty"):
        contents("empty.txt")
    with pytest.raises(ValueError, match=r"folder: no text in this folder \(\.bin\); files may end in"):
        contents("folder")


def test_a_name_for_the_hub_says_so_when_the_hub_is_out_of_reach(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (source,) = find_sources(["someone/some-text"], "text", "train")
    with pytest.raises(OSError, match="someone/some-text: no such file or folder here, and no dataset that the hub"):
        source.identity(FileHashes(tmp_path))


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some text")
    (source,) = find_sources([str(path)], "text", "train")
    path.write_text("some other text")
    with pytest.raises(OSError, match="changed while it was read"):
        list(source.documents(False, lambda _: None))


def test_parquet_and_saved_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"body": DOCUMENTS, "label": [0] * len(DOCUMENTS)})
    data.to_parquet(tmp_path / "a.parquet")
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": data, "test": data.select([1])}).save_to_disk(tmp_path / "two")
    expected = [text.encode() for text in DOCUMENTS]
    assert contents(tmp_path / "a.parquet", field="body") == expected
    assert contents(tmp_path / "one", field="body") == expected
    assert contents(tmp_path / "two", field="body") == expected
    assert contents(tmp_path / "two", field="body", split="test") == expected[1:2]
    for name in ("a.parquet", "one"):
        with pytest.raises(ValueError, match=rf"{name}: there is no 'text' among 'body', 'label'; name"):
            contents(tmp_path / name)
    with pytest.raises(ValueError, match="two: there is no split 'dev' among 'train', 'test'"):
        contents(tmp_path / "two", split="dev")
    (tmp_path / "broken.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    with pytest.raises(OSError, match=r"broken\.parquet: the Parquet file is damaged"):
        contents(tmp_path / "broken.parquet", field="body")


def test_streamed_datasets_are_read_as_the_hub_gives_them(tmp_path: Path) -> None:
    """A local folder in the form of a hub repository goes the hub's way through `datasets`."""
    datasets = pytest.importorskip("datasets")
    from latte.tasks.text.sources import HubDataset

    datasets.Dataset.from_dict({"text": DOCUMENTS}).to_parquet(tmp_path / "data" / "train-00000-of-00001.parquet")
    source = HubDataset(str(tmp_path), "text", "train", None)
    assert [data for data, _ in source.documents(False, lambda _: None)] == [text.encode() for text in DOCUMENTS]


def test_identities_follow_contents_not_names(tmp_path: Path) -> None:
    hashes = FileHashes(tmp_path / "hashes")

    def identity(name: str, data: str) -> str:
        (tmp_path / name).write_text(data)
        return find_sources([str(tmp_path / name)], "text", "train")[0].identity(hashes)

    assert identity("a.txt", "same") == identity("b.txt", "same") != identity("c.txt", "other")
    assert identity("a.jsonl", "same") != identity("a.txt", "same")


def test_hashes_of_large_files_are_remembered_until_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    monkeypatch.setattr("latte.tasks.text.hashes.WORTH_REMEMBERING", 4)
    path, hashes = tmp_path / "a.txt", FileHashes(tmp_path / "hashes")
    computed: list[Path] = []
    compute = FileHashes._compute
    monkeypatch.setattr(
        FileHashes, "_compute", lambda self, path, size: computed.append(path) or compute(self, path, size)
    )
    path.write_text("large enough")
    young = hashes.of(path)
    os.utime(path, (1_000_000, 1_000_000))
    assert [hashes.of(path), hashes.of(path)] == [young, young]
    assert len(computed) == 2  # once while it was young, once when it had settled
    path.write_text("large changed")
    assert hashes.of(path) != young


def test_the_standard_library_is_there_in_one_order_and_without_its_tests() -> None:
    names = [source.name.split(": ")[1] for source in standard_library()]
    assert names == sorted(names)
    assert {"ast.py", "json/decoder.py"} <= set(names)
    assert not [name for name in names if {"test", "tests", "idle_test", "site-packages"} & set(name.split("/"))]
    assert sum(source.size for source in standard_library()) > 5_000_000
