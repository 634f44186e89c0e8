"""Linear-time cross attention: a target token chooses a latent, and the latent has chosen among the source's tokens."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from latte.layers.checks import check_count
from latte.layers.initialization import reset_linear
from latte.layers.projections import head_width, value_heads
from latte.ops import LatteState, latte_attention
from latte.ops.checks import check_cu_seqlens, check_kind, check_mask, check_shape
from latte.ops.states import accumulation_dtype, merge


class CrossAttention(nn.Module):
    """y_t = Σ_l p(l|t) Σ_s p(s|l) v_s: t is a target token, s runs over the source.

    p(l|t) = softmax_l(latent_query(x_t)) and p(s|l) = softmax_s(latent_key(source_s)) know nothing of each other, so
    the source is summed up once, by `summarize`, in one mean of values per latent; a target token then costs the same
    however long the source was. `source_size` is the width of the source, by default the target's.

    Several pairs may lie in one row: `cu_seqlens` are the bounds of the sources for `summarize`, and of as many targets
    for the call; each target sees its own source.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_latents: int = 16,
        *,
        source_size: int | None = None,
        head_dim: int | None = None,
        num_value_heads: int | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        source_size = hidden_size if source_size is None else source_size
        for name, size in (("hidden_size", hidden_size), ("num_heads", num_heads), ("source_size", source_size)):
            check_count(name, size)
        check_count("num_latents", num_latents)
        self.hidden_size, self.source_size, self.num_heads, self.num_latents = (
            hidden_size, source_size, num_heads, num_latents
        )  # fmt: skip
        self.head_dim = head_width(hidden_size, num_heads, head_dim)
        self.num_value_heads = value_heads(num_heads, num_value_heads)
        self.latent_query = nn.Linear(hidden_size, num_heads * num_latents, bias=bias)
        self.latent_key = nn.Linear(source_size, num_heads * num_latents, bias=bias)
        self.value = nn.Linear(source_size, self.num_value_heads * self.head_dim, bias=bias)
        self.output = nn.Linear(num_heads * self.head_dim, hidden_size, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Projections are normal with variance 1 / inputs, biases 0."""
        for linear in (self.latent_query, self.latent_key, self.value, self.output):
            reset_linear(linear)

    def summarize(
        self,
        source: Float[Tensor, "B S source"],
        mask: Bool[Tensor, "B S"] | None = None,
        state: LatteState | None = None,
        cu_seqlens: Int[Tensor, " bounds"] | None = None,
    ) -> LatteState:
        """All that the target will ever see of the source: log Σ_s exp(k_s) and Σ_s p(s|l) v_s, per head and latent.

        `mask` is True at the source's real tokens. `state` is the summary of what came before: a source may come in
        pieces. Where no token is real, the means are 0. Packed sources have a row each.
        """
        check_shape("source", source, "B S C", (None, None, self.source_size))
        check_mask(mask, source.shape[0], source.shape[1])
        check_cu_seqlens(cu_seqlens, source.shape[0])
        k = self.latent_key(source).unflatten(2, (self.num_heads, -1))
        v = self.value(source).unflatten(2, (self.num_value_heads, -1))
        with torch.autocast(source.device.type, enabled=False):
            if cu_seqlens is None:
                summary = _summarize(k, v, mask)
            else:  # the state of attention among the source's tokens is what they have in common
                summary = latte_attention(k, k, v, causal=False, mask=mask, cu_seqlens=cu_seqlens).state
        if state is None:
            return summary
        check_kind("state", state, LatteState)
        axes = "B H L D" if cu_seqlens is None else "N H L D"
        check_shape("state.mean", state.mean, axes, summary.mean.shape)
        return merge(state, summary)

    def forward(
        self,
        x: Float[Tensor, "B T C"],
        state: LatteState,
        cu_seqlens: Int[Tensor, " bounds"] | None = None,
    ) -> Float[Tensor, "B T C"]:
        """y of target tokens, given `summarize(source)`; tokens do not see each other here."""
        check_shape("x", x, "B T C", (None, None, self.hidden_size))
        check_kind("state", state, LatteState)
        rows = check_cu_seqlens(cu_seqlens, x.shape[0])
        axes = "B H L D" if cu_seqlens is None else "N H L D"
        check_shape("state.mean", state.mean, axes, (rows, self.num_heads, self.num_latents, self.head_dim))
        logits = self.latent_query(x).unflatten(2, (self.num_heads, -1))
        if cu_seqlens is None:
            logits = logits.transpose(1, 2)
            p = torch.softmax(logits, dim=-1, dtype=accumulation_dtype(logits)).to(logits.dtype)
            y = (p @ state.mean.to(p.dtype)).transpose(1, 2)
        else:
            y = _read_packed(logits, state, cu_seqlens)
        return self.output(y.flatten(2))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_latents={self.num_latents}, num_value_heads={self.num_value_heads}"


def _summarize(
    k: Float[Tensor, "B S H L"], v: Float[Tensor, "B S Hv D"], mask: Bool[Tensor, "B S"] | None
) -> LatteState:
    """(Z, M) of a piece of the source; heads that share a value are summed up together."""
    batch, tokens, heads, latents = k.shape
    k = k.to(accumulation_dtype(k, v))
    if mask is not None:
        hidden = ~mask[..., None, None]
        k, v = k.masked_fill(hidden, -torch.inf), v.masked_fill(hidden, 0.0)
    if tokens == 0:
        log_norm = k.new_full((batch, heads, latents), -torch.inf)
        return LatteState(log_norm, k.new_zeros((batch, heads, latents, v.shape[3])))
    peak = k.detach().amax(dim=1)
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    weights = torch.exp(k - peak.unsqueeze(1))
    total = weights.sum(dim=1)
    seen = total > 0
    safe = torch.where(seen, total, 1.0)
    grouped = weights.permute(0, 2, 3, 1).reshape(batch, v.shape[2], -1, tokens)
    sums = (grouped @ v.transpose(1, 2).to(k.dtype)).view(batch, heads, latents, -1)
    return LatteState(torch.where(seen, peak + safe.log(), -torch.inf), sums / safe.unsqueeze(-1))


def _read_packed(
    logits: Float[Tensor, "one T H L"], state: LatteState, cu_seqlens: Int[Tensor, " bounds"]
) -> Float[Tensor, "one T H D"]:
    """Σ_l p(l|t) M_l with the means of t's own sequence: attention to a past, by tokens that add nothing to it."""
    keys = torch.full_like(logits, -torch.inf, requires_grad=False)
    values = logits.new_zeros((1, logits.shape[1], 1, state.mean.shape[3]))
    with torch.autocast(logits.device.type, enabled=False):
        return latte_attention(logits, keys, values, causal=False, state=state, cu_seqlens=cu_seqlens).y
