"""Stores of arrays: whole or not there, the same for everybody, and blocks in order whoever makes them."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest

from latte.tasks.generation import block_generator, distinct
from latte.tasks.store import ArrayWriter, StoreWriter, cache_folder, fingerprint, open_store, stored
from latte.tasks.workers import map_blocks


def write_numbers(writer: StoreWriter) -> None:
    for start in (0, 5):
        writer.append("rows", np.arange(start, start + 5, dtype=np.int32))
        writer.append("pixels", np.full((5, 3, 7), start, np.uint8))


def test_arrays_come_back_mapped(tmp_path):
    arrays = stored(str(tmp_path), "numbers", {"a": 1}, write_numbers)
    assert np.array_equal(arrays["rows"], np.arange(10))
    assert arrays["pixels"].shape == (10, 3, 7)
    assert isinstance(arrays["rows"], np.memmap)
    assert len(list(tmp_path.iterdir())) == 1  # nothing else is left


@pytest.mark.parametrize("inside", ["", "in/it"])
def test_a_cache_that_is_a_file(inside, tmp_path, monkeypatch):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(NotADirectoryError, match=r"cache is .*notes\.txt.*: .*notes\.txt is a file; .* --cache"):
        stored(str(file / inside), "numbers", {}, write_numbers)
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.raises(NotADirectoryError, match=r"notes\.txt/latte/tasks: .*notes\.txt is a file"):
        cache_folder(None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    assert cache_folder(None) == tmp_path / "new" / "latte" / "tasks"


def test_made_once_for_each_description(tmp_path):
    made = []

    def make(writer: StoreWriter) -> None:
        made.append(writer.description)
        write_numbers(writer)

    for description in ({"a": 1}, {"a": 1}, {"a": 2}):
        stored(str(tmp_path), "numbers", description, make)
    assert made == [{"a": 1}, {"a": 2}]


def test_nothing_is_left_of_what_broke_off(tmp_path):
    def break_off(writer: StoreWriter) -> None:
        write_numbers(writer)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        stored(str(tmp_path), "numbers", {}, break_off)
    assert not list(tmp_path.iterdir())
    assert len(stored(str(tmp_path), "numbers", {}, write_numbers)["rows"]) == 10


def test_a_process_killed_while_it_writes_leaves_no_store(tmp_path):
    script = (
        "import sys, time, numpy as np; from latte.tasks.store import stored\n"
        "def make(writer):\n"
        "    writer.append('rows', np.arange(10)); print('begun', flush=True); time.sleep(60)\n"
        f"stored({str(tmp_path)!r}, 'numbers', {{}}, make)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not list(tmp_path.glob("numbers-*"))
    assert len(stored(str(tmp_path), "numbers", {}, write_numbers)["rows"]) == 10


def test_two_that_make_the_same_agree(tmp_path):
    def make_while_another_does(writer: StoreWriter) -> None:
        if len(list(tmp_path.glob(".numbers-*"))) == 1:
            stored(str(tmp_path), "numbers", {}, make_while_another_does)
        write_numbers(writer)

    arrays = stored(str(tmp_path), "numbers", {}, make_while_another_does)
    assert np.array_equal(arrays["rows"], np.arange(10))
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_store_is_refused(tmp_path, damage):
    stored(str(tmp_path), "numbers", {}, write_numbers)
    (path,) = tmp_path.glob("numbers-*/rows.npy")
    if damage == "missing":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(ValueError, match=r"rows\.npy has .* bytes where 168 were written; delete"):
        stored(str(tmp_path), "numbers", {}, write_numbers)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"bytes": 5}', "\xff"])
def test_a_damaged_manifest_is_named(content, tmp_path):
    stored(str(tmp_path), "numbers", {"seed": 7}, write_numbers)
    (folder,) = tmp_path.iterdir()
    (folder / "manifest.json").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=r"manifest\.json is damaged; delete .* to make it anew"):
        open_store(folder)


def test_a_damaged_array_is_named(tmp_path):
    stored(str(tmp_path), "numbers", {"seed": 7}, write_numbers)
    (folder,) = tmp_path.iterdir()
    size = (folder / "rows.npy").stat().st_size
    (folder / "rows.npy").write_bytes(bytes(size))
    with pytest.raises(ValueError, match=r"rows\.npy is damaged .*; delete"):
        open_store(folder)


def test_the_manifest_says_what_is_there(tmp_path):
    stored(str(tmp_path), "numbers", {"seed": 7}, write_numbers)
    (folder,) = tmp_path.iterdir()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["description"] == {"seed": 7}
    assert set(manifest["bytes"]) == {"rows", "pixels"}
    assert set(open_store(folder)) == {"rows", "pixels"}


def test_a_file_that_grows_is_an_ordinary_npy(tmp_path):
    writer = ArrayWriter(tmp_path / "a.npy", np.int16, (2,))
    for count in (0, 3, 1):
        writer.append(np.full((count, 2), count, np.int16))
    with pytest.raises(ValueError, match="shape"):
        writer.append(np.zeros((1, 3), np.int16))
    writer.close()
    assert np.load(tmp_path / "a.npy").tolist() == [[3, 3], [3, 3], [3, 3], [1, 1]]


def test_fingerprints_tell_apart():
    parts = [
        ({"a": 1},),
        ({"a": 2},),
        (np.arange(3),),
        (np.arange(3.0),),
        (np.arange(4),),
        (np.arange(4).reshape(2, 2),),
    ]
    assert len({fingerprint(*part) for part in parts}) == len(parts)
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})


def slow_first(seed: int, block: int) -> tuple[int, int]:
    time.sleep(0.2 if block == 0 else 0.0)
    return block, int(block_generator(seed, "train", block).integers(0, 2**60))


def test_blocks_are_in_order_and_the_same_from_any_number_of_processes():
    heard: list[int] = []
    alone = list(map_blocks(partial(slow_first, 3), 12, workers=1))
    together = list(map_blocks(partial(slow_first, 3), 12, workers=2, progress=heard.append))
    assert together == alone
    assert [block for block, _ in alone] == list(range(12))
    assert len(set(alone)) == 12
    assert heard == list(range(1, 13))


def test_workers_that_cannot_be():
    with pytest.raises(ValueError, match="workers is -1"):
        next(map_blocks(abs, 3, workers=-1))


def test_distinct_numbers_are_all_equally_likely():
    drawn = distinct(np.random.default_rng(0), 30_000, 6, 3)
    assert all(len(set(row)) == 3 for row in drawn[:1000].tolist())
    counts = np.unique(drawn @ [36, 6, 1], return_counts=True)[1]
    assert len(counts) == 6 * 5 * 4
    assert ((counts - 250) ** 2 / 250).sum() < 190  # of 119 degrees of freedom
