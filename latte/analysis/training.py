"""How latents were used as a model learned, from the metrics that a training run has written."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class UsageHistory:
    """Usage at N steps of training, for each of the layers with latents."""

    steps: list[int]
    names: list[str]
    effective_latents: Tensor  # [N layers H]
    window_share: Tensor | None  # the same; None without windows
    collapsed: Tensor  # the same, bool
    idle: Tensor  # the same, bool


def read_usage_history(path: Path) -> UsageHistory:
    """The usage in a run's metrics.jsonl.

    Lines that count have a "step", "usage" for a "split" and, as "layers", a list of `LayerUsage.record()`.
    """
    try:
        return _history(path, [record for record in map(json.loads, _lines(path)) if record.get("split") == "usage"])
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path} is no metrics.jsonl as a training run writes it: {error!r}") from error


def _history(path: Path, records: list[dict[str, Any]]) -> UsageHistory:
    if not records:
        raise ValueError(f"{path}: no line is of the usage of latents; the run's model has none, or was not evaluated")
    layers = [record["layers"] for record in records]
    windows = all(layer.get("window_share") is not None for layer in layers[0])
    return UsageHistory(
        [record["step"] for record in records], [layer["layer"] for layer in layers[0]],
        _numbers(layers, "effective_latents"), _numbers(layers, "window_share") if windows else None,
        _numbers(layers, "collapsed").bool(), _numbers(layers, "idle").bool(),
    )  # fmt: skip


def _lines(path: Path) -> list[bytes]:
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file; name the metrics.jsonl of a training run")
    return [line for line in path.read_bytes().split(b"\n") if line.strip()]  # texts may have other ends of lines


def _numbers(layers: list[list[dict[str, Any]]], word: str) -> Tensor:
    return torch.tensor([[layer[word] for layer in step] for step in layers], dtype=torch.float32)
