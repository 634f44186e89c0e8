"""Random examples by number: a generator for every block of them, and settings that can be checked."""

from collections.abc import Iterator

import numpy as np

SPLITS = ("train", "validation", "test")
BLOCK = 1024  # examples that share a generator; another number gives other examples


def block_generator(seed: int, split: str, *key: int) -> np.random.Generator:
    """The generator of one block of a split's examples, which no other block, split or seed shares."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, SPLITS.index(split), *key])))


def blocks(examples: int) -> Iterator[tuple[int, int]]:
    """The number of each block, and how many of its examples are wanted."""
    for block in range(number_of_blocks(examples)):
        yield block, wanted_of_block(examples, block)


def number_of_blocks(examples: int, size: int = BLOCK) -> int:
    """How many blocks hold so many examples."""
    return -(-examples // size)


def wanted_of_block(examples: int, block: int, size: int = BLOCK) -> int:
    """How many examples of a block are wanted, if so many are in all."""
    return min(size, examples - block * size)


def distinct(generator: np.random.Generator, rows: int, among: int, count: int) -> np.ndarray:
    """[rows, count] numbers below `among`, distinct in a row and in any order (Floyd's algorithm, row by row)."""
    chosen = np.empty((rows, count), np.int64)
    for place, top in enumerate(range(among - count, among)):
        draw = generator.integers(0, top + 1, rows)
        seen = (chosen[:, :place] == draw[:, None]).any(axis=1)
        chosen[:, place] = np.where(seen, top, draw)
    return generator.permuted(chosen, axis=1)


def check_counts(settings: object, *names: str, least: int = 1) -> None:
    """Raise ValueError unless all these settings are at least `least`."""
    for name in names:
        if getattr(settings, name) < least:
            raise ValueError(f"{name} is {getattr(settings, name)}; it must be at least {least}")
