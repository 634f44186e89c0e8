"""Which latents a model uses, measured while it runs: running sums of p(l|t), with no more memory than they take."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from inspect import signature
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from latte.ops.states import accumulation_dtype

COLLAPSE_THRESHOLD = 0.9
"""A head whose collapse score is above this is called collapsed: of 16 latents, it uses fewer than 2.5."""

IDLE_THRESHOLD = 0.01
"""Latents whose average probabilities sum to less than this are called idle: the window does nearly all."""

UNUSED = 1e-6
"""Latents whose average probabilities sum to less than this are not in use at all: none is in effect."""


@dataclass(frozen=True)
class LayerUsage:
    """How one layer's heads H spread over their states S: the L latents, before them the window where there is one.

    A state's usage is its average probability (1/T) Σ_t p(l|t) over T tokens.
    """

    name: str
    num_latents: int
    tokens: int
    entropy: Tensor  # [H] mean over tokens of −Σ_l p(l|t) log p(l|t), in nats, over all states
    usage: Tensor  # [H S], rows sum to 1

    @property
    def latent_usage(self) -> Tensor:
        """[H L] usage of the latents alone; rows sum to 1 − the window's share."""
        return self.usage[:, self.usage.shape[1] - self.num_latents :]

    @property
    def window_share(self) -> Tensor | None:
        """[H] mean p(0|t), what goes to the window; None where there is none."""
        return self.usage[:, 0] if self.usage.shape[1] > self.num_latents else None

    @property
    def effective_latents(self) -> Tensor:
        """[H] exp of the entropy of the latents' usage, scaled to sum to 1: L if all are used alike, 1 if one is.

        The window does not count. 0 where the latents are not in use at all.
        """
        used = self.latent_usage
        total = used.sum(dim=1, keepdim=True)
        effective = torch.exp(entropy_of(used / total.clamp(min=UNUSED)))
        return torch.where(total.squeeze(1) < UNUSED, 0.0, effective)

    @property
    def information(self) -> Tensor:
        """[H] entropy of the usage − mean entropy of p(l|t), in nats: what the choice of a state tells of the token.

        0 says that every token chooses alike: all latents may be in use, and none has a meaning.
        """
        return (entropy_of(self.usage) - self.entropy).clamp(min=0.0)

    @property
    def collapse_score(self) -> Tensor:
        """[H] 0 where all latents are used alike, 1 where one is, or none; 0 for a single latent.

        It is (L − effective latents) / (L − 1), and at most 1.
        """
        if self.num_latents == 1:
            return torch.zeros_like(self.entropy)
        return ((self.num_latents - self.effective_latents) / (self.num_latents - 1)).clamp(0.0, 1.0)

    @property
    def collapsed(self) -> Tensor:
        """[H] bool: whether the collapse score is above COLLAPSE_THRESHOLD."""
        return self.collapse_score > COLLAPSE_THRESHOLD

    @property
    def idle(self) -> Tensor:
        """[H] bool: whether the latents have less than IDLE_THRESHOLD together; how they share it says little then."""
        return self.latent_usage.sum(dim=1) < IDLE_THRESHOLD

    def record(self) -> dict[str, Any]:
        """Plain numbers for JSON, one per head."""
        share = self.window_share
        return {
            "layer": self.name,
            "tokens": self.tokens,
            "entropy": self.entropy.tolist(),
            "effective_latents": self.effective_latents.tolist(),
            "information": self.information.tolist(),
            "window_share": None if share is None else share.tolist(),
            "collapse_score": self.collapse_score.tolist(),
            "collapsed": self.collapsed.tolist(),
            "idle": self.idle.tolist(),
        }


def merge_usage(parts: Sequence[LayerUsage]) -> LayerUsage:
    """One layer's usage over all tokens, from its usage over some of them: by several processes, for instance."""
    if not parts:
        raise ValueError("there is no usage to merge; give one part at least")
    tokens = sum(part.tokens for part in parts)
    first = parts[0]
    entropy = sum((part.entropy * (part.tokens / tokens) for part in parts), torch.zeros_like(first.entropy))
    usage = sum((part.usage * (part.tokens / tokens) for part in parts), torch.zeros_like(first.usage))
    return LayerUsage(first.name, first.num_latents, tokens, entropy, usage)


def entropy_of(p: Tensor) -> Tensor:
    """−Σ p log p over the last axis, in nats; 0 log 0 is 0."""
    return torch.special.entr(p).sum(dim=-1)


def latent_layers(model: nn.Module) -> dict[str, nn.Module]:
    """A model's attention layers with latents by name: ours, and converted ones.

    They are known by `num_heads`, `num_latents` (not None) and the projections `latent_query` and `latent_key`. Linear
    attention, which has a `feature_map`, has features in their place, and no p(l|t).
    """
    words = ("num_heads", "latent_query", "latent_key")
    return {
        name: module
        for name, module in model.named_modules()
        if getattr(module, "num_latents", None) is not None
        and getattr(module, "feature_map", None) is None
        and all(hasattr(module, word) for word in words)
    }


def by_head(x: Tensor, heads: int, width: int) -> Tensor:
    """A projection's output as [... H width]; raises ValueError where this process has only some of the heads."""
    if x.shape[-1] != heads * width:
        raise ValueError(
            f"{heads} heads of {width} numbers each give {x.shape[-1]} here, as where tensor parallelism has dealt "
            "heads out; measure a model that one process has whole"
        )
    return x.unflatten(-1, (heads, width))


class UsageMeter:
    """While active, every forward of the model adds to running sums of p(l|t), layer by layer.

        with UsageMeter(model) as meter:
            model(**batch)
        for layer in meter.layers():
            print(layer.name, layer.effective_latents)

    Results and gradients of the model are what they would be without it, to rounding: attention projects queries and
    keys of latents apart while someone looks at them. Padding does not count: masks are read from the arguments
    `mask` or `attention_mask` of the modules around a layer. Recomputation by gradient checkpointing does not count
    either. Of a compiled model, call the one it was made from while measuring: compiled code does not call hooks.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: nn.Module = getattr(model, "_orig_mod", model)
        self._sums = {name: _Sums(layer) for name, layer in latent_layers(self.model).items()}
        if not self._sums:
            raise ValueError(
                f"{type(self.model).__name__} has no attention layer with latents; nothing can be measured. "
                "Choose a model whose num_latents is not None and whose feature_map is"
            )
        self._hooks: ExitStack | None = None
        self._masks: list[_Given] = []  # of the modules that are running, outermost first
        self._running = 0

    def __enter__(self) -> Self:
        if self._hooks is not None:
            raise ValueError("this meter is active already; make another one")
        self._hooks = ExitStack()
        for name, module in self.model.named_modules():
            if self._holds_layers(name):
                enter = partial(self._enter, _MaskArgument(module))
                self._hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                self._hooks.callback(module.register_forward_hook(self._leave, always_call=True).remove)
        for sums in self._sums.values():
            hook = sums.layer.latent_query.register_forward_hook(partial(self._count, sums))
            self._hooks.callback(hook.remove)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._hooks is not None:
            self._hooks.close()
        self._hooks, self._running = None, 0
        self._masks.clear()

    def layers(self) -> list[LayerUsage]:
        """What was measured so far; raises ValueError where no real token went through."""
        return [sums.usage(name) for name, sums in self._sums.items()]

    def reset(self) -> None:
        """Forget what was measured."""
        for sums in self._sums.values():
            sums.clear()

    def _holds_layers(self, name: str) -> bool:
        prefix = f"{name}." if name else ""
        return any(layer == name or layer.startswith(prefix) for layer in self._sums)

    def _enter(self, finder: "_MaskArgument", module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._running += module is self.model
        self._masks.append(finder.find(args, kwargs))

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if self._masks:
            self._masks.pop()
        self._running = max(0, self._running - (module is self.model))

    @torch.no_grad()
    def _count(self, sums: "_Sums", _: nn.Module, __: Any, logits: Tensor) -> None:
        if self._running:  # otherwise this is gradient checkpointing, which has been here before
            sums.add(logits.detach(), self._mask(logits))

    def _mask(self, logits: Tensor) -> Tensor | None:
        """[B T], True at real tokens: what the innermost module that knows was given."""
        for given in reversed(self._masks):
            if given.mask is not None:
                return _fit(given.mask, logits)
            if given.final:
                return None
        return None


@dataclass(frozen=True)
class _Given:
    mask: Tensor | None
    final: bool  # whether no mask means that all tokens are real, whatever the modules around say


class _MaskArgument:
    """Finds the mask among the arguments of a module's forward.

    Our layers call it `mask`: None says that all are real. Transformers' models call it `attention_mask`; inside them
    it may have been turned into scores [B 1 T S], which is none of ours.
    """

    def __init__(self, module: nn.Module) -> None:
        names = list(signature(module.forward).parameters)
        self.final = "mask" in names
        self.word = "mask" if self.final else "attention_mask"
        self.place = names.index(self.word) if self.word in names else None

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Given:
        value = kwargs.get(self.word)
        if value is None and self.place is not None and self.place < len(args):
            value = args[self.place]
        known = isinstance(value, Tensor) and value.ndim == 2
        return _Given(value if known else None, self.final)


def _fit(mask: Tensor, logits: Tensor) -> Tensor:
    """The mask of the last T tokens; a packed row is all rows laid one after another."""
    batch, tokens = logits.shape[:2]
    if mask.numel() == batch * tokens:
        mask = mask.reshape(batch, tokens)
    elif mask.shape[0] == batch and mask.shape[1] >= tokens:
        mask = mask[:, mask.shape[1] - tokens :]
    else:
        raise ValueError(f"a mask of shape {list(mask.shape)} does not fit {batch} x {tokens} tokens")
    return mask.to(logits.device, torch.bool)


class _Sums:
    """Sums over tokens of p(l|t) and of its entropy, on the layer's device."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.sums: tuple[Tensor, Tensor, Tensor] | None = None  # entropy [H], p [H S], number of tokens

    def clear(self) -> None:
        self.sums = None

    def add(self, logits: Tensor, mask: Tensor | None) -> None:
        window = getattr(self.layer, "window", None) is not None
        states = by_head(logits, self.layer.num_heads, self.layer.num_latents + window)
        p = torch.softmax(states, dim=-1, dtype=accumulation_dtype(logits))
        entropy = entropy_of(p)
        if mask is None:
            tokens = torch.tensor(logits.shape[0] * logits.shape[1], device=logits.device)
        else:  # what stands in masked positions may be anything
            p, entropy = torch.where(mask[..., None, None], p, 0.0), torch.where(mask[..., None], entropy, 0.0)
            tokens = mask.sum()
        wide = torch.float32 if logits.device.type == "mps" else torch.float64  # which MPS does not have
        new = (entropy.sum(dim=(0, 1)).to(wide), p.sum(dim=(0, 1)).to(wide), tokens)
        old = self.sums
        self.sums = new if old is None else (old[0] + new[0], old[1] + new[1], old[2] + new[2])

    def usage(self, name: str) -> LayerUsage:
        entropy, p, count = (None, None, 0) if self.sums is None else (*self.sums[:2], int(self.sums[2]))
        if entropy is None or p is None or not count:
            raise ValueError(
                f"no token has gone through {name or 'the layer'} while the meter was active; call the model itself "
                "(of a compiled one, the model that it was made from)"
            )
        return LayerUsage(name, self.layer.num_latents, count, (entropy / count).cpu(), (p / count).cpu())
