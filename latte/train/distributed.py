"""Several processes as one: what one of them does for all, and a model in shards."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

T = TypeVar("T")


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def is_main() -> bool:
    return rank() == 0


def launched_rank() -> int:
    """The process's number before processes know each other: torchrun and accelerate say it."""
    return int(os.environ.get("RANK", "0"))


def leave() -> None:
    """End what processes have in common; PyTorch's threads for it may abort a process that ends without."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def on_main(function: Callable[[], T]) -> T:
    """Run a function in the first process; all processes get its result, or its error."""
    if world_size() == 1:
        return function()
    outcome: list[Any] = [None, None]
    if is_main():
        try:
            outcome[0] = function()
        except (ValueError, OSError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def gather_objects(value: T) -> list[T]:
    """Of every process, in order."""
    if world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def sum_over_processes(x: Tensor) -> Tensor:
    """The sum of a tensor that every process has one of."""
    if world_size() > 1:
        dist.all_reduce(x)
    return x


def any_process(flag: bool, device: torch.device) -> bool:
    """Whether the flag is up in some process."""
    if world_size() == 1:
        return flag
    return bool(sum_over_processes(torch.tensor(float(flag), device=device)))


def shard(model: nn.Module, device: torch.device) -> None:
    """Split a model's parameters among all processes (FSDP2): a unit per layer, and one of what is left."""
    mesh = init_device_mesh(device.type, (world_size(),))
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if hasattr(model, "generate"):
        register_fsdp_forward_method(model, "generate")


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers that a model says must not be split, which are the ones that repeat."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)
