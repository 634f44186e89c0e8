"""The examples of the documentation run, and its table is true."""

import re
from pathlib import Path

import pytest
import torch

from latte.models import PRESETS, LatteConfig, LatteForCausalLM

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")


def test_examples_run_in_order():
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 8
    exec(compile("\n".join(blocks), "models.md", "exec"), {})


def test_presets_and_their_sizes_are_listed():
    listed: dict[str, float] = {}
    for names, sizes in re.findall(r"^\| (`[^|]+`) \|[^|]+\| ([\d., ]+) M \|", PAGE, flags=re.MULTILINE):
        listed |= zip(re.findall(r"`([^`]+)`", names), map(float, sizes.split(", ")), strict=True)
    assert set(listed) == set(PRESETS)
    for name, millions in listed.items():
        with torch.device("meta"):
            model = LatteForCausalLM(LatteConfig.from_preset(name))
        assert millions == pytest.approx(1e-6 * sum(p.numel() for p in model.parameters()), abs=0.05)
