"""Conversion with one shard of the output in memory at a time, by the names of the weights."""

import copy
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig

from latte.convert.folder import saving
from latte.convert.latents import begin_latents, new_parameters
from latte.convert.model import empty_model
from latte.convert.source import check_placed
from latte.models import LatteConvertedConfig
from latte.models.families import find_family
from latte.models.loading import INDEX, read_weight_map

WHOLE = "model.safetensors"
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROWS = 1024  # of two tensors that are compared


class StoredWeights:
    """The tensors of a checkpoint in safetensors, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = self._files()

    def _files(self) -> dict[str, str]:
        """The file that each tensor is in."""
        if (self.folder / INDEX).is_file():
            return read_weight_map(self.folder / INDEX)
        if not (self.folder / WHOLE).is_file():
            raise ValueError(f"{self.folder} has no {WHOLE} and no {INDEX}, which --low-memory reads; leave it out")
        with safe_open(self.folder / WHOLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), WHOLE)

    def read(self, name: str) -> Tensor:
        if name not in self.files:
            raise ValueError(f"{self.folder} has no tensor {name}; copy the model again")
        with safe_open(self.folder / self.files[name], framework="pt") as file:
            return file.get_tensor(name)

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors are equal, found without holding either of them."""
        with (
            safe_open(self.folder / self.files[one], framework="pt") as file,
            safe_open(self.folder / self.files[other], framework="pt") as another,
        ):
            x, y = file.get_slice(one), another.get_slice(other)
            if x.get_shape() != y.get_shape():
                return False
            parts = (slice(row, row + ROWS) for row in range(0, x.get_shape()[0], ROWS))
            return all(torch.equal(x[rows], y[rows]) for rows in parts)

    @cached_property
    def dtype(self) -> torch.dtype:
        """That of the first tensor of floating point."""
        return next(x.dtype for x in map(self.read, self.files) if x.is_floating_point())


class StreamedConversion:
    """The converted model's tensors, made one after another from the source's."""

    def __init__(self, folder: Path, config: LatteConvertedConfig, dtype: torch.dtype | None) -> None:
        self.stored = StoredWeights(folder)
        self.dtype: Any = dtype or config.dtype or self.stored.dtype
        config.dtype = self.dtype
        if config.tie_word_embeddings and self.stored.files.keys() >= {EMBEDDINGS, HEAD}:
            config.tie_word_embeddings = self.stored.same(EMBEDDINGS, HEAD)
        self.model = empty_model(config)
        self.family = find_family(self.model.model.config)
        self.new = set(new_parameters(self.model))
        self.tensors = self.model.state_dict()
        if config.tie_word_embeddings:
            del self.tensors[HEAD]
        strangers = self.stored.files.keys() - self.model.state_dict().keys()
        if strangers and self.tensors.keys() - self.new - self.stored.files.keys():
            other = min(strangers)
            raise ValueError(f"{folder} has other names, such as {other}, than --low-memory knows; leave it out")
        check_placed(strangers, str(folder))
        self._latents: dict[str, Tensor] = {}

    @property
    def size(self) -> int:
        return sum(map(self.bytes_of, self.tensors))

    def bytes_of(self, name: str) -> int:
        width = torch.float32 if name.endswith("a_param") else self.dtype
        return self.tensors[name].numel() * width.itemsize

    def make(self, name: str) -> Tensor:
        """A tensor of the converted model, as it is to be saved."""
        if name not in self.new:
            return self._read(name).to(self.dtype)
        if name not in self._latents:
            self._latents = self._layer_latents(name.partition(f".{self.family.attention}.")[0])
        return self._latents[name]

    def _read(self, name: str) -> Tensor:
        tensor, wanted = self.stored.read(name), self.tensors[name].shape
        if tensor.shape != wanted:
            raise ValueError(
                f"{self.stored.folder}: {name} is {list(tensor.shape)} in the weights, {list(wanted)} by config.json; "
                "weights and config.json are of different models, copy both again"
            )
        return tensor

    def _layer_latents(self, layer: str) -> dict[str, Tensor]:
        """The new weights of a layer."""
        attention: Any = copy.deepcopy(self.model.get_submodule(f"{layer}.{self.family.attention}"))
        begin_latents(attention, self._norm(f"{layer}.{self.family.attention_norm}"), self.dtype)
        return {f"{layer}.{self.family.attention}.{name}": x.data for name, x in new_parameters(attention).items()}

    def _norm(self, name: str) -> nn.Module:
        norm = copy.deepcopy(self.model.get_submodule(name))
        weights = {part: self.make(f"{name}.{part}") for part in norm.state_dict()}
        norm.load_state_dict(weights, assign=True)
        return norm


def write_streamed(conversion: StreamedConversion, out: Path, max_shard_size: int | None) -> None:
    """Write weights, settings and generation settings into `out`; a shard is what is in memory at a time."""
    shards = plan_shards(conversion, max_shard_size)
    count = len(shards)
    files = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)] if count > 1 else [WHOLE]
    for file, names in zip(files, shards, strict=True):
        tensors = {name: conversion.make(name) for name in names}
        with saving():
            save_file(tensors, out / file, metadata={"format": "pt"})
    if count > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": conversion.size}, "weight_map": weight_map}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    conversion.model.save_settings(out)
    generation_config(conversion.stored.folder, conversion.model.config).save_pretrained(out)


def plan_shards(conversion: StreamedConversion, max_shard_size: int | None) -> list[list[str]]:
    """Names of the tensors of each file, in order; by default a file has room for the largest layer."""
    limit = largest_layer(conversion) if max_shard_size is None else max_shard_size
    shards: list[list[str]] = []
    room = -1
    for name in conversion.tensors:
        size = conversion.bytes_of(name)
        if size > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards


def largest_layer(conversion: StreamedConversion) -> int:
    layers = conversion.model.model.layers
    return max(
        sum(conversion.bytes_of(f"model.layers.{index}.{name}") for name in layer.state_dict())
        for index, layer in enumerate(layers)
    )


def generation_config(folder: Path, config: Any) -> GenerationConfig:
    if (folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_model_config(config)
