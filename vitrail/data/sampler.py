"""Deterministic sampling: the image at every position of an epoch is a pure function of (seed, epoch, position).

No shuffled list is kept in memory. A permutation of N images is evaluated only at the positions that are needed, so a run can
start at any step of any epoch, and every process computes its own part of the same sequence.

An epoch is a sequence of positions 0, 1, 2, ... A step takes the next `batch_size` of them and divides them into G groups:
group k takes every G-th position, starting at k. Images are mixed and normalized within their group, so groups are part of the
recipe. Micro-batches (devices x accumulation steps) are not: each has whole groups, or pairs of images of one group.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from vitrail.errors import UserError


@dataclass(frozen=True)
class Samples:
    """The images of a batch and the repeat number of each, which is part of its augmentation key."""

    index: np.ndarray  # [n] images of the source
    repeat: np.ndarray  # [n] 0 ... repeats - 1
    position: np.ndarray  # [n] positions in the epoch


def first_samples(index: np.ndarray) -> Samples:
    """Return samples for images that are loaded outside of an epoch: repeat and position are 0."""
    zeros = np.zeros_like(index)
    return Samples(index, zeros, zeros)


class EpochSize(NamedTuple):
    """The size of one epoch."""

    samples: int  # augmented images
    steps: int  # optimizer steps
    distinct: int  # distinct images among the samples
    passes: float  # samples / images: the average number of samples per image and epoch


@dataclass(frozen=True)
class EpochSampler:
    """The sample sequence of a training run over `num_images` images with a global batch size.

    `repeats` consecutive positions hold the same image (repeated augmentation), so neighboring groups of a step hold its copies.
    The length of the epoch does not change, so an epoch covers `1 / repeats` of the images. `round_to` truncates an epoch
    to a multiple of that number of samples before it is divided into steps (256 in the DeiT code). `labels` turns on class
    balance: every round contains each class once, in random order, and each class cycles through its own images.
    """

    num_images: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    repeats: int = 1
    round_to: int = 1
    group_size: int = 0  # a divisor of the batch size; 0: the batch size
    labels: np.ndarray | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if min(self.num_images, self.batch_size, self.repeats, self.round_to) < 1:
            raise UserError("Sampling needs at least one image, and a batch size, repeats and round_to of at least 1.")
        if self.labels is not None and len(self.labels) != self.num_images:
            raise UserError(f"There are {len(self.labels)} labels for {self.num_images} images.")

    @property
    def steps(self) -> int:
        """Steps per epoch: full batches only. A set smaller than one batch gives one step with repeated images."""
        samples = self.num_images // self.round_to * self.round_to or self.num_images
        return max(samples // self.batch_size, 1)

    def epoch_size(self) -> EpochSize:
        samples = self.steps * self.batch_size
        distinct = min(-(-samples // self.repeats), self.num_images)
        return EpochSize(samples, self.steps, distinct, samples / self.num_images)

    def at(self, epoch: int, positions: np.ndarray) -> Samples:
        """Return the samples at the given positions of an epoch; positions beyond the end of the epoch are allowed."""
        positions = np.asarray(positions, dtype=np.int64)
        slot, repeat = positions // self.repeats, positions % self.repeats
        index = self._balanced(epoch, slot) if self.labels is not None else self._shuffled(epoch, slot)
        return Samples(index, repeat, positions)

    @property
    def groups(self) -> int:
        """Groups per step."""
        return self.batch_size // (self.group_size or self.batch_size)

    def micro_batch(self, epoch: int, step: int, micro_batch: int = 0, micro_batches: int = 1) -> Samples:
        """Return the samples of one micro-batch of a step: group after group, or an even part of a group.

        The images at i and size - 1 - i of a group, which are mixed, are at mirrored indices of its part too. Micro-batches of
        other sizes, which recipes that do not use groups may have, take every `micro_batches`-th position.
        """
        if self.batch_size % micro_batches:
            raise UserError(
                f"The batch size {self.batch_size} is not divisible by {micro_batches} micro-batches: "
                "change the batch size or the number of devices."
            )
        groups, size = self.groups, self.batch_size // micro_batches
        if groups % micro_batches == 0:
            count = groups // micro_batches
            own = np.arange(micro_batch * count, (micro_batch + 1) * count)
            offsets = (own[:, None] + np.arange(0, self.batch_size, groups)).flatten()
        elif micro_batches % groups == 0 and size % 2 == 0:
            group, part = divmod(micro_batch, micro_batches // groups)
            half = np.arange(part * size // 2, (part + 1) * size // 2)
            offsets = group + groups * np.concatenate([half, self.batch_size // groups - 1 - half[::-1]])
        else:
            offsets = np.arange(micro_batch, self.batch_size, micro_batches)
        return self.at(epoch, step * self.batch_size + offsets)

    def _shuffled(self, epoch: int, slot: np.ndarray) -> np.ndarray:
        if not self.shuffle:
            return slot % self.num_images
        # Beyond the last image the sequence continues with another permutation.
        cycle, within = slot // self.num_images, slot % self.num_images
        return permute(within, np.full_like(slot, self.num_images), self._key(epoch, cycle, 0))

    def _balanced(self, epoch: int, slot: np.ndarray) -> np.ndarray:
        members, starts, sizes = self._members
        classes = len(sizes)
        turn = slot // classes
        label = permute(slot % classes, np.full_like(slot, classes), self._key(epoch, turn, 1))
        cycle, within = turn // sizes[label], turn % sizes[label]
        chosen = permute(within, sizes[label], self._key(epoch, cycle, 2 + label))
        index: np.ndarray = members[starts[label] + chosen]
        return index

    @cached_property
    def _members(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (images sorted by class, the start of each class in them, the number of images of each class)."""
        assert self.labels is not None
        members = np.argsort(self.labels, kind="stable")
        _, starts, sizes = np.unique(self.labels[members], return_index=True, return_counts=True)
        return members, starts, sizes

    def _key(self, epoch: int, cycle: np.ndarray, purpose: int | np.ndarray) -> np.ndarray:
        key: np.ndarray = hash64(np.uint64(self.seed & MASK))
        for part in (np.asarray(epoch), cycle, np.asarray(purpose)):
            key = hash64(key ^ (part.astype(np.uint64) + GOLDEN))
        return key


MASK = (1 << 64) - 1
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
ROUNDS = [np.uint64(number * int(GOLDEN) & MASK) for number in range(1, 7)]


def hash64(value: Any) -> Any:
    """Bijective 64-bit hash (the finalizer of SplitMix64)."""
    with np.errstate(over="ignore"):
        value = np.asarray(value, dtype=np.uint64)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))


def permute(position: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Evaluate a pseudo-random permutation of 0 ... size-1 at `position`; each element has its own size and key.

    A Feistel network permutes the next even number of bits. It is applied again until the value is below `size` (cycle walking),
    which makes it a permutation of the smaller set.
    """
    position, size, key = np.broadcast_arrays(position, size, key)
    half = np.maximum((np.ceil(np.log2(np.maximum(size, 2))).astype(np.int64) + 1) // 2, 1).astype(np.uint64)
    mask = (np.uint64(1) << half) - np.uint64(1)
    value = position.astype(np.uint64)
    outside = np.ones(position.shape, dtype=bool)
    while outside.any():
        left, right = value[outside] >> half[outside], value[outside] & mask[outside]
        for constant in ROUNDS:
            left, right = right, left ^ (hash64(key[outside] ^ hash64(right + constant)) & mask[outside])
        value[outside] = (left << half[outside]) | right
        outside = value >= size.astype(np.uint64)
    return value.astype(np.int64)
