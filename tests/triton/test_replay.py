"""Recorded calls know where every address comes from, and are not made where one is unknown."""

from operator import itemgetter
from types import SimpleNamespace

import pytest
import torch

from latte.ops.triton import replay


def record(inputs, launches, results, kept):
    """A recipe of kernels whose tensors are named by functions of what was made."""
    with replay.recording(inputs) as found:
        made = [replay.empty((3, 4), torch.float32, torch.device("cpu")) for _ in range(3)]
        for arguments in launches(made):
            replay.note_launch("kernel", (7,), arguments)
    return found.recipe(results(made), kept(made))


def test_places_of_inputs_results_kept_parts_scratch_and_views():
    x = torch.zeros(5, 8)
    recipe = record(
        (x, None, x[2:]),
        lambda made: [(x, None, made[0], made[1], made[2][1], x[1], 5, True)],
        lambda made: [made[0]],
        lambda made: [made[1]],
    )
    kernel, grid, places, rest = recipe.launches[0]
    assert (kernel, grid, rest) == ("kernel", (7, 1, 1), (5, True))
    # Inputs are 0 and 1, the result 2, what is kept 3, scratch 4; a row of scratch is 16 bytes, one of x is 32.
    assert places == [(0, 0), None, (2, 0), (3, 0), (4, 16), (0, 32)]


def test_a_view_in_two_inputs_spoils_the_recording():
    joint = torch.zeros(4, 2, 8)
    first, second = joint.unbind(1)  # rows of each lie between those of the other
    inside = second.view(torch.int32)[1:]
    assert record((first, second), lambda made: [(inside, made[0])], lambda made: [made[0]], lambda made: []) is None
    whole = second.view(torch.int32)
    recipe = record((first, second), lambda made: [(whole, made[0])], lambda made: [made[0]], lambda made: [])
    assert recipe.launches[0][2] == [(1, 0), (2, 0)]


def test_a_tensor_in_two_places_is_another_call(monkeypatch):
    """Which place a launch took it for, a recording cannot tell."""
    monkeypatch.setattr(replay, "REPLAYED_ON", "cpu")
    monkeypatch.setattr(replay.Recipe, "run", lambda recipe, inputs: recipe.launches[0][2])
    x, y, z = (torch.zeros(3, 4) for _ in range(3))
    book = replay.Cookbook()

    def run(*inputs):
        def call():
            made = replay.empty((3, 4), torch.float32, torch.device("cpu"))
            replay.note_launch("kernel", (1,), (*inputs, made))
            return [made], []

        recipe = book.find(inputs, (), call)
        return None if recipe is None else recipe.run(inputs)

    for _ in range(3):
        twice, apart = run(x, x), run(y, z)
    assert twice == [(0, 0), (0, 0), (2, 0)]
    assert apart == [(0, 0), (1, 0), (2, 0)]


def test_a_tensor_from_elsewhere_spoils_the_recording():
    x = torch.zeros(5, 8)
    assert record((x,), lambda made: [(torch.ones(2), x)], lambda made: [made[0]], lambda made: []) is None
    assert record((x,), lambda made: [(x,)], lambda made: [torch.ones(2)], lambda made: []) is None


def test_parts_lie_side_by_side_and_come_back_as_views():
    tensors = [torch.zeros(3, 5), torch.zeros(7, dtype=torch.int32), torch.zeros(0, 2), torch.zeros(2, 3).bfloat16()]
    parts, size = replay.lay_out(tensors)
    assert [part.offset for part in parts] == [0, 256, 512, 512]
    assert size == 768
    recipe = replay.Recipe(torch.device("cpu"), [], tensors)
    memory = torch.zeros(recipe.kept_bytes, dtype=torch.uint8)
    views = replay.views(memory, recipe.kept)
    assert [(x.shape, x.dtype) for x in views] == [(x.shape, x.dtype) for x in tensors]
    views[1].fill_(-1)
    assert memory.nonzero().flatten().tolist() == list(range(256, 284))


def test_what_is_kept_lies_in_one_piece_as_in_a_recipe():
    tensors = [torch.rand(3, 5), torch.zeros(0, 2), torch.rand(2, 3).bfloat16()]
    recipe = replay.Recipe(torch.device("cpu"), [], tensors)
    (memory,), parts = replay.in_one_piece(tensors)
    assert (parts, memory.shape, memory.dtype) == (recipe.kept, (recipe.kept_bytes,), torch.uint8)
    assert all(x.equal(y) for x, y in zip(replay.views(memory, parts), tensors, strict=True))
    assert replay.in_one_piece([]) == ([], [])


def test_calls_off_the_gpu_are_not_for_replaying():
    book = replay.Cookbook()
    assert all(book.find((torch.zeros(2),), (), lambda: ([], [])) is None for _ in range(3))
    assert not book.recipes


def test_nothing_is_noted_outside_a_recording():
    with replay.recording(()) as found:
        pass
    replay.empty((2,), torch.float32, torch.device("cpu"))
    replay.note_launch("kernel", (1,), ())
    assert (found.made, found.launches) == ([], [])


@pytest.mark.parametrize("hooked", [False, True])
def test_profilers_that_hook_into_triton_see_launches(monkeypatch, hooked):
    calls = []
    binary = SimpleNamespace(
        function="function", packed_metadata="packed", run=lambda *given: calls.append(given),
        launch_metadata=lambda grid, stream, *arguments: ("about", grid, stream, arguments),
    )  # fmt: skip
    enter, leave = (SimpleNamespace(calls=[print] if hooked else []) for _ in range(2))
    runtime = SimpleNamespace(launch_enter_hook=enter, launch_exit_hook=leave)
    monkeypatch.setattr(replay, "knobs", SimpleNamespace(runtime=runtime))
    replay.launch_all([(binary, (7, 1, 1), itemgetter(1, 0), (5, True))], [100, 200], 3)
    arguments = (200, 100, 5, True)
    told = (("about", (7, 1, 1), 3, arguments), enter, leave) if hooked else (None, None, None)
    assert calls == [(7, 1, 1, 3, "function", "packed", *told, *arguments)]
