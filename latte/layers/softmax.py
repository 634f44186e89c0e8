"""Softmax attention over everything seen, with keys and values that grow: what Latte is compared with."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from latte.layers.positions import sequence_numbers
from latte.ops.checks import check_cu_seqlens, check_shape


class SoftmaxState(NamedTuple):
    """Keys and values of all S positions so far."""

    keys: Float[Tensor, "B S Hv E"]
    values: Float[Tensor, "B S Hv D"]
    valid: Bool[Tensor, "B S"] | None  # False at masked positions and in padding; None: all are real


class SoftmaxRoom(NamedTuple):
    """Keys and values of up to S positions, in tensors that stay where they are; a head's lie side by side."""

    keys: Float[Tensor, "B Hv S E"]
    values: Float[Tensor, "B Hv S D"]
    valid: Bool[Tensor, "B S"]  # False at masked positions, and where nothing was written yet

    @classmethod
    def like(cls, state: SoftmaxState, positions: int) -> "SoftmaxRoom":
        """An empty one of so many positions."""
        batch, _, heads, width = state.keys.shape
        keys = state.keys.new_zeros((batch, heads, positions, width))
        values = state.values.new_zeros((batch, heads, positions, state.values.shape[3]))
        return cls(keys, values, torch.zeros((batch, positions), dtype=torch.bool, device=keys.device))

    def write_(self, place: Int[Tensor, " T"], new: SoftmaxState) -> None:
        """Put T keys and values in their places."""
        self.keys.index_copy_(2, place, new.keys.transpose(1, 2).to(self.keys.dtype))
        self.values.index_copy_(2, place, new.values.transpose(1, 2).to(self.values.dtype))
        self.valid.index_copy_(1, place, _all_or(new.valid, new.keys))

    def state(self) -> SoftmaxState:
        """The same keys and values, not copied, as `softmax_attention` takes them."""
        return SoftmaxState(self.keys.transpose(1, 2), self.values.transpose(1, 2), self.valid)


torch.serialization.add_safe_globals([SoftmaxState, SoftmaxRoom])


def softmax_attention(
    q: Float[Tensor, "B T H E"],
    k: Float[Tensor, "B T Hv E"],
    v: Float[Tensor, "B T Hv D"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = True,
    mask: Bool[Tensor, "B T"] | None = None,
    state: SoftmaxState | None = None,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
) -> Float[Tensor, "B T H D"]:
    """y_t = Σ_{s≤t} softmax_s(cap(scale · q_t·k_s)) v_s, by PyTorch's own kernels.

    Without mask, packing, softcap and state there is no [T T] tensor; with one of them there is. Masked positions give
    y = 0 and influence nothing.
    """
    tokens = q.shape[1]
    if mask is not None:  # what stands in masked positions may be anything
        k, v = (x.masked_fill(~mask[..., None, None], 0.0) for x in (k, v))
    plain = mask is None and cu_seqlens is None and (state is None or state.valid is None)
    visible, triangle = None, causal and state is None
    if not plain or (causal and state is not None and tokens != 1):
        triangle, visible = False, _visible(tokens, causal, mask, state, cu_seqlens, q)
    if state is not None:
        k, v = (
            torch.cat([past.reshape(x.shape[0], -1, *x.shape[2:]).to(x.dtype), x], dim=1)
            for past, x in ((state.keys, k), (state.values, v))
        )
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if softcap is not None:
        y = _capped(q, k, v, scale, softcap, visible, triangle)
    else:
        y = F.scaled_dot_product_attention(
            q, k, v, visible, is_causal=triangle, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    y = y.transpose(1, 2)
    return y if mask is None else y.masked_fill(~mask[..., None, None], 0.0)


def check_past(state: SoftmaxState, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None) -> None:
    """Raise ValueError unless `state` has heads and widths as k and v, and a row for each sequence."""
    rows = check_cu_seqlens(cu_seqlens, k.shape[0])
    check_shape("state.keys", state.keys, "B S Hv E", (rows, None, *k.shape[2:]))
    check_shape("state.values", state.values, "B S Hv D", (rows, state.keys.shape[1], *v.shape[2:]))


def advance_softmax(
    state: SoftmaxState | None,
    k: Float[Tensor, "B T Hv E"],
    v: Float[Tensor, "B T Hv D"],
    mask: Bool[Tensor, "B T"] | None = None,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
) -> SoftmaxState:
    """The state after k and v. Packed sequences have a row each, as wide as the packed row: padding is not valid."""
    if mask is not None:
        k, v = (x.masked_fill(~mask[..., None, None], 0.0) for x in (k, v))
    if cu_seqlens is not None:
        k, v, mask = _unpack(k, v, mask, cu_seqlens)
    if state is None:
        return SoftmaxState(k, v, mask)
    valid = None
    if mask is not None or state.valid is not None:
        valid = torch.cat([_all_or(state.valid, state.keys), _all_or(mask, k)], dim=1)
    return SoftmaxState(torch.cat([state.keys, k], dim=1), torch.cat([state.values, v], dim=1), valid)


def extend_softmax_(
    q: Float[Tensor, "B T H E"],
    k: Float[Tensor, "B T Hv E"],
    v: Float[Tensor, "B T Hv D"],
    room: SoftmaxRoom,
    seen: Int[Tensor, ""],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    mask: Bool[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T H D"]:
    """Causal `softmax_attention` of T tokens that are written behind the `seen` in `room`, and read there.

    Of keys and values nothing is copied: heads that share them are further queries of one head. All of the room is
    read, whatever `seen` is, so that a CUDA graph can be replayed as it grows.
    """
    batch, tokens, heads, width = q.shape
    check_past(room.state(), k, v)
    place = seen + torch.arange(tokens, device=q.device)
    room.write_(place, advance_softmax(None, k, v, mask))
    visible = room.valid[:, None, None]
    if tokens > 1 or mask is not None:  # a masked token sees itself, so that no row is empty
        order = torch.arange(visible.shape[3], device=q.device)
        visible = (visible & (order <= place[:, None])) | (order == place[:, None])
    shared = heads // k.shape[2]
    if visible.shape[2] > 1:
        visible = visible.repeat(1, 1, shared, 1)
    q = q.transpose(1, 2).reshape(batch, k.shape[2], shared * tokens, width).to(room.keys.dtype)
    if softcap is not None:
        y = _capped(q, room.keys, room.values, scale, softcap, visible, triangle=False)
    else:
        y = F.scaled_dot_product_attention(q, room.keys, room.values, visible, scale=scale)
    y = y.reshape(batch, heads, tokens, v.shape[3]).transpose(1, 2).to(v.dtype)
    return y if mask is None else y.masked_fill(~mask[..., None, None], 0.0)


def _all_or(valid: Tensor | None, keys: Tensor) -> Tensor:
    return torch.ones(keys.shape[:2], dtype=torch.bool, device=keys.device) if valid is None else valid


def _unpack(k: Tensor, v: Tensor, mask: Tensor | None, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of each packed sequence in a row of its own, and which of them are real."""
    tokens = k.shape[1]
    place = cu_seqlens[:-1, None] + torch.arange(tokens, device=k.device)
    real = place < cu_seqlens[1:, None]
    place = place.clamp(max=max(tokens - 1, 0))
    if mask is not None:
        real = real & mask[0, place]
    return k[0, place], v[0, place], real


def _visible(
    tokens: int, causal: bool, mask: Tensor | None, state: SoftmaxState | None, cu_seqlens: Tensor | None, like: Tensor
) -> Tensor:
    """[B 1 T S+T] True where a token may see a position of the past or of this call; each sees itself at least."""
    place = torch.arange(tokens, device=like.device)
    new = place[:, None] >= place if causal else place.new_ones((tokens, tokens), dtype=torch.bool)
    sequence = None if cu_seqlens is None else sequence_numbers(cu_seqlens, tokens)
    if sequence is not None:
        new = new & (sequence[:, None] == sequence)
    new = new.unsqueeze(0)
    if mask is not None:  # a masked token sees itself, so that no row is empty
        new = new & mask[:, None] | torch.eye(tokens, dtype=torch.bool, device=like.device)
    if state is not None:
        past = _all_or(state.valid, state.keys).unsqueeze(1)
        if sequence is not None:
            own = sequence[:, None] == torch.arange(past.shape[0], device=like.device)
            past = (own[..., None] & past.squeeze(1)).flatten(1).unsqueeze(0)
        rows = max(past.shape[0], new.shape[0])
        new = torch.cat([past.expand(rows, tokens, -1), new.expand(rows, -1, -1)], dim=2)
    return new.unsqueeze(1)


def _capped(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, softcap: float, visible: Tensor | None, triangle: bool
) -> Tensor:
    """Attention whose scores are softcap · tanh(score / softcap); PyTorch's kernels have no such cap."""
    if (groups := q.shape[1] // k.shape[1]) > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(2, 3)
    scores = softcap * torch.tanh(scores.to(torch.promote_types(scores.dtype, torch.float32)) / softcap)
    if triangle:
        visible = scores.new_ones(scores.shape[2:], dtype=torch.bool).tril()
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return torch.softmax(scores, dim=-1).to(v.dtype) @ v
