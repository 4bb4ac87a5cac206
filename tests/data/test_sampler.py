"""The order is a pure function of seed, epoch and position, whatever the cut into devices, steps and workers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.sampler import Order, permute
from vitrail.errors import UserError


def released(permutation, ranks, repeats=3):
    """The sampler of the DeiT code, written out: rank -> its images of one epoch."""
    count = len(permutation)
    stream = np.repeat(permutation, repeats)
    total = -(-len(stream) // ranks) * ranks
    stream = np.concatenate([stream, stream[: total - len(stream)]])
    keep = count // 256 * 256 // ranks
    return [stream[rank::ranks][:keep] for rank in range(ranks)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(size=st.integers(1, 3000), key=st.integers(0, 2**63))
def test_permutations_are_bijections(size, key):
    found = permute(np.arange(size), np.full(size, size), np.full(size, key, dtype=np.uint64))
    assert sorted(found.tolist()) == list(range(size))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    count=st.integers(1, 500),
    micro_batches=st.sampled_from([1, 2, 4, 8]),
    each=st.integers(1, 9),
    repeats=st.sampled_from([1, 2, 3]),
    balanced=st.booleans(),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 10**6),
)
def test_the_stream_does_not_depend_on_the_cut(count, micro_batches, each, repeats, balanced, seed, epoch):
    labels = np.arange(count) % 7 if balanced else None
    order = Order(count, batch=8 * each, seed=seed, repeats=repeats, labels=labels)
    whole = order.at(epoch, np.arange(3 * order.batch))
    for step in range(3):
        one = order.micro_batch(epoch, step)
        parts = [order.micro_batch(epoch, step, micro_batch, micro_batches) for micro_batch in range(micro_batches)]
        for field in ("index", "repeat", "position"):
            joined = np.stack([getattr(part, field) for part in parts], 1).reshape(-1)
            assert np.array_equal(joined, getattr(one, field))
            assert np.array_equal(joined, getattr(whole, field)[step * order.batch : (step + 1) * order.batch])
    assert whole.index.min() >= 0
    assert whole.index.max() < count


def test_an_epoch_sees_each_image_once_and_epochs_differ():
    order = Order(1000, batch=10)
    first, second = (order.at(epoch, np.arange(1000)).index for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(1000))
    assert (first == second).mean() < 0.01
    assert not np.array_equal(first, Order(1000, batch=10, seed=1).at(0, np.arange(1000)).index)
    assert np.array_equal(Order(5, batch=5, shuffle=False).at(3, np.arange(7)).index, [0, 1, 2, 3, 4, 0, 1])


def test_positions_are_uniform():
    """Chi-square over 400 epochs: where image p lands, and who follows whom."""
    order = Order(20, batch=20)
    streams = np.stack([order.at(epoch, np.arange(20)).index for epoch in range(4000)])
    for image in (0, 7, 19):
        counts = np.bincount(np.argmax(streams == image, 1), minlength=20)
        assert ((counts - 200) ** 2 / 200).sum() < 43.8  # 19 degrees of freedom, p = 0.001
    follows = np.bincount(streams[:, 1][streams[:, 0] == 3], minlength=20)
    expected = follows.sum() / 19
    assert ((np.delete(follows, 3) - expected) ** 2 / expected).sum() < 42.3
    assert follows[3] == 0


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_repeated_augmentation_is_the_released_arithmetic(ranks):
    count, batch = 2000, 64
    order = Order(count, batch, repeats=3, round_to=256)
    permutation = Order(count, batch).at(5, np.arange(count)).index
    expected = released(permutation, ranks)
    steps = count // 256 * 256 // batch
    assert order.steps == steps
    for rank in range(ranks):
        mine = np.concatenate([order.micro_batch(5, step, rank, ranks).index for step in range(steps)])
        assert np.array_equal(mine, expected[rank])


@pytest.mark.parametrize(
    ("count", "samples", "distinct"),
    [(1_281_167, 1_281_024, 427_008), (50_000, 49_920, 16_640), (8_144, 7_936, 2_646), (2_040, 1_792, 598)],
)
def test_true_epochs(count, samples, distinct):
    """ImageNet, CIFAR, Cars, Flowers: samples and distinct images of an epoch with three repeats."""
    order = Order(count, batch=256, repeats=3, round_to=256)
    accounting = order.accounting()
    assert (accounting.samples, accounting.distinct) == (samples, distinct)
    if count < 60_000:
        index = order.at(0, np.arange(samples)).index
        assert len(np.unique(index)) == distinct
    assert Order(1_281_167, batch=1024, repeats=3, round_to=256).steps == 1251


def test_class_balance():
    labels = np.array([0] * 90 + [1] * 9 + [5])
    order = Order(100, batch=30, labels=labels)
    index = order.at(0, np.arange(270)).index
    assert np.array_equal(np.bincount(labels[index])[[0, 1, 5]], [90, 90, 90])
    assert sorted(index[labels[index] == 0]) == list(range(90))
    assert np.array_equal(np.bincount(index)[90:99], [10] * 9)


def test_a_set_smaller_than_a_batch_goes_round():
    order = Order(3, batch=8)
    assert order.steps == 1
    index = order.micro_batch(0, 0).index
    assert sorted(index[:3]) == sorted(index[3:6]) == [0, 1, 2]


def test_any_step_is_reached_at_once():
    order = Order(10**9, batch=1024, repeats=3)
    late = order.micro_batch(10**6, 976_000, micro_batch=3, micro_batches=8)
    assert late.index.shape == (128,)
    assert 0 <= late.index.min() <= late.index.max() < 10**9


def test_bad_orders():
    with pytest.raises(UserError, match="at least one image"):
        Order(0, batch=1)
    with pytest.raises(UserError, match="does not divide"):
        Order(10, batch=10).micro_batch(0, 0, 0, 3)
    with pytest.raises(UserError, match="labels"):
        Order(10, batch=1, labels=np.zeros(3))
