"""Learning rates by step, what learns, and what decays."""

import math

import pytest
import torch
from torch import nn

from latte.train import RunSettings
from latte.train.schedules import (
    make_optimizer,
    make_scheduler,
    parameter_groups,
    rate_at,
    resume_scheduler,
)
from latte.train.trainable import choose_trainable

SETTINGS = {"steps": 100, "warmup_steps": 10, "learning_rate": 2.0}


def test_warm_up():
    settings = RunSettings(**SETTINGS)
    assert [rate_at(step, settings) for step in (0, 4, 9, 10)] == [0.1, 0.5, 1.0, 1.0]


@pytest.mark.parametrize(
    ("schedule", "final", "expected"),
    [
        ("constant", 0.0, [1.0, 1.0, 1.0, 1.0]),
        ("linear", 0.0, [1.0, 2 / 3, 1 / 3, 0.0]),
        ("linear", 0.1, [1.0, 0.7, 0.4, 0.1]),
        ("cosine", 0.0, [1.0, 0.75, 0.25, 0.0]),
        ("cosine", 0.2, [1.0, 0.8, 0.4, 0.2]),
    ],
)
def test_after_the_warm_up(schedule, final, expected):
    settings = RunSettings(**SETTINGS, schedule=schedule, final_rate=final)
    assert [rate_at(step, settings) for step in (10, 40, 70, 100)] == pytest.approx(expected)
    assert rate_at(1000, settings) == pytest.approx(expected[-1])  # beyond the end it stays


def test_no_warm_up_and_a_single_step():
    assert rate_at(0, RunSettings(steps=1)) == 1.0
    assert math.isfinite(rate_at(1, RunSettings(steps=1, warmup_steps=5)))


def test_a_scheduler_goes_on():
    settings = RunSettings(**SETTINGS)
    model = nn.Linear(2, 2)
    optimizers = [make_optimizer(model, settings) for _ in range(2)]
    whole, resumed = (make_scheduler(optimizer, settings) for optimizer in optimizers)
    rates = []
    for _ in range(30):
        rates.append([group["lr"] for group in optimizers[0].param_groups])
        optimizers[0].step()
        whole.step()
    resume_scheduler(resumed, 17)
    for step in range(17, 30):
        assert [group["lr"] for group in optimizers[1].param_groups] == rates[step]
        optimizers[1].step()
        resumed.step()
    assert resumed.get_last_lr() == whole.get_last_lr()


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.latent_query, self.value = nn.Linear(3, 4), nn.Linear(3, 5)
        self.norm = nn.LayerNorm(3)
        self.a_param = nn.Parameter(torch.ones(3))


def test_vectors_do_not_decay():
    model = Parts()
    decaying, others = parameter_groups(model, 0.3)
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert [id(weight) for weight in decaying["params"]] == [id(model.latent_query.weight), id(model.value.weight)]
    assert len(others["params"]) == 5


@pytest.mark.parametrize(
    ("trainable", "names"),
    [
        ("all", 7),
        ("latents", {"latent_query.weight", "latent_query.bias"}),
        ("norms", {"norm.weight", "norm.bias"}),
        (r"^value\.bias$", {"value.bias"}),
    ],
)
def test_what_learns(trainable, names):
    model = Parts()
    choose_trainable(model, trainable)
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert learning == names or len(learning) == names
    groups = parameter_groups(model, 0.1)
    assert sum(len(group["params"]) for group in groups) == len(learning)
    assert all(group["params"] for group in groups)


@pytest.mark.parametrize(("trainable", "words"), [("nothing", "no parameter is called"), ("(", "regular expression")])
def test_nothing_learns(trainable, words):
    with pytest.raises(ValueError, match=words):
        choose_trainable(Parts(), trainable)
