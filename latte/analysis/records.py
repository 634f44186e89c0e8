"""What the report keeps of every token: small integers, from which a browser computes attention again."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from latte.analysis.projections import LayerForm, Projected

NEAREST = 8
"""Of softmax attention, windowed or full, the report keeps each token's so many largest weights."""

STEPS = 65_535  # what 16 bits can tell apart
DISTANCES = 65_536  # in 16 bits; among so few tokens a distance ahead is told from one back
QUERIES = 256  # rows of scores that are made at once


@dataclass(frozen=True)
class LayerRecord:
    """One layer's attention over the first T tokens of a text, in 16 bits a number; None where it has no such part.

    Probabilities are in steps of 1/65535. Key logits of a head's latent are low + step · number; what a constant adds
    to all of them does not matter, and their error is half a step.
    """

    form: LayerForm
    states: np.ndarray | None  # [H T S] p(l|t)
    keys: np.ndarray | None  # [H T L] key logits
    key_low: np.ndarray | None  # [H L] float32
    key_step: np.ndarray | None
    near_distance: np.ndarray | None  # [H T K] how far back the largest softmax weights lie, largest first, mod 2^16
    near_weight: np.ndarray | None  # [H T K] those weights; 0 where there are fewer tokens


class Recorder:
    """Makes a layer's record from the pieces of a text, up to `limit` tokens."""

    def __init__(self, form: LayerForm, limit: int) -> None:
        self.form, self.left = form, limit
        self.states: list[np.ndarray] = []
        self.keys: list[Tensor] = []
        self.near: list[tuple[np.ndarray, np.ndarray]] = []
        self.past: Tensor | None = None

    def add(self, projected: Projected) -> None:
        if not self.left:
            return
        latent_query, latent_key, query, key = (None if x is None else x[: self.left] for x in projected)
        self.left -= len(next(x for x in (latent_query, query) if x is not None))
        if latent_query is not None and latent_key is not None:
            self.states.append(sixteen_bits(torch.softmax(latent_query.float(), dim=-1).transpose(0, 1)))
            self.keys.append(latent_key.float().cpu())
        if query is not None and key is not None:
            self._add_near(query.float(), key.float())

    def record(self) -> LayerRecord:
        states = np.concatenate(self.states, axis=1) if self.states else None
        keys, low, step = quantized_keys(torch.cat(self.keys)) if self.keys else (None, None, None)
        near = [np.concatenate(parts, axis=1) for parts in zip(*self.near, strict=True)] or [None, None]
        return LayerRecord(self.form, states, keys, low, step, near[0], near[1])

    def _add_near(self, query: Tensor, key: Tensor) -> None:
        keys = key if self.past is None else torch.cat([self.past, key])
        before = len(keys) - len(key)
        for start in range(0, len(query), QUERIES):
            block = query[start : start + QUERIES]
            first = before + start  # the place of the block's first token among the keys
            begin = 0 if self.form.window is None else max(0, first - self.form.window + 1)
            ahead = 0 if self.form.causal else len(keys) if self.form.window is None else self.form.window - 1
            self.near.append(self._nearest(block, keys[begin : first + len(block) + ahead], first - begin))
        kept = len(keys) if self.form.window is None else self.form.window - 1
        self.past = keys[max(0, len(keys) - kept) :]

    def _nearest(self, query: Tensor, keys: Tensor, first: int) -> tuple[np.ndarray, np.ndarray]:
        """The largest of softmax_s(cap(scale · q·k_s)) of a block of queries, of which the first stands at `first`."""
        groups = query.unflatten(1, (keys.shape[1], -1))
        scale = query.shape[-1] ** -0.5 if self.form.scale is None else self.form.scale
        scores = torch.einsum("tkge,ske->kgts", groups, keys).flatten(0, 1) * scale
        if self.form.softcap is not None:
            scores = self.form.softcap * torch.tanh(scores / self.form.softcap)
        own = first + torch.arange(len(query), device=query.device)
        distance = own[:, None] - torch.arange(len(keys), device=query.device)
        hidden = distance.abs() >= (self.form.window or len(keys))
        if self.form.causal:
            hidden |= distance < 0
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
        largest, place = torch.nn.functional.pad(weights, (0, max(0, NEAREST - len(keys)))).topk(NEAREST)
        distances = torch.where(largest > 0, own[:, None] - place, 0) % DISTANCES
        return distances.cpu().numpy().astype(np.uint16), sixteen_bits(largest)


def sixteen_bits(p: Tensor) -> np.ndarray:
    return (p * STEPS).round().cpu().numpy().astype(np.uint16)


def quantized_keys(keys: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Key logits [T H L] as integers [H T L], and the lowest and the step of every head's latent."""
    low, high = keys.amin(dim=0), keys.amax(dim=0)
    step = ((high - low) / STEPS).clamp(min=torch.finfo(torch.float32).tiny)
    numbers = ((keys - low) / step).round().clamp(0, STEPS)
    return numbers.transpose(0, 1).numpy().astype(np.uint16), low.numpy(), step.numpy()


def bytes_per_token(forms: list[LayerForm]) -> int:
    """What the records of all layers take for a token."""
    total = 0
    for form in forms:
        latents = 0 if form.num_latents is None else form.num_latents + form.num_states
        near = 0 if form.window is None and form.num_latents is not None else 2 * NEAREST
        total += 2 * form.num_heads * (latents + near)
    return total
