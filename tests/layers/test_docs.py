"""The examples of the documentation run."""

import re
from pathlib import Path

import torch

from latte import layers

PAGE = (Path(__file__).parents[2] / "docs" / "layers.md").read_text(encoding="utf-8")


def test_examples_run_in_order():
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 7
    with torch.no_grad():
        exec(compile("\n".join(blocks), "layers.md", "exec"), {})


def test_every_layer_is_described():
    public = {name: getattr(layers, name) for name in layers.__all__}
    modules = {name for name, kind in public.items() if isinstance(kind, type) and issubclass(kind, torch.nn.Module)}
    assert [name for name in modules - {"BlockDiagonal"} if f"`{name}" not in PAGE] == []
