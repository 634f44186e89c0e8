"""The documentation names every layer."""

import torch

from latte import layers
from tests.pages import read_page

PAGE = read_page("layers.md")


def test_every_layer_is_described():
    public = {name: getattr(layers, name) for name in layers.__all__}
    modules = {name for name, kind in public.items() if isinstance(kind, type) and issubclass(kind, torch.nn.Module)}
    assert [name for name in modules - {"BlockDiagonal"} if f"`{name}" not in PAGE] == []
