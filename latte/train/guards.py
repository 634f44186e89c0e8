"""What keeps a run from being lost: an eye on the loss, and on signals."""

import math
import os
import signal
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from latte.tasks.base import Batch
from latte.train.checkpoints import naming, write_json
from latte.train.distributed import world_size
from latte.train.states import whole

RECENT = 100  # steps whose mean loss an explosion is measured against


class Diverged(RuntimeError):  # noqa: N818 - a state of affairs
    """The loss of a step is no number, or far above those before."""

    def __init__(self, reason: str, reading: "Reading", recent: Sequence[float]) -> None:
        super().__init__(reason)
        self.reading, self.recent = reading, list(recent)


class StepLoss(NamedTuple):
    """A step's loss on the device, and the terms that it is made of where there are several."""

    loss: Tensor
    parts: Mapping[str, Tensor]


@dataclass(frozen=True)
class Reading:
    """One step's loss, over all processes, with its terms, and length of the gradient; `step` counts from 1."""

    step: int
    loss: float
    gradient: float
    parts: Mapping[str, float] = field(default_factory=dict)


class LossWatch:
    """Losses of steps, kept on the device and looked at together: looking makes the host wait."""

    def __init__(self, explosion: float, *, gradients_may_overflow: bool) -> None:
        self.explosion, self.gradients_may_overflow = explosion, gradients_may_overflow
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.unlogged: list[Reading] = []
        self._unread: list[tuple[int, StepLoss, Tensor]] = []

    def add(self, step: int, loss: StepLoss, gradient: Tensor) -> None:
        self._unread.append((step, loss, gradient))

    def read(self) -> None:
        """Look at the steps since the last look; raises Diverged at the first one that went wrong."""
        if not self._unread:
            return
        steps, names = [step for step, _, _ in self._unread], list(self._unread[0][1].parts)
        losses = torch.stack([torch.stack([loss, *parts.values()]).float() for _, (loss, parts), _ in self._unread])
        gradients = torch.stack([whole(gradient).float() for _, _, gradient in self._unread])
        self._unread.clear()
        if world_size() > 1:
            dist.all_reduce(losses)
            losses /= world_size()
        rows = torch.cat([losses, gradients[:, None]], dim=1).tolist()
        for step, (loss, *parts, gradient) in zip(steps, rows, strict=True):
            self._look(Reading(step, loss, gradient, dict(zip(names, parts, strict=True))))

    def _look(self, reading: Reading) -> None:
        reason = self._fault(reading)
        if reason is not None:
            raise Diverged(reason, reading, self.recent)
        self.recent.append(reading.loss)
        self.unlogged.append(reading)

    def _fault(self, reading: Reading) -> str | None:
        if not math.isfinite(reading.loss):
            return f"the loss of step {reading.step} is {reading.loss}"
        if not math.isfinite(reading.gradient) and not self.gradients_may_overflow:
            return f"the gradient of step {reading.step} is {reading.gradient}, its loss {reading.loss:.4g}"
        usual = sum(self.recent) / len(self.recent) if self.recent else math.inf
        if self.explosion and reading.loss > self.explosion * max(1.0, usual):
            return f"the loss of step {reading.step} is {reading.loss:.4g}, after {usual:.4g} on average"
        return None

    def take(self) -> list[Reading]:
        """What was read since the last call of this."""
        taken, self.unlogged = self.unlogged, []
        return taken

    def state(self) -> dict[str, Any]:
        return {
            "recent": list(self.recent),
            "unlogged": [list(vars(reading).values()) for reading in self.unlogged],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.recent.extend(state["recent"])
        self.unlogged = [Reading(*values) for values in state["unlogged"]]


def write_evidence(folder: Path, fault: Diverged, batch: Batch, facts: Mapping[str, Any]) -> Path:
    """Write down the step that went wrong and what it had learned from; returns the folder."""
    place = folder / f"step-{fault.reading.step:08d}"
    place.mkdir(parents=True, exist_ok=True)
    with naming(place):
        save_file({name: tensor.contiguous() for name, tensor in batch.items()}, place / "batch.safetensors")
    report = {
        "step": fault.reading.step,
        "reason": str(fault),
        "loss": fault.reading.loss,
        "gradient_norm": fault.reading.gradient,
        "losses_before": fault.recent[-10:],
        **facts,
    }
    write_json(place / "report.json", report)
    return place


class Interrupts:
    """While active, the first SIGINT or SIGTERM is noted in `received`; a second one has its usual effect.

    Where a launcher started the process, further ones are noted too: it passes signals on, and they come twice.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, *, launched: bool) -> None:
        self.received: signal.Signals | None = None
        self._launched = launched
        self._process = os.getpid()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self  # signals are the main thread's
        self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a reader of examples that has not come to `ignore_signals` yet
            return
        self.received = self.received or signal.Signals(number)
        if not self._launched:
            self._restore()


def ignore_signals(*_: Any) -> None:
    """For readers of examples: a signal to all processes is the first one's to answer, and it still needs them."""
    for number in Interrupts.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
