"""Random nested expressions of ListOps (Nangia & Bowman 2018), drawn as Long Range Arena draws them, and their values.

A node is an operator with probability 1/4, and a digit otherwise or at the greatest depth; an operator has from 2 to
`max_args` arguments. Expressions of other lengths than wanted are thrown away. All expressions of a block grow, are
evaluated and are written down together, one depth at a time.
"""

from typing import NamedTuple

import numpy as np

PAD, FIRST_DIGIT, FIRST_OPERATOR, END = 0, 1, 11, 15
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
TOKENS = ("", *map(str, range(10)), *OPERATORS, "]")  # as text, in the order of their numbers; the first is padding
OPERATOR_SHARE = 0.25
CANDIDATES = 4096  # expressions begun at a time
PATIENCE = 10_000  # times in a row that none of them may be of the wanted length


class Shape(NamedTuple):
    """Which expressions are wanted; lengths are between the two, both excluded, as in Long Range Arena."""

    min_length: int
    max_length: int
    max_depth: int
    max_args: int


class Level(NamedTuple):
    """The nodes at one depth, those of an expression together and siblings in order."""

    owner: np.ndarray  # the number of each node's expression
    arity: np.ndarray  # 0 is a digit

    def only(self, owners: np.ndarray) -> "Level":
        """The nodes of some expressions, given as a mask over all."""
        kept = owners[self.owner]
        return Level(self.owner[kept], self.arity[kept])


class Expressions(NamedTuple):
    """Expressions as tokens, one after another, with where each begins and ends, and their values."""

    tokens: np.ndarray
    offsets: np.ndarray
    values: np.ndarray


def make_expressions(generator: np.random.Generator, count: int, shape: Shape) -> Expressions:
    """So many expressions of the wanted shape; ValueError where there are next to none."""
    parts, found, vain = [], 0, 0
    while found < count:
        levels, lengths = _grow(generator, shape)
        if len(lengths):
            parts.append(_write(generator, levels, lengths))
            found, vain = found + len(lengths), 0
        elif (vain := vain + 1) == PATIENCE:
            raise ValueError(
                f"of {vain * CANDIDATES:,} expressions with max_depth {shape.max_depth} and max_args {shape.max_args} "
                f"none has more than {shape.min_length} and less than {shape.max_length} tokens; choose other lengths, "
                "or more depth or arguments"
            )
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])[:count]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.concatenate([part.tokens for part in parts])[: offsets[-1]]
    return Expressions(tokens, offsets, np.concatenate([part.values for part in parts])[:count])


def _grow(generator: np.random.Generator, shape: Shape) -> tuple[list[Level], np.ndarray]:
    """The levels of the expressions that turned out to be of the wanted length, and those lengths."""
    owner, lengths, levels = np.arange(CANDIDATES), np.zeros(CANDIDATES, np.int64), []
    for depth in range(1, shape.max_depth + 1):
        if depth == 1:  # a digit alone is too short
            operator = np.ones(len(owner), np.bool_)
        else:
            operator = (generator.random(len(owner)) < OPERATOR_SHARE) & (depth < shape.max_depth)
        arity = np.where(operator, generator.integers(2, shape.max_args + 1, len(owner)), 0)
        levels.append(Level(owner, arity))
        lengths += np.bincount(owner, 1 + operator, CANDIDATES).astype(np.int64)  # an operator has its "]" too
        still_short = lengths < shape.max_length
        owner = np.repeat(owner, arity * still_short[owner])
    right = (lengths > shape.min_length) & (lengths < shape.max_length)
    number = np.cumsum(right) - 1
    kept = (level.only(right) for level in levels)
    return [Level(number[owner], arity) for owner, arity in kept if len(owner)], lengths[right]


def _write(generator: np.random.Generator, levels: list[Level], lengths: np.ndarray) -> Expressions:
    """Digits and operators for grown expressions: their values from the leaves up, their tokens from the root down."""
    nodes = _evaluate(generator, levels)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.zeros(offsets[-1], np.uint8)
    starts = offsets[:-1]
    for level, node, below in zip(levels, nodes, [*nodes[1:], None], strict=True):
        tokens[starts] = node.token
        operator = level.arity > 0
        tokens[(starts + node.size)[operator] - 1] = END
        if below is not None:
            before = np.cumsum(below.size) - below.size  # tokens of all nodes on its level before it
            arity = level.arity[operator]
            first = np.cumsum(arity) - arity
            starts = np.repeat(starts[operator] + 1 - before[first], arity) + before
    return Expressions(tokens, offsets, nodes[0].value.astype(np.uint8))


class Nodes(NamedTuple):
    """What the nodes of a level are: their first token, their value, and how many tokens they take."""

    token: np.ndarray
    value: np.ndarray
    size: np.ndarray


def _evaluate(generator: np.random.Generator, levels: list[Level]) -> list[Nodes]:
    """Choose digits and operators, and work out the values, from the deepest level up."""
    nodes: list[Nodes] = []
    for level in reversed(levels):
        value = generator.integers(0, 10, len(level.arity))
        token, size = FIRST_DIGIT + value, np.ones_like(value)
        operator = level.arity > 0
        if operator.any():
            arity = level.arity[operator]
            chosen = generator.integers(0, len(OPERATORS), len(arity))
            token[operator] = FIRST_OPERATOR + chosen
            value[operator] = _apply(chosen, arity, nodes[-1].value)
            size[operator] = 2 + np.add.reduceat(nodes[-1].size, np.cumsum(arity) - arity)
        nodes.append(Nodes(token, value, size))
    return nodes[::-1]


def _apply(operator: np.ndarray, arity: np.ndarray, arguments: np.ndarray) -> np.ndarray:
    """The value of each operator; those of its arguments stand together, one operator's after another's."""
    first = np.cumsum(arity) - arity
    group = np.repeat(np.arange(len(arity)), arity)
    ascending = np.sort(16 * group + arguments) % 16  # within each group
    least, greatest = ascending[first], ascending[first + arity - 1]
    median = (ascending[first + (arity - 1) // 2] + ascending[first + arity // 2]) // 2  # a half is dropped
    total = np.add.reduceat(arguments, first) % 10
    return np.choose(operator, [least, greatest, median, total])
