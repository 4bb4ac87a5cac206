"""Two-way adapters between our tensors and another project's: reshapes, transposes and joins, never arithmetic."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import UserError

Shapes = dict[str, tuple[int, ...]]
Known = dict[str, Any]  # fields of the architecture that the caller knows, for what a file does not say


@dataclass(frozen=True)
class Codec:
    """`read` makes our tensor from theirs, `write` makes theirs from ours; both must be exact inverses."""

    read: Callable[[list[Tensor]], Tensor]
    write: Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True)
class Pair:
    """One of our tensors and the one or several of theirs that hold the same numbers."""

    ours: str
    theirs: tuple[str, ...]
    codec: Codec


class CannotHold(UserError):
    """A format has no place for a part of a model."""


def _single(read: Callable[[Tensor], Tensor], write: Callable[[Tensor], Tensor]) -> Codec:
    return Codec(lambda tensors: read(tensors[0]), lambda tensor: [write(tensor)])


SAME = _single(lambda t: t, lambda t: t)
LEADING = _single(lambda t: t[0], lambda t: t[None])  # [1, ...] <-> [...]
CHANNELS = _single(lambda t: t.reshape(-1), lambda t: t[None, None])  # [1, 1, D] <-> [D]
POINTWISE = _single(lambda t: t[:, :, 0, 0], lambda t: t[:, :, None, None])  # 1x1 convolution <-> linear
VECTOR = _single(lambda t: t.reshape(-1), lambda t: t)  # old files have [1, 1, 1, C]; [C] is written
TRANSPOSED = _single(lambda t: t.T, lambda t: t.T)  # Flax dense kernels
CONV = _single(lambda t: t.permute(3, 2, 0, 1), lambda t: t.permute(2, 3, 1, 0))  # [H, W, I, O] <-> [O, I, H, W]
STACKED = Codec(torch.cat, lambda t: list(t.chunk(3)))  # query, key, value one after the other
TOKENS = Codec(lambda ts: torch.cat([t.reshape(1, -1) for t in ts]), lambda t: [row[None, None] for row in t])
ROWS = Codec(torch.cat, lambda t: list(t.split(1)))  # one row per file tensor
HEADS_OUT = lambda heads: _single(lambda t: t.flatten(0, 1).T, lambda t: t.T.unflatten(0, (heads, -1)))  # noqa: E731


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


def count(shapes: Iterable[str], prefix: str) -> int:
    """How many numbered members (prefix.0, prefix.1, ...) there are."""
    numbers = {int(key[len(prefix) :].split(".")[0]) for key in shapes if key.startswith(prefix) and key[len(prefix)].isdigit()}
    return max(numbers) + 1 if numbers else 0


def square_grid(rows: int) -> tuple[int, int] | None:
    side = math.isqrt(rows)
    return (side, side) if side * side == rows and side > 0 else None


def grid_of(rows: int, prefixes: Iterable[int], patch: int, known: Known) -> tuple[tuple[int, int], int]:
    """(image size, prefix rows) of a position table with so many rows; a square grid unless the size is given."""
    image_size = known.get("image_size")
    for prefix in prefixes:
        if image_size is not None:
            if (image_size[0] // patch) * (image_size[1] // patch) == rows - prefix:
                return image_size, prefix
        elif grid := square_grid(rows - prefix):
            return (grid[0] * patch, grid[1] * patch), prefix
    if image_size is None:
        raise UserError(f"The file's {rows} positions fit no square image; load it with image_size=(height, width).")
    size = f"{image_size[0]}x{image_size[1]}"
    raise UserError(f"The file's {rows} positions do not fit an image of {size} in patches of {patch} pixels.")


def heads_of(width: int, known: Known) -> int:
    """Heads are not written in ViT-like files: 64 channels each, but 16 heads in the largest models."""
    if "heads" in known:
        return known["heads"]
    if width in (1280, 1408, 1664):
        return 16
    if width % 64:
        raise UserError(
            f"The number of heads is not in the file and {width} channels are not a multiple of 64; load it with heads=…."
        )
    return width // 64
