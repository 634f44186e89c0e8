"""The cache: a layer's `AttentionState` behind the interface that Transformers' `generate` knows.

`DynamicCache(config=…)` and `StaticCache(config=…)` look a layer type up in two tables, where ours is entered below.
Dynamic layers replace their state, but for one token, which is written to its tensors. Those of static layers stay
where they are, as CUDA graphs need it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
)

from latte.layers import AttentionOutput, AttentionState, LatteAttention, SoftmaxRoom, SoftmaxState, StepCounters
from latte.models.configuration import STATE_LAYER, LatteConfig
from latte.models.rollback import Recording, Step, map_tensors
from latte.ops import MacchiatoState, WindowState
from latte.ops.window_state import in_order


class StateLayer(CacheLayerMixin):
    """One layer's state. Its size does not depend on how much was read, unless attention is full."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.state: AttentionState | None = None
        self.counters: StepCounters | None = None
        self.seen = 0
        self.record_past = False
        self.recording: Recording | None = None

    def advance(self, attention: LatteAttention, step: Step) -> Tensor:
        """The attention's output for the next tokens; the state moves on."""
        if self.recording is None and self.state is not None and attention.has_step and self._steps(step):
            y = attention.step_(step.x, self.state, step.mask, step.rotary, self._step_counters(self.state))
        elif self.recording is None:
            y, self.state = run(attention, step, self.state)
        else:
            y, self.state = self.recording.advance(lambda *call: run(attention, *call), self.state, step)
            if not self.record_past:
                self.recording = None
        self.is_initialized = True
        self.seen += step.x.shape[1]
        return y

    def _steps(self, step: Step) -> bool:
        """Whether one token can advance the state where it lies, which takes less time."""
        if self.state is None or step.x.shape[1] != 1 or step.cu_seqlens is not None or torch.is_grad_enabled():
            return False
        return not isinstance(self.state.attention, SoftmaxState) and all(map(may_be_written, tensors(self.state)))

    def _step_counters(self, state: AttentionState) -> StepCounters:
        """Those of the step before, if they still fit: to make them takes two launches a layer and token."""
        known, rows = self.counters, state.position
        fits = known is not None and known.arrivals.shape == rows.shape and known.seen.device == rows.device
        if known is None or not fits or not all(map(may_be_written, tensors(known))):
            arrivals = torch.zeros_like(rows, dtype=torch.int32)
            known = self.counters = StepCounters(arrivals, torch.zeros((), dtype=torch.long, device=rows.device))
        return known

    def activate_past_recording(self) -> None:
        """From now on remember enough to take tokens back with `crop`."""
        self.record_past = True
        if self.recording is None:
            self.recording = Recording(self.state)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last −`tokens_to_remove` tokens; 0 says that all those before are to stay.

        A positive number is, as in releases before 5.15, the number of tokens to keep.
        """
        if tokens_to_remove >= max(self.seen, 1):
            return
        if tokens_to_remove > 0:
            tokens_to_remove -= self.seen
        if self.recording is None:
            if tokens_to_remove:
                raise ValueError("the cache has not recorded its past; call activate_past_recording() before reading")
        elif tokens_to_remove:
            self.recording.take_back(-tokens_to_remove)
            self.seen += tokens_to_remove
        elif not self.recording.cut:
            self.recording.settle(self.state)

    def reset(self) -> None:
        """Back to before the first token."""
        self.state, self.seen, self.is_initialized = None, 0, False
        self.recording = Recording(None) if self.record_past else None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda x: x[indices.to(x.device)])

    def offload(self) -> None:
        self._map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Nothing to do: Transformers never offloads a layer whose state it does not update itself."""

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def movable_state(self) -> AttentionState | None:
        """The state as a dynamic layer can hold it."""
        return self.state

    @property
    def position(self) -> Tensor | None:
        """The number of real tokens read, for each row; None if none was."""
        if self.recording is not None and self.recording.cut:
            return self.recording.position
        return None if self.state is None else self.state.position

    @property
    def batch_size(self) -> int:
        return -1 if self.state is None else self.state.position.shape[0]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise TypeError("this cache layer holds a state, not keys and values; it is for Latte models alone")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise TypeError("this cache layer holds a state, not keys and values; it is for Latte models alone")

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        self.state = map_tensors(function, self.state)
        if self.recording is not None:
            self.recording.map(function)


class StaticStateLayer(StateLayer):
    """A state in tensors that stay where they are; full attention has room for `max_cache_len` tokens.

    The window's positions are a ring, in which a step writes one.
    """

    is_compileable = True
    is_croppable = False

    def __init__(self, max_cache_len: int, **_: Any) -> None:
        super().__init__()
        self.max_cache_len = max_cache_len
        self.seen = torch.zeros((), dtype=torch.long)
        self.arrivals = torch.zeros(0, dtype=torch.int32)  # a counter of the step in place, for each row
        self.turn = torch.zeros(0, dtype=torch.int32)  # where the ring begins, for each row
        self.fresh = True

    def advance(self, attention: LatteAttention, step: Step) -> Tensor:
        tokens = step.x.shape[1]
        if self.state is not None and not self.fresh:
            if attention.has_step and self._steps(step):
                counters = StepCounters(self.arrivals, self.seen, self.turn)
                return attention.step_(step.x, self.state, step.mask, step.rotary, counters)
            if isinstance(self.state.attention, SoftmaxRoom) and attention.causal and step.cu_seqlens is None:
                self._check_room(tokens)
                y = attention.extend_(step.x, self.state, self.seen, step.mask, step.rotary)
                self.seen.add_(tokens)
                return y
        y, state = run(attention, step, None if self.fresh else self._plain_state())
        if isinstance(state.attention, SoftmaxState):
            state = state._replace(attention=self._fill_room(state.attention, tokens))
        self._store(state)
        self.fresh = False
        self.seen.add_(tokens)
        return y

    def movable_state(self) -> AttentionState | None:
        return self._plain_state(int(self.seen))

    def _plain_state(self, positions: int | None = None) -> AttentionState | None:
        """The state as a stream takes it: positions in order, of a room its first `positions`, by default all."""
        state = self._state_in_order()
        if state is None or not isinstance(state.attention, SoftmaxRoom):
            return state
        held = state.attention.state()
        return state._replace(attention=map_tensors(lambda x: x[:, :positions], held))

    def _state_in_order(self) -> AttentionState | None:
        """The state with the oldest of the window's positions first."""
        held = None if self.state is None else self.state.attention
        if self.state is None or not isinstance(held, (WindowState, MacchiatoState)):
            return self.state
        window = in_order(WindowState(held.keys, held.values, held.valid), self.turn)
        return self.state._replace(attention=held._replace(**window._asdict()))

    def _fill_room(self, new: SoftmaxState, tokens: int) -> SoftmaxRoom:
        """The room, with the last `tokens` keys and values in their places."""
        self._check_room(tokens)
        if self.state is not None and isinstance(self.state.attention, SoftmaxRoom):
            room = self.state.attention
        else:
            room = SoftmaxRoom.like(new, self.max_cache_len)
        if self.fresh:  # what a text before has left, be it NaN, is gone
            for x in room:
                x.zero_()
        place = self.seen.to(new.keys.device) + torch.arange(tokens, device=new.keys.device)
        room.write_(place, map_tensors(lambda x: x[:, x.shape[1] - tokens :], new))
        return room

    def _check_room(self, tokens: int) -> None:
        """Raise ValueError if there are too many, where the number of those before is known without waiting."""
        if torch.compiler.is_compiling() or self.seen.device.type != "cpu":
            return
        if (needed := int(self.seen) + tokens) > self.max_cache_len:
            raise ValueError(
                f"the static cache has room for {self.max_cache_len} tokens and {needed} are read; "
                f"make it with max_cache_len={needed} or more"
            )

    def _store(self, state: AttentionState) -> None:
        if self.state is None:
            self._allocate(state)
            return
        for buffer, tensor in zip(tensors(self.state), tensors(state), strict=True):
            if buffer is not tensor:
                buffer.copy_(tensor)
        self.turn.zero_()

    def _allocate(self, state: AttentionState) -> None:
        def copied(part: Any) -> Any:
            if isinstance(part, SoftmaxRoom):  # is this layer's own already
                return part
            return map_tensors(lambda x: x.clone(memory_format=torch.contiguous_format), part)

        self.state = AttentionState(*map(copied, state))
        self.seen = self.seen.to(state.position.device)
        self.arrivals, self.turn = (torch.zeros_like(state.position, dtype=torch.int32) for _ in range(2))
        self.is_initialized = True
        if not torch.compiler.is_compiling():
            for buffer in (self.seen, self.arrivals, self.turn, *tensors(self.state)):
                torch._dynamo.mark_static_address(buffer)

    def activate_past_recording(self) -> None:
        raise ValueError("a static cache cannot take tokens back; use a dynamic one, cache_implementation=None")

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError("a static cache cannot take tokens back; use a dynamic one, cache_implementation=None")

    def reset(self) -> None:
        self.fresh = True
        self.seen.zero_()

    @property
    def position(self) -> Tensor | None:
        return None if self.fresh or self.state is None else self.state.position

    def get_seq_length(self) -> int | Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.seen if self.is_initialized else 0

    def get_max_length(self) -> int:
        return self.max_cache_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len, 0

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.state is None:
            return
        moved = map_tensors(function, self._state_in_order())
        if moved.position.shape != self.state.position.shape:  # another batch: other tensors
            self.state = None
        self._store(moved)


DYNAMIC_LAYER_TYPE_MAPPING[STATE_LAYER] = StateLayer
STATIC_LAYER_TYPE_MAPPING[STATE_LAYER] = StaticStateLayer


def state_layer(cache: Cache, index: int) -> StateLayer:
    """One layer of a cache that `check_cache` has found to be ours."""
    return cache.layers[index]  # pyright: ignore[reportReturnType]


def run(attention: LatteAttention, step: Step, state: AttentionState | None) -> AttentionOutput:
    return attention.stream(step.x, state, step.mask, step.cu_seqlens, rotary=step.rotary)


def may_be_written(x: Tensor) -> bool:
    """Whether a step may write to x: it lies as kernels expect, no graph needs it, inference mode has not sealed it."""
    frozen = not torch.compiler.is_compiling() and x.is_inference() and not torch.is_inference_mode_enabled()
    return x.is_contiguous() and not x.requires_grad and not frozen


def tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors of nested tuples, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif tree is not None:
        for part in tree:
            yield from tensors(part)


def cache_bytes(cache: Cache | None) -> int:
    """Bytes of all tensors that a cache's layers hold, ours or Transformers' own."""
    held = (x for layer in (() if cache is None else cache.layers) for x in _tensors_in(list(vars(layer).values())))
    return sum(x.numel() * x.element_size() for x in held)


def _tensors_in(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)) and not isinstance(tree, StepCounters):  # which remember nothing
        for part in tree:
            yield from _tensors_in(part)


def check_cache(cache: Any, config: LatteConfig) -> None:
    """Raise ValueError unless `cache` has a layer of ours for each of the model's layers."""
    remedy = "make one with DynamicCache(config=model.config)"
    if not isinstance(cache, Cache) or not hasattr(cache, "layers"):  # a cache of an encoder-decoder has two of them
        raise ValueError(f"past_key_values is {type(cache).__name__}; it must be a Cache with layers: {remedy}")
    if len(cache.layers) != config.num_hidden_layers:
        raise ValueError(
            f"past_key_values has {len(cache.layers)} layers and the model {config.num_hidden_layers}; "
            f"it is of another model: {remedy}"
        )
    if not isinstance(cache.layers[0], StateLayer):
        raise ValueError(
            f"past_key_values has layers of type {type(cache.layers[0]).__name__}; it is of another model: {remedy}"
        )
