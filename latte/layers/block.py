"""The pre-norm residual block: attention, then feed-forward."""

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from latte.layers.attention import LatteAttention
from latte.layers.attention_state import AttentionOutput, AttentionState, Rotary
from latte.layers.norms import make_norm


class Block(nn.Module):
    """x + attention(norm(x)), then x + feedforward(norm(x)); `norm` is "rmsnorm" or "layernorm"."""

    def __init__(
        self, attention: LatteAttention, feedforward: nn.Module, *, norm: str = "rmsnorm", eps: float = 1e-6
    ) -> None:
        super().__init__()
        self.attention_norm = make_norm(norm, attention.hidden_size, eps)
        self.attention = attention
        self.feedforward_norm = make_norm(norm, attention.hidden_size, eps)
        self.feedforward = feedforward

    def forward(
        self,
        x: Float[Tensor, "B T C"],
        mask: Bool[Tensor, "B T"] | None = None,
        cu_seqlens: Int[Tensor, " bounds"] | None = None,
        positions: Int[Tensor, "_ T"] | None = None,
        rotary: Rotary | None = None,
    ) -> Float[Tensor, "B T C"]:
        """Whole sequences; the arguments are those of `LatteAttention.stream`."""
        x = x + self.attention(self.attention_norm(x), mask, cu_seqlens, positions, rotary)
        return x + self.feedforward(self.feedforward_norm(x))

    def stream(
        self,
        x: Float[Tensor, "B T C"],
        state: AttentionState | None = None,
        mask: Bool[Tensor, "B T"] | None = None,
        cu_seqlens: Int[Tensor, " bounds"] | None = None,
        positions: Int[Tensor, "_ T"] | None = None,
        rotary: Rotary | None = None,
    ) -> AttentionOutput:
        """The next tokens of a sequence and the state after them; see `LatteAttention.stream`."""
        y, state = self.attention.stream(self.attention_norm(x), state, mask, cu_seqlens, positions, rotary)
        x = x + y
        return AttentionOutput(x + self.feedforward(self.feedforward_norm(x)), state)
