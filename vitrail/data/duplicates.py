"""Images that occur twice: pixel for pixel, or nearly so (re-encoded, resized, a little brighter, the next frame of a film).

Equal pixels have equal digests. Near twins have hashes that differ in few of 63 bits and thumbnails that correlate; the hashes
are compared through an index, never all with all.
"""

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from PIL import Image

SIDE, LOW, THUMBNAIL = 32, 8, 8  # of the small image that is transformed, the frequencies kept, the thumbnail compared
BANDS, BAND_BITS = 4, 16
# Eight differing bits can lie two in every band; with at most seven some band has at most one, which is how the index finds it.
NEAR_BITS = 2 * BANDS - 1
NEAR_CORRELATION = 0.98
PLAIN = 8  # levels between darkest and brightest: below, an image is one color and resembles every other such
PAIRS_AT_ONCE = 1 << 17

FREQUENCY, PLACE = np.arange(LOW)[:, None], np.arange(SIDE)[None]
COSINES = np.cos(np.pi * (2 * PLACE + 1) * FREQUENCY / (2 * SIDE))
ONES = np.array([number.bit_count() for number in range(1 << 16)], dtype=np.uint8)


class Fingerprint(NamedTuple):
    digest: bytes  # 16 bytes of the size and the pixels
    hash: int  # the signs of the 63 lowest frequencies about their median
    thumbnail: np.ndarray  # uint8 [8, 8, 3]


def fingerprint(pixels: np.ndarray) -> Fingerprint:
    """Of decoded pixels uint8 [height, width, 3]."""
    digest = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=16)
    digest.update(pixels.tobytes())
    small = Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.BOX)
    grey = np.asarray(small.convert("L"), dtype=np.float64)
    waves = (COSINES @ grey @ COSINES.T).ravel()[1:]
    bits = np.append(waves > np.median(waves), False)
    blocks = np.asarray(small, dtype=np.float32).reshape(THUMBNAIL, SIDE // THUMBNAIL, THUMBNAIL, SIDE // THUMBNAIL, 3)
    thumbnail = np.rint(blocks.mean(axis=(1, 3))).astype(np.uint8)
    return Fingerprint(digest.digest(), int.from_bytes(np.packbits(bits).tobytes(), "big"), thumbnail)


def exact_groups(digests: np.ndarray) -> np.ndarray:
    """For every image the first image with the same digest: int64 [N]."""
    _, first, group = np.unique(digests, return_index=True, return_inverse=True)
    return first[group.reshape(-1)]


def near_groups(exact: np.ndarray, hashes: np.ndarray, thumbnails: np.ndarray) -> np.ndarray:
    """For every image the first image of its group: int64 [N]; near twins of near twins are in one group.

    `exact` is what `exact_groups` gave; hashes are uint64 [N], thumbnails uint8 [N, 8, 8, 3].
    """
    group = exact.copy()
    values = thumbnails.reshape(len(thumbnails), THUMBNAIL * THUMBNAIL * 3)
    chosen = np.flatnonzero((exact == np.arange(len(exact))) & (values.max(axis=1) - values.min(axis=1) >= PLAIN))
    for one, other in _candidates(hashes[chosen]):
        one, other = chosen[one], chosen[other]
        apart = group[one] != group[other]
        one, other = one[apart], other[apart]
        alike = _distance(hashes[one], hashes[other]) <= NEAR_BITS
        one, other = one[alike], other[alike]
        alike = _correlation(values[one], values[other]) >= NEAR_CORRELATION
        group = _join(group, one[alike], other[alike])
    return group


def _candidates(hashes: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs that agree in some band but for at most one bit, some at a time."""
    for band in range(BANDS):
        keys = (hashes >> np.uint64(BAND_BITS * band)).astype(np.int64) & ((1 << BAND_BITS) - 1)
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        for flip in (0, *(1 << bit for bit in range(BAND_BITS))):
            start, stop = np.searchsorted(keys, keys ^ flip), np.searchsorted(keys, keys ^ flip, "right")
            if flip == 0:
                start = np.arange(len(keys)) + 1  # those behind it: each pair once
            counts = np.where((keys ^ flip) >= keys, stop - start, 0)
            ends = np.cumsum(counts)
            row = 0
            while row < len(keys):
                done = ends[row - 1] if row else 0
                until = max(int(np.searchsorted(ends, done + PAIRS_AT_ONCE, "right")), row + 1)
                some = counts[row:until]
                one = np.repeat(np.arange(row, until), some)
                other = np.arange(len(one)) + np.repeat(start[row:until] - (ends[row:until] - some - done), some)
                yield order[one], order[other]
                row = until


def _distance(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Differing bits of uint64 hashes."""
    return ONES[(one ^ other).view(np.uint16).reshape(-1, 4)].sum(axis=1)


def _correlation(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    one, other = (each - each.mean(axis=1, keepdims=True, dtype=np.float32) for each in (one, other))
    return (one * other).sum(axis=1) / np.sqrt((one**2).sum(axis=1) * (other**2).sum(axis=1))


def _join(group: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The groups after these pairs have been put together; the lowest image stands for its group."""
    while len(one):
        low, high = np.minimum(group[one], group[other]), np.maximum(group[one], group[other])
        np.minimum.at(group, high, low)
        while (group[group] != group).any():
            group = group[group]
        apart = group[one] != group[other]
        one, other = one[apart], other[apart]
    return group
