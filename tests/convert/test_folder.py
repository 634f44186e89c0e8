"""What stands at OUT after failures, kills and other conversions: a whole model, or nothing."""

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from latte.convert import Settings, convert_checkpoint
from latte.convert.folder import whole_folder
from tests.convert.sources import SETTINGS, load


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("low_memory", [False, True])
def test_nothing_is_left_of_what_fails(source, tmp_path, monkeypatch, low_memory):
    out = tmp_path / "out"
    convert_checkpoint(str(source), out, SETTINGS)
    before = snapshot(tmp_path)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    where = "latte.convert.streaming.save_file" if low_memory else "latte.convert.source.shutil.copyfile"
    monkeypatch.setattr(where, full)
    for target, overwrite in ((out, True), (tmp_path / "new", False)):
        with pytest.raises(OSError, match="No space left"):
            convert_checkpoint(str(source), target, SETTINGS, low_memory=low_memory, overwrite=overwrite)
    assert snapshot(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_overwriting(source, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    convert_checkpoint(str(source), out, SETTINGS)  # an empty folder is as good as none
    (out / "old").write_text("old")
    with pytest.raises(ValueError, match="has something in it; name another, or use --overwrite"):
        convert_checkpoint(str(source), out, SETTINGS)
    convert_checkpoint(str(source), out, Settings(window=5), overwrite=True)
    assert load(out).config.window == 5
    assert not (out / "old").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match="the folder holds no model, so --overwrite will not replace it"):
        convert_checkpoint(str(source), tmp_path / "mine", SETTINGS, overwrite=True)
    with pytest.raises(ValueError, match="the source is there"):
        convert_checkpoint(str(source), source, SETTINGS, overwrite=True)
    with pytest.raises(ValueError, match="it is a file"):
        convert_checkpoint(str(source), tmp_path / "mine" / "letter.txt", SETTINGS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "out"]


def test_a_link_stays_and_its_folder_is_written(source, tmp_path):
    disk, link = tmp_path / "disk", tmp_path / "link"
    link.symlink_to(disk / "out")
    for window in (7, 5):  # the second time there is a model
        convert_checkpoint(str(source), link, Settings(window=window), overwrite=True)
        assert link.is_symlink()
        assert load(disk / "out").config.window == window
        assert [path.name for path in disk.iterdir()] == ["out"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]


def test_a_place_in_a_file(source, tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(ValueError, match="file is a file, so nothing can be in it; name another folder"):
        convert_checkpoint(str(source), tmp_path / "file" / "deep" / "out", SETTINGS)


@pytest.mark.parametrize("low_memory", [False, True])
def test_weights_that_cannot_be_written_are_not_taken_for_broken_ones(source, tmp_path, low_memory):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    work = "import sys; from latte.cli.app import main; sys.exit(main(sys.argv[1:]))"
    more = ["--low-memory"] if low_memory else []
    command = ["convert", str(source), str(tmp_path / "out"), "--window", "7", *more]
    process = subprocess.run(
        [sys.executable, "-c", f"{limit}; {work}", *command], capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 2
    last = process.stderr.splitlines()[-1]
    assert re.search(r"error: the weights cannot be written \(.*\); make room, or name another OUT", last), last
    assert not list(tmp_path.iterdir())


def test_an_interrupted_folder_is_removed(tmp_path):
    def interrupted() -> None:
        with whole_folder(tmp_path / "out") as folder:
            (folder / "half").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())


def test_leftovers_of_killed_processes_are_removed(source, tmp_path):
    """Those of OUT alone, and of processes that are gone."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    number = gone.pid
    left = [  # the last two as containers number processes
        f".out.partial-{number}", f".out.former-{number}", f".out.partial-{os.getpid()}", f".out.partial-{10**30}",
    ]  # fmt: skip
    others = [
        f".out.partial-{os.getppid()}", f".out.partial-{number}.bak", f".out.partial--{number}", ".out.partial-0",
        f".out.former-{os.getppid()}", f".outs.partial-{number}", f".other.partial-{number}", f"out.partial-{number}",
        f".out.partial-{number}x", ".out.partial-", "notes",
    ]  # fmt: skip
    for name in (*left, *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("text")
    (tmp_path / f".out.partial-{10**31}").symlink_to(tmp_path / "notes")
    convert_checkpoint(str(source), tmp_path / "out", SETTINGS)
    assert {path.name for path in tmp_path.iterdir()} == {"out", *others, f".out.partial-{10**31}"}
    assert all((tmp_path / name / "file").exists() for name in others)


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from latte.convert.folder import whole_folder

moment, out = sys.argv[1], Path(sys.argv[2])
home, calls = (Path if moment == "rename" else shutil), []
original = getattr(home, moment)

def deadly(path, *rest, **more):
    calls.append(path)
    if len(calls) == int(sys.argv[3]):
        if moment == "rmtree":
            (path / "config.json").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return original(path, *rest, **more)

setattr(home, moment, deadly)
with whole_folder(out) as folder:
    (folder / "config.json").write_text("new")
"""


@pytest.mark.parametrize("mkdir", [False, True])
def test_killed_between_two_names_the_former_model_comes_back(source, tmp_path, mkdir):
    """It is the only one there is. Then it counts as any model in OUT."""
    out = tmp_path / "out"
    convert_checkpoint(str(source), out, SETTINGS)
    process = subprocess.run([sys.executable, "-c", KILLED, "rename", str(out), "2"], check=False)
    assert process.returncode == -signal.SIGKILL
    assert not out.exists()
    if mkdir:  # as a script does before it converts
        out.mkdir()
    notes = []
    with pytest.raises(ValueError, match="the folder has something in it"):
        convert_checkpoint(str(source), out, Settings(window=5), note=notes.append)
    assert notes == [f"{out} has its former model again: a conversion was killed when it had just moved it aside"]
    assert load(out).config.window == 7
    convert_checkpoint(str(source), out, Settings(window=5), overwrite=True)
    assert load(out).config.window == 5
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(("moment", "call"), [("rename", 3), ("rmtree", 1)])
def test_killed_while_the_former_model_is_removed(source, tmp_path, moment, call):
    """What is left of it goes with the next conversion."""
    out = tmp_path / "out"
    convert_checkpoint(str(source), out, SETTINGS)
    process = subprocess.run([sys.executable, "-c", KILLED, moment, str(out), str(call)], check=False)
    assert process.returncode == -signal.SIGKILL
    assert (out / "config.json").read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 2
    convert_checkpoint(str(source), out, SETTINGS, overwrite=True)
    assert load(out).config.window == 7
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
