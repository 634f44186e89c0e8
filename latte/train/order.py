"""Which examples are in which batch: a pure function of the seed and the step, whatever the number of processes."""

from collections.abc import Collection, Iterator
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

ROUNDS = 6
Indices = NDArray[np.int64]


def permute(indices: Indices, size: int, seed: int, epoch: int) -> Indices:
    """Where an epoch's permutation of range(size) sends `indices`, without making the permutation.

    A Feistel network permutes the numbers of an even number of bits; those that land outside range(size) go through it
    again until they are inside, which keeps it a permutation.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    digest = blake2b(f"{seed}:{epoch}".encode(), digest_size=8 * ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    values = np.asarray(indices).astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        for key in keys:
            left, right = right, left ^ (scramble(right ^ key) & mask)
        values[outside] = (left << half) | right
        outside = values >= np.uint64(size)
    return values.astype(np.int64)


def scramble(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Every bit of the result depends on every bit of x: the mixing steps of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Order:
    """The examples of every step: epoch after epoch, each in an order of its own, cut into batches of one size.

    `skipped` are numbers of batches that are left out; the steps after move up.
    """

    def __init__(self, size: int, batch_size: int, seed: int, skipped: Collection[int] = ()) -> None:
        if size < 1:
            raise ValueError("there is no example to train on; check the task's data settings")
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.skipped = sorted(skipped)

    def batch_number(self, step: int) -> int:
        """Of the batch that step `step`, counted from 0, learns from."""
        number = step
        for skipped in self.skipped:
            number += skipped <= number
        return number

    def batch(self, step: int) -> Indices:
        """Indices of the examples of a step, counted from 0."""
        first = self.batch_number(step) * self.batch_size
        positions = np.arange(first, first + self.batch_size)
        epochs = positions // self.size
        parts = [
            permute(positions[epochs == epoch] - epoch * self.size, self.size, self.seed, int(epoch))
            for epoch in np.unique(epochs)
        ]
        return np.concatenate(parts)


class MicroBatches(Sampler[list[int]]):
    """What one process reads: of each step's batch, its share of every micro batch, from step `start` on.

    Micro batch m of a step is the m-th piece of the batch, and process r takes the r-th piece of that.
    """

    def __init__(self, order: Order, *, start: int, stop: int, micro_batch_size: int, rank: int, world: int) -> None:
        self.order, self.start, self.stop = order, start, stop
        self.micro_batch_size, self.rank, self.world = micro_batch_size, rank, world

    @property
    def accumulation(self) -> int:
        return self.order.batch_size // (self.micro_batch_size * self.world)

    def __len__(self) -> int:
        """Of the whole run, what was before `start` included: the engine counts so."""
        return self.stop * self.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.start, self.stop):
            pieces = self.order.batch(step).reshape(self.accumulation, self.world, self.micro_batch_size)
            yield from pieces[:, self.rank].tolist()
