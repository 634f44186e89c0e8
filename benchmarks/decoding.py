"""One more token: our models with their own static cache, and the transformer at its strongest.

A transformer's cache in a CUDA graph needs a fixed size. One that is larger than the context costs a mask and wasted
reads, so here it is exactly as long as the context: the step writes its key and value into the last place and reads
all of them without a mask, as a kernel made for the purpose would.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, StaticCache

from benchmarks.models import Entry, Model, random_tokens
from latte.layers import AttentionState, SoftmaxState
from latte.models.cache import StateLayer, tensors
from latte.models.rollback import Step

CHUNK = 8192  # tokens of a context that are read at once


class ExactLayer(StateLayer):
    """Keys and values of a context of exactly `length` tokens, of which the step's own is the last."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        batch, length = keys.shape[:2]
        self.keys_first, self.values_first = (x.transpose(1, 2).contiguous() for x in (keys, values))  # [B Hv S E]
        position = torch.full((batch,), length - 1, device=keys.device)
        self.state = AttentionState(None, SoftmaxState(self.keys_first, self.values_first, None), position)
        self.seen, self.is_initialized = length - 1, True
        for x in (self.keys_first, self.values_first):
            torch._dynamo.mark_dynamic(x, 2)  # one graph for all contexts

    def advance(self, attention: Any, step: Step) -> Tensor:
        q, k, v = attention._scores(step.x, step.x, None, None, None, None, step.rotary)
        self.keys_first[:, :, -1:].copy_(k.transpose(1, 2))
        self.values_first[:, :, -1:].copy_(v.transpose(1, 2))
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), self.keys_first, self.values_first, enable_gqa=q.shape[2] != k.shape[2]
        )
        return attention.output(y.transpose(1, 2).flatten(2))


def exact_cache(model: Model, states: list[tuple[Tensor, Tensor]]) -> Cache:
    cache = DynamicCache(config=model.config)
    cache.layers[:] = [ExactLayer(keys, values) for keys, values in states]
    return cache


def context_bytes(model: Model, batch: int, length: int, element: int = 2) -> int:
    """Bytes of a transformer's keys and values."""
    config = model.config
    return 2 * config.num_hidden_layers * batch * length * config.num_value_heads * config.head_dim * element


def random_context(model: Model, batch: int, length: int, device: str, dtype: torch.dtype) -> Cache:
    """A transformer's cache after `length` − 1 tokens that nobody read: random keys and values take as long."""
    config, generator = model.config, torch.Generator(device).manual_seed(2)
    shape = (batch, length, config.num_value_heads, config.head_dim)

    def draw() -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    return exact_cache(model, [(draw(), draw()) for _ in range(config.num_hidden_layers)])


class Reader:
    """Our model with its static cache, and how far it has read."""

    def __init__(self, model: Model, batch: int, device: str) -> None:
        self.model, self.batch, self.device = model, batch, device
        self.cache = StaticCache(config=model.config, max_cache_len=1)  # nothing in it depends on a length

    @property
    def seen(self) -> int:
        return int(self.cache.get_seq_length())

    def copy(self) -> Cache:
        """The cache as it is now, while this one reads on."""
        return deepcopy(self.cache)

    @torch.no_grad()
    def read(self, length: int) -> None:
        """Random tokens until `length` were read, a chunk at a time."""
        while self.seen < length:
            tokens = random_tokens(self.model, self.batch, min(CHUNK, length - self.seen), self.device)
            self.model(input_ids=tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)


def make_step(model: Model, cache: Cache, batch: int, device: str, forward: Any = None) -> Callable[[], Tensor]:
    """Reads its last token and chooses the likeliest next one, in tensors that stay where they are.

    `forward` is the model as a compiler made it.
    """
    token = random_tokens(model, batch, 1, device)
    run = model if forward is None else forward

    @torch.no_grad()
    def step() -> Tensor:
        logits = run(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        token.copy_(logits[:, -1].argmax(dim=-1, keepdim=True))
        return logits

    return step


def capture(step: Callable) -> torch.cuda.CUDAGraph:
    """The step as a CUDA graph; it runs a few times first, on a stream of its own, and compiles if it has to."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def state_layers(cache: Cache) -> list[Any]:
    return cache.layers


def cache_bytes(cache: Cache) -> int:
    """Bytes of all tensors that the layers' states hold."""
    return sum(x.numel() * x.element_size() for layer in state_layers(cache) for x in tensors(layer.state))


@torch.no_grad()
def decoding_error(entry: Entry, model: Model, device: str, length: int = 300) -> float:
    """How far the last token's logits by way of the measured cache are from those of the whole sequence at once."""
    tokens, steps = random_tokens(model, 2, length, device), 1
    whole = model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits
    if entry.is_ours:
        cache: Cache = StaticCache(config=model.config, max_cache_len=1)
        steps = 3  # each reads what those before have written
        model(input_ids=tokens[:, :-steps], past_key_values=cache, use_cache=True, logits_to_keep=1)
    else:
        read = DynamicCache(config=model.config)
        model(input_ids=tokens[:, :-1], past_key_values=read, use_cache=True, logits_to_keep=1)
        states = [layer.state.attention for layer in state_layers(read)]
        room = (0, 0, 0, 0, 0, 1)  # for the last token
        cache = exact_cache(model, [(F.pad(state.keys, room), F.pad(state.values, room)) for state in states])
    *_, logits = (
        model(input_ids=tokens[:, place : place + 1], past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        for place in range(length - steps, length)
    )
    return float((logits - whole).double().norm() / whole.double().norm())
