"""Losses that are no numbers or explode, and signals."""

import json
import math
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from latte.train import Display, Diverged, read_metrics, run
from latte.train.guards import RECENT, Interrupts, LossWatch, Reading, StepLoss
from latte.train.objective import NextToken
from latte.train.order import Order
from tests.train import tiny


def watch(losses: list[float], gradients: list[float] | None = None, **options) -> LossWatch:
    made = LossWatch(**{"explosion": 10.0, "gradients_may_overflow": False} | options)
    for step, loss in enumerate(losses, start=1):
        gradient = 1.0 if gradients is None else gradients[step - 1]
        made.add(step, StepLoss(torch.tensor(loss), {}), torch.tensor(gradient))
    made.read()
    return made


def test_losses_are_read_together():
    made = watch([3.0, 2.0, 2.5])
    assert [(reading.step, reading.loss) for reading in made.take()] == [(1, 3.0), (2, 2.0), (3, 2.5)]
    assert made.take() == []


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_no_number(loss):
    with pytest.raises(Diverged, match=f"the loss of step 2 is {loss}") as caught:
        watch([3.0, loss, math.nan])
    assert caught.value.reading.step == 2
    assert caught.value.recent == [3.0]


def test_a_gradient_that_is_no_number():
    with pytest.raises(Diverged, match="the gradient of step 2 is nan"):
        watch([3.0, 3.0], [1.0, math.nan])
    watch([3.0, 3.0], [1.0, math.inf], gradients_may_overflow=True)


def test_explosion():
    watch([3.0, 2.0, 24.9])
    with pytest.raises(Diverged, match=r"the loss of step 3 is 25.1, after 2.5 on average"):
        watch([3.0, 2.0, 25.1])
    watch([0.01, 0.01, 9.9])  # ten times little is little
    with pytest.raises(Diverged):
        watch([0.01, 0.01, 10.1])
    watch([3.0, 2.0, 1e30], explosion=0.0)
    watch([1e30, 1.0])  # nothing to compare with


def test_what_is_recent():
    made = watch([100.0] + [2.0] * RECENT)
    made.add(0, StepLoss(torch.tensor(20.1), {}), torch.tensor(1.0))
    with pytest.raises(Diverged):
        made.read()


def test_a_watch_goes_on():
    made = watch([3.0, 2.0])
    other = LossWatch(10.0, gradients_may_overflow=False)
    other.restore(json.loads(json.dumps(made.state())))
    assert other.take() == made.take()
    assert other.recent == made.recent


def test_terms_of_a_loss_are_read_and_go_on_with_it():
    made = LossWatch(10.0, gradients_may_overflow=False)
    for step in (1, 2):
        made.add(
            step, StepLoss(torch.tensor(3.0), {"a": torch.tensor(1.0 * step), "b": torch.tensor(2.0)}), torch.ones(())
        )
    made.read()
    other = LossWatch(10.0, gradients_may_overflow=False)
    other.restore(json.loads(json.dumps(made.state())))
    assert other.take() == [Reading(step, 3.0, 1.0, {"a": 1.0 * step, "b": 2.0}) for step in (1, 2)]


class Poisoned(NextToken):
    """The loss of a batch with the poisoned example is no number, or is a thousand times what it was."""

    def __init__(self, example: int, factor: float = math.nan) -> None:
        self.tokens, self.factor = tiny.Counting(EXAMPLES, 0)[example]["input_ids"], factor

    def loss(self, model, batch, items):
        poison = self.factor if (batch["input_ids"] == self.tokens).all(dim=1).any() else 1.0
        return super().loss(model, batch, items) * poison


EXAMPLES, BATCH = 33, 3  # one epoch is 11 batches, and no two examples are the same
ORDER = Order(EXAMPLES, BATCH, seed=3)  # of tiny.settings
POISON = int(ORDER.batch(7)[2])  # is read at step 8


def poisoned_settings(output: Path, **given):
    return tiny.settings(output, batch_size=BATCH, steps=10, schedule="constant", **given)


def test_stopping(tmp_path):
    output = tmp_path / "run"
    with pytest.raises(Diverged, match=r"the loss of step 8 is nan; its batch is in .*step-00000008; .* of step 6"):
        run(tiny.task(examples=EXAMPLES), poisoned_settings(output), objective=Poisoned(POISON))
    evidence = output / "diverged" / "step-00000008"
    report = json.loads((evidence / "report.json").read_text())
    assert (report["step"], report["batch"]) == (8, 7)
    assert report["examples"] == ORDER.batch(7).tolist()
    batch = load_file(evidence / "batch.safetensors")
    expected = torch.stack([tiny.Counting(EXAMPLES, 0)[index]["input_ids"] for index in report["examples"]])
    assert torch.equal(batch["input_ids"], expected)
    assert max(tiny.losses(output)) == 7
    assert (output / "checkpoints" / "step-00000006").is_dir()


def test_an_explosion_stops_too(tmp_path):
    with pytest.raises(Diverged, match=r"the loss of step 8 is \d+"):
        run(tiny.task(examples=EXAMPLES), poisoned_settings(tmp_path / "run"), objective=Poisoned(POISON, 1000.0))


@pytest.mark.parametrize("log_every", [1, 5])
def test_rolling_back(log_every, tmp_path):
    """The batch is left out, and all is as if it had never been there."""
    notes: list[str] = []

    class Notes(Display):
        def note(self, message: str) -> None:
            notes.append(message)

    output = tmp_path / "run"
    settings = poisoned_settings(output, on_nan="rollback", log_every=log_every)
    result = run(tiny.task(examples=EXAMPLES), settings, objective=Poisoned(POISON), display=Notes())
    assert (result.step, result.rollbacks) == (10, 1)
    assert any("Rolling back, and leaving batch 7 out" in note for note in notes)
    events = [record for record in read_metrics(output / "metrics.jsonl") if record["split"] == "rollback"]
    assert [(event["step"], event["skipped_batches"]) for event in events] == [(6, [7])]
    expected = tmp_path / "expected"
    run(SkippingTask(tiny.CountingSettings(EXAMPLES)), poisoned_settings(expected, log_every=log_every))
    assert tiny.losses(output) == tiny.losses(expected)


class SkippingTask(tiny.CountingTask):
    """Counting, with examples under such numbers that the order of examples passes over the poisoned batch."""

    def prepare(self, progress=None):
        data = super().prepare()
        wanted = [number for number in range(11) if number != 7]
        places = {
            int(mine): int(theirs)
            for step, number in enumerate(wanted)
            for mine, theirs in zip(ORDER.batch(step), ORDER.batch(number), strict=True)
        }
        return replace(data, train=Renumbered(data.train, places))


class Renumbered:
    def __init__(self, examples: tiny.Counting, places: dict[int, int]) -> None:
        self.examples, self.places = examples, places

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int, /):
        return self.examples[self.places[index]]


def test_rolling_back_has_an_end(tmp_path):
    """Every batch is poisoned: there is nothing to be saved."""

    class Hopeless(NextToken):
        def loss(self, model, batch, items):
            return super().loss(model, batch, items) * math.nan

    settings = tiny.settings(tmp_path / "run", on_nan="rollback", max_rollbacks=2)
    with pytest.raises(Diverged, match=r"the loss of step 1 is nan; .* no checkpoint before.* more than 2 rollbacks"):
        run(tiny.task(), settings, objective=Hopeless())
    assert [path.name for path in (tmp_path / "run" / "diverged").iterdir()] == ["step-00000001"]


@pytest.fixture
def usual_interrupt():
    """Python's own handler, whatever started the tests: a shell has what it runs in the background ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("usual_interrupt")
def test_a_second_signal_has_its_usual_effect():
    with Interrupts(launched=False) as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_launcher_may_pass_a_signal_on():
    with Interrupts(launched=True) as interrupts:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.received == signal.SIGINT
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
