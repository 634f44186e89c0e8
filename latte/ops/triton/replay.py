"""Calls that are recorded once and run again.

What a call allocates and launches depends only on the shapes, strides, dtypes and options it is given. From the third
time on, such a call is a list of kernels and of places in memory: the host has no more to do than to allocate, to add
offsets to addresses and to launch.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from functools import cached_property
from operator import itemgetter
from threading import local
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from latte.ops.known import sign_places

MOST_RECIPES = 1024
ALIGNMENT = 256
REPLAYED_ON = "cuda"  # elsewhere kernels are interpreted
_thread = local()
Place = tuple[int, int]  # the number of a piece of memory, and bytes from its start


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`, noted if a call is being recorded."""
    made = torch.empty(shape, dtype=dtype, device=device)
    recording = getattr(_thread, "recording", None)
    if recording is not None:
        recording.made.append(made)
    return made


def note_launch(binary: Any, grid: tuple[int, ...], arguments: tuple) -> None:
    """Add a compiled kernel, launched with all its arguments, constants included, to what is being recorded."""
    recording = getattr(_thread, "recording", None)
    if recording is not None:
        recording.launches.append((binary, (*grid, 1, 1)[:3], arguments))


Launch = tuple[Any, tuple[int, ...], Callable[[list], tuple], tuple]  # kernel, grid, choice of addresses, the rest


def launch_all(launches: Sequence[Launch], addresses: list[int | None], stream: int) -> None:
    """Launch compiled kernels, each on those of the addresses that it picks; profilers that hook into Triton see it."""
    enter, leave, about = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, None
    hooked = bool(getattr(enter, "calls", None) or getattr(leave, "calls", None))
    if not hooked:
        enter = leave = None
    for binary, grid, pick, rest in launches:
        arguments = pick(addresses) + rest
        if hooked:
            about = binary.launch_metadata(grid, stream, *arguments)
        binary.run(*grid, stream, binary.function, binary.packed_metadata, about, enter, leave, *arguments)


class Part(NamedTuple):
    """A tensor's place in a larger piece of memory."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype


class Recipe:
    """A recorded call: results of their own, parts to keep in one piece of memory, scratch in another."""

    def __init__(self, device: torch.device, results: list[Tensor], kept: list[Tensor]) -> None:
        self.device = device
        self.results = [(tuple(x.shape), x.stride(), x.dtype) for x in results]
        self.kept, self.kept_bytes = lay_out(kept)
        self.scratch_bytes = 0
        self.launches: list[tuple[Any, tuple[int, ...], list[Place | None], tuple]] = []

    @cached_property
    def steps(self) -> tuple[list[Place], list[Launch]]:
        """Every place that some launch needs, and the launches, each of which picks its own from all addresses."""
        places = list(dict.fromkeys(place for _, _, own, _ in self.launches for place in own if place is not None))
        number = {place: n for n, place in enumerate([*places, None])}
        return places, [
            (binary, grid, itemgetter(*(number[place] for place in own)), rest)
            for binary, grid, own, rest in self.launches
        ]

    def run(self, inputs: Iterable[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        """The results on new inputs, where None is left out, and the memory of the parts to keep if there are any."""
        device, (places, steps) = self.device, self.steps
        # With strides, which are known, an allocation costs the host less than by a shape alone.
        made = [torch.empty_strided(*sizes, dtype=dtype, device=device) for *sizes, dtype in self.results]
        kept = [torch.empty(self.kept_bytes, dtype=torch.uint8, device=device)] if self.kept else []
        scratch = [torch.empty(self.scratch_bytes, dtype=torch.uint8, device=device)] if self.scratch_bytes else []
        given = [x for x in inputs if x is not None]
        bases = [x.data_ptr() for x in (*given, *made, *kept, *scratch)]
        addresses = [*(bases[piece] + offset for piece, offset in places), None]
        with torch.cuda.device_of(given[0]):
            launch_all(steps, addresses, cast(Any, driver.active).get_current_stream(device.index))
        return made, kept


class Recording:
    """What a call makes and launches while it runs."""

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        self.inputs = inputs
        self.made: list[Tensor] = []
        self.launches: list[tuple[Any, tuple[int, ...], tuple]] = []

    def recipe(self, results: list[Tensor], kept: list[Tensor]) -> Recipe | None:
        """The recorded call, or None if a kernel took a tensor that is neither input nor noted."""
        device = next(x.device for x in (*results, *self.inputs) if x is not None)
        recipe = Recipe(device, results, kept)
        named = {id(x) for x in (*results, *kept)}
        if not named <= {id(x) for x in self.made}:
            return None
        rest = [x for x in self.made if id(x) not in named]
        scratch, recipe.scratch_bytes = lay_out(rest)
        inputs = [x for x in self.inputs if x is not None]
        first = len(inputs)
        kept_at = first + len(results)
        scratch_at = kept_at + bool(kept)
        homes = [(x, i, 0) for i, x in enumerate(inputs)]
        homes += [(x, first + i, 0) for i, x in enumerate(results)]
        homes += [(x, kept_at, part.offset) for x, part in zip(kept, recipe.kept, strict=True)]
        homes += [(x, scratch_at, part.offset) for x, part in zip(rest, scratch, strict=True)]
        for binary, grid, arguments in self.launches:
            count = max((i for i, x in enumerate(arguments) if isinstance(x, Tensor)), default=-1) + 1
            places = [None if x is None else find(x, homes) for x in arguments[:count]]
            if any(place is None and x is not None for place, x in zip(places, arguments, strict=False)):
                return None
            recipe.launches.append((binary, grid, places, arguments[count:]))
        return recipe


def lay_out(tensors: Sequence[Tensor]) -> tuple[list[Part], int]:
    """Places side by side for tensors, each aligned, and the bytes they take."""
    parts, offset = [], 0
    for x in tensors:
        parts.append(Part(offset, x.shape, x.dtype))
        offset += -(-x.numel() * x.dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return parts, offset


def views(memory: Tensor, parts: Sequence[Part]) -> list[Tensor]:
    """The tensors that lie in a piece of memory."""
    return [
        memory[part.offset : part.offset + math.prod(part.shape) * part.dtype.itemsize]
        .view(part.dtype)
        .view(part.shape)
        for part in parts
    ]


def in_one_piece(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Part]]:
    """Tensors to keep copied into one piece of memory, as a recipe has them.

    A checkpoint's call may be recorded before it runs again, and must have saved what it saves then.
    """
    parts, size = lay_out(tensors)
    if not parts:
        return [], parts
    memory = torch.empty(size, dtype=torch.uint8, device=tensors[0].device)
    for place, x in zip(views(memory, parts), tensors, strict=True):
        place.copy_(x)
    return [memory], parts


def find(x: object, homes: list[tuple[Tensor, int, int]]) -> Place | None:
    """Which piece of memory a tensor lies in, and where; a view lies in what it is a view of.

    Inputs that are parts of one tensor may lie in each other's way: a view of which it cannot be told lies nowhere.
    """
    if not isinstance(x, Tensor):
        return None
    for home, index, offset in homes:
        if x is home:
            return index, offset
    if x.numel() == 0:  # it has no address, and nobody reads it
        return homes[0][1:]
    storage, address = x.untyped_storage().data_ptr(), x.data_ptr()
    around = [
        (address - home.data_ptr(), index, offset)
        for home, index, offset in homes
        if home.untyped_storage().data_ptr() == storage and 0 <= address - home.data_ptr() < max(home.nbytes, 1)
    ]
    if len(around) > 1:
        around = [place for place in around if place[0] == 0][:1]
    return (around[0][1], around[0][2] + around[0][0]) if around else None


@contextmanager
def recording(inputs: Sequence[Tensor | None]):
    _thread.recording = found = Recording(inputs)
    try:
        yield found
    finally:
        _thread.recording = None


class Cookbook:
    """Recipes by signature. A call is recorded the second time it is seen: most lengths of a text come only once."""

    def __init__(self) -> None:
        self.recipes: dict[Any, Recipe | None] = {}
        self.seen: set[Any] = set()

    def find(
        self,
        inputs: Sequence[Tensor | None],
        options: tuple,
        call: Callable[[], tuple[list[Tensor], list[Tensor]]],
    ) -> Recipe | None:
        """The recipe for such a call, or None if it must run as it is; `call` gives results and parts to keep.

        To be recorded it is called, besides what the recipe is run for.
        """
        signature = sign(inputs, options)
        if signature in self.recipes:
            return self.recipes[signature]
        if not self._seen_before(signature):
            return None
        with recording(inputs) as found:
            results, kept = call()
        recipe = self.recipes[signature] = found.recipe(results, kept)
        return recipe

    def run(
        self,
        inputs: Sequence[Tensor | None],
        options: tuple,
        call: Callable[[], tuple[list[Tensor], list[Tensor]]],
        *,
        plain: bool,
        keep: bool,
    ) -> tuple[list[Tensor], list[Tensor], list[Part] | None]:
        """Results, what to keep, and the parts of that if it is in one piece, which it is for `plain` calls.

        Only those are recorded, and only what is to `keep` is worth the copy.
        """
        recipe = self.find(inputs, options, call) if plain else None
        if recipe is not None:
            return *recipe.run(inputs), recipe.kept
        results, kept = call()
        return (results, *in_one_piece(kept)) if plain and keep else (results, kept, None)

    def follow(
        self, inputs: Sequence[Tensor | None], options: tuple, call: Callable[[], list[Tensor]]
    ) -> tuple[list[Tensor], Recipe | None]:
        """The results of a call that keeps nothing, and the recipe for it, if there is one.

        It runs once, however it is run, so that it may write to inputs.
        """
        signature = sign(inputs, options)
        recipe = self.recipes.get(signature)
        if recipe is not None:
            return recipe.run(inputs)[0], recipe
        if signature in self.recipes or not self._seen_before(signature):
            return call(), None
        with recording(inputs) as found:
            results = call()
        recipe = self.recipes[signature] = found.recipe(results, [])
        return results, recipe

    def perform(
        self, inputs: Sequence[Tensor | None], options: tuple, call: Callable[[], list[Tensor]]
    ) -> list[Tensor]:
        """The results of a call that keeps nothing, as by `follow`."""
        return self.follow(inputs, options, call)[0]

    def _seen_before(self, signature: tuple | None) -> bool:
        """Whether it is time to record such a call; None is never."""
        if signature is None or signature in self.seen:
            if len(self.recipes) >= MOST_RECIPES:
                self.recipes.clear()
            return signature is not None
        if len(self.seen) >= MOST_RECIPES:
            self.seen.clear()
        self.seen.add(signature)
        return False


def sign(inputs: Sequence[Tensor | None], options: tuple) -> tuple | None:
    """What a call's launches follow from; None where it is not for replaying: off the GPU, or not aligned."""
    parts: list[Any] = [options]
    addresses = []
    for x in inputs:
        if x is None:
            parts.append(None)
            continue
        device = x.device
        if device.type != REPLAYED_ON:
            return None
        addresses.append(x.data_ptr())
        parts.append((x.shape, x.stride(), x.dtype, device))
    return sign_places(parts, addresses)
