"""What custom operations are given: the mixture's tensors, in the order of every backend, and sizes of heads."""

from typing import NamedTuple

TENSORS = ("q", "k", "v", "window_q", "window_k", "mask", "log_norm", "mean", "past_keys", "past_values", "past_valid")
MIXTURE = (
    ", ".join(f"Tensor{'' if name == 'v' else '?'} {name}" for name in (*TENSORS, "cu_seqlens"))
    + ", SymInt window, float scale, float softcap, bool undirected, bool causal"
)
"""The same in PyTorch's language of schemas, with packing and options."""

DIFFERENTIABLE = ("q", "k", "v", "window_q", "window_k", "log_norm", "mean", "past_keys", "past_values")


class HeadSizes(NamedTuple):
    heads: int
    value_heads: int
    latents: int
    width: int  # of values
    key_width: int  # of the window's queries and keys

    @property
    def scores(self) -> tuple[int, int, int]:
        """Columns of queries, keys and values."""
        return self.heads * self.key_width, self.value_heads * self.key_width, self.value_heads * self.width

    @property
    def logits(self) -> tuple[int, int]:
        """Columns of the latents' keys and queries; the odd one last, so that nothing has to be skipped before it."""
        return self.heads * self.latents, self.heads * (self.latents + 1)
