"""States of optimisers and generators, to files and back."""

import json
import random

import numpy as np
import pytest
import torch
from torch import nn

from latte.train.states import (
    gather_optimizer,
    load_optimizer,
    random_state,
    restore_random_state,
    save_optimizer,
)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False))
    groups = [{"params": [model[0].bias], "lr": 0.1}, {"params": [model[0].weight, model[1].weight], "lr": 0.01}]
    return model, torch.optim.AdamW(groups, fused=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_an_optimizer_goes_on_as_if_nothing_happened(tmp_path):
    model, optimizer = make()
    for _ in range(3):
        step(model, optimizer)
    save_optimizer(gather_optimizer(model, optimizer), tmp_path)
    again, other = make()
    again.load_state_dict(model.state_dict())
    load_optimizer(again, other, tmp_path)
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.01]
    for _ in range(2):
        step(model, optimizer)
        step(again, other)
    for expected, actual in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(expected, actual)


def test_states_of_other_parameters(tmp_path):
    model, optimizer = make()
    step(model, optimizer)
    states = gather_optimizer(model, optimizer)
    save_optimizer({name.replace("1.weight", "2.weight"): state for name, state in states.items()}, tmp_path)
    with pytest.raises(ValueError, match=r"other parameters: 1.weight, 2.weight"):
        load_optimizer(*make(), tmp_path)


def test_generators_go_on_as_if_nothing_happened():
    random.gauss(0, 1)
    np.random.standard_normal()  # these have a value in store, which must not be lost
    state = json.loads(json.dumps(random_state()))

    def draw() -> list[float]:
        return [random.gauss(0, 1), float(np.random.standard_normal()), float(torch.randn(()))]

    expected = [draw() for _ in range(3)]
    draw()
    restore_random_state(state)
    assert [draw() for _ in range(3)] == expected
