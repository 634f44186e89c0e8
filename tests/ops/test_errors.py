"""Bad input: `ValueError` with the argument's name, what it was and what it should be."""

from typing import Any

import pytest
import torch
from torch import Tensor

from latte.ops import (
    LatteState,
    MacchiatoState,
    WindowState,
    attention_weights,
    latte_attention,
    linear_attention,
    macchiato_attention,
    window_attention,
)

B, T, H, HV, L, D, E, W = 2, 5, 6, 3, 7, 11, 13, 4


def z(*shape: int, **how: Any) -> Tensor:
    return torch.zeros(shape, **how)


def latents(batch: int = B, heads: int = H, number: int = L, width: int = D) -> LatteState:
    return LatteState(z(batch, heads, number), z(batch, heads, number, width))


def recent(batch: int = B, slots: int = W - 1, heads: int = HV, key: int = E, value: int = D) -> WindowState:
    return WindowState(
        z(batch, slots, heads, key), z(batch, slots, heads, value), z(batch, slots, dtype=torch.bool)
    )  # fmt: skip


def both(**sizes: int) -> MacchiatoState:
    return MacchiatoState(latents(batch=sizes.get("batch", B)), *recent(**sizes))


V = z(B, T, HV, D)
BASE: dict[str, tuple[Any, dict[str, Any]]] = {
    "latte": (latte_attention, {"q": z(B, T, H, L), "k": z(B, T, H, L), "v": V}),
    "linear": (linear_attention, {"q": z(B, T, H, L), "k": z(B, T, H, L), "v": V}),
    "window": (window_attention, {"q": z(B, T, H, E), "k": z(B, T, HV, E), "v": V, "window": W}),
    "macchiato": (
        macchiato_attention,
        {
            "q": z(B, T, H, L + 1), "k": z(B, T, H, L), "v": V,
            "window_q": z(B, T, H, E), "window_k": z(B, T, HV, E), "window": W,
        },
    ),
    "weights": (
        attention_weights,
        {
            "q": z(B, T, H, L + 1), "k": z(B, T, H, L),
            "window_q": z(B, T, H, E), "window_k": z(B, T, HV, E), "window": W,
        },
    ),
}  # fmt: skip
PACK = {name: {"q": z(1, T, H, L), "k": z(1, T, H, L), "v": z(1, T, HV, D)} for name in ("latte", "linear")}
PACK["window"] = {"q": z(1, T, H, E), "k": z(1, T, HV, E), "v": z(1, T, HV, D)}
PACK["macchiato"] = {**PACK["latte"], "q": z(1, T, H, L + 1), "window_q": z(1, T, H, E), "window_k": z(1, T, HV, E)}
PACK["weights"] = {name: x for name, x in PACK["macchiato"].items() if name != "v"}

ALL = tuple(BASE)
OPS = ALL[:-1]
WITH_LATENTS = ("latte", "linear", "macchiato")
WITH_WINDOW = ("window", "macchiato")
WINDOWED = ("window", "macchiato", "weights")
HYBRID = ("macchiato", "weights")
INT = torch.int64


def ends(*bounds: float, dtype: torch.dtype = INT) -> Tensor:
    return torch.tensor(bounds, dtype=dtype)


# Each row: which operations, the arguments that are wrong, and what the message says: name and value; what is right.
MISMATCHED = [
    (("latte", "linear"), {"k": z(B, T + 1, H, L)}, r"k has shape \[2, 6, 6, 7\]; it must be \[B=2, T=5, H=6, L=7\]"),
    (HYBRID, {"k": z(B, T, H + 1, L)}, r"k has shape \[2, 5, 7, 7\]; .* \[B=2, T=5, H=6, L=7\]"),
    (WITH_LATENTS, {"v": z(B, T - 1, HV, D)}, r"q has shape \[2, 5, 6, \d\]; it must be \[B=2, T=4, H, "),
    (WITH_LATENTS, {"q": z(B + 1, T, H, L)}, r"q has shape \[3, 5, 6, 7\]; it must be \[B=2, T=5, H, L"),
    (WITH_LATENTS, {"q": z(B, T, L)}, r"q has shape \[2, 5, 7\]; it must be \[B=2, T=5, H, L"),
    (OPS, {"v": z(B, T, D)}, r"v has shape \[2, 5, 11\]; it must be \[B, T, Hv, D\]"),
    (("window",), {"v": z(B, T - 1, HV, D)}, r"q has shape \[2, 5, 6, 13\]; it must be \[B=2, T=4, H, E\]"),
    (("window",), {"k": z(B, T, HV, E + 1)}, r"k has shape \[2, 5, 3, 14\]; it must be \[B=2, T=5, Hv=3, E=13\]"),
    (("window",), {"k": z(B, T, H, E)}, r"k has shape \[2, 5, 6, 13\]; it must be \[B=2, T=5, Hv=3, E=13\]"),
    (("macchiato",), {"window_k": z(B, T, H, E)}, r"window_k has shape \[2, 5, 6, 13\]; .* \[B=2, T=5, Hv=3, E=13\]"),
    (("macchiato",), {"window_q": z(B, T, HV, E)}, r"window_q has shape \[2, 5, 3, 13\]; .* \[B=2, T=5, H=6, E\]"),
    (("macchiato",), {"window_q": z(B, T + 1, H, E)}, r"window_q has shape \[2, 6, 6, 13\]; .* \[B=2, T=5, H, E\]"),
    (("weights",), {"window_k": z(B, T, HV, E + 1)}, r"window_k has shape \[2, 5, 3, 14\]; .* Hv, E=13\]"),
    (("weights",), {"q": z(B, T, HV, L + 1)}, r"q has shape \[2, 5, 3, 8\]; it must be \[B=2, T=5, H=6, L\+1\]"),
    # H is no multiple of Hv
    (OPS, {"v": z(B, T, 4, D), "k4": 4}, r"v has 4 heads and (window_)?q has 6; \S*q's must be a multiple of v's"),
    (OPS, {"v": z(B, T, 0, D), "k4": 0}, r"v has 0 heads and (window_)?q has 6; \S*q's must be a multiple of v's"),
    (("weights",), {"window_k": z(B, T, 4, E)}, r"window_k has 4 heads and window_q has 6; .* multiple"),
    # L + 1 and L mixed up
    (HYBRID, {"q": z(B, T, H, L)}, r"k has shape \[2, 5, 6, 7\]; it must be \[B=2, T=5, H=6, L=6\]"),
    (("latte",), {"q": z(B, T, H, L + 1)}, r"k has shape \[2, 5, 6, 7\]; it must be \[B=2, T=5, H=6, L=8\]"),
    # no latents, no width
    (("latte", "linear"), {"q": z(B, T, H, 0), "k": z(B, T, H, 0)}, r"q has L = 0; it must be at least 1"),
    (HYBRID, {"q": z(B, T, H, 1), "k": z(B, T, H, 0)}, r"q has L = 0; it must be at least 1"),
    (OPS, {"v": z(B, T, HV, 0)}, r"v has D = 0; it must be at least 1"),
    (("window",), {"q": z(B, T, H, 0), "k": z(B, T, HV, 0)}, r"q has E = 0; it must be at least 1"),
    (HYBRID, {"window_q": z(B, T, H, 0), "window_k": z(B, T, HV, 0)}, r"window_q has E = 0; .* at least 1"),
]  # fmt: skip
KINDS = [
    (OPS, {"v": V.long()}, r"v has dtype torch\.int64; it must be a floating point tensor \[B T Hv D\]"),
    (ALL, {"q": z(B, T, H, L, dtype=torch.bool)}, r"q has dtype torch\.bool; it must be a floating point tensor"),
    (ALL, {"q": z(B, T, H, L, dtype=torch.float8_e4m3fn)}, r"q has dtype torch\.float8_e4m3fn; .* float64"),
    (ALL, {"q": z(B, T, H, L).to_sparse()}, r"q has layout torch\.sparse_coo; it must be a dense tensor"),
    (ALL, {"k": [1.0]}, r"k is list; it must be a tensor"),
    (OPS, {"v": None}, r"v is NoneType; it must be a tensor"),
    (WITH_WINDOW, {"window": 0}, r"window is 0; it must be an integer of at least 1"),
    (WINDOWED, {"window": -3}, r"window is -3; it must be an integer of at least 1"),
    (WINDOWED, {"window": 2.0}, r"window is 2\.0; it must be an integer of at least 1"),
    (WITH_WINDOW, {"window": None}, r"window is None; it must be an integer of at least 1"),
    (WITH_WINDOW, {"window": True}, r"window is True; it must be an integer of at least 1"),
    (WINDOWED, {"softcap": 0.0}, r"softcap is 0\.0; it must be positive and finite"),
    (WITH_WINDOW, {"softcap": -1.0}, r"softcap is -1\.0; it must be positive and finite in float32 \(.*\), or None"),
    (WITH_WINDOW, {"softcap": torch.inf}, r"softcap is inf; it must be positive and finite"),
    (WINDOWED, {"softcap": 1e39}, r"softcap is 1e\+39; it must be positive and finite in float32 \(1\.2e-38 to"),
    (WINDOWED, {"softcap": 1e-46}, r"softcap is 1e-46; it must be positive and finite in float32"),
    (WINDOWED, {"scale": -1e39}, r"scale is -1e\+39; it must be finite in float32, or None"),
    (WINDOWED, {"scale": torch.tensor(0.5, requires_grad=True)}, r"scale is tensor\(0\.5.*\); it must be a number"),
    (WINDOWED, {"scale": "0.5"}, r"scale is '0\.5'; it must be a number"),
    (WINDOWED, {"softcap": torch.tensor(5.0)}, r"softcap is tensor\(5\.\); it must be a number"),
    (WITH_WINDOW, {"softcap": True}, r"softcap is True; it must be a number"),
    (ALL, {"causal": "False"}, r"causal is 'False'; it must be True or False"),
    (ALL, {"causal": None}, r"causal is None; it must be True or False"),
    (WINDOWED, {"scale": torch.nan}, r"scale is nan; it must be finite in float32, or None"),
    (OPS, {"backend": "cuda"}, r"backend is 'cuda'; it must be one of 'auto', 'reference', 'torch', 'triton'"),
    (OPS, {"backend": None}, r"backend is None; it must be one of"),
    (("linear",), {"feature_map": "softmax"}, r"feature_map is 'softmax'; it must be \"elu\+1\", \"exp\", \"relu\" or"),
    (("linear",), {"feature_map": None}, r"feature_map is None; it must be"),
    (("linear",), {"feature_map": lambda x: x[0]}, r"feature_map\(q\) gives \[5, 6, 7\]; .* \[2, 5, 6, 'L'\]"),
    (("linear",), {"feature_map": lambda x: 1.0}, r"feature_map\(q\) gives float; it must give \[B, T, H, L\]"),
]  # fmt: skip
MASKS = [
    (ALL, {"mask": z(B, T + 1, dtype=torch.bool)}, r"mask has shape \[2, 6\]; it must be \[B=2, T=5\]"),
    (ALL, {"mask": z(T, dtype=torch.bool)}, r"mask has shape \[5\]; it must be \[B=2, T=5\]"),
    (ALL, {"mask": z(B, T)}, r"mask has dtype torch\.float32; it must be a bool tensor \[B, T\], True = real token"),
    (ALL, {"mask": z(B, T, dtype=INT)}, r"mask has dtype torch\.int64; it must be a bool tensor"),
    (ALL, {"mask": [[True] * T] * B}, r"mask has type list; it must be a bool tensor"),
]
PACKED = [
    (ALL, {"cu_seqlens": ends(1, T)}, r"cu_seqlens starts at 1; it must start at 0"),
    (ALL, {"cu_seqlens": ends(0, 4, 3, T)}, r"cu_seqlens decreases from 4 to 3 at index 2; it must never decrease"),
    (ALL, {"cu_seqlens": ends(0, 2, T - 1)}, r"cu_seqlens ends at 4; it must end at the number of tokens, 5"),
    (ALL, {"cu_seqlens": ends(0, 2, T + 2)}, r"cu_seqlens ends at 7; it must end at the number of tokens, 5"),
    (ALL, {"cu_seqlens": ends(0)}, r"cu_seqlens has shape \[1\]; it must be \[N \+ 1\] for N >= 1 sequences"),
    (ALL, {"cu_seqlens": ends(0, T)[None]}, r"cu_seqlens has shape \[1, 2\]; it must be \[N \+ 1\]"),
    (ALL, {"cu_seqlens": ends(0, T, dtype=torch.float32)}, r"cu_seqlens has dtype torch\.float32; .* int32 or int64"),
    (ALL, {"cu_seqlens": [0, T]}, r"cu_seqlens has type list; it must be an int32 or int64 tensor \[N \+ 1\]"),
]
STATES = [
    (("latte", "linear"), {"state": latents(batch=3)}, r"state\.log_norm has shape \[3, 6, 7\]; .* \[B=2, H=6, L=7\]"),
    (("latte", "linear"), {"state": latents(number=8)}, r"state\.log_norm has shape \[2, 6, 8\]; .* \[B=2, H=6, L=7\]"),
    (("latte", "linear"), {"state": latents(width=3)}, r"state\.mean has shape \[2, 6, 7, 3\]; .* L=7, D=11\]"),
    (("latte",), {"state": latents(heads=3)}, r"state\.log_norm has shape \[2, 3, 7\]; it must be \[B=2, H=6, L=7\]"),
    (("latte",), {"state": LatteState(z(B, H, L).long(), z(B, H, L, D))}, r"state\.log_norm has dtype torch\.int64"),
    (("window",), {"state": recent(batch=3)}, r"state\.keys has shape \[3, 3, 3, 13\]; .* \[B=2, w-1=3, Hv=3, E=13\]"),
    (("window",), {"state": recent(slots=4)}, r"state\.keys has shape \[2, 4, 3, 13\]; .* \[B=2, w-1=3, Hv=3, E=13\]"),
    (WITH_WINDOW, {"state": both(value=4)}, r"state\.values has shape \[2, 3, 3, 4\]; .* \[B=2, w-1=3, Hv=3, D=11\]"),
    (("macchiato",), {"state": both(batch=3)}, r"state\.latents\.log_norm has shape \[3, 6, 7\]; .* \[B=2, H=6, L=7\]"),
    (("macchiato",), {"state": both(slots=2)}, r"state\.keys has shape \[2, 2, 3, 13\]; .* \[B=2, w-1=3, Hv=3, E=13\]"),
    (("window",), {"state": recent()._replace(valid=z(B, 3))}, r"state\.valid has dtype torch\.float32; .* bool"),
    (("window",), {"state": recent()._replace(valid=z(B, 2).bool())}, r"state\.valid has shape \[2, 2\]; .* \[B=2, "),
    (("latte", "linear"), {"state": both()}, r"state is MacchiatoState; it must be a LatteState"),
    (("latte", "linear"), {"state": z(B, H, L)}, r"state is Tensor; it must be a LatteState"),
    (("window",), {"state": latents()}, r"state is LatteState; it must be a WindowState"),
    (("macchiato",), {"state": latents()}, r"state is LatteState; it must be a MacchiatoState"),
    (("macchiato",), {"state": both()._replace(latents=None)}, r"state\.latents is NoneType; it must be a LatteState"),
]  # fmt: skip
META = "meta"
ELSEWHERE = [
    (WITH_LATENTS, {"k": z(B, T, H, L, device=META)}, r"k is on meta; it must be on cpu, where q is"),
    (("window",), {"k": z(B, T, HV, E, device=META)}, r"k is on meta; it must be on cpu, where q is"),
    (OPS, {"v": V.to(META)}, r"v is on meta; it must be on cpu, where q is"),
    (HYBRID, {"window_q": z(B, T, H, E, device=META)}, r"window_q is on meta; it must be on cpu, where"),
    (HYBRID, {"window_k": z(B, T, HV, E, device=META)}, r"window_k is on meta; it must be on cpu, w"),
    (ALL, {"mask": z(B, T, device=META).bool()}, r"mask is on meta; it must be on cpu, where q is"),
    (("latte",), {"state": LatteState(*(x.to(META) for x in latents()))}, r"state\.log_norm is on meta; .* on cpu"),
    (("latte",), {"state": latents()._replace(mean=z(B, H, L, D, device=META))}, r"state\.mean is on meta; .* on cpu"),
    (("window",), {"state": recent()._replace(keys=z(B, 3, HV, E, device=META))}, r"state\.keys is on meta; .* on cpu"),
    (WITH_WINDOW, {"state": both()._replace(valid=z(B, 3, device=META).bool())}, r"state\.valid is on meta; .* on cpu"),
]  # fmt: skip


def rows(table: list) -> list:
    """One parameter for each operation of each row."""
    return [
        pytest.param(name, wrong, message, id=name + ": " + message.replace("\\", "")[:40])
        for names, wrong, message in table
        for name in names
    ]


@pytest.mark.parametrize(
    ("name", "wrong", "message"), rows(MISMATCHED) + rows(KINDS) + rows(MASKS) + rows(STATES) + rows(ELSEWHERE)
)
def test_bad_argument(name: str, wrong: dict[str, Any], message: str) -> None:
    function, arguments = BASE[name]
    heads = wrong.get("k4")  # window keys have as many heads as values
    wrong = {argument: value for argument, value in wrong.items() if argument != "k4"}
    if heads is not None and name in WITH_WINDOW:
        wrong["k" if name == "window" else "window_k"] = z(B, T, heads, E)
    if name == "window" and isinstance(wrong.get("state"), MacchiatoState):
        wrong["state"] = WindowState(*wrong["state"][1:])
    with pytest.raises(ValueError, match=f"^{message}"):
        function(**{**arguments, **wrong})


@pytest.mark.parametrize(("name", "wrong", "message"), rows(PACKED))
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_bad_packing(name: str, wrong: dict[str, Any], message: str, backend: str) -> None:
    choice = {} if name == "weights" else {"backend": backend}
    with pytest.raises(ValueError, match=f"^{message}"):
        BASE[name][0](**PACK[name], **wrong, **choice)


@pytest.mark.parametrize("name", ALL)
def test_packing_of_several_rows(name: str) -> None:
    function, arguments = BASE[name]
    with pytest.raises(ValueError, match=r"^cu_seqlens is given with batch size 2; .* lie in one row, B = 1"):
        function(**arguments, cu_seqlens=ends(0, T))


def test_a_state_for_each_packed_sequence() -> None:
    expected = r"^state\.log_norm has shape \[2, 6, 7\]; it must be \[B=3, H=6, L=7\]"
    with pytest.raises(ValueError, match=expected):
        latte_attention(**PACK["latte"], cu_seqlens=ends(0, 2, 2, T), state=latents(batch=2))


def test_packing_elsewhere() -> None:
    with pytest.raises(ValueError, match=r"^cu_seqlens is on meta; it must be on cpu, where q is"):
        latte_attention(**PACK["latte"], cu_seqlens=torch.zeros(2, dtype=INT, device=META))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"nothing is given; give q and k, window_q and window_k, or all four"),
        ({"q": z(B, T, H, L)}, r"k is missing; give both q and k"),
        ({"k": z(B, T, H, L)}, r"q is missing; give both q and k"),
        ({"window_q": z(B, T, H, E)}, r"window_k is missing; give both"),
        ({"window_k": z(B, T, H, E)}, r"window_q is missing; give both"),
        (
            {"q": z(B, T, H, L), "k": z(B, T, H, L), "feature_map": lambda x: x[..., :0]},
            r"q has L = 0; it must be at least 1",
        ),
        ({**PACK["weights"], "feature_map": "exp"}, r"feature_map is 'exp' with a window; linear attention has none"),
    ],
)
def test_weights_of_no_form(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        attention_weights(**given)


@pytest.mark.parametrize("name", OPS)
def test_base_is_good(name: str) -> None:
    """What the tables change is what makes the difference."""
    function, arguments = BASE[name]
    assert function(**arguments, backend="torch").y.shape == (B, T, H, D)
    assert function(**PACK[name], cu_seqlens=ends(0, 2, 2, T)).y.shape == (1, T, H, D)
