"""Instance masks: polygons and run lengths of COCO, and the packed bits of batches.

Polygons are drawn by the rule of COCO's tools, so that masks, their areas and AP are those of other programs: the outline is
traced at five times the resolution, and a pixel is inside if the outline passes above it an odd number of times.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vitrail.data.decode import resize_mask

PER_PLANE = 8  # masks that are packed into one byte per pixel
TRACE = 5  # steps per pixel of an outline
MAX_POINTS = 100_000  # of all polygons of an object
MAX_COORDINATE = 1 << 20  # pixels
MAX_STEPS = 1 << 22  # of an outline


class Rle(NamedTuple):
    """Run lengths down the columns of a mask, background first; `counts` are numbers, or COCO's text of them."""

    counts: bytes | np.ndarray
    size: tuple[int, int]  # height, width


Polygons = tuple[np.ndarray, ...]  # float64 [n, 2] each: x, y
Shape = Polygons | Rle | None


def shape_to_mask(shape: Polygons | Rle, height: int, width: int, size: tuple[int, int] | None, relative: bool) -> np.ndarray:
    """A mask, bool [height, width], of a shape that was drawn on an image of `size`, or relative to its sides."""
    if isinstance(shape, Rle):
        return resize_mask(decode_rle(shape), height, width)
    if sum(map(len, shape)) > MAX_POINTS:
        raise ValueError(f"polygons of {sum(map(len, shape)):,} points; at most {MAX_POINTS:,} are supported")
    stored = (1, 1) if relative else size or (height, width)
    scale = (width / stored[1], height / stored[0])
    mask = np.zeros((height, width), dtype=bool)
    for polygon in shape:
        mask |= draw_polygon(polygon * scale, height, width)
    return mask


def draw_polygon(points: np.ndarray, height: int, width: int) -> np.ndarray:
    """The inside of a polygon [n, 2] of x and y, bool [height, width]."""
    if len(points) < 3 or not np.isfinite(points).all() or np.abs(points).max() > MAX_COORDINATE:
        raise ValueError(f"a polygon has at least three points, of coordinates up to {MAX_COORDINATE:,} pixels")
    xs, ys = trace_outline(np.trunc(points * TRACE + 0.5).astype(np.int64))
    # Where the outline moves to another column of the fine grid it may cross the center line of a column of pixels.
    moves = np.flatnonzero(xs[1:] != xs[:-1])
    columns = (np.where(xs[moves + 1] < xs[moves], xs[moves + 1], xs[moves + 1] - 1) + 0.5) / TRACE - 0.5
    rows = (np.minimum(ys[moves], ys[moves + 1]) + 0.5) / TRACE - 0.5
    kept = (columns == np.floor(columns)) & (columns >= 0) & (columns <= width - 1)
    rows = np.ceil(np.clip(rows[kept], 0, height)).astype(np.int64)
    crossings = np.sort(columns[kept].astype(np.int64) * height + rows)
    return fill_runs(np.diff(crossings, prepend=0, append=height * width), height, width)


def trace_outline(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All grid points x, y of the closed outline through integer points [n, 2], one step at a time along the longer axis."""
    start, stop = points, np.roll(points, -1, 0)
    lengths = np.abs(stop - start)
    if int(lengths.max(1).sum()) > MAX_STEPS:
        raise ValueError("an outline of millions of pixels: simplify the polygon")
    along_x = lengths[:, 0] >= lengths[:, 1]
    steps = lengths.max(1)
    edge = np.repeat(np.arange(len(points)), steps + 1)
    step = np.arange(len(edge)) - np.repeat(np.cumsum(steps + 1) - steps - 1, steps + 1)
    axis = np.where(along_x, 0, 1)
    every = np.arange(len(points))
    # An edge is always computed from its lower end, so that both directions give the same points.
    backward = start[every, axis] > stop[every, axis]
    low, high = (np.where(backward[:, None], *pair) for pair in ((stop, start), (start, stop)))
    other = 1 - axis
    slope = (high - low)[every, other] / np.maximum(steps, 1)
    offset = np.where(backward[edge], steps[edge] - step, step)
    main = low[every, axis][edge] + offset
    side = np.trunc(low[every, other][edge] + slope[edge] * offset + 0.5).astype(np.int64)
    return np.where(along_x[edge], main, side), np.where(along_x[edge], side, main)


def decode_rle(rle: Rle) -> np.ndarray:
    """The mask of run lengths, bool [height, width]; ValueError unless they cover exactly the size."""
    height, width = rle.size
    counts = parse_counts(rle.counts, height * width) if isinstance(rle.counts, bytes) else rle.counts
    if len(counts) > height * width + 1 or (counts < 0).any() or (counts > height * width).any():
        raise ValueError(f"run lengths that do not fit {width} x {height} pixels")
    if int(counts.sum()) != height * width:
        raise ValueError(f"run lengths of {int(counts.sum()):,} pixels instead of {width} x {height}")
    return fill_runs(counts, height, width)


def fill_runs(counts: np.ndarray, height: int, width: int) -> np.ndarray:
    """The mask, bool [height, width], of run lengths down the columns, background first."""
    mask: np.ndarray = np.repeat(np.arange(len(counts)) % 2 == 1, counts).reshape(width, height).T
    return mask


def parse_counts(text: bytes, limit: int) -> np.ndarray:
    """The numbers of COCO's text: groups of six bits from the lowest on, each a difference to the number two before."""
    values = np.frombuffer(text, dtype=np.uint8).astype(np.int64) - 48
    if not 0 < len(values) <= 4 * (limit + 2) or ((values < 0) | (values > 63)).any() or values[-1] & 32:
        raise ValueError("run lengths that are not COCO's text")
    ends = np.flatnonzero(values & 32 == 0)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > 8:
        raise ValueError("run lengths that are not COCO's text")
    place = np.arange(len(values)) - np.repeat(starts, lengths)
    numbers = np.add.reduceat((values & 31) << (5 * place), starts)
    negative = values[ends] & 16 != 0
    numbers = np.where(negative, numbers - (1 << (5 * lengths)), numbers)
    # Differences start at the fourth number: odd and even ones are summed separately.
    for first in (1, 2):
        numbers[first::2] = np.cumsum(numbers[first::2])
    return numbers


def encode_rle(mask: np.ndarray) -> Rle:
    """COCO's text of a mask, bool [height, width]."""
    flat = np.concatenate([[False], mask.T.reshape(-1)])
    changes = np.flatnonzero(flat[1:] != flat[:-1])
    counts = np.diff(np.concatenate([[0], changes, [mask.size]]))
    differences = counts.copy()
    differences[3:] -= counts[1:-2]
    text = bytearray()
    for number in differences.tolist():
        while True:
            group, number = number & 31, number >> 5
            more = number != (-1 if group & 16 else 0)
            text.append(group + 32 * more + 48)
            if not more:
                break
    return Rle(bytes(text), (mask.shape[0], mask.shape[1]))


def pack_masks(masks: np.ndarray) -> np.ndarray:
    """Masks, bool [N, H, W], as bits, uint8 [ceil(N / 8), H, W]."""
    packed: np.ndarray = np.packbits(masks, axis=0, bitorder="little")
    return packed


def unpack_masks(planes: np.ndarray, count: int) -> np.ndarray:
    """The first `count` masks of packed bits, bool [count, H, W]."""
    masks: np.ndarray = np.unpackbits(planes, axis=0, count=count, bitorder="little").view(bool)
    return masks


def read_polygons(polygons: Sequence[Sequence[float]]) -> Polygons:
    """COCO's polygons [x1, y1, x2, y2, …]; ValueError for lists that are no polygons."""
    found = []
    for polygon in polygons:
        points = np.asarray(polygon, dtype=np.float64)
        if points.ndim != 1 or len(points) % 2 or len(points) < 4:
            raise ValueError("a polygon is a list of x and y of at least three points")
        found.append(points.reshape(-1, 2))
    return tuple(found)
