"""Eager calls of the recurrences, which give y and a state and keep checkpoints for backward."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from latte.ops.known import needs_gradients, remember
from latte.ops.states import RGLRUOutput
from latte.ops.triton.known_call import Finish, Known, KnownCall
from latte.ops.triton.replay import Cookbook, Part, Recipe, sign, views

Backward = Callable[..., tuple[Tensor, ...]]


def turn_back(
    book: Cookbook, backward: Backward, parts: list[Part] | None, gradients: Sequence[Any], kept: Tensor,
    tensors: Sequence[Any], options: tuple,
) -> tuple[list[Tensor], Recipe | None]:  # fmt: skip
    """`backward` after a call, and the recording it was replayed from, if there is one in `book`.

    `kept` are the checkpoints, or the memory of which they are `parts`.
    """
    dy, dfinal = gradients
    inputs = (dy, dfinal, *tensors, kept)

    def call() -> list[Tensor]:
        checkpoints = kept if parts is None else views(kept, parts)[0]
        return list(backward(dy, dfinal, checkpoints, *tensors, *options))

    plain = parts is not None and dy.stride(2) == 1 and dfinal.is_contiguous()
    return book.follow(inputs, options, call) if plain else (call(), None)


def remember_call(
    signature: tuple, tensors: tuple[Tensor, ...], absent: tuple[None, ...], options: tuple,
    books: tuple[Cookbook, Cookbook], backward: Backward, finish: Finish,
) -> None:  # fmt: skip
    """If a plain call was recorded in the first of `books`, let the next like it go to its kernels at once."""
    with_gradients = needs_gradients(tensors)
    recipe = books[0].recipes.get(sign((*tensors, *absent), (*options, with_gradients)))
    if recipe is None:
        return

    def turn(gradients: Sequence[Any], saved: Sequence[Any]) -> tuple[list[Tensor], Recipe | None]:
        *given, kept = saved
        return turn_back(books[1], backward, recipe.kept, gradients, kept, (*given, *absent), options)

    known = Known(recipe, turn, finish, saved_results=slice(0), absent_are_zero=True)

    def ready(given: Sequence[Any]) -> RGLRUOutput:
        return RGLRUOutput(*(KnownCall.apply(known, *given) if with_gradients else recipe.run(given)[0]))

    remember(signature, ready)
