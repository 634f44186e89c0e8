"""The optimiser and how its rate goes."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from latte.train.settings import RunSettings


def rate_at(step: int, settings: RunSettings) -> float:
    """The learning rate of a step, counted from 0, as a share of the highest."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return 1.0
    done = min(1.0, (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps))
    left = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.final_rate + (1 - settings.final_rate) * left


def make_scheduler(optimizer: torch.optim.Optimizer, settings: RunSettings) -> LambdaLR:
    share: Callable[[int], float] = lambda step: rate_at(step, settings)  # noqa: E731
    return LambdaLR(optimizer, share)


def resume_scheduler(scheduler: LambdaLR, step: int) -> None:
    """Go on after `step` steps: the rate is a function of the step, and needs no other memory."""
    rates = [base * share(step) for base, share in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler.last_epoch, scheduler._last_lr = step, rates


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters that learn, with and without weight decay: vectors (norms, biases, decays) have none."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in learning if parameter.ndim > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in learning if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(model: nn.Module, settings: RunSettings) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameter_groups(model, settings.weight_decay),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        fused=True,  # one kernel for all parameters, on CPUs too
    )
