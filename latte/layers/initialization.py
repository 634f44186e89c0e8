"""How weights begin, unless a model says otherwise."""

from torch import Tensor, nn


def reset_weight(weight: Tensor, fan_in: int) -> None:
    """Normal with variance 1 / fan_in: inputs of variance 1 give outputs of variance 1."""
    nn.init.normal_(weight, std=fan_in**-0.5)


def reset_linear(linear: nn.Linear) -> None:
    reset_weight(linear.weight, linear.in_features)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
