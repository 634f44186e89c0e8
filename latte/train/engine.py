"""The training loop: Transformers' Trainer, with our own order of examples, loss, checkpoints and looks at the model.

Where it stands for what Trainer does by default:

- a batch is moved to the device without waiting, and its items are counted there;
- nothing reads a tensor's value in a step: losses stay on the device until a record is due;
- `floating_point_ops` walks through all modules at every micro batch, for a number that nobody asked for;
- checkpoints have no pickles, and the weights come from them before Trainer is made;
- the order of examples is a function of the step: nothing is read, or drawn, to skip what was seen.
"""

# Trainer's methods are not typed as they are called.
# pyright: reportArgumentType=false, reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback, PrinterCallback

from latte.tasks.base import Batch, TaskData
from latte.train.checkpoints import write_json
from latte.train.distributed import gather_objects, is_sharded, rank, sum_over_processes, world_size
from latte.train.guards import LossWatch, StepLoss, ignore_signals
from latte.train.lora import has_lora, merge, save_apart
from latte.train.objective import Objective
from latte.train.order import MicroBatches, Order
from latte.train.schedules import make_optimizer, make_scheduler, resume_scheduler
from latte.train.settings import RunSettings
from latte.train.states import (
    gather_optimizer,
    gather_weights,
    load_optimizer,
    random_state,
    restore_random_state,
    save_optimizer,
)

STATE_FILE = "state.json"
TRAINER_STATE_FILE = "trainer_state.json"


@dataclass
class Memory:
    """What a run knows besides weights and optimiser; all of it goes into checkpoints."""

    step: int = 0
    seconds: float = 0.0
    best: dict[str, Any] | None = None  # step, metric and value
    skipped: list[int] = field(default_factory=list)  # numbers of batches
    latest: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    watch: dict[str, Any] | None = None
    random: list[dict[str, Any]] = field(default_factory=list)  # of every process
    scaler: dict[str, Any] | None = None


class Flow(TrainerCallback):
    """When to end; what is due at a step is the run's own business."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if state.global_step >= state.max_steps:
            control.should_training_stop = True
        return control


class Engine(Trainer):
    """Trainer with the parts above in place of its own. After each step it calls `after_step`."""

    def __init__(
        self,
        model: PreTrainedModel,
        arguments: TrainingArguments,
        settings: RunSettings,
        data: TaskData,
        objective: Objective,
        order: Order,
        memory: Memory,
        after_step: Callable[["Engine", int, StepLoss, Tensor], None],
    ) -> None:
        use_cache = getattr(model.config, "use_cache", None)
        super().__init__(model=model, args=arguments, train_dataset=data.train, callbacks=[Flow()])
        self.remove_callback(DefaultFlowCallback)
        self.remove_callback(PrinterCallback)
        self.settings, self.data, self.objective, self.order, self.memory = settings, data, objective, order, memory
        self.after_step = after_step
        self.use_cache = use_cache  # Trainer has switched it off
        self.data_seconds = 0.0  # waited for examples since the last record
        self.learning_rate = 0.0  # of the step that was begun last
        self._micro_losses: list[Tensor] = []
        self._micro_parts: list[Mapping[str, Tensor]] = []

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """It is there already."""

    def floating_point_ops(self, inputs: Any) -> int:
        return 0

    def get_train_dataloader(self) -> DataLoader:
        batches = MicroBatches(
            self.order, start=self.memory.step, stop=self.settings.steps, rank=rank(), world=world_size(),
            micro_batch_size=self.args.per_device_train_batch_size,
        )  # fmt: skip
        workers = self.args.dataloader_num_workers
        return DataLoader(
            self.data.train,
            batch_sampler=batches,
            collate_fn=self.data.collate,
            num_workers=workers,
            pin_memory=self.args.device.type == "cuda",
            prefetch_factor=4 if workers else None,
            worker_init_fn=ignore_signals,
            generator=torch.Generator(),  # else it draws from the generator that the model uses
        )

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> Any:
        """The micro batches of a step on the device, and the items in all of them, of all processes."""
        self.learning_rate = self.raw_optimizer.param_groups[0]["lr"]  # when records are due, it is the next step's
        begun = time.perf_counter()
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        self.data_seconds += time.perf_counter() - begun
        batches = [{k: v.to(device, non_blocking=True) for k, v in batch.items()} for batch in batches]
        items = torch.stack([self.objective.items(batch) for batch in batches]).sum()
        return batches, sum_over_processes(items)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Tensor:
        """This micro batch's part of the step's loss, times the processes, for gradients are averaged over them."""
        if num_items_in_batch is None:
            raise ValueError("a loss needs the number of items in its step")
        loss = self.objective.loss(model, inputs, num_items_in_batch) * world_size()
        self._micro_losses.append(loss.detach())
        self._micro_parts.append(getattr(self.objective, "parts", {}))
        return loss

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """One micro batch, forward and backward."""
        model.train()
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, grad_norm: Any, *_: Any, **__: Any) -> None:
        if self._micro_losses:  # Trainer comes here once more at the end
            loss = torch.stack(self._micro_losses).sum()
            parts = {
                name: torch.stack([part[name] for part in self._micro_parts]).sum() * world_size()
                for name in self._micro_parts[0]
            }
            self._micro_losses.clear()
            self._micro_parts.clear()
            gradient = grad_norm if isinstance(grad_norm, Tensor) else torch.as_tensor(grad_norm)
            self.after_step(self, self.state.global_step, StepLoss(loss, parts), gradient.detach())

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = make_optimizer(self.model, self.settings)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = make_scheduler(self.optimizer, self.settings)
        return self.lr_scheduler

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """A model in shards needs no other wrapping, which Accelerate must be told before it does it."""
        if is_sharded(model):
            return self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        return super()._wrap_model(model, training, dataloader)

    @property
    def plain_model(self) -> PreTrainedModel:
        """The model itself, neither compiled nor in DDP's wrapping."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    def stop(self) -> None:
        self.control.should_training_stop = True

    # Checkpoints

    def remember(self, watch: LossWatch, seconds: float) -> None:
        """Bring the run's memory up to date; every process must call this."""
        scaler = self.accelerator.scaler
        self.memory.step, self.memory.seconds, self.memory.watch = self.state.global_step, seconds, watch.state()
        self.memory.random = gather_objects(random_state())
        self.memory.scaler = None if scaler is None else scaler.state_dict()

    def gather_weights(self) -> dict[str, Tensor] | None:
        """The weights where they are in shards or have LoRA beside them, else None; every process must call this."""
        model = self.plain_model
        return gather_weights(model) if is_sharded(model) or has_lora(model) else None

    def gather_optimizer(self) -> dict[str, Tensor]:
        """The optimiser's states; every process must call this."""
        return gather_optimizer(self.plain_model, self.raw_optimizer)

    def fill_checkpoint(
        self, folder: Path, weights: Mapping[str, Tensor] | None, optimizer: Mapping[str, Tensor]
    ) -> None:
        """Write all that a resumed run needs; the folder is one for `from_pretrained` too."""
        self.save_weights(folder, weights)
        if weights is not None and has_lora(self.plain_model):
            save_apart(weights, folder)
        save_optimizer(optimizer, folder)
        self.state.save_to_json(str(folder / TRAINER_STATE_FILE))
        write_json(folder / STATE_FILE, vars(self.memory))

    def save_weights(self, folder: Path, weights: Mapping[str, Tensor] | None) -> None:
        model = self.plain_model
        if weights is not None and has_lora(model):
            weights = merge(weights)
        with using_cache(model, self.use_cache):
            model.save_pretrained(folder, state_dict=weights)
        if self.data.tokenizer is not None:
            self.data.tokenizer.save_pretrained(folder)

    @property
    def raw_optimizer(self) -> torch.optim.Optimizer:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """The model was made from the checkpoint."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_optimizer(self.plain_model, self.raw_optimizer, Path(checkpoint))
            resume_scheduler(self.lr_scheduler, self.memory.step)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self.memory.scaler is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(self.memory.scaler)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            restore_random_state(self.memory.random[rank() % len(self.memory.random)])

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Records are kept elsewhere."""


@contextmanager
def using_cache(model: PreTrainedModel, use_cache: Any) -> Iterator[None]:
    """The setting as it was before training, for what is saved."""
    training, model.config.use_cache = model.config.use_cache, use_cache
    try:
        yield
    finally:
        model.config.use_cache = training
