"""Duplicate images: exact (equal pixels) or near (re-encoded, resized, slightly brighter, the next video frame).

Exact duplicates have equal digests. Near duplicates have perceptual hashes that differ in few of 63 bits, and correlated
thumbnails. The hashes are compared through an index instead of all pairs.
"""

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from PIL import Image

SIDE, LOW, THUMBNAIL = 32, 8, 8  # sides of the image for the hash, of its frequencies, of the thumbnail
BANDS, BAND_BITS = 4, 16
# With at most 7 differing bits in 4 bands, some band has at most one differing bit, by which the index finds the pair.
NEAR_BITS = 2 * BANDS - 1
NEAR_CORRELATION = 0.98
MIN_CONTRAST = 8  # gray levels; images of a single color have no near duplicates
PAIRS_PER_CHUNK = 1 << 17

FREQUENCY, POSITION = np.arange(LOW)[:, None], np.arange(SIDE)[None]
COSINES = np.cos(np.pi * (2 * POSITION + 1) * FREQUENCY / (2 * SIDE))
POPCOUNT = np.array([number.bit_count() for number in range(1 << 16)], dtype=np.uint8)


class Fingerprint(NamedTuple):
    digest: bytes  # 16-byte digest of the size and the pixels
    hash: int  # 63 lowest DCT frequencies, compared with their median
    thumbnail: np.ndarray  # uint8 [8, 8, 3]


def fingerprint(pixels: np.ndarray) -> Fingerprint:
    """Return the fingerprint of decoded pixels, uint8 [height, width, 3]."""
    digest = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=16)
    digest.update(pixels.tobytes())
    small = Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.BOX)
    gray = np.asarray(small.convert("L"), dtype=np.float64)
    frequencies = (COSINES @ gray @ COSINES.T).ravel()[1:]
    bits = np.append(frequencies > np.median(frequencies), False)
    blocks = np.asarray(small, dtype=np.float32).reshape(THUMBNAIL, SIDE // THUMBNAIL, THUMBNAIL, SIDE // THUMBNAIL, 3)
    thumbnail = np.rint(blocks.mean(axis=(1, 3))).astype(np.uint8)
    return Fingerprint(digest.digest(), int.from_bytes(np.packbits(bits).tobytes(), "big"), thumbnail)


def exact_groups(digests: np.ndarray) -> np.ndarray:
    """Return for every image the first image with the same digest, int64 [N]."""
    _, first, group = np.unique(digests, return_index=True, return_inverse=True)
    return first[group.reshape(-1)]


def near_groups(exact: np.ndarray, hashes: np.ndarray, thumbnails: np.ndarray) -> np.ndarray:
    """Return for every image the first image of its group of near duplicates (transitive), int64 [N].

    `exact` is the result of `exact_groups`; hashes are uint64 [N], thumbnails uint8 [N, 8, 8, 3].
    """
    group = exact.copy()
    values = thumbnails.reshape(len(thumbnails), THUMBNAIL * THUMBNAIL * 3)
    chosen = np.flatnonzero((exact == np.arange(len(exact))) & (values.max(axis=1) - values.min(axis=1) >= MIN_CONTRAST))
    for one, other in _candidates(hashes[chosen]):
        one, other = chosen[one], chosen[other]
        separate = group[one] != group[other]
        one, other = one[separate], other[separate]
        near = _distance(hashes[one], hashes[other]) <= NEAR_BITS
        one, other = one[near], other[near]
        near = _correlation(values[one], values[other]) >= NEAR_CORRELATION
        group = _merge_groups(group, one[near], other[near])
    return group


def _candidates(hashes: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield chunks of pairs that differ in at most one bit of some band."""
    for band in range(BANDS):
        keys = (hashes >> np.uint64(BAND_BITS * band)).astype(np.int64) & ((1 << BAND_BITS) - 1)
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        for flip in (0, *(1 << bit for bit in range(BAND_BITS))):
            start, stop = np.searchsorted(keys, keys ^ flip), np.searchsorted(keys, keys ^ flip, "right")
            if flip == 0:
                start = np.arange(len(keys)) + 1  # only later ones: each pair once
            counts = np.where((keys ^ flip) >= keys, stop - start, 0)
            ends = np.cumsum(counts)
            row = 0
            while row < len(keys):
                done = ends[row - 1] if row else 0
                until = max(int(np.searchsorted(ends, done + PAIRS_PER_CHUNK, "right")), row + 1)
                chunk = counts[row:until]
                one = np.repeat(np.arange(row, until), chunk)
                other = np.arange(len(one)) + np.repeat(start[row:until] - (ends[row:until] - chunk - done), chunk)
                yield order[one], order[other]
                row = until


def _distance(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the number of differing bits of uint64 hashes."""
    distance: np.ndarray = POPCOUNT[(one ^ other).view(np.uint16).reshape(-1, 4)].sum(axis=1)
    return distance


def _correlation(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    one, other = (each - each.mean(axis=1, keepdims=True, dtype=np.float32) for each in (one, other))
    correlation: np.ndarray = (one * other).sum(axis=1) / np.sqrt((one**2).sum(axis=1) * (other**2).sum(axis=1))
    return correlation


def _merge_groups(group: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Merge the groups of the pairs; a group is identified by its lowest image."""
    while len(one):
        low, high = np.minimum(group[one], group[other]), np.maximum(group[one], group[other])
        np.minimum.at(group, high, low)
        while (group[group] != group).any():
            group = group[group]
        separate = group[one] != group[other]
        one, other = one[separate], other[separate]
    return group
