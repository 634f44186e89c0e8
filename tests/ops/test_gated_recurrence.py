"""The RG-LRU with its gates where no kernel makes them; tests/triton has those."""

import pytest
import torch

from latte.ops.gated_recurrence import gated_rglru

B, T, BLOCKS, SIZE = 2, 9, 2, 3
W = BLOCKS * SIZE
SHAPES = {"x": (B, T, W), "a_weight": (BLOCKS, SIZE, SIZE), "a_bias": (W,), "x_weight": (BLOCKS, SIZE, SIZE)}
SHAPES |= {"x_bias": (W,), "a_param": (W,)}


def draw() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_what_stands_in_masked_positions_does_not_matter(backend: str) -> None:
    mask = torch.arange(T).expand(B, T) % 3 > 0
    results = []
    for filler in (0.0, torch.nan):
        inputs = draw()
        inputs["x"].masked_fill_(~mask[..., None], filler)
        leaves = [x.requires_grad_() for x in inputs.values()]
        y, state = gated_rglru(**inputs, mask=mask, backend=backend)
        results.append((y, state, *torch.autograd.grad(y.square().sum() + state.sum(), leaves)))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "x"])
def test_inputs_elsewhere(name: str) -> None:
    inputs = draw()
    with pytest.raises(ValueError, match=rf"^{name} is on meta; it must be on cpu, where x is"):
        gated_rglru(**{**inputs, name: inputs[name].to("meta")})
