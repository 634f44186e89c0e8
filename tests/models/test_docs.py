"""The table of the documentation is true."""

import re

import pytest
import torch

from latte.models import PRESETS, LatteConfig, LatteForCausalLM
from tests.pages import read_page

PAGE = read_page("models.md")


def test_presets_and_their_sizes_are_listed():
    listed: dict[str, float] = {}
    for names, sizes in re.findall(r"^\| (`[^|]+`) \|[^|]+\| ([\d., ]+) M \|", PAGE, flags=re.MULTILINE):
        listed |= zip(re.findall(r"`([^`]+)`", names), map(float, sizes.split(", ")), strict=True)
    assert set(listed) == set(PRESETS)
    for name, millions in listed.items():
        with torch.device("meta"):
            model = LatteForCausalLM(LatteConfig.from_preset(name))
        assert millions == pytest.approx(1e-6 * sum(p.numel() for p in model.parameters()), abs=0.05)
