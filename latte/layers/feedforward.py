"""Feed-forward layers: what each token does by itself."""

from collections.abc import Callable
from functools import partial

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from latte.layers.checks import check_choice, check_count
from latte.layers.initialization import reset_linear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}
FEEDFORWARDS = ("mlp", "glu")


class MLP(nn.Module):
    """down(activation(up(x)))."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: str = "gelu", bias: bool = False) -> None:
        super().__init__()
        _check(hidden_size, intermediate_size, activation)
        self.activation = activation
        self.up = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for linear in (self.up, self.down):
            reset_linear(linear)

    def forward(self, x: Float[Tensor, "*batch C"]) -> Float[Tensor, "*batch C"]:
        return self.down(ACTIVATIONS[self.activation](self.up(x)))

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class GLU(nn.Module):
    """down(activation(gate(x)) ⊙ up(x)): SwiGLU with "silu", GEGLU with "gelu"."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: str = "silu", bias: bool = False) -> None:
        super().__init__()
        _check(hidden_size, intermediate_size, activation)
        self.activation = activation
        self.gate = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for linear in (self.gate, self.up, self.down):
            reset_linear(linear)

    def forward(self, x: Float[Tensor, "*batch C"]) -> Float[Tensor, "*batch C"]:
        return self.down(ACTIVATIONS[self.activation](self.gate(x)) * self.up(x))

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


def make_feedforward(
    name: str, hidden_size: int, intermediate_size: int, activation: str | None = None, bias: bool = False
) -> MLP | GLU:
    """The layer called "mlp" (GELU unless `activation` says otherwise) or "glu" (SiLU)."""
    check_choice("feedforward", name, FEEDFORWARDS)
    if name == "mlp":
        return MLP(hidden_size, intermediate_size, activation or "gelu", bias)
    return GLU(hidden_size, intermediate_size, activation or "silu", bias)


def _check(hidden_size: int, intermediate_size: int, activation: str) -> None:
    check_count("hidden_size", hidden_size)
    check_count("intermediate_size", intermediate_size)
    check_choice("activation", activation, ACTIVATIONS)
