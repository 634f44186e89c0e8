"""Mixers feed the logits of the latents: each token with a little, or a fading memory, of those around it."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from latte.layers.checks import check_choice, check_count, check_multiple
from latte.layers.initialization import reset_weight
from latte.ops import RGLRUOutput, ShortConvOutput, short_conv
from latte.ops.gated_recurrence import gated_rglru
from latte.ops.steps import ConvolutionWeights, RGLRUWeights, rglru_step_, short_conv_step_

MIXERS = ("none", "conv", "rglru")


class ShortConvolution(nn.Module):
    """y_t = Σ_j weight[:, j] x_{t−K+1+j}, channel by channel, over the last K = `size` tokens.

    With `causal=False` the taps are centred on the token: (K − 1) / 2 on either side. The state is then that many
    inputs; what follows the tokens of a call is never seen.
    """

    def __init__(
        self, hidden_size: int, size: int = 3, causal: bool = True, *, bias: bool = False, backend: str = "auto"
    ) -> None:
        super().__init__()
        check_count("hidden_size", hidden_size)
        check_count("conv_size", size)
        if not causal and size % 2 == 0:
            raise ValueError(f"conv_size is {size}; taps that look both ways are odd in number, e.g. {size + 1}")
        self.size, self.causal, self.backend = size, causal, backend
        self.weight = nn.Parameter(torch.empty(hidden_size, size))
        self.bias = nn.Parameter(torch.empty(hidden_size)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Taps are normal with variance 1 / K, so that y varies as much as x; the bias is 0."""
        reset_weight(self.weight, self.size)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Float[Tensor, "B T C"],
        mask: Bool[Tensor, "B T"] | None = None,
        cu_seqlens: Int[Tensor, " bounds"] | None = None,
    ) -> Float[Tensor, "B T C"]:
        return self.stream(x, None, mask, cu_seqlens).y

    def stream(
        self,
        x: Float[Tensor, "B T C"],
        state: Float[Tensor, "N P C"] | None = None,
        mask: Bool[Tensor, "B T"] | None = None,
        cu_seqlens: Int[Tensor, " bounds"] | None = None,
    ) -> ShortConvOutput:
        """y, and the last inputs that tokens to come will want."""
        past = {"state": state, "mask": mask, "cu_seqlens": cu_seqlens, "backend": self.backend}
        if self.causal:
            return short_conv(x, self.weight, self.bias, **past)
        reach = self.size // 2
        y, last = short_conv(x, self.weight[:, : reach + 1], self.bias, **past)
        later = torch.cat([self.weight[:, reach + 1 :].flip(1), torch.zeros_like(self.weight[:, :1])], dim=1)
        x, mask, cu_seqlens = reverse(x, mask, cu_seqlens)
        ahead = short_conv(x, later, mask=mask, cu_seqlens=cu_seqlens, backend=self.backend).y
        return ShortConvOutput(y + ahead.flip(1), last)

    def step_(
        self, x: Float[Tensor, "B one C"], state: Float[Tensor, "B P C"], mask: Bool[Tensor, "B one"] | None = None
    ) -> Float[Tensor, "B one C"]:
        """y of one more token; the last inputs in `state` move up by one, in place."""
        return short_conv_step_(x, *self.weights, state, mask=mask, backend=self.backend)

    @property
    def weights(self) -> ConvolutionWeights:
        return ConvolutionWeights(self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, size={self.size}, causal={self.causal}, bias={self.bias is not None}"


class RGLRU(nn.Module):
    """Griffin's gated linear recurrence: h_t = a_t h_{t−1} + sqrt(1 − a_t²) σ(input_gate(x_t)) x_t, a_t in (0, 1).

    log a_t = −8 softplus(a_param) σ(recurrence_gate(x_t)). With `causal=False` y is the mean of a scan from the left
    and one from the right that share their parameters; the state is that of the scan from the left.
    """

    def __init__(self, hidden_size: int, num_blocks: int = 16, causal: bool = True, *, backend: str = "auto") -> None:
        super().__init__()
        self.causal, self.backend = causal, backend
        self.input_gate = BlockDiagonal(hidden_size, num_blocks)
        self.recurrence_gate = BlockDiagonal(hidden_size, num_blocks)
        self.a_param = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gates as `BlockDiagonal` says; a_param as `initial_a_param` says."""
        self.input_gate.reset_parameters()
        self.recurrence_gate.reset_parameters()
        with torch.no_grad():
            self.a_param.copy_(initial_a_param(self.a_param))

    def forward(
        self,
        x: Float[Tensor, "B T C"],
        mask: Bool[Tensor, "B T"] | None = None,
        cu_seqlens: Int[Tensor, " bounds"] | None = None,
    ) -> Float[Tensor, "B T C"]:
        return self.stream(x, None, mask, cu_seqlens).y

    def stream(
        self,
        x: Float[Tensor, "B T C"],
        state: Float[Tensor, "N C"] | None = None,
        mask: Bool[Tensor, "B T"] | None = None,
        cu_seqlens: Int[Tensor, " bounds"] | None = None,
    ) -> RGLRUOutput:
        """y, and h after the last token."""
        y, last = gated_rglru(x, *self.weights, mask=mask, state=state, cu_seqlens=cu_seqlens, backend=self.backend)
        if self.causal:
            return RGLRUOutput(y, last)
        x, mask, cu_seqlens = reverse(x, mask, cu_seqlens)
        back = gated_rglru(x, *self.weights, mask=mask, cu_seqlens=cu_seqlens, backend=self.backend).y
        return RGLRUOutput(0.5 * (y + back.flip(1)), last)

    def step_(
        self, x: Float[Tensor, "B one C"], state: Float[Tensor, "B C"], mask: Bool[Tensor, "B one"] | None = None
    ) -> Float[Tensor, "B one C"]:
        """y of one more token; h in `state` is advanced in place."""
        return rglru_step_(x, *self.weights, state, mask=mask, backend=self.backend)

    @property
    def weights(self) -> RGLRUWeights:
        a, i = self.recurrence_gate, self.input_gate
        return RGLRUWeights(a.weight, a.bias, i.weight, i.bias, self.a_param)

    def extra_repr(self) -> str:
        return f"causal={self.causal}"


class BlockDiagonal(nn.Module):
    """x W + b with W block-diagonal: the weight of block n is `weight[n]`, [in, out]."""

    def __init__(self, hidden_size: int, num_blocks: int) -> None:
        super().__init__()
        check_count("hidden_size", hidden_size)
        check_count("mixer_blocks", num_blocks)
        check_multiple("hidden_size", hidden_size, "mixer_blocks", num_blocks, "choose mixer_blocks that divide it")
        width = hidden_size // num_blocks
        self.weight = nn.Parameter(torch.empty(num_blocks, width, width))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with variance 1 / (width of a block), bias 0: gates begin around one half and differ by token."""
        reset_weight(self.weight, self.weight.shape[1])
        nn.init.zeros_(self.bias)

    def forward(self, x: Float[Tensor, "*batch C"]) -> Float[Tensor, "*batch C"]:
        rows = x.unflatten(-1, (self.weight.shape[0], -1)).unsqueeze(-2)
        return (rows @ self.weight).flatten(-3) + self.bias

    def extra_repr(self) -> str:
        return f"{self.bias.shape[0]}, blocks={self.weight.shape[0]}"


def initial_a_param(like: Tensor) -> Tensor:
    """a_param for which the decay with its gate open, exp(−8 softplus(a_param)), is uniform in [0.9, 0.999].

    That is Griffin's choice: channels begin with memories from about ten to a thousand tokens, twice that at a gate of
    one half. In float32, since 0.999 is 1 in bfloat16.
    """
    decay = torch.empty_like(like, dtype=torch.float32).uniform_(0.9, 0.999)
    return torch.log(torch.expm1(-torch.log(decay) / 8))


def reverse(x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The row from its end: every sequence reversed, and the last one first."""
    backwards = None if cu_seqlens is None else x.shape[1] - cu_seqlens.flip(0)
    return x.flip(1), None if mask is None else mask.flip(1), backwards


def make_mixer(
    name: str,
    hidden_size: int,
    *,
    conv_size: int = 3,
    blocks: int = 16,
    causal: bool = True,
    bias: bool = False,
    backend: str = "auto",
) -> ShortConvolution | RGLRU | None:
    """The mixer called "conv" or "rglru"; None for "none"."""
    check_choice("mixer", name, MIXERS)
    if name == "conv":
        return ShortConvolution(hidden_size, conv_size, causal, bias=bias, backend=backend)
    return RGLRU(hidden_size, blocks, causal, backend=backend) if name == "rglru" else None
