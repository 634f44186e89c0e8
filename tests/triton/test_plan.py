"""Launches that skip Triton's look at the arguments take it again whenever that could find something else."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton

from latte.ops.triton import plan as plans
from latte.ops.triton.prepare import is_preparing, prepare
from latte.ops.triton.tiles import asked_ahead, lane_pieces


class Kernel:
    """A kernel that notes how it is launched: by way of Triton, or straight."""

    params = (SimpleNamespace(name="N", is_constexpr=True), SimpleNamespace(name="x", is_constexpr=False))

    def __init__(self) -> None:
        self.launches: list[tuple] = []

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.launches.append(("by Triton", grid, arguments, constants))
            return Binary(self)

        return launch


class Binary:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.launches.append(("straight", grid, arguments, {}))


@pytest.fixture
def plan() -> plans.Plan:
    return plans.Plan(64, {}, 1, False, {}, {}, {}, {}, True)


def launch(plan: plans.Plan, kernel: Kernel, tensors: tuple, numbers: tuple = (3,), aligned: bool = True) -> str:
    plan.launch("kernel", kernel, (7,), tensors, numbers, {"N": 5, "num_warps": 4}, aligned)
    return kernel.launches[-1][0]


def test_the_second_launch_is_straight(plan: plans.Plan) -> None:
    kernel, x = Kernel(), torch.zeros(2)
    assert [launch(plan, kernel, (None, x)) for _ in range(2)] == ["by Triton", "straight"]
    assert kernel.launches[1] == ("straight", (7, 1, 1), (None, x, 3, 5), {})


def test_other_numbers_absences_or_alignment_go_by_triton(plan: plans.Plan) -> None:
    kernel, x = Kernel(), torch.zeros(2)
    launch(plan, kernel, (None, x))
    assert launch(plan, kernel, (None, x), numbers=(4,)) == "by Triton"
    assert launch(plan, kernel, (x, x)) == "by Triton"
    assert launch(plan, kernel, (None, x), aligned=False) == "by Triton"


def test_nothing_is_launched_for_an_empty_grid(plan: plans.Plan) -> None:
    kernel = Kernel()
    plan.launch("kernel", kernel, (0, 3), (torch.zeros(2),), (), {}, True)
    assert not kernel.launches


def test_lengths_seen_once_are_not_kept_for_ever(plan: plans.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MOST_COMPILED", 10)
    kernel, x = Kernel(), torch.zeros(2)
    for length in range(50):
        launch(plan, kernel, (x,), numbers=(length,))
    assert len(plan.compiled) <= 10


FORM = plans.Form(
    heads=12, value_heads=12, latents=16, width=64, key_width=64, window=128, dtype=torch.bfloat16,
    dtypes=(torch.bfloat16,) * 3, causal=True, undirected=False, packed=False, masked=False, capped=False, given=False,
    full=True, early=False,
)  # fmt: skip


class Compiling:
    """A kernel that is being compiled, as Triton gives it; `run` builds its launcher at the first look."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def result(self) -> "Compiling":
        self.events.append("compiled")
        return self

    @property
    def run(self) -> None:
        self.events.append("loaded")


@pytest.mark.parametrize("can", [True, False], ids=["Triton 3.5 on", "Triton 3.4"])
def test_kernels_are_compiled_and_loaded_before_they_are_launched_where_triton_can(
    can: bool, plan: plans.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "JITFunction", SimpleNamespace)
    monkeypatch.setattr(triton, "AsyncCompileMode", lambda pool: nullcontext(), raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # which stands for none
    if not can:
        monkeypatch.delattr(triton, "AsyncCompileMode")
    events: list[str] = []

    def warmup(*arguments, grid, **constants) -> Compiling:
        assert is_preparing()
        assert (arguments, grid, constants["N"]) == ((None, x, 3), (7,), 5)
        events.append("asked for")
        return Compiling(events)

    kernel, x = SimpleNamespace(warmup=warmup), torch.zeros(2)
    prepare(kernel, lambda: plan.launch("kernel", kernel, (7,), (None, x), (3,), {"N": 5}, True))
    assert events == (["asked for", "compiled", "loaded"] if can else [])
    assert not is_preparing()


def test_a_kernel_that_does_not_compile_says_so(plan: plans.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "JITFunction", SimpleNamespace)
    monkeypatch.setattr(triton, "AsyncCompileMode", lambda pool: nullcontext(), raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)

    class Failing(Compiling):
        def result(self) -> "Compiling":
            raise RuntimeError("out of registers")

    kernel = SimpleNamespace(warmup=lambda *arguments, **constants: Failing([]))
    with pytest.raises(RuntimeError, match="out of registers"):
        prepare(kernel, lambda: plan.launch("kernel", kernel, (7,), (torch.zeros(2),), (), {}, True))
    assert not is_preparing()


def test_plans_differ_by_every_part_of_a_form() -> None:
    assert plans.make_plan(FORM) is plans.make_plan(replace(FORM))
    assert plans.make_plan(FORM) is not plans.make_plan(replace(FORM, dtypes=(torch.float32,) * 3))
    assert plans.make_plan(replace(FORM, width=256, dtype=torch.float32)).tile == 32


def test_states_are_kept_while_they_are_a_tenth_of_the_rest() -> None:
    """Heads of 64 with 16 latents: 7 % beside a window, 11 % without."""
    without = replace(FORM, key_width=0, dtypes=(torch.bfloat16, torch.bfloat16, None))
    assert plans.make_plan(FORM).keeps_states
    assert not plans.make_plan(without).keeps_states
    assert not plans.make_plan(replace(FORM, latents=64)).keeps_states
    assert plans.make_plan(replace(without, latents=8)).keeps_states


@pytest.mark.parametrize(
    ("tiles", "found"),
    [(1, (1, 1)), (16, (1, 16)), (64, (4, 16)), (65, (4, 17)), (256, (8, 32)), (300, (16, 19)), (512, (16, 32)),
     (1100, (24, 46)), (16384, (256, 64))],
)  # fmt: skip
def test_a_row_is_spread_over_at_most_64_pieces(tiles: int, found: tuple[int, int]) -> None:
    assert lane_pieces(tiles) == found


def test_pieces_cover_a_row_and_are_asked_for_in_whole_steps() -> None:
    for tiles in range(1, 3000):
        per_piece, pieces = lane_pieces(tiles)
        assert (pieces - 1) * per_piece < tiles <= pieces * per_piece
        assert pieces <= 64
        assert per_piece % asked_ahead(per_piece) == 0


@pytest.mark.parametrize(
    "other",
    [{"window": 127}, {"window": 256}, {"width": 96}, {"latents": 17}, {"latents": 0}, {"key_width": 0},
     {"dtype": torch.float32}, {"full": False}, {"causal": False}, {"undirected": True}],
    ids=str,
)  # fmt: skip
def test_only_plain_calls_with_a_window_of_two_tiles_fold(other: dict) -> None:
    assert plans.make_plan(FORM).folds
    assert not plans.make_plan(replace(FORM, **other)).folds
