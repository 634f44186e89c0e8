"""A run from beginning to end: prepare, train, survive, finish."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainingArguments

import latte
from latte.tasks.base import Task, TaskData
from latte.train.building import check_words, compile_layers, count_parameters, find_device, make_arguments, make_model
from latte.train.checkpoints import (
    PARTIAL,
    Checkpoint,
    Checkpoints,
    DamagedCheckpoint,
    naming,
    point_to,
    replace_folder,
    write_json,
)
from latte.train.distillation import Distillation
from latte.train.distributed import is_main, launched_rank, on_main, shard, world_size
from latte.train.engine import STATE_FILE, Engine, Memory
from latte.train.guards import Diverged, Interrupts, write_evidence
from latte.train.lora import add_lora, check_peft
from latte.train.objective import Objective, objective_for
from latte.train.order import Order
from latte.train.progress import Display
from latte.train.quiet import quiet_transformers
from latte.train.records import MetricsFile, Records, check_trackers, open_trackers
from latte.train.session import Session
from latte.train.settings import RunPlan, RunSettings, differences
from latte.train.teachers import check_distillation, make_teacher
from latte.train.trainable import wants_lora

VERSIONS_OF = ("torch", "transformers", "accelerate")
RUN_FILE, RESULT_FILE, METRICS_FILE = "run.json", "result.json", "metrics.jsonl"


@dataclass(frozen=True)
class Result:
    """What came of a run."""

    task: str
    output: Path
    model: Path | None  # the folder of the trained model; None where the run was interrupted
    step: int
    steps: int
    tokens: int
    seconds: float  # of training alone
    parameters: int
    validation: Mapping[str, float]  # of the last evaluation
    test: Mapping[str, float]
    best: Mapping[str, Any] | None  # step, metric, value
    rollbacks: int
    signal: int | None  # that interrupted it

    def document(self) -> dict[str, Any]:
        return asdict(self) | {"output": str(self.output), "model": None if self.model is None else str(self.model)}


def run(
    task: Task,
    settings: RunSettings,
    *,
    resume: bool = False,
    overwrite: bool = False,
    objective: Objective | None = None,
    display: Display | None = None,
) -> Result:
    """Train a model on a task. Everything that is written goes to `settings.output`.

    `resume` goes on from the newest whole checkpoint there; `overwrite` removes a run that is there. In processes that
    torchrun or accelerate launched, all of them call this alike.

    Raises ValueError for settings that make no run, OSError where nothing can be written, and Diverged where the loss
    did and `settings.on_nan` says to stop.
    """
    if task.seed != settings.data_seed:
        raise ValueError(f"the task's seed is {task.seed} and data_seed {settings.data_seed}; make them the same")
    return Run(task, settings, resume, overwrite, objective, display or Display()).perform()


def ended(task: Task, settings: RunSettings) -> Result | None:
    """What came of the run in `settings.output`, if it has ended; raises ValueError where it was of other settings."""
    path = settings.output / RESULT_FILE
    if not path.is_file():
        return None
    Run(task, settings, True, False, None, Display())._check_folder()
    document = json.loads(path.read_text(encoding="utf-8"))
    places = {"output": settings.output, "model": settings.output / "model"}
    return Result(**(document | places)) if document["steps"] == settings.steps else None


class Run:
    def __init__(
        self,
        task: Task,
        settings: RunSettings,
        resume: bool,
        overwrite: bool,
        objective: Objective | None,
        display: Display,
    ) -> None:
        self.device = find_device(settings)
        if settings.precision == "auto":
            settings = replace(settings, precision="bf16" if self.device.type == "cuda" else "fp32")
        if settings.parallel == "fsdp" and settings.precision == "fp16":
            raise ValueError("precision is fp16 and parallel fsdp: the scale of fp16 losses is not sharded; use bf16")
        check_words(settings)
        check_learning(settings)
        check_trackers(settings.track)
        if objective is not None and settings.teacher != "none":
            raise ValueError("an objective is given, and a teacher is set, which makes one; leave one of them out")
        self.task, self.settings, self.resume, self.overwrite = task, settings, resume, overwrite
        self.objective = objective
        self.display = display if launched_rank() == 0 else Display()
        self.folder = settings.output
        self.checkpoints = Checkpoints(self.folder / "checkpoints")
        self.plan = RunPlan(task.name, task.settings, settings)
        self.rollbacks = 0
        self.skipped: set[int] = set()

    def perform(self) -> Result:
        with quiet_transformers():
            return self._perform()

    def _perform(self) -> Result:
        arguments = make_arguments(self.settings, self.device)
        on_main(self._check_folder)
        data = self._prepare()
        on_main(lambda: self._compare_data(data))
        with Interrupts(launched=world_size() > 1) as interrupts:
            while True:
                try:
                    return self._attempt(arguments, data, interrupts)
                except Diverged as fault:
                    self._roll_back(fault, data)
                arguments = make_arguments(self.settings, self.device)

    def _check_folder(self) -> None:
        """Make sure that the folder is ours to write to, and that what is there fits; nothing is written yet."""
        begun = self.folder / RUN_FILE
        if self.resume:
            if not begun.is_file():
                raise ValueError(f"there is nothing to resume in {self.folder}: it has no {RUN_FILE}")
            before = RunPlan.from_document(json.loads(begun.read_text(encoding="utf-8")), type(self.task), str(begun))
            if changes := differences(before, self.plan):
                raise ValueError(
                    f"{self.folder} was begun with other settings: {'; '.join(changes)}. "
                    "Resume with the same ones, or begin anew in another folder"
                )
        elif self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            if not begun.is_file():
                raise ValueError(f"{self.folder} is not empty and holds no run; name another folder with --output")
            if not self.overwrite:
                raise ValueError(
                    f"{self.folder} holds a run; go on with --resume, begin anew with --overwrite, "
                    "or name another --output"
                )
        nearest = next(place for place in (self.folder, *self.folder.absolute().parents) if place.exists())
        if not nearest.is_dir():
            raise NotADirectoryError(f"{self.folder} cannot be made: {nearest} is a file; name another --output")
        if not os.access(nearest, os.W_OK):
            raise PermissionError(f"{self.folder} cannot be made: {nearest} does not allow it; name another --output")

    def _prepare(self) -> TaskData:
        """The first process makes what is kept on the disk, the others find it there."""
        prepared: list[TaskData] = []
        on_main(lambda: prepared.append(self.task.prepare(self.display.prepare)))
        self.display.end()
        return prepared[0] if prepared else self.task.prepare()

    def _compare_data(self, data: TaskData) -> None:
        """A run that goes on must have the data that it began with."""
        if self.resume:
            document = json.loads((self.folder / RUN_FILE).read_text(encoding="utf-8"))
            before = document.get("data", {}).get("fingerprint")
            if before is not None and before != data.fingerprint:
                raise ValueError(f"{self.folder} was begun with other data: the examples have changed since")

    def _begin(self, data: TaskData) -> None:
        """Write down what is run. Nothing is written before: what is wrong with settings has been found by now."""
        if self.rollbacks:
            return
        if self.overwrite and self.folder.exists():
            shutil.rmtree(self.folder)
        self.checkpoints.folder.mkdir(parents=True, exist_ok=True)
        self.checkpoints.sweep()
        document = {
            **self.plan.document(),
            "data": {"fingerprint": data.fingerprint, "facts": dict(data.facts)},
            "versions": {"latte": latte.__version__, **{name: version(name) for name in VERSIONS_OF}},
        }
        write_json(self.folder / RUN_FILE, document)
        (self.folder / RESULT_FILE).unlink(missing_ok=True)

    def _attempt(self, arguments: TrainingArguments, data: TaskData, interrupts: Interrupts) -> Result:
        """Train from the newest checkpoint, or from the beginning, to the end."""
        checkpoint = on_main(self._find_checkpoint)
        memory = read_memory(checkpoint)
        self.skipped.update(memory.skipped)
        memory.skipped = sorted(self.skipped)
        model = make_model(self.settings, data, checkpoint and checkpoint.path)
        model.to(self.device)  # pyright: ignore[reportArgumentType] - it is typed for quantized models
        objective = self._make_objective(model, data)
        if wants_lora(self.settings.trainable):
            add_lora(model, self.settings.lora_rank, self.settings.seed, checkpoint and checkpoint.path)
        on_main(lambda: self._begin(data))
        parameters = count_parameters(model)
        self.display.note("{all:,} parameters, of which {trainable:,} learn".format(**parameters))
        if self.settings.parallel == "fsdp" and world_size() > 1:
            shard(model, self.device)
        if self.settings.compile:
            compile_layers(model)
            if isinstance(objective, Distillation):
                compile_layers(objective.teacher.model)
        records = self._open_records(memory, resumed=checkpoint is not None)
        session = Session(
            self.task, data, self.settings, self.checkpoints, memory, records, self.display, interrupts, self.device
        )
        self.order = Order(len(data.train), self.settings.batch_size, self.settings.seed, memory.skipped)
        engine = Engine(
            model, arguments, self.settings, data, objective, self.order, memory, session.after_step
        )  # fmt: skip
        torch.set_float32_matmul_precision("high" if self.settings.tf32 else "highest")  # Accelerate may have chosen
        self.display.begin(self.task.name, self.settings.steps, memory.step)
        try:
            engine.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint.path))
            return self._finish(session, engine, parameters["all"])
        finally:
            self.display.end()
            records.close()

    def _make_objective(self, model: PreTrainedModel, data: TaskData) -> Objective:
        if self.settings.teacher == "none":
            return self.objective or objective_for(data.head)
        if data.head != "causal-lm":
            raise ValueError(f"teacher is {self.settings.teacher}, but {self.task.name} is no task of language models")
        teacher = make_teacher(self.settings, model, data, self.device)
        return Distillation(self.settings, model, teacher, self.device)

    def _find_checkpoint(self) -> Checkpoint | None:
        if not self.resume and not self.rollbacks:
            return None
        checkpoint = self.checkpoints.newest(self.display.note, read_memory)
        if checkpoint is None:
            self.display.note("there is no checkpoint yet: beginning at step 0")
        elif checkpoint.step > self.settings.steps:
            raise ValueError(
                f"steps is {self.settings.steps} and {self.folder} has learned for {checkpoint.step} already; "
                f"resume with --steps {checkpoint.step} or more, or begin anew in another folder"
            )
        else:
            self.display.note(f"going on from {checkpoint.path}")
            self._point_to_best(read_memory(checkpoint))
        return checkpoint

    def _point_to_best(self, memory: Memory) -> None:
        """As it was when the checkpoint was written: the run may have ended before it was, or gone on after."""
        for checkpoint in self.checkpoints.all():
            if memory.best is not None and checkpoint.step == memory.best["step"]:
                point_to(self.folder / "best", checkpoint.path)

    def _open_records(self, memory: Memory, *, resumed: bool) -> Records:
        if not is_main():
            return Records(None, [])
        after = memory.step if resumed else None
        trackers = open_trackers(self.settings.track, self.folder, after, self.plan.document(), self.display.note)
        records = Records(MetricsFile(self.folder / METRICS_FILE, after), trackers)
        if memory.skipped and self.rollbacks:
            records.write(memory.step, "rollback", {}, skipped_batches=memory.skipped)
        return records

    def _roll_back(self, fault: Diverged, data: TaskData) -> None:
        """Write down what happened; raise it where that is wanted, else leave the batch out from now on."""
        number = self.order.batch_number(fault.reading.step - 1)
        place = on_main(lambda: self._write_evidence(fault, data, number))
        whole = self.checkpoints.all()
        last = f"the last checkpoint is of step {whole[-1].step}" if whole else "there is no checkpoint before it"
        story = f"{fault}; its batch is in {place}; {last}"
        if self.settings.on_nan == "stop":
            raise Diverged(f"{story}. Lower the rate, or train with --on-nan rollback", fault.reading, fault.recent)
        if self.rollbacks == self.settings.max_rollbacks:
            raise Diverged(f"{story}. That was once more than {self.rollbacks} rollbacks", fault.reading, fault.recent)
        self.rollbacks += 1
        self.skipped.add(number)
        self.display.note(f"warning: {story}. Rolling back, and leaving batch {number} out")

    def _write_evidence(self, fault: Diverged, data: TaskData, number: int) -> Path:
        indices = self.order.batch(fault.reading.step - 1).tolist()
        batch = data.collate([data.train[index] for index in indices])
        facts = {"batch": number, "examples": indices, "data_fingerprint": data.fingerprint}
        return write_evidence(self.folder / "diverged", fault, batch, facts)

    def _finish(self, session: Session, engine: Engine, parameters: int) -> Result:
        """Measure on the test split and write the model, unless the run was interrupted."""
        test: dict[str, float] = {}
        if not session.interrupted:
            if session.data.test is not None:
                test = session.measure(engine, "test", session.memory.step)
            weights = engine.gather_weights()
            on_main(lambda: self._write_model(engine, weights))
        memory = session.memory
        result = Result(
            task=self.task.name,
            output=self.folder,
            model=None if session.interrupted else self.folder / "model",
            step=memory.step,
            steps=self.settings.steps,
            tokens=session.tokens(memory.step),
            seconds=memory.seconds,
            parameters=parameters,
            validation=memory.latest,
            test=test,
            best=memory.best,
            rollbacks=self.rollbacks,
            signal=session.signal() if session.interrupted else None,
        )
        if not session.interrupted:
            on_main(lambda: write_json(self.folder / RESULT_FILE, result.document()))
        return result

    def _write_model(self, engine: Engine, weights: Mapping[str, Any] | None) -> None:
        partial = self.folder / f"{PARTIAL}model"
        shutil.rmtree(partial, ignore_errors=True)
        with naming(self.folder / "model"):
            engine.save_weights(partial, weights)
            replace_folder(partial, self.folder / "model")


def check_learning(settings: RunSettings) -> None:
    """Raise ValueError for what cannot learn so, before any work is done."""
    check_distillation(settings)
    if settings.frozen_dtype == "bf16" and settings.precision != "bf16":
        raise ValueError(f"frozen_dtype is bf16 and precision {settings.precision}; it needs --precision bf16")
    if wants_lora(settings.trainable):
        if settings.parallel == "fsdp":
            raise ValueError("trainable has lora and parallel is fsdp, which do not go together; use --parallel ddp")
        check_peft()


def read_memory(checkpoint: Checkpoint | None) -> Memory:
    if checkpoint is None:
        return Memory()
    name = checkpoint.path.name
    try:
        memory = Memory(**json.loads((checkpoint.path / STATE_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise DamagedCheckpoint(f"{name} is damaged: its {STATE_FILE} cannot be read") from error
    if memory.step != checkpoint.step:
        raise DamagedCheckpoint(f"{name} is damaged: its {STATE_FILE} is of step {memory.step}")
    return memory
