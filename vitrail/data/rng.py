"""Random numbers that are a pure function of their key: the same on any device, in any batch, before and after a resume.

An image's key folds (seed, epoch, image, repeat); an operation's name and a counter give its numbers. Only integer arithmetic
on 32 bits is used (held in int64), so a CPU and a GPU agree to the last bit.
"""

import math
from typing import Any

import torch
from torch import Tensor

from vitrail.data.transforms.backend import kernels_for

MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9


def scramble(x: Any) -> Any:
    """A bijective hash of 32 bits: of an int64 tensor elementwise, or of a number."""
    x = x & MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def sample_key(seed: int, epoch: int, index: Tensor, repeat: Tensor) -> Tensor:
    """One key per image [B]: everything that its augmentation depends on."""
    key: Any = 0
    for number in (seed & MASK, (seed >> 32) & MASK, epoch & MASK):
        key = scramble(key * 3 + number + GOLDEN)
    kernels = kernels_for(index)
    if kernels is not None:
        return kernels.fold(key, index, repeat)
    for part in (index & MASK, index >> 32, repeat):
        key = scramble(key * 3 + part + GOLDEN)
    return key


def name_hash(name: str) -> int:
    """FNV-1a of a name, in plain arithmetic that the compiler can follow."""
    value = 0x811C9DC5
    for letter in name:
        value = ((value ^ ord(letter)) * 0x01000193) & MASK
    return value


def bits(key: Tensor, operation: str, count: int) -> Tensor:
    """Random 32-bit numbers, int64 [B, count]."""
    kernels = kernels_for(key)
    if kernels is not None:
        return kernels.bits(key, name_hash(operation), count)
    start = scramble(key ^ name_hash(operation))
    counter = scramble(torch.arange(1, count + 1, device=key.device))
    return scramble(scramble(start[:, None] + counter) + start[:, None])


def uniform(key: Tensor, operation: str, count: int = 1) -> Tensor:
    """Numbers in [0, 1), float32 [B, count]: 24 bits each."""
    kernels = kernels_for(key)
    if kernels is not None:
        return kernels.uniform(key, name_hash(operation), count)
    return (bits(key, operation, count) >> 8).float() * 2.0**-24


def between(key: Tensor, operation: str, low: float, high: float) -> Tensor:
    """One number per image in [low, high), float32 [B]."""
    return low + (high - low) * uniform(key, operation)[:, 0]


def integers(key: Tensor, operation: str, high: int | Tensor, count: int = 1) -> Tensor:
    """Whole numbers in [0, high), int64 [B, count]; `high` may differ per image [B]."""
    limit = high[:, None] if isinstance(high, Tensor) else high
    return (bits(key, operation, count) * limit) >> 32


def chance(key: Tensor, operation: str, probability: float) -> Tensor:
    """True with the given probability, bool [B]."""
    return uniform(key, operation)[:, 0] < probability


def normal(key: Tensor, operation: str, count: int = 1) -> Tensor:
    """Standard normal numbers [B, count] (Box-Muller)."""
    pair = uniform(key, operation, 2 * count)
    radius = torch.sqrt(-2.0 * torch.log1p(-pair[:, :count]))
    return radius * torch.cos(2.0 * math.pi * pair[:, count:])
