"""Text is tokenised once; what is half done, spoilt or another process's work in progress is never used."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from latte.tasks.text import PreparedText, preparation, prepare_text
from latte.tasks.text.preparation import trained_vocabulary
from latte.tasks.text.shards import ShardWriter
from latte.tasks.text.sources import find_sources
from latte.tasks.text.vocabulary import load_vocabulary
from tests.tasks.text.samples import make_text

CHILD = """
import multiprocessing, sys
from pathlib import Path
from latte.tasks.text import encoding, prepare_text
from latte.tasks.text.sources import find_sources
from latte.tasks.text.vocabulary import load_vocabulary

def main():
    data, tokenizer, cache, workers, stop = sys.argv[1:]
    encoding.BATCH_BYTES = 1 << 15
    calls = 0
    def progress(what, done, total):
        nonlocal calls
        calls += what == "tokenizing"
        if calls == int(stop):
            print("in the middle", *(child.pid for child in multiprocessing.active_children()), flush=True)
            sys.stdin.readline()
    text = prepare_text(find_sources([data], "text", "train"), load_vocabulary(tokenizer), Path(cache),
                        workers=int(workers), progress=progress)
    print(text.folder, flush=True)

if __name__ == "__main__":
    main()
"""


def prepare(data: Path, cache: Path, tokenizer: str = "bytes", **options) -> PreparedText:
    return prepare_text(find_sources([str(data)], "text", "train"), load_vocabulary(tokenizer), cache, **options)


@contextmanager
def child(script: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Another process that prepares a text, and waits for a line in the middle of it."""
    script.write_text(CHILD)
    command = [sys.executable, str(script), *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def write_documents(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_what_is_prepared_is_the_text(tmp_path: Path) -> None:
    texts = [make_text(700, seed) for seed in range(3)] + ["", "last"]
    text = prepare(write_documents(tmp_path / "a.jsonl", texts), tmp_path / "cache")
    kept = [part.encode() for part in texts if part]
    expected = [token for part in kept for token in (*part, 256)]
    assert np.concatenate(text.shards).tolist() == expected
    assert text.documents["end"].tolist() == np.cumsum([len(part) + 1 for part in kept]).tolist()
    assert text.documents["bytes"].tolist() == [len(part) for part in kept]
    assert {text.manifest[name] for name in ("documents", "tokens", "bytes")} == {4, len(expected), len(expected) - 4}
    text.verify()


def test_the_second_time_nothing_is_done(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "a.jsonl", [make_text(900)])
    first = prepare(data, tmp_path / "cache")
    before = (first.folder / "manifest.json").stat().st_mtime_ns
    done: list[str] = []
    os.utime(data)
    again = prepare(data, tmp_path / "cache", progress=lambda what, *_: done.append(what))
    moved = prepare(data.rename(tmp_path / "b.jsonl"), tmp_path / "cache")
    assert again.folder == moved.folder == first.folder
    assert (again.folder / "manifest.json").stat().st_mtime_ns == before
    assert not done


def test_other_contents_and_other_tokenizers_are_other_texts(tmp_path: Path, bpe_folder: Path) -> None:
    data, other = (write_documents(tmp_path / f"{n}.jsonl", [make_text(900, n)]) for n in (1, 2))
    folders = {
        prepare(path, tmp_path / "cache", tokenizer).folder
        for path in (data, other)
        for tokenizer in ("bytes", str(bpe_folder))
    }
    assert len(folders) == 4


def test_progress_ends_where_it_should(tmp_path: Path) -> None:
    data = tmp_path / "a.txt"
    data.write_text(make_text(200_000))
    seen: list[tuple[str, int, int]] = []
    prepare(data, tmp_path / "cache", progress=lambda *call: seen.append(call))
    size = data.stat().st_size
    assert seen[-1] == ("tokenizing", size, size)
    assert len(seen) > 2
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_no_document_lies_in_two_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("latte.tasks.text.encoding.BATCH_BYTES", 50)
    monkeypatch.setattr(preparation, "ShardWriter", lambda folder, dtype: ShardWriter(folder, dtype, shard_tokens=100))
    texts = [make_text(length) for length in (30, 170, 20, 500, 90, 1)]
    text = prepare(write_documents(tmp_path / "a.jsonl", texts), tmp_path / "cache")
    assert len(text.shards) == 4
    assert set(text.bounds[1:]) <= set(text.documents["end"].tolist())
    expected = b"".join(part.encode() for part in texts)
    assert bytes(token for token in np.concatenate(text.shards).tolist() if token < 256) == expected


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks into /proc")
def test_a_killed_preparation_leaves_nothing_that_counts(tmp_path: Path, bpe_folder: Path) -> None:
    data = tmp_path / "a.txt"
    data.write_text(make_text(700_000))
    with child(tmp_path / "child.py", data, bpe_folder, tmp_path / "cache", 2, 8) as process:
        assert process.stdout is not None
        workers = [int(word) for word in process.stdout.readline().split()[3:]]
        assert len(workers) == 2
        (partial,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
        assert [path.stat().st_size > 0 for path in partial.iterdir()] == [True]  # a shard, begun
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, workers))

    again = prepare(data, tmp_path / "cache", str(bpe_folder), workers=1)
    fresh = prepare(data, tmp_path / "fresh", str(bpe_folder), workers=1)
    assert again.folder.name == fresh.folder.name
    assert files(again.folder) == files(fresh.folder)
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [again.folder]
    again.verify()


def test_two_at_once_do_not_spoil_each_other(tmp_path: Path) -> None:
    """Another process is in the middle of it; it goes on when this one says that it is waiting."""
    data = write_documents(tmp_path / "a.jsonl", [make_text(1000, seed) for seed in range(200)])
    seen: list[str] = []
    with child(tmp_path / "child.py", data, "bytes", tmp_path / "cache", 1, 2) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "in the middle\n"

        def progress(what: str, *_: int) -> None:
            if not seen:
                print(file=process.stdin, flush=True)
            seen.append(what)

        ours = prepare(data, tmp_path / "cache", progress=progress)
        assert process.stdout.readline() == f"{ours.folder}\n"
    assert set(seen) == {"waiting for another process that prepares the same text"}
    assert files(ours.folder) == files(prepare(data, tmp_path / "fresh").folder)


def test_where_locks_do_not_work_the_faster_one_wins(tmp_path: Path) -> None:
    finished, late = tmp_path / "finished", tmp_path / "late"
    for folder in (finished, late):
        folder.mkdir()
        (folder / "mark").write_text(folder.name)
    preparation._publish(late, finished, "mark")
    assert (finished / "mark").read_text() == "finished"


def test_errors_leave_no_folder_behind(tmp_path: Path) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text('{"text": "good"}\n{"text": 1}\n')
    with pytest.raises(ValueError, match="line 2"):
        prepare(data, tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_full_disk_leaves_no_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: ShardWriter, tokens: np.ndarray) -> None:
        raise OSError(28, "No space left on device")

    data = write_documents(tmp_path / "a.jsonl", ["some text"])
    monkeypatch.setattr(ShardWriter, "write", full)
    with pytest.raises(OSError, match="No space left"):
        prepare(data, tmp_path / "cache")
    monkeypatch.undo()
    assert prepare(data, tmp_path / "cache").tokens == 10


@pytest.mark.parametrize("texts", [[""], ["", ""]])
def test_a_text_without_a_token_is_refused(tmp_path: Path, texts: list[str]) -> None:
    data = write_documents(tmp_path / "a.jsonl", texts)
    with pytest.raises(ValueError, match=r"a\.jsonl: there is not one token of text"):
        prepare(data, tmp_path / "cache")


def test_damage_is_noticed(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "a.jsonl", ["some text", "and more"])

    def damaged(name: str, change) -> PreparedText:
        folder = prepare(data, tmp_path / name).folder
        change(folder)
        return PreparedText(folder)

    def flip(folder: Path) -> None:
        shard = folder / "tokens-00000.bin"
        shard.write_bytes(shard.read_bytes()[:-1] + b"\x07")

    def swap(folder: Path) -> None:
        table = np.load(folder / "documents.npy")
        np.save(folder / "documents.npy", table[::-1])

    remedy = "; delete the folder to prepare it anew"
    with pytest.raises(ValueError, match=f"tokens-00000.bin has 3 bytes in place of 38{remedy}"):
        damaged("cut", lambda folder: os.truncate(folder / "tokens-00000.bin", 3))
    with pytest.raises(ValueError, match=f"tokens-00000.bin has 0 bytes in place of 38{remedy}"):
        damaged("gone", lambda folder: (folder / "tokens-00000.bin").unlink())
    with pytest.raises(ValueError, match=f"manifest.json is no JSON document{remedy}"):
        damaged("json", lambda folder: os.truncate(folder / "manifest.json", 30))
    with pytest.raises(ValueError, match="its format is 0, and this version reads 1"):
        damaged("old", lambda folder: (folder / "manifest.json").write_text('{"format": 0}'))
    with pytest.raises(ValueError, match=f"its format is None, and this version reads 1{remedy}"):
        damaged("list", lambda folder: (folder / "manifest.json").write_text("[]"))
    with pytest.raises(ValueError, match=f"manifest.json has no tokenizer, sources, .*, table{remedy}"):
        damaged("bare", lambda folder: (folder / "manifest.json").write_text('{"format": 1}'))
    with pytest.raises(ValueError, match=r"documents\.npy cannot be read"):
        damaged("table", lambda folder: os.truncate(folder / "documents.npy", 20)).documents  # noqa: B018
    for name, change in (("flipped", flip), ("swapped", swap)):
        with pytest.raises(ValueError, match=f"the SHA-256 of .* is not the manifest's{remedy}"):
            damaged(name, change).verify()


def test_a_bpe_is_trained_once_and_its_text_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_documents(tmp_path / "a.jsonl", [make_text(4000, seed) for seed in range(3)])
    sources = find_sources([str(data)], "text", "train")
    first = trained_vocabulary("bpe:300", sources, tmp_path / "cache", None, None)
    monkeypatch.setattr(preparation, "train_bpe", None)
    again = trained_vocabulary("bpe:300", sources, tmp_path / "cache", None, None)
    assert again.sha256 == first.sha256
    assert first.size == 300
    text = prepare_text(sources, first, tmp_path / "cache")
    start, end = text.documents["end"][:2].tolist()
    assert first.tokenizer.decode(text.shards[0][start : end - 1].tolist()) == make_text(4000, seed=1)
    assert text.shards[0][end - 1] == first.separator


def test_what_is_wrong_with_a_text_is_said_while_a_bpe_is_trained(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"body": 1}\n')
    sources = find_sources([str(tmp_path / "a.jsonl")], "text", "train")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: there is no 'text' among 'body'"):
        trained_vocabulary("bpe:300", sources, tmp_path / "cache", None, None)


def test_a_cache_that_cannot_be_written_to_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_documents(tmp_path / "a.jsonl", ["some text"])
    os.utime(data, (1_000_000, 1_000_000))
    prepare(data, tmp_path / "cache")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("latte.tasks.text.hashes.WORTH_REMEMBERING", 1)
    monkeypatch.setattr("latte.tasks.text.hashes.write_atomically", refuse)
    monkeypatch.setattr(preparation, "FileLock", refuse)
    assert prepare(data, tmp_path / "cache").tokens == 10
