"""One more token in PyTorch, in place: no more operations than the formula has, since each one has its price."""

import torch
from torch import Tensor

from latte.ops.rounding import round_to
from latte.ops.states import LatteState, WindowState


def mixture_step(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    window_q: Tensor | None,
    window_k: Tensor | None,
    latents: LatteState | None,
    past: WindowState | None,
    turn: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    mask: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """y [B 1 H D] of one token; the states of latents and window are advanced where they lie."""
    if past is None and latents is None:
        raise ValueError("neither latents nor past is given; a step needs the state of one of them")
    value = v[:, 0] if mask is None else v[:, 0].masked_fill(~mask[..., None], 0.0)
    y = local = None
    if past is not None and window_q is not None and window_k is not None:
        key = window_k[:, 0] if mask is None else window_k[:, 0].masked_fill(~mask[..., None], 0.0)
        local = window_mean(window_q[:, 0], key, value, past, scale, softcap, dtype)
        if turn is None:
            move_window(past, key, value, mask)
        else:
            turn_window(past, turn, key, value, mask)
        y = local
    if latents is not None and q is not None and k is not None:
        new = k[:, 0].to(dtype) if mask is None else k[:, 0].to(dtype).masked_fill(~mask[..., None], -torch.inf)
        advance_latents(latents, new, value.to(dtype))
        shares = torch.softmax(q[:, 0].to(dtype), dim=-1)
        own = shares if local is None else shares[..., 1:]
        y = torch.matmul(own.unsqueeze(2), latents.mean.to(dtype)).squeeze(2)
        if local is not None:
            y = torch.addcmul(y, shares[..., :1], local)
    if y is None:
        raise ValueError("a state is given without its queries and keys; give q and k, or window_q and window_k")
    if mask is not None:
        y = y.masked_fill(~mask[..., None], 0.0)
    return y.to(v.dtype).unsqueeze(1)


def window_mean(
    q: Tensor, key: Tensor, value: Tensor, past: WindowState, scale: float, softcap: float | None, dtype: torch.dtype
) -> Tensor:
    """Σ_s a_s v_s [B H D] over the past positions that are valid and the token itself."""
    value_heads = key.shape[1]
    grouped = q.to(dtype).unflatten(1, (value_heads, q.shape[1] // value_heads)) * scale
    scores = torch.cat(
        [
            torch.matmul(grouped, past.keys.to(dtype).permute(0, 2, 3, 1)),
            torch.matmul(grouped, key.to(dtype).unsqueeze(3)),
        ],
        dim=3,
    )
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores[..., :-1].masked_fill_(~past.valid[:, None, None], -torch.inf)
    weights = torch.softmax(scores, dim=3)
    mean = torch.matmul(weights[..., :-1], past.values.to(dtype).transpose(1, 2))
    return torch.addcmul(mean, weights[..., -1:], value.to(dtype).unsqueeze(2)).flatten(1, 2)


def move_window(past: WindowState, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """The oldest position leaves, the token's own comes in."""
    if past.valid.shape[1] == 0:
        return
    for kept, new in ((past.keys, key), (past.values, value)):
        kept.copy_(torch.cat([kept[:, 1:], round_to(new, kept.dtype).unsqueeze(1)], dim=1))
    real = past.valid.new_ones((past.valid.shape[0], 1)) if mask is None else mask
    past.valid.copy_(torch.cat([past.valid[:, 1:], real], dim=1))


def turn_window(past: WindowState, turn: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """The token takes the place of the oldest position, which is at `turn` in each row."""
    slots = past.valid.shape[1]
    if slots == 0:
        return
    place = (torch.arange(len(turn), device=turn.device), turn.long())
    past.keys.index_put_(place, round_to(key, past.keys.dtype))
    past.values.index_put_(place, round_to(value, past.values.dtype))
    past.valid.index_put_(place, past.valid.new_ones(len(turn)) if mask is None else mask[:, 0])
    turn.copy_((turn + 1) % slots)


def advance_latents(latents: LatteState, new: Tensor, value: Tensor) -> None:
    """Z ← log(exp Z + exp k), M ← exp(Z_old − Z) M + exp(k − Z) v; nothing changes where both are −inf."""
    norm = torch.logaddexp(latents.log_norm, new)
    safe = norm.masked_fill(norm == -torch.inf, 0.0)
    kept, added = torch.exp(latents.log_norm - safe), torch.exp(new - safe)
    groups = new.shape[1] // value.shape[1]
    if groups > 1:
        value = value.repeat_interleave(groups, dim=1)
    latents.mean.mul_(kept.unsqueeze(3)).add_(added.unsqueeze(3) * value.unsqueeze(2))
    latents.log_norm.copy_(norm)
