"""The order in which images are seen: a pure function of (seed, epoch, position).

Nothing is stored and nothing is shuffled in memory: a permutation of N images is evaluated at the positions one asks for, so
that a run may start at any step of any epoch at once, and every process of a run computes its own part of the same stream.

An epoch is a stream of positions 0, 1, 2, ... A step takes the next `batch` of them. When a step is cut into units
(micro-batches: devices x accumulation steps), unit u takes every `micro_batches`-th position from u on. The stream does not depend on
the cut.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from vitrail.errors import UserError


@dataclass(frozen=True)
class Samples:
    """Which images, and which copy of each: the key of its augmentation."""

    index: np.ndarray  # [n] images
    repeat: np.ndarray  # [n] 0 ... repeats - 1
    position: np.ndarray  # [n] places in the epoch's stream


class Accounting(NamedTuple):
    """What one epoch really is."""

    samples: int  # augmented images
    steps: int  # of the global batch
    distinct: int  # different images among them
    passes: float  # samples / images: how often an image is seen per epoch on average


@dataclass(frozen=True)
class Order:
    """The stream of one training: `count` images, a global `batch`.

    `repeats` copies of an image follow each other (repeated augmentation), so that neighbouring units see them in the same step;
    the epoch keeps its length, so it covers `1 / repeats` of the images. `round_to` cuts an epoch to a multiple of that number
    of samples before it is cut into steps (256 in the DeiT code). `labels` turns on class balance: classes take turns, each in a
    fresh random order every round, and each class runs through its own images.
    """

    count: int
    batch: int
    seed: int = 0
    shuffle: bool = True
    repeats: int = 1
    round_to: int = 1
    labels: np.ndarray | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if min(self.count, self.batch, self.repeats, self.round_to) < 1:
            raise UserError("An order needs at least one image, and a batch, repeats and round_to of at least 1.")
        if self.labels is not None and len(self.labels) != self.count:
            raise UserError(f"There are {len(self.labels)} labels for {self.count} images.")

    @property
    def steps(self) -> int:
        """Steps per epoch: whole batches only; a set smaller than one batch makes one step and repeats images."""
        samples = self.count // self.round_to * self.round_to or self.count
        return max(samples // self.batch, 1)

    def accounting(self) -> Accounting:
        samples = self.steps * self.batch
        distinct = min(-(-samples // self.repeats), self.count)
        return Accounting(samples, self.steps, distinct, samples / self.count)

    def at(self, epoch: int, positions: np.ndarray) -> Samples:
        """The stream of an epoch at these positions, which may lie anywhere, also beyond the epoch's end."""
        positions = np.asarray(positions, dtype=np.int64)
        place, repeat = positions // self.repeats, positions % self.repeats
        index = self._balanced(epoch, place) if self.labels is not None else self._plain(epoch, place)
        return Samples(index, repeat, positions)

    def micro_batch(self, epoch: int, step: int, micro_batch: int = 0, micro_batches: int = 1) -> Samples:
        """The part of a step that unit `micro_batch` of `micro_batches` computes."""
        if self.batch % micro_batches:
            raise UserError(
                f"The global batch of {self.batch} does not divide into {micro_batches} parts; change batch or devices."
            )
        return self.at(epoch, step * self.batch + np.arange(micro_batch, self.batch, micro_batches))

    def _plain(self, epoch: int, place: np.ndarray) -> np.ndarray:
        if not self.shuffle:
            return place % self.count
        # A stream longer than the set goes on with another permutation.
        lap, within = place // self.count, place % self.count
        return permute(within, np.full_like(place, self.count), self._key(epoch, lap, 0))

    def _balanced(self, epoch: int, place: np.ndarray) -> np.ndarray:
        members, starts, sizes = self._members
        classes = len(sizes)
        turn = place // classes
        order = permute(place % classes, np.full_like(place, classes), self._key(epoch, turn, 1))
        lap, within = turn // sizes[order], turn % sizes[order]
        chosen = permute(within, sizes[order], self._key(epoch, lap, 2 + order))
        return members[starts[order] + chosen]

    @cached_property
    def _members(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Images sorted by class, where each present class starts, how many it has."""
        assert self.labels is not None
        members = np.argsort(self.labels, kind="stable")
        _, starts, sizes = np.unique(self.labels[members], return_index=True, return_counts=True)
        return members, starts, sizes

    def _key(self, epoch: int, lap: np.ndarray, purpose: int | np.ndarray) -> np.ndarray:
        key = mix(np.uint64(self.seed & MASK))
        for part in (np.asarray(epoch), lap, np.asarray(purpose)):
            key = mix(key ^ (part.astype(np.uint64) + GOLDEN))
        return key


MASK = (1 << 64) - 1
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
ROUNDS = [np.uint64(turn * int(GOLDEN) & MASK) for turn in range(1, 7)]


def mix(value: Any) -> Any:
    """A bijective scramble of 64 bits (the finaliser of SplitMix64)."""
    with np.errstate(over="ignore"):
        value = np.asarray(value, dtype=np.uint64)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))


def permute(place: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
    """A pseudo-random permutation of 0 ... size-1, evaluated at `place`; each element has its own size and key.

    A Feistel network on the next even number of bits, walked until it falls inside: a bijection of the smaller set.
    """
    place, size, key = np.broadcast_arrays(place, size, key)
    half = np.maximum((np.ceil(np.log2(np.maximum(size, 2))).astype(np.int64) + 1) // 2, 1).astype(np.uint64)
    mask = (np.uint64(1) << half) - np.uint64(1)
    value = place.astype(np.uint64)
    waiting = np.ones(place.shape, dtype=bool)
    while waiting.any():
        left, right = value[waiting] >> half[waiting], value[waiting] & mask[waiting]
        for constant in ROUNDS:
            left, right = right, left ^ (mix(key[waiting] ^ mix(right + constant)) & mask[waiting])
        value[waiting] = (left << half[waiting]) | right
        waiting = value >= size.astype(np.uint64)
    return value.astype(np.int64)
