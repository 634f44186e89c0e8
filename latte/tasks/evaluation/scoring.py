"""Losses of tokens under any causal language model, without the logits of a whole sequence."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latte.ops.cross_entropy import linear_cross_entropy

IGNORED = -100
WINDOW_CHUNK = 4096  # tokens read at once by a model with windows, which else would hold a mask of all pairs
STATE_CHUNK = 8192  # tokens read at once by a model whose state does not grow
EAGER_CHUNK = 1024  # and by one whose attention holds its scores
LOGIT_BYTES = 2**28  # of logits in float32 that are held at once
PROBE = 16  # tokens on which a head is compared with the model's own logits


class Head(Protocol):
    """What makes losses and logits of `features`, which a model computes for its tokens."""

    @property
    def rows(self) -> int | None:
        """Tokens at once, where features are large."""
        ...

    def features(self, **inputs: Any) -> tuple[Tensor, Any]:
        """Of the tokens [B T ·], and the cache after them."""
        ...

    def losses(self, features: Tensor, targets: Tensor) -> Tensor:
        """−log p(target) in float32, 0 where the target is ignored."""
        ...

    def logits(self, features: Tensor) -> Tensor:
        """In float32."""
        ...


@dataclass(frozen=True)
class HiddenHead:
    """Features are hidden states; logits are a linear map of them, bounded by a softcap."""

    decoder: nn.Module
    weight: Tensor
    softcap: float | None
    rows: int | None = None

    def features(self, **inputs: Any) -> tuple[Tensor, Any]:
        output = self.decoder(**inputs)
        return output.last_hidden_state, output.past_key_values

    def losses(self, features: Tensor, targets: Tensor) -> Tensor:
        hidden, shape = features.flatten(0, -2), targets.shape
        each = linear_cross_entropy(
            hidden, self.weight, targets.flatten(), ignore_index=IGNORED, reduction="none", softcap=self.softcap
        )
        return each.reshape(shape)

    def logits(self, features: Tensor) -> Tensor:
        logits = F.linear(features, self.weight).float()
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


@dataclass(frozen=True)
class LogitHead:
    """Features are the model's own logits, whatever it does to them."""

    model: nn.Module
    rows: int | None

    def features(self, **inputs: Any) -> tuple[Tensor, Any]:
        output = self.model(**inputs)
        return output.logits, getattr(output, "past_key_values", None)

    def losses(self, features: Tensor, targets: Tensor) -> Tensor:
        rows = zip(features.flatten(0, -2).split(256), targets.flatten().split(256), strict=True)
        each = [F.cross_entropy(x.float(), y, ignore_index=IGNORED, reduction="none") for x, y in rows]
        return torch.cat(each).reshape(targets.shape)

    def logits(self, features: Tensor) -> Tensor:
        return features.float()


class Scorer:
    """Reads tokens with a model: a chunk at a time with its cache, or all at once.

    `chunk` None chooses by the model: chunks where its state does not grow (memory is then that of a chunk) or where
    attention would hold the scores of all pairs of tokens; all at once elsewhere.
    """

    def __init__(self, model: Any, chunk: int | None = None) -> None:
        self.model = model
        self.device: torch.device = model.device
        self.vocabulary: int = vocabulary_size(model)
        self.head = find_head(model)
        self.chunk = chunk or suggested_chunk(model)

    @torch.no_grad()
    def losses(self, tokens: Tensor) -> Tensor:
        """−log p(token | those before it) of all tokens but the first: [B T] gives [B T−1]."""
        targets = F.pad(tokens[:, 1:], (0, 1), value=IGNORED)
        parts = [self.head.losses(features, targets[:, rows]) for rows, features in self._read(tokens)]
        return torch.cat(parts, dim=1)[:, :-1]

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Any:
        """The cache after the tokens [B T]."""
        cache, size = None, self.chunk or tokens.shape[1]
        for part in tokens.split(size, dim=1):
            cache = self.step(part, cache)[1]
        return cache

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Logits [B V] after the last of some more tokens, and the cache after them."""
        output = self.model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1].float(), output.past_key_values

    @torch.no_grad()
    def continued_losses(self, tokens: Tensor, targets: Tensor, cache: Any) -> Tensor:
        """Losses of targets [B T], each after the token in its place, with a cache of what stood before."""
        features, _ = self.head.features(input_ids=tokens, past_key_values=cache, use_cache=True)
        return self.head.losses(features, targets)

    @torch.no_grad()
    def padded_features(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Of short texts [B T], padded on the right."""
        return self.head.features(input_ids=tokens, attention_mask=mask, use_cache=False)[0]

    def _read(self, tokens: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Places of tokens and their features, some at a time."""
        batch, length = tokens.shape
        chunk = self.chunk or length
        if self.head.rows is not None:
            chunk = min(chunk, max(1, self.head.rows // batch))
        if length <= chunk:
            features, _ = self.head.features(input_ids=tokens, use_cache=False)
            yield slice(0, length), features
            return
        cache = None
        for start in range(0, length, chunk):
            rows = slice(start, min(start + chunk, length))
            features, cache = self.head.features(input_ids=tokens[:, rows], past_key_values=cache, use_cache=True)
            yield rows, features


def vocabulary_size(model: Any) -> int:
    return model.get_input_embeddings().weight.shape[0]


def suggested_chunk(model: Any) -> int | None:
    config = text_config(model)
    if getattr(config, "num_latents", None) is not None:
        return STATE_CHUNK
    if getattr(config, "_attn_implementation", None) == "eager":
        return EAGER_CHUNK
    return WINDOW_CHUNK if "sliding_attention" in (getattr(config, "layer_types", None) or ()) else None


def text_config(model: Any) -> Any:
    return model.config.get_text_config()


def find_head(model: Any) -> Head:
    """Hidden states and the weight of the last layer, if the model's own logits are made of them and nothing else."""
    logit_rows = max(1, LOGIT_BYTES // (4 * vocabulary_size(model)))
    last = model.get_output_embeddings()
    decoder = model.get_decoder()
    if not isinstance(last, nn.Linear) or last.bias is not None or decoder is model:
        return LogitHead(model, logit_rows)
    config = text_config(model)
    softcap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_softcap", None)
    head = HiddenHead(decoder, last.weight.detach(), softcap)
    return head if gives_logits(head, model) else LogitHead(model, logit_rows)


@torch.no_grad()
def gives_logits(head: Head, model: Any) -> bool:
    """Whether the head's logits are the model's own: many models scale or shift theirs."""
    tokens = torch.arange(PROBE, device=model.device)[None] % vocabulary_size(model)
    own = model(input_ids=tokens, use_cache=False).logits.float()
    made = head.logits(head.features(input_ids=tokens, use_cache=False)[0])
    tolerance = 1e-3 if model.dtype == torch.float32 else 2e-2
    return made.shape == own.shape and bool((made - own).norm() <= tolerance * own.norm())
