"""What happens at each step of a run: losses are looked at, records written, the model evaluated and saved."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from latte.tasks.base import Task, TaskData
from latte.train.checkpoints import Checkpoints, point_to
from latte.train.distributed import any_process, gather_objects, on_main, world_size
from latte.train.engine import Engine, Memory
from latte.train.evaluation import collapsed_heads, evaluate, usage_curves, write_samples
from latte.train.guards import Interrupts, LossWatch, StepLoss
from latte.train.progress import Display
from latte.train.records import Records
from latte.train.settings import RunSettings

LOOK_EVERY = 10  # steps after which several processes ask each other whether to stop


class Clock:
    """Seconds of training: what is done besides does not count."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._lap = seconds
        self._since = time.perf_counter()

    def pause(self) -> None:
        now = time.perf_counter()
        self.seconds += now - self._since
        self._since = now

    def go_on(self) -> None:
        self._since = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        lap, self._lap = self.seconds - self._lap, self.seconds
        return lap


@dataclass
class Session:
    """One stretch of training, from its beginning or a checkpoint to its end or an interruption."""

    task: Task
    data: TaskData
    settings: RunSettings
    checkpoints: Checkpoints
    memory: Memory
    records: Records
    display: Display
    interrupts: Interrupts
    device: torch.device
    clock: Clock = field(init=False)
    watch: LossWatch = field(init=False)
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.clock = Clock(self.memory.seconds)
        self.watch = LossWatch(
            self.settings.explosion, gradients_may_overflow=self.settings.precision == "fp16"
        )  # with fp16 the scale of the loss is tried out: gradients overflow, and the step is left out
        if self.memory.watch is not None:
            self.watch.restore(self.memory.watch)
        self._logged_at = self.memory.step
        self._collapsed: set[tuple[str, int]] = set()

    def after_step(self, engine: Engine, step: int, loss: StepLoss, gradient: Tensor) -> None:
        settings = self.settings
        self.watch.add(step, loss, gradient)
        self.display.advance(step)
        last = step >= settings.steps
        log_due = step % settings.log_every == 0 or last
        evaluation_due = step % settings.evaluation_interval == 0 or last
        save_due = step % settings.save_interval == 0 or last
        stopping = self._should_stop(step)
        if not (log_due or evaluation_due or save_due or stopping):
            return
        self.watch.read()
        self.clock.pause()
        if log_due:
            self._log(engine, step)
        better = evaluation_due and self._evaluate(engine, step)
        if save_due or better or stopping:
            self.save(engine)
        if stopping and not last:
            self.interrupted = True
            engine.stop()
        self.clock.go_on()

    def _should_stop(self, step: int) -> bool:
        wanted = self.interrupts.received is not None
        if world_size() == 1:
            return wanted
        return step % LOOK_EVERY == 0 and any_process(wanted, self.device)

    def signal(self) -> int:
        """What a process of this run was interrupted by."""
        return max(gather_objects(int(self.interrupts.received or 0)))

    def tokens(self, steps: int) -> int:
        return steps * self.settings.batch_size * self.data.tokens_per_example

    def progress(self, step: int) -> dict[str, Any]:
        return {"tokens": self.tokens(step), "seconds": round(self.clock.seconds, 3)}

    def _log(self, engine: Engine, step: int) -> None:
        readings = self.watch.take()
        seconds = self.clock.lap()
        values = {
            "loss": sum(reading.loss for reading in readings) / len(readings),
            **{
                f"{part}_loss": sum(reading.parts[part] for reading in readings) / len(readings)
                for part in readings[0].parts
            },
            "gradient_norm": readings[-1].gradient,
            "learning_rate": engine.learning_rate,
            "tokens_per_second": self.tokens(step - self._logged_at) / max(seconds, 1e-9),
            "data_share": min(1.0, engine.data_seconds / max(seconds, 1e-9)),
            "memory_bytes": memory_bytes(self.device),
        }
        engine.data_seconds, self._logged_at = 0.0, step
        self.records.write(step, "train", values, **self.progress(step))
        self.display.show(values)

    def _evaluate(self, engine: Engine, step: int) -> bool:
        """Measure, write down, and say whether this is the best so far."""
        values = self.measure(engine, "validation", step)
        self.memory.latest = values
        texts = write_samples(self.data, engine.plain_model, self.settings.sample_tokens, self.device)
        if texts:
            self.records.write_texts(step, "samples", texts)
            self.display.note(f"{texts[0]['prompt']!r} → {texts[0]['text'][:200]!r}")
        metric, direction = self.task.best
        if metric not in values:
            raise ValueError(f"{self.task.name} calls {metric!r} its best metric, but measures {', '.join(values)}")
        best, value = self.memory.best, values[metric]
        better = best is None or (value < best["value"] if direction == "min" else value > best["value"])
        if better:
            self.memory.best = {"step": step, "metric": metric, "value": value}
        return better

    def measure(self, engine: Engine, split: str, step: int) -> dict[str, float]:
        """The metrics of a split, written down with the usage of latents."""
        settings = self.settings
        values, layers = evaluate(
            self.task, self.data, engine.plain_model, split, count=settings.eval_examples, device=self.device,
            batch_size=settings.eval_batch_size or engine.args.per_device_train_batch_size,
        )  # fmt: skip
        self.records.write(step, split, values, **self.progress(step))
        self.display.note(f"step {step:,}: {split} " + ", ".join(f"{k} {v:.4g}" for k, v in values.items()))
        if layers and split == "validation":
            self.records.write_usage(step, [layer.record() for layer in layers], usage_curves(layers))
            self._warn_of_collapse(collapsed_heads(layers))
        return values

    def _warn_of_collapse(self, collapsed: set[tuple[str, int]]) -> None:
        """Once for every head that collapses."""
        if new := sorted(collapsed - self._collapsed):
            heads = ", ".join(f"{layer} head {head}" for layer, head in new[:4]) + (" …" if len(new) > 4 else "")
            self.display.note(f"warning: latents have collapsed in {len(new)} heads, nearly all use one: {heads}")
        self._collapsed = collapsed

    def save(self, engine: Engine) -> None:
        """A checkpoint of this step, by all processes; `best` points to the best one, and old ones go."""
        engine.remember(self.watch, self.clock.seconds)
        weights, optimizer = engine.gather_weights(), engine.gather_optimizer()
        on_main(lambda: self._write(lambda folder: engine.fill_checkpoint(folder, weights, optimizer)))

    def _write(self, fill: Callable[[Path], None]) -> None:
        memory = self.memory
        self.records.sync()
        checkpoint = self.checkpoints.write(memory.step, fill)
        best = None if memory.best is None else memory.best["step"]
        if best == memory.step:
            point_to(self.settings.output / "best", checkpoint.path)
        self.checkpoints.prune(self.settings.keep, spare=() if best is None else (best,))


def memory_bytes(device: torch.device) -> int:
    """The most that PyTorch has held of a GPU's memory, or what the process holds of the machine's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss
