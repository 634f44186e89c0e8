"""A known call with gradients: one node of autograd's graph around two recordings.

The general nodes of the ops find their recordings by signatures of all that they are given. Here forward has its own at
hand, and backward only looks how what it is given lies in memory: shapes and dtypes are those of forward.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from latte.ops.first_derivatives import first_derivatives
from latte.ops.known import ALIGNED
from latte.ops.triton.replay import Recipe

Tensors = Sequence[Tensor | None]
TurnBack = Callable[[Tensors, Tensors], tuple[list[Any], Recipe | None]]
Finish = Callable[[list[Any], Tensors], Tensors]


class Known:
    """A recorded call with gradients. `saved_results` are those that backward needs, besides what was kept and given.

    `turn_back` runs backward in whichever way, on the gradients of results and on all that was saved, and tells the
    recording that can do so, if there is one: of launches that take the same, in that order. `finish` makes the
    gradients of what was given out of what either gives, and of what was saved.
    """

    def __init__(
        self, recipe: Recipe, turn_back: TurnBack, finish: Finish, *, saved_results: slice, absent_are_zero: bool
    ) -> None:
        self.recipe, self.turn_back, self.finish = recipe, turn_back, finish
        self.saved_results, self.absent_are_zero = saved_results, absent_are_zero
        self.backward: dict[tuple, Recipe] = {}

    def gradients(self, gradients: Tensors, saved: Tensors) -> list[Any]:
        inputs = [x for x in (*gradients, *saved) if x is not None]
        addresses = [x.data_ptr() for x in inputs]
        if reduce(or_, addresses) % ALIGNED:
            return self.turn_back(gradients, saved)[0]
        # Hooks of saved tensors may bring them back elsewhere, with rows side by side that were apart.
        place = (*(x is None for x in gradients), *(x.stride() for x in inputs))
        recipe = self.backward.get(place)
        if recipe is not None:
            return recipe.run(inputs)[0]
        found, recipe = self.turn_back(gradients, saved)
        real = [address for address in addresses if address]
        if recipe is not None and len(set(real)) == len(real):  # one tensor in two places is recorded as another call
            self.backward[place] = recipe
        return found


class KnownCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        """`arguments` are what is known, and what is given to the call."""
        known, *given = arguments
        results, kept = known.recipe.run(given)
        ctx.save_for_backward(*results[known.saved_results], *given, *kept)  # in the order of the general nodes
        ctx.known = known
        ctx.set_materialize_grads(known.absent_are_zero)
        return tuple(results)

    @staticmethod
    @first_derivatives
    def backward(ctx, saved, *gradients):
        known = ctx.known
        return None, *known.finish(known.gradients(gradients, saved), saved)
