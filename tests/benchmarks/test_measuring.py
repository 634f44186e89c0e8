"""What is measured and how: contenders do the same work, times and limits are what they say."""

import math
import time

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from benchmarks import limits, timing
from benchmarks.contenders import LATTE, LIGHTNET, LOOP, MACCHIATO, OURS, RGLRU, SOFTMAX, WINDOW, Sizes, band, first
from benchmarks.correctness import Check, check, relative_error

SMALL = Sizes(2, 67, heads=3, head_dim=8, latents=5, window=17)


@pytest.mark.parametrize("contender", OURS, ids=lambda contender: contender.op)
def test_every_op_steps_forward_and_back(contender):
    inputs = contender.inputs(SMALL, torch.float32, "cpu")
    y = first(contender.step(inputs, SMALL, backward=False)())
    assert not y.requires_grad
    grads = contender.step(inputs, SMALL, backward=True)()
    assert [grad.shape for grad in grads] == [x.shape for x in inputs]
    again = contender.inputs(SMALL, torch.float32, "cpu")
    assert all(torch.equal(x, other) for x, other in zip(inputs, again, strict=True))


def test_the_python_loop_is_the_recurrence():
    inputs = RGLRU.inputs(SMALL, torch.float64, "cpu")
    torch.testing.assert_close(LOOP.run(inputs, SMALL), RGLRU.run(inputs, SMALL).y)


def test_softmax_is_the_widest_window():
    inputs = SOFTMAX.inputs(SMALL, torch.float32, "cpu")
    whole = SMALL._replace(window=SMALL.tokens)
    y = WINDOW.run([x.transpose(1, 2) for x in inputs], whole).y
    torch.testing.assert_close(SOFTMAX.run(inputs, SMALL), y.transpose(1, 2))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [1, 2, 128, 129, 130, 300, 1000])
def test_the_block_mask_is_the_window(window):
    q, k, v = torch.randn((3, 1, 2, 512, 8), generator=torch.Generator().manual_seed(3))
    expected = WINDOW.run([x.transpose(1, 2) for x in (q, k, v)], Sizes(1, 512, window=window)).y.transpose(1, 2)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=band(512, window, "cpu")), expected)


def test_the_block_mask_takes_whole_blocks_only():
    with pytest.raises(ValueError, match="tokens is 500"):
        band(500, 128, "cpu")


def test_absent_peers_say_so():
    with pytest.raises(ImportError, match="fla"):
        LIGHTNET.run(LIGHTNET.inputs(SMALL, torch.float32, "cpu"), SMALL)


def test_limits_at_the_bandwidth_of_an_h200():
    """Milliseconds at 4.27 TB/s for 32,768 tokens in bfloat16, counted by hand."""
    sizes = Sizes(8, 4096)

    def limit(contender, *, backward: bool) -> float:
        widths = [x.shape for x in contender.inputs(sizes._replace(tokens=1), torch.bfloat16, "cpu")]
        inputs = [torch.empty((8, 4096, *shape[2:]), dtype=torch.bfloat16) for shape in widths if len(shape) > 1]
        y = inputs[2] if len(inputs[0].shape) == 4 else inputs[0]
        return limits.milliseconds(limits.bytes_moved(inputs, y, backward=backward), 4.27e12)

    assert limit(LATTE, backward=False) == pytest.approx(0.0295, abs=5e-5)
    assert limit(MACCHIATO, backward=False) == pytest.approx(0.0532, abs=5e-5)
    assert limit(MACCHIATO, backward=True) == pytest.approx(0.1479, abs=5e-5)
    assert limit(RGLRU, backward=False) == pytest.approx(4 * 0.01179, abs=5e-5)
    assert limit(RGLRU, backward=True) == pytest.approx(11 * 0.01179, abs=1e-4)


def test_goals_are_floors_above_aims():
    assert all(0 < goal.aim < goal.floor for goal in limits.GOALS.values())


@pytest.mark.parametrize("contender", OURS, ids=lambda contender: contender.op)
def test_checks_pass_and_see_what_is_wrong(contender):
    found = check(contender, SMALL, torch.bfloat16, "cpu", "torch")
    assert found.right(1e-2)
    assert not found._replace(error=0.02).right(1e-2)
    assert not found._replace(same_bits=False).right(1e-2)
    assert not Check(math.nan, "y", True).right(1e-2)


def test_relative_error():
    right = torch.tensor([3.0, 4.0, -torch.inf], dtype=torch.float64)
    assert relative_error(right.float(), right) == 0.0
    assert relative_error(torch.tensor([3.0, 4.5, -torch.inf]), right) == pytest.approx(0.1)
    assert relative_error(torch.tensor([3.0, 4.0, 0.0]), right) == math.inf
    assert relative_error(torch.tensor([3.0, math.nan, -torch.inf]), right) == math.inf


def test_interleaved_steps_take_turns_after_a_warm_up():
    calls = []
    times = timing.interleave({name: lambda name=name: calls.append(name) for name in "ab"}, rounds=3)
    assert "".join(calls) == "abababab"
    assert {name: len(taken) for name, taken in times.items()} == {"a": 3, "b": 3}


def test_long_steps_count_from_the_first_call_and_stop_early(monkeypatch):
    monkeypatch.setattr(timing, "WARM_UP", 0.005)
    monkeypatch.setattr(timing, "PATIENCE", 0.015)
    times = timing.interleave({"slow": lambda: time.sleep(0.01), "slower": lambda: time.sleep(0.03)}, rounds=5)
    assert {name: len(taken) for name, taken in times.items()} == {"slow": 3, "slower": 3}


def test_compared_steps_alternate():
    calls = []
    timing.compare(lambda: calls.append("a"), lambda: calls.append("b"), repeats=4)
    assert "".join(calls[20:]) == "baabbaab"


def test_reasons_are_one_short_line():
    assert timing.reason(ValueError("first\nsecond")) == "ValueError: first"
    assert timing.reason(RuntimeError()) == "RuntimeError: "
    assert len(timing.reason(ValueError(300 * "x"))) == 160
