"""Invertible conversions between our tensors and those of another project: reshape, transpose, concatenate; no arithmetic."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import UserError

Shapes = dict[str, tuple[int, ...]]
Hints = dict[str, Any]  # fields of the architecture that the caller gives, for what a file does not contain


@dataclass(frozen=True)
class Codec:
    """`read` converts their tensors to ours, `write` ours to theirs; each is the exact inverse of the other."""

    read: Callable[[list[Tensor]], Tensor]
    write: Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True)
class Pair:
    """The name of one of our tensors, and of the one or more tensors of theirs with the same values."""

    ours: str
    theirs: tuple[str, ...]
    codec: Codec


class UnknownFormat(UserError):
    """The tensor names of a checkpoint are not those of a supported vision transformer."""


class UnsupportedByFormat(UserError):
    """A format cannot represent a part of a model."""


def _single(read: Callable[[Tensor], Tensor], write: Callable[[Tensor], Tensor]) -> Codec:
    return Codec(lambda tensors: read(tensors[0]), lambda tensor: [write(tensor)])


SAME = _single(lambda t: t, lambda t: t)
LEADING = _single(lambda t: t[0], lambda t: t[None])  # [1, ...] <-> [...]
CHANNELS = _single(lambda t: t.reshape(-1), lambda t: t[None, None])  # [1, 1, D] <-> [D]
POINTWISE = _single(lambda t: t[:, :, 0, 0], lambda t: t[:, :, None, None])  # 1x1 convolution <-> linear
VECTOR = _single(lambda t: t.reshape(-1), lambda t: t)  # old files have [1, 1, 1, C]; [C] is written
TRANSPOSED = _single(lambda t: t.T, lambda t: t.T)  # Flax dense kernels
CONV = _single(lambda t: t.permute(3, 2, 0, 1), lambda t: t.permute(2, 3, 1, 0))  # [H, W, I, O] <-> [O, I, H, W]
STACKED = Codec(torch.cat, lambda t: list(t.chunk(3)))  # query, key, value <-> qkv
TOKENS = Codec(lambda ts: torch.cat([t.reshape(1, -1) for t in ts]), lambda t: [row[None, None] for row in t])
ROWS = Codec(torch.cat, lambda t: list(t.split(1)))  # one row per file tensor


def flax_proj(heads: int) -> Codec:
    """Kernel of the output projection [H, D/H, D] <-> [D, D]."""
    return _single(lambda t: t.flatten(0, 1).T, lambda t: t.T.unflatten(0, (heads, -1)))


def flax_qkv(heads: int) -> Codec:
    """Three kernels [D, H, D/H] <-> [3D, D]."""
    return Codec(
        lambda ts: torch.cat([t.flatten(1).T for t in ts]),
        lambda t: [part.T.unflatten(1, (heads, -1)) for part in t.chunk(3)],
    )


def flax_qkv_bias(heads: int) -> Codec:
    """Three biases [H, D/H] <-> [3D]."""
    return Codec(
        lambda ts: torch.cat([t.flatten() for t in ts]),
        lambda t: [part.unflatten(0, (heads, -1)) for part in t.chunk(3)],
    )


def pair(ours: str, theirs: str | Iterable[str], codec: Codec = SAME) -> Pair:
    return Pair(ours, (theirs,) if isinstance(theirs, str) else tuple(theirs), codec)


def count_members(shapes: Iterable[str], prefix: str) -> int:
    """The number of indexed members (prefix.0, prefix.1, ...)."""
    numbers = {int(key[len(prefix) :].split(".")[0]) for key in shapes if key.startswith(prefix) and key[len(prefix)].isdigit()}
    return max(numbers) + 1 if numbers else 0


def square_grid(rows: int) -> tuple[int, int] | None:
    side = math.isqrt(rows)
    return (side, side) if side * side == rows and side > 0 else None


def infer_image_size(rows: int, prefixes: Iterable[int], patch: int, hints: Hints) -> tuple[tuple[int, int], int]:
    """(image size, prefix rows) of a position table with `rows` rows; a square grid unless `hints` has an image size."""
    image_size = hints.get("image_size")
    for prefix in prefixes:
        if image_size is not None:
            if (image_size[0] // patch) * (image_size[1] // patch) == rows - prefix:
                return image_size, prefix
        elif grid := square_grid(rows - prefix):
            return (grid[0] * patch, grid[1] * patch), prefix
    if image_size is None:
        raise UserError(f"The position table of {rows} rows is not that of a square image: load with image_size=(height, width).")
    size = f"{image_size[0]}x{image_size[1]}"
    raise UserError(f"The position table of {rows} rows does not match an image size of {size} with patch size {patch}.")


def infer_num_heads(width: int, hints: Hints) -> int:
    """The number of heads, which ViT files do not contain: 64 channels per head; 16 heads in the largest models."""
    if "heads" in hints:
        heads: int = hints["heads"]
        return heads
    if width in (1280, 1408, 1664):
        return 16
    if width % 64:
        raise UserError(
            f"The file does not contain the number of heads, and its width {width} is not a multiple of 64: load with heads=…."
        )
    return width // 64
