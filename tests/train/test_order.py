"""The order of examples: permutations, and batches that do not depend on processes or on where a run begins."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from latte.train.order import MicroBatches, Order, permute

numbers = st.integers(0, 2**31)


@given(size=st.integers(1, 700), seed=numbers, epoch=st.integers(0, 9))
def test_every_index_comes_once(size, seed, epoch):
    assert sorted(permute(np.arange(size), size, seed, epoch)) == list(range(size))


@given(size=st.integers(1, 700), seed=numbers, chosen=st.lists(st.integers(0, 699), min_size=1))
def test_an_index_goes_where_it_goes_alone(size, seed, chosen):
    indices = np.array(chosen) % size
    together = permute(indices, size, seed, 1)
    assert together.tolist() == [permute(np.array([index]), size, seed, 1)[0] for index in indices]


def test_sizes_beyond_32_bits():
    size = 10**12
    moved = permute(np.arange(1000), size, 0, 0)
    assert len(set(moved.tolist())) == 1000
    assert 0 <= moved.min() < moved.max() < size
    assert abs(moved.mean() / size - 0.5) < 0.05


def test_seeds_and_epochs_differ():
    orders = {tuple(permute(np.arange(50), 50, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_no_place_is_preferred():
    """Where each of 7 indices goes, over many epochs: a chi-squared test with 36 degrees of freedom."""
    counts = np.zeros((7, 7))
    for epoch in range(2100):
        counts[np.arange(7), permute(np.arange(7), 7, 11, epoch)] += 1
    assert ((counts - 300) ** 2 / 300).sum() < 75  # a chance of 1 in 10,000


@given(size=st.integers(1, 40), batch=st.integers(1, 23), seed=numbers)
def test_epoch_after_epoch(size, batch, seed):
    """The batches one after another are every example once, then every example once more."""
    order = Order(size, batch, seed)
    stream = np.concatenate([order.batch(step) for step in range(-(-3 * size // batch))])
    for epoch in range(3):
        assert sorted(stream[epoch * size : (epoch + 1) * size]) == list(range(size))


@settings(max_examples=30)
@given(world=st.sampled_from([1, 2, 3]), micro=st.sampled_from([1, 2, 4]), start=st.integers(0, 5), seed=numbers)
def test_processes_share_the_batch_of_one(world, micro, start, seed):
    assume(12 % (world * micro) == 0)
    order = Order(29, 12, seed)
    shares = [
        list(MicroBatches(order, start=start, stop=7, micro_batch_size=micro, rank=rank, world=world))
        for rank in range(world)
    ]
    accumulation = 12 // (world * micro)
    for step in range(start, 7):
        rows = slice((step - start) * accumulation, (step - start + 1) * accumulation)
        together = [index for share in shares for batch in share[rows] for index in batch]
        assert sorted(together) == sorted(order.batch(step).tolist())
    assert all(len(batch) == micro for share in shares for batch in share)


def test_a_batch_that_is_left_out():
    order, without = Order(101, 5, 0), Order(101, 5, 0, skipped=[2, 3, 6])
    used = [without.batch(step).tolist() for step in range(5)]
    assert used == [order.batch(number).tolist() for number in (0, 1, 4, 5, 7)]


def test_no_examples():
    with pytest.raises(ValueError, match="no example"):
        Order(0, 4, 0)
