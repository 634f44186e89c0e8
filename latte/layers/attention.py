"""Attention with its projections: Latte, Latte Macchiato, window and full softmax attention by configuration."""

from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from latte.layers.attention_state import AttentionOutput, AttentionState, Rotary, StepCounters
from latte.layers.checks import check_choice, check_count
from latte.layers.initialization import reset_linear
from latte.layers.mixers import make_mixer
from latte.layers.norms import RMSNorm
from latte.layers.positions import check_packing, count_tokens, token_positions
from latte.layers.projections import are_plain, head_width, project, value_heads
from latte.layers.rotary import apply_rotary, check_rotary
from latte.layers.rotary import rotary as make_rotary
from latte.layers.softmax import (
    SoftmaxRoom,
    SoftmaxState,
    advance_softmax,
    check_past,
    extend_softmax_,
    softmax_attention,
)
from latte.ops import (
    LatteState,
    MacchiatoState,
    WindowState,
    latte_attention,
    linear_attention,
    macchiato_attention,
    window_attention,
)
from latte.ops.arguments import HeadSizes
from latte.ops.checks import (
    BACKENDS,
    backend_for,
    check_kind,
    check_mask,
    check_scores,
    check_shape,
    check_sizes,
)
from latte.ops.features import FeatureMap
from latte.ops.projected import MacchiatoWeights, projected_macchiato
from latte.ops.steps import LinearWeights, Place, input_step_, mixture_step_

FEATURE_MAPS = ("elu+1", "exp", "relu")


class LatteAttention(nn.Module):
    """Linear-time attention from x to y, projections included, without norm and residual.

    | num_latents | window | what it is |
    |---|---|---|
    | L | None | Latte: attention through L latents per head |
    | L | w | Latte Macchiato: the last w tokens as one more latent, under the same softmax |
    | None | w | softmax attention over the last w tokens |
    | None | None | softmax attention over all tokens, with a state that grows |

    `mixer` ("none", "conv" of `conv_size` taps, "rglru" with gates in `mixer_blocks` blocks) feeds the latents' logits;
    without latents, the window's queries and keys, through a norm. Values come from x. They are `head_dim` wide, by
    default hidden_size / num_heads; softmax queries and keys `window_head_dim`, by default as wide as values. With
    `num_value_heads` below num_heads, heads share values and softmax keys. Softmax queries and keys have rotary
    positions unless `rope_theta` is None; latents have none. `scale`, `softcap` and `backend` are the ops'.

    With a `feature_map` ("elu+1", "exp", "relu") the latents are features, and attention is linear attention, the
    undirected model that Latte is compared with; that is without a window.

    With `one_operation` set, Macchiato's projections and attention run on a GPU as one (`latte.ops.projected`). It is
    off until it has been measured there.
    """

    one_operation = False

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_latents: int | None = 16,
        *,
        head_dim: int | None = None,
        num_value_heads: int | None = None,
        window: int | None = None,
        window_head_dim: int | None = None,
        mixer: str = "none",
        conv_size: int = 3,
        mixer_blocks: int = 16,
        causal: bool = True,
        rope_theta: float | None = 10_000.0,
        bias: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        feature_map: str | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.feature_map = feature_map
        self.hidden_size, self.num_heads, self.num_latents, self.window = hidden_size, num_heads, num_latents, window
        self._check_form(mixer, window_head_dim)
        self.head_dim = head_width(hidden_size, num_heads, head_dim)
        self.num_value_heads = value_heads(num_heads, num_value_heads)
        self.window_head_dim = self.head_dim if window_head_dim is None else window_head_dim
        check_count("window_head_dim", self.window_head_dim)
        self.rope_theta = rope_theta if self.has_scores else None
        if self.rope_theta is not None:
            check_rotary(self.window_head_dim, self.rope_theta)
        check_scores(scale, softcap)
        check_choice("backend", backend, BACKENDS)
        self.causal, self.scale, self.softcap, self.backend = causal, scale, softcap, backend
        self.mixer = make_mixer(
            mixer, hidden_size, conv_size=conv_size, blocks=mixer_blocks, causal=causal, bias=bias, backend=backend
        )
        self._make_projections(bias)
        self.reset_parameters()

    def _check_form(self, mixer: str, window_head_dim: int | None) -> None:
        check_count("hidden_size", self.hidden_size)
        check_count("num_heads", self.num_heads)
        if self.num_latents is not None:
            check_count("num_latents", self.num_latents, ", or None for softmax attention")
        if self.window is not None:
            check_count("window", self.window, " (the token itself counts), or None for none")
        if mixer != "none" and self.num_latents is None and self.window is None:
            raise ValueError(f'mixer is {mixer!r} in full attention; set num_latents or window, or mixer="none"')
        if self.feature_map is not None:
            check_choice("feature_map", self.feature_map, FEATURE_MAPS)
            if self.num_latents is None or self.window is not None:
                raise ValueError(
                    f"feature_map is {self.feature_map!r} with num_latents={self.num_latents}, window={self.window}; "
                    "linear attention has num_latents features and no window"
                )
        if window_head_dim is not None and not self.has_scores:
            raise ValueError(f"window_head_dim is {window_head_dim} without a window; set window, or leave it None")

    def _make_projections(self, bias: bool) -> None:
        hidden_size, heads, latents = self.hidden_size, self.num_heads, self.num_latents
        if latents is not None:
            choices = latents + (self.window is not None)
            self.latent_query = nn.Linear(hidden_size, heads * choices, bias=bias)
            self.latent_key = nn.Linear(hidden_size, heads * latents, bias=bias)
        elif self.mixer is not None:
            self.mixer_norm = RMSNorm(hidden_size)
        if self.has_scores:
            self.query = nn.Linear(hidden_size, heads * self.window_head_dim, bias=bias)
            self.key = nn.Linear(hidden_size, self.num_value_heads * self.window_head_dim, bias=bias)
        self.value = nn.Linear(hidden_size, self.num_value_heads * self.head_dim, bias=bias)
        self.output = nn.Linear(heads * self.head_dim, hidden_size, bias=bias)

    @property
    def has_scores(self) -> bool:
        """Whether attention is, in part or all, by scores of queries and keys: those have positions."""
        return self.num_latents is None or self.window is not None

    @property
    def has_step(self) -> bool:
        """Whether `step_` can advance a state of this layer where it lies."""
        return self.causal and self.feature_map is None and (self.num_latents is not None or self.window is not None)

    def reset_parameters(self) -> None:
        """Projections are normal with variance 1 / inputs, biases 0: from a normed x, logits have variance 1."""
        for module in self.children():
            if isinstance(module, nn.Linear):
                reset_linear(module)
            else:
                module.reset_parameters()  # pyright: ignore[reportCallIssue]

    def forward(
        self,
        x: Float[Tensor, "B T C"],
        mask: Bool[Tensor, "B T"] | None = None,
        cu_seqlens: Int[Tensor, " bounds"] | None = None,
        positions: Int[Tensor, "_ T"] | None = None,
        rotary: Rotary | None = None,
    ) -> Float[Tensor, "B T C"]:
        """y of whole sequences; the arguments are those of `stream`."""
        if self.num_latents is None and self.window is None:  # whose state, when packed, is N times the row
            self._check_arguments(x, None, mask, cu_seqlens)
            q, k, v = self._scores(x, x, None, mask, cu_seqlens, positions, rotary)
            return self._merge_heads(self._full_attention(q, k, v, None, mask, cu_seqlens))
        if self.one_operation and self._is_plain_macchiato():
            self._check_arguments(x, None, mask, cu_seqlens)
            if backend_for(self.backend, x.device) == "triton":
                return self._merge_heads(self._attend_at_once(x, mask, cu_seqlens, positions, rotary))
        return self.stream(x, None, mask, cu_seqlens, positions, rotary).y

    def stream(
        self,
        x: Float[Tensor, "B T C"],
        state: AttentionState | None = None,
        mask: Bool[Tensor, "B T"] | None = None,
        cu_seqlens: Int[Tensor, " bounds"] | None = None,
        positions: Int[Tensor, "_ T"] | None = None,
        rotary: Rotary | None = None,
    ) -> AttentionOutput:
        """y of the next tokens and the state after them; `state` is what the call before returned.

        `mask` is True at real tokens; others influence nothing. `cu_seqlens` packs sequences into one row (B = 1).
        `positions` say where tokens stand for rotary positions, by default after as many real tokens as came before;
        `rotary` gives cos and sin (of `layers.rotary`) in their place, computed once for many layers.
        """
        self._check_arguments(x, state, mask, cu_seqlens)
        mixed, memory = x, None
        if self.mixer is not None:
            mixed, memory = self.mixer.stream(x, None if state is None else state.mixer, mask, cu_seqlens)
        y, attention = self._attend(x, mixed, state, mask, cu_seqlens, positions, rotary)
        batch, tokens, _ = x.shape
        before = None if state is None else state.position
        position = count_tokens(batch, tokens, x.device, before=before, mask=mask, cu_seqlens=cu_seqlens)
        return AttentionOutput(self._merge_heads(y), AttentionState(memory, attention, position))

    def step_(
        self,
        x: Float[Tensor, "B one C"],
        state: AttentionState,
        mask: Bool[Tensor, "B one"] | None = None,
        rotary: Rotary | None = None,
        counters: StepCounters | None = None,
    ) -> Float[Tensor, "B one C"]:
        """y of one more token, without gradients; `state` is advanced in place, so that a CUDA graph can replay it.

        On a GPU the mixer with all projections of x is one launch and attention another. Give `counters` that stay, or
        the step makes its own.
        """
        self._check_arguments(x, state, mask, None)
        if isinstance(state.attention, (SoftmaxState, SoftmaxRoom)) or not self.has_step:
            raise ValueError("a step in place needs causal attention with a window or latents; use stream")
        if counters is None:
            arrivals = torch.zeros(x.shape[0], dtype=torch.int32, device=x.device)
            counters = StepCounters(arrivals, torch.zeros((), dtype=torch.long, device=x.device))
        latent_q, latent_k, v, q, k = self._step_inputs(x, state, mask)
        if q is not None and rotary is None and self.rope_theta is not None:
            rotary = make_rotary(state.position.unsqueeze(1), self.window_head_dim, self.rope_theta)
        y = mixture_step_(
            latent_q, latent_k, v, q, k, state.attention, Place(state.position, *counters), window=self.window,
            rotary=None if self.window is None or self.rope_theta is None else rotary, scale=self.scale,
            softcap=self.softcap, mask=mask, backend=self.backend,
        )  # fmt: skip
        return self._merge_heads(y)

    def extend_(
        self,
        x: Float[Tensor, "B T C"],
        state: AttentionState,
        seen: Int[Tensor, ""],
        mask: Bool[Tensor, "B T"] | None = None,
        rotary: Rotary | None = None,
    ) -> Float[Tensor, "B T C"]:
        """y of the next tokens of full attention, whose state is a `SoftmaxRoom` with `seen` tokens in it.

        Keys and values are written there, and the position is advanced in place.
        """
        self._check_arguments(x, state, mask, None)
        if not isinstance(state.attention, SoftmaxRoom) or not self.causal:
            raise ValueError("to extend a state in place, attention must be full and causal, in a room; use stream")
        q, k, v = self._scores(x, x, state, mask, None, None, rotary)
        y = extend_softmax_(q, k, v, state.attention, seen, scale=self.scale, softcap=self.softcap, mask=mask)
        state.position.add_(x.shape[1] if mask is None else mask.sum(dim=1))
        return self._merge_heads(y)

    def _step_inputs(
        self, x: Tensor, state: AttentionState, mask: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None, Tensor | None]:
        """One token's logits of latents, value, query and key; the mixer's memory is advanced in place."""
        mixed = [self.latent_query, self.latent_key] if self.num_latents is not None else []
        plain = []
        if type(self) is LatteAttention:  # a subclass may project in another way
            plain = [self.value, self.query, self.key] if self.has_scores else [self.value]
        if mixed and plain and are_plain(*mixed, *plain):
            weights = None if self.mixer is None else self.mixer.weights
            layers = ([LinearWeights(layer.weight, layer.bias) for layer in group] for group in (mixed, plain))
            logits, projected = input_step_(x, weights, state.mixer, *layers, mask=mask, backend=self.backend)
            latent_q, latent_k = self._latent_heads(*logits)
            v = projected[0].unflatten(2, (-1, self.head_dim))
            q, k = [y.unflatten(2, (-1, self.window_head_dim)) for y in projected[1:]] or (None, None)
            return latent_q, latent_k, v, q, k
        source = inside = x if self.mixer is None or state.mixer is None else self.mixer.step_(x, state.mixer, mask)
        latent_q = latent_k = q = k = None
        if self.num_latents is not None:
            latent_q, latent_k = self._latent_heads(*(layer(inside) for layer in mixed))
            source = x
        elif self.mixer is not None:
            source = self.mixer_norm(inside)
        if self.window is not None:
            q, k = self._queries_and_keys(source)
        return latent_q, latent_k, self._values(x), q, k

    def _check_arguments(
        self, x: Tensor, state: AttentionState | None, mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> None:
        check_shape("x", x, "B T C", (None, None, self.hidden_size))
        check_mask(mask, x.shape[0], x.shape[1])
        sequences = check_packing(cu_seqlens, x.shape[0], x.shape[1])
        if state is None:
            return
        check_kind("state", state, AttentionState)
        check_sizes("state.position", state.position, "B" if cu_seqlens is None else "N", (sequences,))
        if (state.mixer is None) != (self.mixer is None):
            mixer = "no" if state.mixer is None else "a"
            raise ValueError(f"state has {mixer} mixer's memory; it must be from this layer or one with its settings")

    def _attend(
        self,
        x: Tensor,
        mixed: Tensor,
        state: AttentionState | None,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        positions: Tensor | None,
        rotary: Rotary | None,
    ) -> tuple[Tensor, LatteState | MacchiatoState | WindowState | SoftmaxState]:
        """The form's attention of this layer's projections, [B T H D], and its state."""
        past = None if state is None else state.attention
        options = {
            "causal": self.causal, "mask": mask, "state": past, "cu_seqlens": cu_seqlens, "backend": self.backend
        }  # fmt: skip
        window = {"window": self.window, "scale": self.scale, "softcap": self.softcap}
        if self.num_latents is None:
            source = x if self.mixer is None else self.mixer_norm(mixed)
            q, k, v = self._scores(source, x, state, mask, cu_seqlens, positions, rotary)
            if self.window is not None:
                return window_attention(q, k, v, **window, **options)
            if past is not None and not isinstance(past, SoftmaxState):
                raise ValueError(f"state.attention is {type(past).__name__}; it must be a SoftmaxState")
            if past is not None:
                check_past(past, k, v, cu_seqlens)
            y = self._full_attention(q, k, v, past, mask, cu_seqlens)
            return y, advance_softmax(past, k, v, mask, cu_seqlens)
        latent_q, latent_k = self._latent_heads(*project(mixed, self.latent_query, self.latent_key))
        if self.feature_map is not None:
            features = cast(FeatureMap, self.feature_map)
            return linear_attention(latent_q, latent_k, self._values(x), feature_map=features, **options)
        if self.window is None:
            return latte_attention(latent_q, latent_k, self._values(x), **options)
        q, k, v = self._scores(x, x, state, mask, cu_seqlens, positions, rotary)
        return macchiato_attention(latent_q, latent_k, v, q, k, **window, **options)

    def _is_plain_macchiato(self) -> bool:
        """Whether queries, keys, values and logits are nothing but products of the projections' weights."""
        if self.num_latents is None or self.window is None or type(self) is not LatteAttention:
            return False
        linears = self.query, self.key, self.value, self.latent_query, self.latent_key
        return are_plain(*linears) and all(linear.bias is None for linear in linears)

    def _attend_at_once(
        self,
        x: Tensor,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        positions: Tensor | None,
        rotary: Rotary | None,
    ) -> Tensor:
        """What `_attend` gives without a state, [B T H D]."""
        mixed = x if self.mixer is None else self.mixer.stream(x, None, mask, cu_seqlens)[0]
        linears = self.query, self.key, self.value, self.latent_query, self.latent_key
        weights = MacchiatoWeights(*(linear.weight for linear in linears))
        heads, value_heads = weights.query.shape[0] // self.window_head_dim, weights.value.shape[0] // self.head_dim
        latents, window = cast(int, self.num_latents), cast(int, self.window)
        return projected_macchiato(
            x, mixed, weights, self._angles(x, None, positions, rotary, mask=mask, cu_seqlens=cu_seqlens),
            HeadSizes(heads, value_heads, latents, self.head_dim, self.window_head_dim), window=window,
            scale=self.scale, softcap=self.softcap, causal=self.causal, mask=mask, cu_seqlens=cu_seqlens,
            backend=self.backend,
        )  # fmt: skip

    def _latent_heads(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of each head; how many there are is read off, for a rank of several has some of them."""
        latents = cast(int, self.num_latents)
        return q.unflatten(2, (-1, latents + (self.window is not None))), k.unflatten(2, (-1, latents))

    def _queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (y.unflatten(2, (-1, self.window_head_dim)) for y in project(x, self.query, self.key))
        return q, k

    def _values(self, x: Tensor) -> Tensor:
        return self.value(x).unflatten(2, (-1, self.head_dim))

    def _merge_heads(self, y: Tensor) -> Tensor:
        return self.output(y.flatten(2))

    def _scores(
        self,
        source: Tensor,
        x: Tensor,
        state: AttentionState | None,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        positions: Tensor | None,
        rotary: Rotary | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Softmax queries and keys of `source`, turned by their positions, and values of x."""
        q, k = self._queries_and_keys(source)
        before = None if state is None else state.position
        angles = self._angles(x, before, positions, rotary, mask=mask, cu_seqlens=cu_seqlens)
        if angles is not None:
            q, k = apply_rotary(q, *angles), apply_rotary(k, *angles)
        return q, k, self._values(x)

    def _angles(
        self, x: Tensor, before: Tensor | None, positions: Tensor | None, rotary: Rotary | None, **tokens: Tensor | None
    ) -> Rotary | None:
        """cos and sin by which queries and keys of x are turned, or None; `tokens` are mask and cu_seqlens."""
        if rotary is not None and positions is not None:
            raise ValueError("positions and rotary are both given; give one, since rotary is made from positions")
        if self.rope_theta is None:
            return None
        if rotary is not None:
            return rotary
        if positions is None:
            positions = token_positions(x.shape[1], x.device, before=before, **tokens)
        else:
            rows = 1 if positions.shape[:1] == (1,) else x.shape[0]
            check_sizes("positions", positions, "B T", (rows, x.shape[1]))
        return make_rotary(positions, self.window_head_dim, self.rope_theta)

    def _full_attention(
        self, q: Tensor, k: Tensor, v: Tensor, past: SoftmaxState | None, mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        return softmax_attention(
            q, k, v, scale=self.scale, softcap=self.softcap, causal=self.causal, mask=mask, state=past,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip

    def extra_repr(self) -> str:
        settings = ("num_heads", "num_latents", "window", "num_value_heads", "causal", "rope_theta")
        return ", ".join(f"{name}={getattr(self, name)}" for name in settings)
