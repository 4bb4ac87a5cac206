"""Counter-based random numbers: a pure function of a key, identical on every device, in every batch and after a resume.

The key of an image is a hash of (seed, epoch, index, repeat). Its random numbers are hashes of the key, the name of the operation
and a counter. All arithmetic is on 32-bit integers (stored as int64), so CPU and GPU results are bit-identical. The names of the
operations are part of the random stream: renaming one changes the augmentation.
"""

import math
from typing import TypeVar

import torch
from torch import Tensor

from vitrail.data.transforms.backend import kernels_for

MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
Number = TypeVar("Number", int, Tensor)


def hash32(x: Number) -> Number:
    """Bijective 32-bit hash of an int or, elementwise, of an int64 tensor."""
    x = x & MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def sample_key(seed: int, epoch: int, index: Tensor, repeat: Tensor) -> Tensor:
    """Return one key per image [B], from which all of its augmentation is drawn."""
    start = 0
    for number in (seed & MASK, (seed >> 32) & MASK, epoch & MASK):
        start = hash32(start * 3 + number + GOLDEN)
    kernels = kernels_for(index)
    if kernels is not None:
        out: Tensor = kernels.fold_keys(start, index, repeat)
        return out
    key = hash32(start * 3 + (index & MASK) + GOLDEN)
    for part in (index >> 32, repeat):
        key = hash32(key * 3 + part + GOLDEN)
    return key


def hash_name(name: str) -> int:
    """FNV-1a hash of a name, in plain arithmetic that torch.compile can trace."""
    value = 0x811C9DC5
    for letter in name:
        value = ((value ^ ord(letter)) * 0x01000193) & MASK
    return value


def random_bits(key: Tensor, operation: str, count: int) -> Tensor:
    """Random 32-bit integers, int64 [B, count]."""
    kernels = kernels_for(key)
    if kernels is not None:
        out: Tensor = kernels.random_bits(key, hash_name(operation), count)
        return out
    start = hash32(key ^ hash_name(operation))
    counter = hash32(torch.arange(1, count + 1, device=key.device))
    return hash32(hash32(start[:, None] + counter) + start[:, None])


def uniform(key: Tensor, operation: str, count: int = 1) -> Tensor:
    """Uniform numbers in [0, 1) with 24 random bits each, float32 [B, count]."""
    kernels = kernels_for(key)
    if kernels is not None:
        out: Tensor = kernels.uniform(key, hash_name(operation), count)
        return out
    return (random_bits(key, operation, count) >> 8).float() * 2.0**-24


def uniform_between(key: Tensor, operation: str, low: float, high: float) -> Tensor:
    """One uniform number in [low, high) per image, float32 [B]."""
    return low + (high - low) * uniform(key, operation)[:, 0]


def randint(key: Tensor, operation: str, high: int | Tensor) -> Tensor:
    """Uniform integers in [0, high), int64 [B, 1]. `high` is a number or one bound per image [B]."""
    limit = high[:, None] if isinstance(high, Tensor) else high
    return (random_bits(key, operation, 1) * limit) >> 32


def bernoulli(key: Tensor, operation: str, probability: float) -> Tensor:
    """True with the given probability, bool [B]."""
    return uniform(key, operation)[:, 0] < probability


def normal(key: Tensor, operation: str, count: int = 1) -> Tensor:
    """Standard normal numbers [B, count] (Box-Muller)."""
    pair = uniform(key, operation, 2 * count)
    radius = torch.sqrt(-2.0 * torch.log1p(-pair[:, :count]))
    return radius * torch.cos(2.0 * math.pi * pair[:, count:])
