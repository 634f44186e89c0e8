"""Cases of the attention forms and what every backend must do with them, shared by the tests of all backends."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from latte.ops import (
    LatteState,
    MacchiatoState,
    WindowState,
    latte_attention,
    linear_attention,
    macchiato_attention,
    window_attention,
)

WINDOW = 17
MASKS = ("none", "left", "right", "holes")


def squares(x: Tensor) -> Tensor:
    """A feature map that is a plain function and gives another number of features than it takes."""
    return torch.cat([softplus(x), x[..., :2].square()], dim=-1)


FEATURE_MAPS = {"linear elu+1": "elu+1", "linear exp": "exp", "linear relu": "relu", "linear callable": squares}
FORMS = ("latte", "macchiato", *FEATURE_MAPS, "window")
MAIN_FORMS = ("latte", "macchiato", "linear elu+1", "window")


class Sizes(NamedTuple):
    """Distinct primes, heads per value head included: a swapped axis cannot pass."""

    batch: int = 5
    value_heads: int = 2
    groups: int = 3
    latents: int = 7
    width: int = 11
    window_width: int = 13

    @property
    def heads(self) -> int:
        return self.value_heads * self.groups


PRIMES = Sizes()
SMALL = Sizes(batch=2, value_heads=1, groups=3, latents=5, width=7, window_width=11)


@dataclass(frozen=True)
class Case:
    """One call: tensors by argument name, the state's parts by field name, and the other arguments."""

    form: str
    inputs: Mapping[str, Tensor]
    state: Mapping[str, Tensor] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.inputs["v"].shape[1]

    def with_options(self, **options: Any) -> "Case":
        return replace(self, options={**self.options, **options})

    def map(self, function) -> "Case":
        """The case with `function` applied to every floating point tensor, the state's included."""
        state = {name: function(x) if x.is_floating_point() else x for name, x in self.state.items()}
        return replace(self, inputs={name: function(x) for name, x in self.inputs.items()}, state=state)

    def to(self, dtype: torch.dtype) -> "Case":
        """The case in another dtype; the latents' state is never narrower than float32."""
        case = self.map(lambda x: x.detach().to(dtype))
        wide = torch.promote_types(dtype, torch.float32)
        latents = {name: x.detach().to(wide) for name, x in self.state.items() if name in ("log_norm", "mean")}
        return replace(case, state={**case.state, **latents})

    def tokens_between(self, start: int, end: int) -> "Case":
        """The case of those tokens alone, with the same state."""
        options = dict(self.options)
        if options.get("mask") is not None:
            options["mask"] = options["mask"][:, start:end]
        return replace(self, inputs={name: x[:, start:end] for name, x in self.inputs.items()}, options=options)

    def rows(self, rows: slice) -> "Case":
        """The case of those batch rows alone."""
        options = dict(self.options)
        if options.get("mask") is not None:
            options["mask"] = options["mask"][rows]
        inputs = {name: x[rows] for name, x in self.inputs.items()}
        return Case(self.form, inputs, {name: x[rows] for name, x in self.state.items()}, options)

    def call(self, backend: str):
        state, options = build_state(self.form, self.state), self.options
        match self.form:
            case "latte":
                return latte_attention(**self.inputs, **options, state=state, backend=backend)
            case "macchiato":
                return macchiato_attention(**self.inputs, **options, state=state, backend=backend)
            case "window":
                return window_attention(**self.inputs, **options, state=state, backend=backend)
        feature_map = FEATURE_MAPS[self.form]
        return linear_attention(**self.inputs, feature_map=feature_map, **options, state=state, backend=backend)


def build_state(form: str, parts: Mapping[str, Tensor]):
    if not parts:
        return None
    if form == "window":
        return WindowState(**parts)
    latents = LatteState(parts["log_norm"], parts["mean"])
    return latents if form != "macchiato" else MacchiatoState(latents, parts["keys"], parts["values"], parts["valid"])


def state_parts(state: LatteState | WindowState | MacchiatoState) -> dict[str, Tensor]:
    """A state's tensors by field name."""
    parts = state._asdict()
    return {**(parts.pop("latents")._asdict() if "latents" in parts else {}), **parts}


def make_case(
    form: str,
    tokens: int,
    *,
    sizes: Sizes = PRIMES,
    mask: str = "none",
    state: bool = False,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device | None = None,
    seed: int = 0,
    **options: Any,
) -> Case:
    """Random inputs, the same on every device (by default PyTorch's own default device).

    Forms with a window have one of WINDOW tokens unless `options` say otherwise.
    """
    device = torch.get_default_device() if device is None else device
    noise = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=noise, dtype=torch.float64, device="cpu").to(device, dtype)

    b, t, h, latents = sizes.batch, tokens, sizes.heads, sizes.latents
    inputs = {"v": normal(b, t, sizes.value_heads, sizes.width)}
    if form == "window":
        inputs |= {"q": normal(b, t, h, sizes.window_width), "k": normal(b, t, sizes.value_heads, sizes.window_width)}
    else:
        inputs |= {"q": normal(b, t, h, latents + (form == "macchiato")), "k": normal(b, t, h, latents)}
    if form == "macchiato":
        inputs["window_q"] = normal(b, t, h, sizes.window_width)
        inputs["window_k"] = normal(b, t, sizes.value_heads, sizes.window_width)
    if form in ("window", "macchiato"):
        options.setdefault("window", WINDOW)
    if mask != "none":
        options["mask"] = make_mask(mask, b, t, noise).to(device)
    parts = make_state(form, sizes, options.get("window", 0), noise) if state else {}
    parts = {name: x.to(device, dtype if x.is_floating_point() else None) for name, x in parts.items()}
    return Case(form, inputs, parts, options)


def make_mask(kind: str, batch: int, tokens: int, noise: torch.Generator) -> Tensor:
    """Padding left or right of a different length in each row, one row of nothing else; or holes anywhere."""
    if kind == "holes":
        return torch.rand((batch, tokens), generator=noise, device="cpu") > 0.3
    padding = torch.arange(batch, device="cpu")[:, None] * tokens // max(batch - 1, 1)
    place = torch.arange(tokens, device="cpu")
    return place >= padding if kind == "left" else place < tokens - padding


def make_state(form: str, sizes: Sizes, window: int, noise: torch.Generator) -> dict[str, Tensor]:
    """A state such as a past leaves: one latent has seen nothing, some of the window's slots are not valid."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=noise, dtype=torch.float64, device="cpu")

    parts = {}
    if form != "window":
        latents = sizes.latents + (2 if form == "linear callable" else 0)
        log_norm = normal(sizes.batch, sizes.heads, latents)
        mean = normal(*log_norm.shape, sizes.width)
        log_norm[..., 0], mean[..., 0, :] = -torch.inf, 0.0
        parts |= {"log_norm": log_norm, "mean": mean}
    if form in ("window", "macchiato"):
        slots = (sizes.batch, window - 1)
        parts |= {
            "keys": normal(*slots, sizes.value_heads, sizes.window_width),
            "values": normal(*slots, sizes.value_heads, sizes.width),
            "valid": torch.rand(slots, generator=noise, device="cpu") > 0.3,
        }
    return parts


def outputs(output) -> dict[str, Tensor]:
    """y and the state's parts by name."""
    return {"y": output.y, **{f"state.{name}": x for name, x in state_parts(output.state).items()}}


def pull(x: Tensor, name: str) -> Tensor:
    """The same random gradient for the same output of every backend, in numbers that every dtype holds exactly."""
    noise = torch.Generator().manual_seed(sum(map(ord, name)))
    return (torch.randint(-8, 9, x.shape, generator=noise, device="cpu") / 4).to(x.device, x.dtype)


def evaluate(case: Case, backend: str, of: str = "") -> dict[str, Tensor]:
    """Outputs, and the gradients of y and the returned state (those whose names start with `of`), by name."""
    return differentiate(case, lambda leaf: outputs(leaf.call(backend)), of)


def differentiate(case: Case, function: Callable[[Case], dict[str, Tensor]], of: str = "") -> dict[str, Tensor]:
    """What `function` makes of the case, and the gradients of it with respect to inputs and given state."""
    leaf = case.map(lambda x: x.detach().requires_grad_())
    given = {**leaf.inputs, **{f"state.{name}": x for name, x in leaf.state.items() if x.is_floating_point()}}
    result = function(leaf)
    reached = {name: x for name, x in result.items() if x.requires_grad and name.startswith(of)}
    grads = torch.autograd.grad(
        list(reached.values()),
        list(given.values()),
        [pull(x, name) for name, x in reached.items()],
        materialize_grads=True,
    )
    detached = {name: x.detach() for name, x in result.items()}
    return detached | {f"gradient of {name}": x for name, x in zip(given, grads, strict=True)}


def assert_same(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-10, *, dtypes: bool = True
) -> None:
    """Equal by name; the tolerance is relative to the largest entry of each tensor (at least 1)."""
    assert actual.keys() == expected.keys()
    for name, x in actual.items():
        other = expected[name]
        assert x.shape == other.shape, name
        if dtypes:
            assert x.dtype == other.dtype, name
        if not x.is_floating_point():
            assert torch.equal(x, other), name
            continue
        if name == "state.log_norm":
            assert torch.equal(x == -torch.inf, other == -torch.inf), name
            x, other = (part.masked_fill(part == -torch.inf, 0.0) for part in (x, other))
        assert x.isfinite().all(), name
        x, other = x.to(torch.float64), other.to(torch.float64)
        scale = max(1.0, other.abs().max().item()) if other.numel() else 1.0
        torch.testing.assert_close(x, other, rtol=0, atol=tolerance * scale, msg=lambda text, n=name: f"{n}: {text}")


def check_against_reference(case: Case, backend: str, tolerance: float = 1e-10) -> None:
    """Outputs, states and gradients are those of the reference in float64, to `tolerance`."""
    assert_same(
        evaluate(case, backend), evaluate(case.to(torch.float64), "reference"), tolerance,
        dtypes=case.inputs["v"].dtype == torch.float64,
    )  # fmt: skip
