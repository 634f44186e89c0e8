"""Attention of a converted layer: the source's projections, and beside them the latents' new ones."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from latte.layers import LatteAttention
from latte.layers.initialization import reset_linear
from latte.layers.mixers import RGLRU
from latte.models.cache import state_layer
from latte.models.converted_configuration import LatteConvertedConfig
from latte.models.families import Family, head_dim, own_window, score_scale
from latte.models.offload import weights_at_hand
from latte.models.padding import Layout
from latte.models.rollback import Step

ALWAYS = 1024.0  # a logit so far above the others that their share is 0, in float64 too


class LatentQuery(nn.Linear):
    """Logits of p(·|t) over the window and the latents, which begin as the same for every token.

    Weights are 0 and biases such that p(0|t) is `share` and the latents have equal parts of the rest. Latents differ by
    their keys, so that the weights' gradients are not 0. With a share of 1 the window is certain, and nothing moves.
    """

    def __init__(self, hidden_size: int, num_heads: int, num_latents: int, share: float) -> None:
        super().__init__(hidden_size, num_heads * (num_latents + 1))
        self.num_latents, self.share = num_latents, share

    @torch.no_grad()
    def reset_choice(self) -> None:
        self.weight.zero_()
        self.bias.copy_(self.first_logits())

    def first_logits(self) -> Tensor:
        """The biases that give the window its share."""
        logits = torch.zeros(self.out_features // (self.num_latents + 1), self.num_latents + 1)
        logits[:, 0] = ALWAYS if self.share == 1 else math.log(self.num_latents * self.share / (1 - self.share))
        return logits.flatten()


class ConvertedAttention(LatteAttention):
    """Stands in the place of a source's attention module and is called as that was, with a `Layout` for a mask.

    The source's projections and norms keep their names. In a converted layer there are `latent_query`, `latent_key` and
    `mixer` besides; in another, attention is what it was, over the source's own window or over all tokens, computed by
    this package's layers, so that masks, packing and the cache are of one kind.
    """

    def __init__(
        self, config: LatteConvertedConfig, source: PreTrainedConfig, family: Family, layer: int, attention: nn.Module
    ) -> None:
        converted = layer in (config.layers or ())
        self._share = config.initial_window_share
        super().__init__(
            source.hidden_size, source.num_attention_heads, config.num_latents if converted else None,
            head_dim=head_dim(source), num_value_heads=source.num_key_value_heads,
            window=config.window if converted else own_window(source, layer),
            mixer=config.mixer if converted else "none", conv_size=config.conv_size, mixer_blocks=config.mixer_blocks,
            scale=score_scale(family, source), softcap=getattr(source, family.softcap) if family.softcap else None,
            backend=config.backend,
        )  # fmt: skip
        self.family, self.layer_idx = family, layer
        for name, module in attention.named_children():
            self.add_module(name, module)

    def _make_projections(self, bias: bool) -> None:
        if self.num_latents is not None:
            self.latent_query = LatentQuery(self.hidden_size, self.num_heads, self.num_latents, self._share)
            self.latent_key = nn.Linear(self.hidden_size, self.num_heads * self.num_latents, bias=False)

    def reset_parameters(self) -> None:
        """The new weights, as for inputs of variance 1; the source's are not touched."""
        if self.num_latents is not None:
            self.latent_query.reset_choice()
            reset_linear(self.latent_key)
            if self.mixer is not None:
                self.mixer.reset_parameters()

    @torch.no_grad()
    def expect_inputs_of(self, size: float) -> None:
        """Divide by `size` the new weights that meet the input, so that logits and gates begin as if it were 1."""
        self.latent_key.weight.div_(size)
        if isinstance(self.mixer, RGLRU):
            self.mixer.input_gate.weight.div_(size)
            self.mixer.recurrence_gate.weight.div_(size)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        layout: Layout,
        past_key_values: Cache | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        cos, sin = position_embeddings  # each angle twice, for both channels that it turns
        half = cos.shape[-1] // 2
        step = Step(hidden_states, layout.mask, layout.cu_seqlens, (cos[..., :half], sin[..., :half]))
        with weights_at_hand(self.mixer):
            if past_key_values is None:
                return super().forward(step.x, step.mask, step.cu_seqlens, rotary=step.rotary), None
            return state_layer(past_key_values, self.layer_idx).advance(self, step), None

    def _queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q = self._project(x, self.family.query, self.num_heads, self.family.query_norm)
        return q, self._project(x, self.family.key, self.num_value_heads, self.family.key_norm)

    def _values(self, x: Tensor) -> Tensor:
        return self._project(x, self.family.value, self.num_value_heads, None)

    def _merge_heads(self, y: Tensor) -> Tensor:
        return self.get_submodule(self.family.output)(y.flatten(2))

    def _project(self, x: Tensor, name: str, heads: int, norm: str | None) -> Tensor:
        y = getattr(self, name)(x).unflatten(2, (heads, -1))
        return y if norm is None else getattr(self, norm)(y)
