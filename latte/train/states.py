"""Optimiser, scheduler and random states as safetensors and JSON: nothing that is loaded can run code."""

import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from latte.train.distributed import is_main

OPTIMIZER_FILE = "optimizer.safetensors"


def whole(x: Tensor) -> Tensor:
    """A tensor with all its shards, gathered from every process: all of them must call this."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def share_like(x: Tensor, model: Tensor) -> Tensor:
    """Of a whole tensor, what this process holds of `model`; a scalar stays as it is."""
    if not isinstance(model, DTensor) or x.ndim == 0:
        return x
    return distribute_tensor(x.to(model.device), model.device_mesh, model.placements, src_data_rank=None)


def gather(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors whole and in CPU memory, in the first process; the others help, and get nothing."""
    gathered = {}
    for name, tensor in tensors:
        tensor = whole(tensor.detach())
        if is_main():
            gathered[name] = tensor.cpu().contiguous()
    return gathered


def gather_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers; tied ones once."""
    named: dict[int, tuple[str, Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        named.setdefault(id(value), (name, value))
    return gather(named.values())


def gather_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """State tensors by `parameter/state`."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return gather(
        (f"{names[parameter]}/{key}", value)
        for parameter, states in optimizer.state.items()
        for key, value in states.items()
    )


def save_optimizer(states: Mapping[str, Tensor], folder: Path) -> None:
    save_file(dict(states), folder / OPTIMIZER_FILE)


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Put saved states into the optimiser; raises ValueError unless they are of the same parameters."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with safe_open(folder / OPTIMIZER_FILE, framework="pt") as file:
        keys: dict[str, list[str]] = {}
        for key in file.keys():  # noqa: SIM118 - it is no mapping
            parameter, _, state = key.rpartition("/")
            keys.setdefault(parameter, []).append(state)
        expected = {names[parameter] for parameter in ordered}
        if keys and set(keys) != expected:
            odd = sorted(set(keys) ^ expected)
            raise ValueError(f"{folder.name} has optimiser states of other parameters: {', '.join(odd[:3])} …")
        states = {
            index: {
                state: share_like(file.get_tensor(f"{names[parameter]}/{state}"), parameter)
                for state in keys.get(names[parameter], [])
            }
            for index, parameter in enumerate(ordered)
        }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": {i: state for i, state in states.items() if state}, "param_groups": groups})


def random_state() -> dict[str, Any]:
    """Of this process's generators: Python's, NumPy's and PyTorch's."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "cpu": bytes_of(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        state["cuda"] = bytes_of(torch.cuda.get_rng_state())
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensor_of(state["cpu"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensor_of(state["cuda"]))


def bytes_of(x: Tensor) -> str:
    return x.cpu().numpy().tobytes().hex()


def tensor_of(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
