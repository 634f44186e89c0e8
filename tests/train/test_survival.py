"""Killed at any moment, a run that is resumed computes what it would have computed, bit for bit."""

import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from latte.train import Display, run
from tests.train import tiny


class Killer(Display):
    """Dies at the end of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def advance(self, done: int) -> None:
        if done == self.step:
            tiny.kill_self()


class Interrupter(Display):
    """Gets a signal at the end of a step."""

    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def advance(self, done: int) -> None:
        if done == self.step:
            os.kill(os.getpid(), self.number)


def train_and_die_at(step: int, output: Path, resume: bool) -> None:
    run(tiny.task(), tiny.settings(output), resume=resume, display=Killer(step))


def train_and_die_in(module: str, name: str, call: int, output: Path, resume: bool) -> None:
    """Dies when a module calls a function for the n-th time."""
    home = import_module(module)
    original, calls = getattr(home, name), []

    def deadly(*arguments: object) -> object:
        calls.append(name)
        if len(calls) == call:
            tiny.kill_self()
        return original(*arguments)

    setattr(home, name, deadly)
    run(tiny.task(), tiny.settings(output), resume=resume)


def train_and_be_interrupted(step: int, number: int, output: Path) -> None:
    result = run(tiny.task(), tiny.settings(output), display=Interrupter(step, number))
    assert (result.step, result.signal, result.model) == (step, number, None)
    os._exit(128 + number)


def assert_same_run(output: Path, undisturbed: Path) -> None:
    """The same losses, metrics and weights, and nothing twice."""
    for split in ("train", "validation", "test"):
        assert tiny.losses(output, split) == tiny.losses(undisturbed, split)
    for folder in ("model", "best", "checkpoints/step-00000012"):
        assert_same_tensors(output / folder / "model.safetensors", undisturbed / folder / "model.safetensors")
    last = Path("checkpoints/step-00000012/optimizer.safetensors")
    assert_same_tensors(output / last, undisturbed / last)
    assert not list((output / "checkpoints").glob(".partial*"))


def assert_same_tensors(actual: Path, expected: Path) -> None:
    tensors, wanted = load_file(actual), load_file(expected)
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)


def test_killed_after_a_step(tmp_path, undisturbed):
    """Twice: before there is a checkpoint, and between two of them."""
    output = tmp_path / "run"
    assert tiny.in_process(train_and_die_at, 2, output, False) == -signal.SIGKILL
    assert tiny.in_process(train_and_die_at, 8, output, True) == -signal.SIGKILL
    assert max(tiny.losses(output)) == 7
    run(tiny.task(), tiny.settings(output), resume=True)
    assert_same_run(output, undisturbed)


def test_killed_while_saving(tmp_path, undisturbed):
    """Again and again, each time a bit later: files half written, without a manifest, without a name, links missing."""
    output, resume = tmp_path / "run", False
    in_checkpoints = [("sync", 5), ("write_manifest", 1), ("replace_folder", 1), ("remove", 1)]
    moments = [("latte.train.checkpoints", *moment) for moment in in_checkpoints]
    moments[3:3] = [("latte.train.session", "point_to", 1)]
    for moment in [*moments, ("latte.train.runs", "replace_folder", 1)]:  # the last one is that of the finished model
        assert tiny.in_process(train_and_die_in, *moment, output, resume) == -signal.SIGKILL
        resume = True
    assert not (output / "model").exists()
    run(tiny.task(), tiny.settings(output), resume=True)
    assert_same_run(output, undisturbed)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_ends(number, tmp_path, undisturbed):
    output = tmp_path / "run"
    assert tiny.in_process(train_and_be_interrupted, 5, number, output) == 128 + number
    assert (output / "checkpoints/step-00000005/manifest.json").is_file()
    run(tiny.task(), tiny.settings(output), resume=True)
    assert_same_run(output, undisturbed)


SCRIPT = """
import sys
from pathlib import Path
from latte.train import Display, run
from tests.train import tiny

class Steps(Display):
    def advance(self, done):
        print(done, flush=True)

settings = tiny.settings(Path(sys.argv[1]), steps=100_000, readers=2, save_every=50_000)
result = run(tiny.task(), settings, display=Steps())
sys.exit(128 + result.signal)
"""


def test_a_signal_to_all_processes_is_one_to_the_run(tmp_path):
    """As a terminal's Ctrl-C and `timeout` send it: readers of examples get it too, and stay until they are not needed.

    What is read after the signal is more than was read ahead: without its readers, the run would fail.
    """
    output = tmp_path / "run"
    command = [sys.executable, "-c", SCRIPT, str(output)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    home = Path(__file__).parents[2]
    with subprocess.Popen(command, start_new_session=True, cwd=home, env=environment, **pipes) as process:
        assert process.stdout is not None
        while process.stdout.readline().strip() != "20":
            assert process.poll() is None, process.stderr.read()
        os.killpg(process.pid, signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert errors == ""
    assert list((output / "checkpoints").glob("step-*/manifest.json"))


def test_losses_between_records_are_not_lost(tmp_path):
    """A record is a mean over the steps since the last one, of which some may have been before the interruption."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(tiny.task(), tiny.settings(whole, log_every=4))
    run(tiny.task(), tiny.settings(cut, log_every=4), display=Interrupter(6, signal.SIGINT))
    run(tiny.task(), tiny.settings(cut, log_every=4), resume=True)
    assert tiny.losses(whole) == tiny.losses(cut)
    assert list(tiny.losses(whole)) == [4, 8, 12]
