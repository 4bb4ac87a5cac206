"""The samples are a pure function of seed, epoch and position, independent of the division into micro-batches."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.sampler import EpochSampler, permute
from vitrail.errors import UserError


def deit_sampler(permutation, ranks, repeats=3):
    """The repeated-augmentation sampler of the DeiT code: the images of one epoch for each rank."""
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
    groups=st.sampled_from([1, 2, 4]),
    each=st.integers(1, 9),
    repeats=st.sampled_from([1, 2, 3]),
    balanced=st.booleans(),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 10**6),
)
def test_samples_do_not_depend_on_the_number_of_micro_batches(count, micro_batches, groups, each, repeats, balanced, seed, epoch):
    labels = np.arange(count) % 7 if balanced else None
    sampler = EpochSampler(count, 8 * each, seed, repeats=repeats, group_size=8 * each // groups, labels=labels)
    whole = sampler.at(epoch, np.arange(3 * sampler.batch_size))
    for step in range(3):
        one = sampler.micro_batch(epoch, step)
        parts = [sampler.micro_batch(epoch, step, micro_batch, micro_batches) for micro_batch in range(micro_batches)]
        joined = np.concatenate([part.position for part in parts])
        for field in ("index", "repeat", "position"):
            values = np.concatenate([getattr(part, field) for part in parts])[np.argsort(joined)]
            assert np.array_equal(values, getattr(one, field)[np.argsort(one.position)])
            assert np.array_equal(values, getattr(whole, field)[step * sampler.batch_size : (step + 1) * sampler.batch_size])
        if (8 * each // micro_batches) % 2 == 0:
            check_pairs(sampler, [part.position for part in parts])
    assert whole.index.min() >= 0
    assert whole.index.max() < count


def check_pairs(sampler, parts):
    """Mirrored images of a group, every G-th position of the step, are at mirrored indices of a part."""
    size = sampler.batch_size // sampler.groups
    for part in parts:
        for run in part.reshape(-1, min(size, len(part))):
            group, member = run % sampler.batch_size % sampler.groups, run % sampler.batch_size // sampler.groups
            assert len(set(group)) == 1
            assert np.array_equal(member + member[::-1], np.full_like(member, size - 1))


def test_an_epoch_contains_each_image_once_and_epochs_differ():
    sampler = EpochSampler(1000, batch_size=10)
    first, second = (sampler.at(epoch, np.arange(1000)).index for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(1000))
    assert (first == second).mean() < 0.01
    assert not np.array_equal(first, EpochSampler(1000, batch_size=10, seed=1).at(0, np.arange(1000)).index)
    assert np.array_equal(EpochSampler(5, batch_size=5, shuffle=False).at(3, np.arange(7)).index, [0, 1, 2, 3, 4, 0, 1])


def test_positions_are_uniform():
    """Chi-square over 400 epochs: the position of an image, and the image after it."""
    sampler = EpochSampler(20, batch_size=20)
    streams = np.stack([sampler.at(epoch, np.arange(20)).index for epoch in range(4000)])
    for image in (0, 7, 19):
        counts = np.bincount(np.argmax(streams == image, 1), minlength=20)
        assert ((counts - 200) ** 2 / 200).sum() < 43.8  # 19 degrees of freedom, p = 0.001
    follows = np.bincount(streams[:, 1][streams[:, 0] == 3], minlength=20)
    expected = follows.sum() / 19
    assert ((np.delete(follows, 3) - expected) ** 2 / expected).sum() < 42.3
    assert follows[3] == 0


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_repeated_augmentation_matches_the_deit_code(ranks):
    count, batch = 2000, 64
    sampler = EpochSampler(count, batch, repeats=3, round_to=256, group_size=batch // ranks)
    permutation = EpochSampler(count, batch).at(5, np.arange(count)).index
    expected = deit_sampler(permutation, ranks)
    steps = count // 256 * 256 // batch
    assert sampler.steps == steps
    for rank in range(ranks):
        mine = np.concatenate([sampler.micro_batch(5, step, rank, ranks).index for step in range(steps)])
        assert np.array_equal(mine, expected[rank])


@pytest.mark.parametrize(
    ("count", "samples", "distinct"),
    [(1_281_167, 1_281_024, 427_008), (50_000, 49_920, 16_640), (8_144, 7_936, 2_646), (2_040, 1_792, 598)],
)
def test_epoch_size(count, samples, distinct):
    """ImageNet, CIFAR, Cars, Flowers: samples and distinct images of an epoch with three repeats."""
    sampler = EpochSampler(count, batch_size=256, repeats=3, round_to=256)
    size = sampler.epoch_size()
    assert (size.samples, size.distinct) == (samples, distinct)
    if count < 60_000:
        index = sampler.at(0, np.arange(samples)).index
        assert len(np.unique(index)) == distinct
    assert EpochSampler(1_281_167, batch_size=1024, repeats=3, round_to=256).steps == 1251


def test_class_balance():
    labels = np.array([0] * 90 + [1] * 9 + [5])
    sampler = EpochSampler(100, batch_size=30, labels=labels)
    index = sampler.at(0, np.arange(270)).index
    assert np.array_equal(np.bincount(labels[index])[[0, 1, 5]], [90, 90, 90])
    assert sorted(index[labels[index] == 0]) == list(range(90))
    assert np.array_equal(np.bincount(index)[90:99], [10] * 9)


def test_a_set_smaller_than_a_batch_repeats_images():
    sampler = EpochSampler(3, batch_size=8)
    assert sampler.steps == 1
    index = sampler.micro_batch(0, 0).index
    assert sorted(index[:3]) == sorted(index[3:6]) == [0, 1, 2]


def test_any_step_can_be_computed_directly():
    sampler = EpochSampler(10**9, batch_size=1024, repeats=3)
    late = sampler.micro_batch(10**6, 976_000, micro_batch=3, micro_batches=8)
    assert late.index.shape == (128,)
    assert 0 <= late.index.min() <= late.index.max() < 10**9


def test_invalid_arguments():
    with pytest.raises(UserError, match="at least one image"):
        EpochSampler(0, batch_size=1)
    with pytest.raises(UserError, match="not divisible"):
        EpochSampler(10, batch_size=10).micro_batch(0, 0, 0, 3)
    with pytest.raises(UserError, match="labels"):
        EpochSampler(10, batch_size=1, labels=np.zeros(3))
