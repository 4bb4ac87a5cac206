"""The random numbers of `data/rng.py`, one kernel launch each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TINY = tl.constexpr(2.0**-24)  # resolution of the uniform numbers


@triton.jit
def hash32(x):
    """`rng.hash32` in arithmetic modulo 2**32."""
    x = x.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


def signed(number: int) -> int:
    """Convert an unsigned 32-bit number to int32, so that one compiled kernel accepts all values."""
    return number - (1 << 32) if number >> 31 else number


@triton.jit(do_not_specialize=["start", "total"])
def fold_kernel(index, repeat, out, start, total, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(index + offset, offset < total, 0)
    key = hash32(start.to(tl.uint32) * 3 + number.to(tl.uint32) + 0x9E3779B9)
    key = hash32(key * 3 + (number >> 32).to(tl.uint32) + 0x9E3779B9)
    key = hash32(key * 3 + tl.load(repeat + offset, offset < total, 0).to(tl.uint32) + 0x9E3779B9)
    tl.store(out + offset, key.to(tl.int64), offset < total)


def fold_keys(start: int, index: Tensor, repeat: Tensor) -> Tensor:
    """Keys [B] of images [B] and repeats [B]; `start` is the hash of seed and epoch. See `rng.sample_key`."""
    out = torch.empty_like(index)
    grid = (triton.cdiv(len(index), 256),)
    fold_kernel[grid](index.contiguous(), repeat.contiguous(), out, signed(start), len(index), BLOCK=256)
    return out


@triton.jit(do_not_specialize=["name", "total", "count"])
def draw_kernel(key, out, name, total, count, UNIFORM: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < total
    start = hash32(tl.load(key + offset // count, mask, 0) ^ name)
    drawn = hash32(hash32(start + hash32(offset % count + 1)) + start)
    tl.store(out + offset, (drawn >> 8).to(tl.float32) * TINY if UNIFORM else drawn.to(tl.int64), mask)


def random_bits(key: Tensor, name: int, count: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Random 32-bit integers [B, count] for keys [B] and the hash of an operation name."""
    out = torch.empty(len(key), count, dtype=dtype, device=key.device)
    grid = (triton.cdiv(out.numel(), 256),)
    draw_kernel[grid](key.contiguous(), out, signed(name), out.numel(), count, UNIFORM=dtype == torch.float32, BLOCK=256)
    return out


def uniform(key: Tensor, name: int, count: int) -> Tensor:
    return random_bits(key, name, count, torch.float32)
