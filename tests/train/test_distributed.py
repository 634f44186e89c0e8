"""Two processes train what one does: a whole model each (DDP), or half of one each (FSDP2)."""

import multiprocessing
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from latte.analysis import measure
from latte.models import LatteConfig, LatteForCausalLM
from latte.train import Display, Diverged, read_metrics, run
from latte.train.distributed import shard
from latte.train.engine import Engine
from latte.train.objective import NextToken
from tests.train import tiny

PROCESSES = 2
PRELOADED = ["latte.train.runs", "tests.train.test_distributed"]


def launch(function: Any, *arguments: Any) -> list[int | None]:
    """Run a function in two processes that know of each other, as torchrun would; their exit codes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    processes = [context.Process(target=enter, args=(rank, port, function, *arguments)) for rank in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(180)
    return [process.exitcode for process in processes]


def enter(rank: int, port: int, function: Any, *arguments: Any) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(PROCESSES), "LOCAL_WORLD_SIZE": str(PROCESSES),
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    torch.set_num_threads(1)
    function(*arguments)
    torch.distributed.destroy_process_group()


def train(output: Path, parallel: str, steps: int, resume: bool) -> None:
    run(tiny.task(), tiny.settings(output, parallel=parallel, steps=steps), resume=resume)


def train_and_look(output: Path) -> None:
    """While a model is sharded, every process holds half of what it holds, and of the optimiser's states."""
    seen = []
    original = Engine._maybe_log_save_evaluate

    def look(engine: Engine, *arguments: Any, **words: Any) -> None:
        for parameter in engine.model.parameters():
            assert isinstance(parameter, DTensor)
            assert parameter.to_local().numel() * 2 <= parameter.numel() + parameter[0].numel()
            assert engine.raw_optimizer.state[parameter]["exp_avg"].to_local().shape == parameter.to_local().shape
        seen.append(True)
        original(engine, *arguments, **words)

    Engine._maybe_log_save_evaluate = look
    train(output, "fsdp", 12, False)
    assert len(seen) == 13


def assert_same_weights(actual: Path, expected: Path) -> None:
    tensors, wanted = (load_file(folder / "model" / "model.safetensors") for folder in (actual, expected))
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=1e-2, atol=2e-3)


def assert_same_losses(actual: Path, expected: Path) -> None:
    for split in ("train", "validation", "test"):
        assert tiny.losses(actual, split) == pytest.approx(tiny.losses(expected, split), rel=1e-4)


def test_whole_models(tmp_path, undisturbed):
    output = tmp_path / "run"
    assert launch(train, output, "ddp", 12, False) == [0, 0]
    assert_same_losses(output, undisturbed)
    assert_same_weights(output, undisturbed)


def test_shards(tmp_path, undisturbed):
    output = tmp_path / "run"
    assert launch(train_and_look, output) == [0, 0]
    assert_same_losses(output, undisturbed)
    assert_same_weights(output, undisturbed)


def measure_shards(output: Path) -> None:
    """The first call of a sharded model, and those after, give what the whole model gives."""
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = LatteForCausalLM(LatteConfig.from_preset("macchiato-tiny", vocab_size=tiny.PRIME, **tiny.SMALL)).eval()
    tokens = torch.arange(40) % tiny.PRIME
    expected = [layer.usage for layer in measure(model, tokens, chunk=16)]
    shard(model, torch.device("cpu"))
    names = set(vars(model))
    model.set_reshard_after_forward(True, recurse=False)
    for _ in range(2):
        for layer, wanted in zip(measure(model, tokens, chunk=16), expected, strict=True):
            assert layer.usage is not None
            assert wanted is not None
            torch.testing.assert_close(layer.usage.usage, wanted.usage)
        with torch.no_grad():
            assert model(tokens[None]).logits.shape == (1, 40, tiny.PRIME)
    assert set(vars(model)) == names


def test_sharded_models_can_be_looked_at(tmp_path):
    assert launch(measure_shards, tmp_path) == [0, 0]


def test_usage_counts_what_is_shown_again_once(tmp_path):
    """Five examples are three batches of two, so that one of the processes is shown a batch again."""
    task, counts = tiny.task(held_out=5), []
    for folder in (tmp_path / "one", tmp_path / "two"):
        if folder.name == "one":
            run(task, tiny.settings(folder, steps=6, eval_batch_size=2))
        else:
            assert launch(train_on_five, folder) == [0, 0]
        usage = [record for record in read_metrics(folder / "metrics.jsonl") if record["split"] == "usage"]
        counts.append([layer["tokens"] for layer in usage[-1]["layers"]])
    assert counts[0] == counts[1] == [5 * tiny.LENGTH] * 2


def train_on_five(output: Path) -> None:
    run(tiny.task(held_out=5), tiny.settings(output, steps=6, eval_batch_size=2))


def train_on_few(output: Path) -> None:
    run(tiny.task(held_out=2), tiny.settings(output, steps=6, eval_batch_size=2))


def test_a_process_with_nothing_to_measure_has_no_usage(tmp_path):
    assert launch(train_on_few, tmp_path / "run") == [0, 0]
    usage = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record["split"] == "usage"]
    assert [layer["tokens"] for layer in usage[-1]["layers"]] == [2 * tiny.LENGTH] * 2


def test_checkpoints_fit_any_number_of_processes(tmp_path, undisturbed):
    """Begun in shards by two, gone on with by one, then by two with whole models, and in shards again."""
    output = tmp_path / "run"
    assert launch(train, output, "fsdp", 3, False) == [0, 0]
    run(tiny.task(), tiny.settings(output, steps=6, parallel="fsdp"), resume=True)
    assert launch(train, output, "ddp", 9, True) == [0, 0]
    assert launch(train, output, "fsdp", 12, True) == [0, 0]
    assert list(tiny.losses(output)) == list(range(1, 13))
    straight = tmp_path / "straight"
    for steps in (3, 6, 9, 12):  # the schedule follows the number of steps
        run(tiny.task(), tiny.settings(straight, steps=steps), resume=steps > 3)
    assert tiny.losses(output) == pytest.approx(tiny.losses(straight), rel=1e-4)


def be_refused(output: Path) -> None:
    with pytest.raises(ValueError, match="batch_size is 3; it must be a multiple of the 2 processes"):
        run(tiny.task(), tiny.settings(output, batch_size=3))
    (output / "photos").mkdir(parents=True, exist_ok=True)
    with pytest.raises(ValueError, match="holds no run"):
        run(tiny.task(), tiny.settings(output))


def test_all_processes_hear_of_bad_input(tmp_path):
    assert launch(be_refused, tmp_path / "run") == [0, 0]


class Interrupter(Display):
    def advance(self, done: int) -> None:
        if done == 4:
            os.kill(os.getpid(), signal.SIGTERM)


class BadLuck(NextToken):
    """One of the processes gets a loss that is no number at its fifth micro batch."""

    def __init__(self) -> None:
        self.calls = 0

    def loss(self, model: Any, batch: Any, items: Any) -> Any:
        self.calls += 1
        unlucky = self.calls == 5 and os.environ["RANK"] == "1"
        return super().loss(model, batch, items) * (float("nan") if unlucky else 1.0)


def be_interrupted(output: Path) -> None:
    """The first process gets a signal; both save the same step and end."""
    result = run(tiny.task(), tiny.settings(output, steps=30), display=Interrupter())
    assert (result.step, result.signal) == (10, signal.SIGTERM)


def diverge(output: Path) -> None:
    with pytest.raises(Diverged, match="the loss of step 5 is nan"):
        run(tiny.task(), tiny.settings(output), objective=BadLuck())


def test_all_processes_end_together(tmp_path):
    assert launch(be_interrupted, tmp_path / "interrupted") == [0, 0]
    assert launch(diverge, tmp_path / "diverged") == [0, 0]
