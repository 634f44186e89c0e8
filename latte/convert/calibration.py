"""`calibrate`: new latents that begin as what the window lacks, found on some text without training."""

import copy
from collections.abc import Sequence
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, PreTrainedModel

from latte.convert.latents import new_parameters
from latte.convert.model import share_weights
from latte.convert.sink import Sink, fit_sink, only_window
from latte.models import LatteConvertedForCausalLM
from latte.models.converted_attention import ConvertedAttention
from latte.models.families import find_family, own_window

OBSERVED = "latte_observed"  # the name of `observed_attention` among Transformers' implementations
LEAST_PAST_WINDOW = 16  # tokens of a text whose window has lost the first one
LOCAL_SHARE = 0.999  # p(0|t) of layers that do not see the first token of a long text: they have lost little or nothing


@torch.no_grad()
def calibrate(
    model: LatteConvertedForCausalLM,
    source: PreTrainedModel,
    rows: Sequence[Tensor],
    *,
    device: torch.device | str | None = None,
) -> None:
    """Give one latent of each head the role of the first token, which the window soon loses.

    `source` reads `rows`, which are token ids [T] of some dozen texts, begun as every text of this model is. Layer by
    layer, the latent's key becomes a discriminant of first tokens, and the logits of p(l|t) linear fits to the source's
    own log-odds of the first token over the window. The other latents keep their keys and begin with little weight.
    Local layers, which do not see the first token of a long text, begin with p(0|t) = 0.999.

    Only `latent_query` and `latent_key` change, when all layers are done. `source` computes in float32, on `device`, by
    default its own, without being touched.
    """
    check_pair(model, source)
    check_rows(rows, model)
    observer = Observer(model, [len(row) for row in rows])
    borrowed: Any = borrow(source)
    borrowed.to(device=device or source.device, dtype=torch.float32).eval()
    observer.watch(borrowed)
    tokens = pad_sequence(list(rows), batch_first=True).to(borrowed.device)
    borrowed.base_model(tokens, use_cache=False, observer=observer)
    for layer, sink in observer.sinks.items():
        if not all(tensor.isfinite().all() for tensor in sink if tensor is not None):
            raise ValueError(f"calibration of layer {layer} gave numbers that are not finite; give other or more text")
    for layer, sink in observer.sinks.items():
        install(observer.attentions[layer], sink)


def check_pair(model: object, source: object) -> None:
    """Raise ValueError unless `model` has latents to calibrate and was converted from a model such as `source`."""
    if not isinstance(model, LatteConvertedForCausalLM):
        raise ValueError(f"model is {type(model).__name__}; it must be a converted one: use latte.convert.convert")
    family = model.config.source["model_type"]
    if not isinstance(source, PreTrainedModel) or source.config.model_type != family:
        raise ValueError(f"source is {type(source).__name__}; the model was converted from a {family!r} model: give it")
    new = new_parameters(model)
    kept = {name: tuple(weight.shape) for name, weight in model.named_parameters() if name not in new}
    own = {name: tuple(weight.shape) for name, weight in source.named_parameters()}
    for name in sorted(kept.keys() | own.keys()):
        if kept.get(name) != own.get(name):
            raise ValueError(
                f"{name} is of shape {own.get(name)} in the source and {kept.get(name)} in the model; "
                "give the source that it was converted from"
            )
    if all(own_window(source.config, layer) is not None for layer in model.config.layers):
        raise ValueError(
            "no converted layer sees the first token of a long text: there is nothing to calibrate, leave it out"
        )


def check_rows(rows: Sequence[Tensor], model: LatteConvertedForCausalLM) -> None:
    """Raise ValueError for rows that the source cannot read, or whose first token never leaves the window."""
    if not len(rows):
        raise ValueError("there are no rows to calibrate with; give token ids of some texts")
    window, longest, vocabulary = (
        getattr(model.config, name) for name in ("window", "max_position_embeddings", "vocab_size")
    )
    for number, row in enumerate(rows):
        if row.ndim != 1 or row.dtype != torch.long:
            raise ValueError(f"row {number} is {row.dtype} of shape {tuple(row.shape)}; it must be int64 of shape [T]")
        if len(row) < window + LEAST_PAST_WINDOW:
            needed = window + LEAST_PAST_WINDOW
            raise ValueError(f"row {number} has {len(row)} tokens; with a window of {window} it needs {needed} or more")
        if len(row) > longest:
            raise ValueError(
                f"row {number} has {len(row)} tokens, over the source's own context of {longest}; "
                f"cut rows to that: --calibration-tokens {longest}"
            )
        strange = row[(row < 0) | (row >= vocabulary)]
        if len(strange):
            known = f"0 to {vocabulary - 1}"
            raise ValueError(f"row {number} has token {int(strange[0])}; the model knows {known}: use its tokenizer")


def borrow(source: PreTrainedModel) -> PreTrainedModel:
    """Another model with the source's tensors, whose attention can be observed."""
    config = copy.deepcopy(source.config)
    config._attn_implementation = OBSERVED
    with torch.device("meta"):
        other = type(source)(config)
    share_weights(source, other)
    return other


class Observer:
    """Computes the attention of a source that reads rows, and on the way fits the sinks of converted layers.

    Rows are padded on the right, which causal attention does not see.
    """

    def __init__(self, model: LatteConvertedForCausalLM, lengths: Sequence[int]) -> None:
        self.window, self.lengths = model.config.window, lengths
        self.sinks: dict[int, Sink] = {}
        self.attentions: dict[int, ConvertedAttention] = {}
        for layer in model.config.layers:
            self.attentions[layer] = getattr(model.model.layers[layer], find_family(model.model.config).attention)

    def watch(self, source: PreTrainedModel) -> None:
        """See what each attention module of `source` reads."""
        decoder: Any = source.base_model
        for layer in decoder.layers:
            attention = getattr(layer, find_family(source.config).attention)
            attention.register_forward_pre_hook(self._read, with_kwargs=True)

    def _read(self, _module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inputs = kwargs["hidden_states"]

    def attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> Tensor:
        """The layer's own attention of [B H T D], as [B T H D]."""
        own = own_window(module.config, module.layer_idx)
        age = torch.arange(q.shape[2], device=q.device)
        age = age[:, None] - age
        hidden = (age < 0) | (age >= (len(age) if own is None else own))
        y, odds = torch.empty_like(q), q.new_empty(q.shape[:3])
        shared = q.shape[1] // k.shape[1]
        for row, group in product(range(q.shape[0]), range(k.shape[1])):  # so that few scores are in memory at a time
            heads = slice(group * shared, (group + 1) * shared)
            scores = capped(q[row, heads] @ k[row, group].T * scale, softcap).masked_fill_(hidden, -torch.inf)
            y[row, heads] = scores.softmax(dim=-1) @ v[row, group]
            odds[row, heads] = scores[..., 0] - scores.masked_fill(age >= self.window, -torch.inf).logsumexp(dim=-1)
        if module.layer_idx in self.attentions:
            self.sinks[module.layer_idx] = self._fit(self.attentions[module.layer_idx], odds, local=own is not None)
        return y.transpose(1, 2)

    def _fit(self, attention: ConvertedAttention, odds: Tensor, *, local: bool) -> Sink:
        latents = cast(int, attention.num_latents)
        if local:
            return only_window(attention.num_heads, latents, attention.hidden_size, LOCAL_SHARE)
        x = self._inputs
        if attention.mixer is not None:
            x = copy.deepcopy(attention.mixer).to(x.device, torch.float32)(x)
        lengths = torch.tensor(self.lengths, device=x.device)
        real = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        return fit_sink(x, odds.transpose(1, 2), real, self.window, latents)


def observed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    observer: Observer,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What Transformers calls in place of its own implementations; `observer` comes with the model's arguments."""
    return observer.attend(module, query, key, value, scaling, softcap), None


AttentionInterface.register(OBSERVED, observed_attention)


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def install(attention: ConvertedAttention, sink: Sink) -> None:
    """Write a sink into a layer's new weights."""
    attention.latent_query.weight.copy_(sink.weight.flatten(0, 1))
    attention.latent_query.bias.copy_(sink.bias.flatten())
    if sink.key is not None:
        attention.latent_key.weight.unflatten(0, (attention.num_heads, -1))[:, 0].copy_(sink.key)
