"""Checkpoints on disk: whole or not there, and what is damaged is found and passed over."""

import json
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from latte.train.checkpoints import (
    MANIFEST,
    Checkpoints,
    DamagedCheckpoint,
    naming,
    point_to,
    verify,
    write_json,
    write_text,
)
from latte.train.records import MetricsFile
from tests.train import tiny


def fill(folder: Path) -> None:
    (folder / "weights").write_bytes(bytes(range(256)) * 20)
    (folder / "part").mkdir()
    (folder / "part" / "state.json").write_text("{}")


@pytest.fixture
def checkpoints(tmp_path):
    made = Checkpoints(tmp_path)
    for step in (5, 20, 100):
        made.write(step, fill)
    return made


def steps(checkpoints: Checkpoints) -> list[int]:
    return [checkpoint.step for checkpoint in checkpoints.all()]


def test_in_the_order_of_steps(checkpoints):
    assert steps(checkpoints) == [5, 20, 100]
    newest = checkpoints.newest(pytest.fail)
    assert newest.step == 100
    assert (newest.path / "weights").stat().st_size == 5120
    assert set(json.loads((newest.path / MANIFEST).read_text())["files"]) == {"weights", "part/state.json"}


def truncate(folder: Path) -> None:
    (folder / "weights").write_bytes(b"short")


def tamper(folder: Path) -> None:
    content = bytearray((folder / "weights").read_bytes())
    content[1000] ^= 1
    (folder / "weights").write_bytes(content)


def lose(folder: Path) -> None:
    (folder / "part" / "state.json").unlink()


def cut_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text()[:40])


def lose_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def swap(folder: Path) -> None:
    """The manifest of another step."""
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"step": 7}))


def list_files(files: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        manifest = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(json.dumps(manifest | {"files": files}))

    return damage


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, ["weights is 5 bytes", "5,120 bytes were written"]),
        (tamper, ["weights is not what was written"]),
        (lose, ["part/state.json is missing"]),
        (cut_manifest, [MANIFEST, "cannot be read"]),
        (lose_manifest, [MANIFEST, "cannot be read"]),
        (swap, ["is of step 7"]),
        (list_files({}), ["names no files"]),
        (list_files([]), [MANIFEST, "cannot be read"]),
        (list_files({"weights": 5}), [MANIFEST, "cannot be read"]),
        (list_files({"weights": {"bytes": "many", "sha256": ""}}), [MANIFEST, "cannot be read"]),
    ],
)
def test_damage_is_found_and_the_one_before_is_taken(damage, words, checkpoints):
    damage(checkpoints.folder / "step-00000100")
    notes = []
    assert checkpoints.newest(notes.append).step == 20
    (note,) = notes
    assert all(word in note for word in [*words, "step-00000100", "step-00000020", "damaged-"]), note
    assert steps(checkpoints) == [5, 20]  # the damaged one has another name, and counts no more
    checkpoints.write(100, fill)
    assert checkpoints.newest(pytest.fail).step == 100


def test_nothing_whole_is_left(checkpoints):
    for checkpoint in checkpoints.all():
        tamper(checkpoint.path)
    with pytest.raises(DamagedCheckpoint, match=r"no checkpoint .* can be used: step-00000100 .*; step-00000020"):
        checkpoints.newest(pytest.fail)


def test_there_is_none(tmp_path):
    assert Checkpoints(tmp_path / "nothing").newest(pytest.fail) is None


def test_a_format_of_the_future(checkpoints):
    path = checkpoints.folder / "step-00000100" / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(DamagedCheckpoint, match="format 99"):
        verify(checkpoints.all()[-1])


def test_what_fails_leaves_nothing(checkpoints):
    def break_down(folder: Path) -> None:
        fill(folder)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        checkpoints.write(200, break_down)
    assert steps(checkpoints) == [5, 20, 100]
    assert not list(checkpoints.folder.glob(".*"))


def test_what_a_crash_leaves_is_not_looked_at(checkpoints):
    fill(make(checkpoints.folder / ".partial-step-00000200-1"))
    assert checkpoints.newest(pytest.fail).step == 100
    checkpoints.sweep()
    assert not list(checkpoints.folder.glob(".*"))


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_written_anew(checkpoints):
    """As when a run went back and comes to the same step again."""

    def fill_otherwise(folder: Path) -> None:
        (folder / "weights").write_bytes(b"other")

    checkpoint = checkpoints.write(20, fill_otherwise)
    assert steps(checkpoints) == [5, 20, 100]
    assert sorted(path.name for path in checkpoint.path.iterdir()) == [MANIFEST, "weights"]
    verify(checkpoint)


@pytest.mark.parametrize(("keep", "spare", "left"), [(1, (), [100]), (2, (5,), [5, 20, 100]), (1, (5,), [5, 100])])
def test_pruning(keep, spare, left, checkpoints):
    checkpoints.prune(keep, spare)
    assert steps(checkpoints) == left
    assert not list(checkpoints.folder.glob(".*"))


def test_a_link_is_replaced_at_once(checkpoints):
    link = checkpoints.folder / "best"
    for checkpoint in checkpoints.all():
        point_to(link, checkpoint.path)
        assert link.resolve() == checkpoint.path
    assert not link.readlink().is_absolute()  # the whole folder can be moved


def write_with_a_small_disk(folder: Path) -> None:
    """No file may be larger than 3,000 bytes: writing more fails as on a disk that is full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
    checkpoints = Checkpoints(folder)
    with pytest.raises(OSError, match=r"step 200 cannot be written to .*: File too large; the last whole one is .*100"):
        checkpoints.write(200, fill)
    assert not list(folder.glob(".*"))


def test_a_full_disk(checkpoints):
    assert tiny.in_process(write_with_a_small_disk, checkpoints.folder) == 0
    assert checkpoints.newest(pytest.fail).step == 100


def save_tensors(folder: Path) -> None:
    save_file({"weight": torch.zeros(2000)}, folder / "model.safetensors")


def write_tensors_with_a_small_disk(folder: Path) -> None:
    """Safetensors writes by itself, and its errors are no OSError."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
    with pytest.raises(OSError, match=r"step 200 cannot be written to .*File too large.* the last whole one is .*100"):
        Checkpoints(folder).write(200, save_tensors)
    assert not list(folder.glob(".*"))
    with pytest.raises(OSError, match=r"model cannot be written: .*File too large"), naming(folder / "model"):
        save_tensors(folder)
    with pytest.raises(OSError, match=r"run\.json cannot be written: File too large"):
        write_text(folder / "run.json", "x" * 4000)
    metrics = MetricsFile(folder / "metrics.jsonl", None)
    with pytest.raises(OSError, match=r"metrics\.jsonl cannot be written: File too large"):
        metrics.write({"step": 1, "split": "train", "text": "x" * 4000})
    metrics.close()


def test_a_full_disk_for_tensors_and_records(checkpoints):
    assert tiny.in_process(write_tensors_with_a_small_disk, checkpoints.folder) == 0
    assert checkpoints.newest(pytest.fail).step == 100


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "settings.json"
    write_json(path, {"a": [1, "é"]})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": [1, "é"]}
    assert list(tmp_path.iterdir()) == [path]
