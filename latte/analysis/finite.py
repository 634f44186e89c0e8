"""What to say where a model's numbers are NaN or infinite."""

import torch
from torch import nn


def not_finite_because(model: nn.Module) -> str:
    """Why that may be: a weight is, or all are finite and the dtype does not hold what is made of them."""
    for name, weight in model.named_parameters():
        if weight.numel() and not torch.stack(weight.detach().aminmax()).isfinite().all():
            return f"its weight {name} holds NaN or infinity; save it again from where it was whole"
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return f"its weights are finite, in {dtype}; a wider dtype may help"
