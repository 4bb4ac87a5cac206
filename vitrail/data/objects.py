"""Objects in images: boxes with classes, and instance masks, as data sets store them and as batches contain them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.decode import decode_mask, fit_mask
from vitrail.data.instance_masks import PER_PLANE, Rle, Shape, pack_masks, shape_to_mask, unpack_masks
from vitrail.data.mask_classes import IGNORE
from vitrail.errors import UserError

MAX_OBJECTS = 1000  # of an image
MAX_MASK_PIXELS = 1 << 31  # of the masks of an image together
MAX_OBJECT_CLASSES, MAX_NAME = 10_000, 1000
CROWD, DIFFICULT = 1, 2  # flags of objects that are neither trained nor counted: a group, and one that is hard to see
MIN_SIDE = 1e-3  # pixels of a box; smaller ones have no area
UNKNOWN_CLASS = -1


@dataclass(frozen=True)
class Objects:
    """The objects of one image, as a data set stores them."""

    boxes: np.ndarray  # float64 [N, 4]: left, top, right, bottom in pixels of the upright image, or relative to its sides
    classes: np.ndarray  # int64 [N]; UNKNOWN_CLASS: a category that is not listed
    flags: np.ndarray  # uint8 [N]: 0, CROWD or DIFFICULT
    areas: np.ndarray  # float64 [N], which decides between small, medium and large; NaN: that of the mask or of the box
    shapes: tuple[Shape, ...] = ()  # one for each object, or none
    size: tuple[int, int] | None = None  # height and width of the image that they were drawn on, if they are stored
    relative: bool = False
    instances: bytes | None = None  # an index PNG: object k has the value k + 1

    def __len__(self) -> int:
        return len(self.boxes)


def make_objects(rows: Sequence[Mapping[str, Any]]) -> Objects:
    """Objects from rows with a `box`, a `class`, and optionally `flag`, `area` and `shape`."""
    shapes = tuple(row.get("shape") for row in rows)
    return Objects(
        np.array([row["box"] for row in rows], dtype=np.float64).reshape(-1, 4),
        np.array([row["class"] for row in rows], dtype=np.int64),
        np.array([row.get("flag", 0) for row in rows], dtype=np.uint8),
        np.array([row.get("area", np.nan) for row in rows], dtype=np.float64),
        shapes if any(shape is not None for shape in shapes) else (),
    )


class DecodedObjects(NamedTuple):
    """The objects of a decoded image that are visible in it."""

    boxes: np.ndarray  # float32 [N, 4]: left, top, right, bottom in pixels, inside of the image
    classes: np.ndarray  # int64 [N]
    flags: np.ndarray  # uint8 [N]
    areas: np.ndarray  # float32 [N], in pixels of the decoded image
    planes: np.ndarray | None  # uint8 [ceil(N / 8), H, W]: object k is bit k % 8 of plane k // 8


def decode_objects(objects: Objects, height: int, width: int) -> DecodedObjects:
    """Objects in the pixels of a decoded image, clipped to it; those outside of it and those without area are left out.

    ValueError for what cannot be drawn: values that are NaN, unknown classes, masks or boxes of an image of another shape.
    """
    boxes, scale = scale_boxes(objects, height, width)
    if (objects.classes < 0).any():
        raise ValueError(f"object {int(np.argmax(objects.classes < 0))} has a category that is not listed")
    limits = np.array([width, height, width, height])
    clipped = np.minimum(np.maximum(boxes, 0), limits)
    kept = np.flatnonzero(((clipped[:, 2:] - clipped[:, :2]) > MIN_SIDE).all(1))
    masks = read_masks(objects, kept, height, width)
    areas = objects.areas[kept] * scale
    sides = boxes[kept, 2:] - boxes[kept, :2]
    measured = sides.prod(1) if masks is None else np.where(masks.any((1, 2)), masks.sum((1, 2)), sides.prod(1))
    return DecodedObjects(
        clipped[kept].astype(np.float32),
        objects.classes[kept],
        objects.flags[kept],
        np.where(np.isnan(areas), measured, areas).astype(np.float32),
        None if masks is None else pack_masks(masks),
    )


def scale_boxes(objects: Objects, height: int, width: int) -> tuple[np.ndarray, float]:
    """Boxes in pixels of a decoded image of this size, and the factor of areas; ValueError for boxes that are no boxes."""
    if len(objects) > MAX_OBJECTS:
        raise ValueError(f"{len(objects):,} objects; at most {MAX_OBJECTS:,} are supported")
    wrong = ~np.isfinite(objects.boxes).all(1) | (objects.boxes[:, 2:] < objects.boxes[:, :2]).any(1)
    if wrong.any():
        raise ValueError(f"the box of object {int(np.argmax(wrong))} is not a box: its sides are negative, NaN or Inf")
    if objects.relative:
        return objects.boxes * (width, height, width, height), float(width * height)
    if objects.size is None or objects.size == (height, width):
        return objects.boxes, 1.0
    stored = objects.size
    if abs(stored[0] * width - stored[1] * height) > max(stored):  # scaled JPEG decoding rounds each side up
        raise ValueError(f"its objects are those of an image of {stored[1]} x {stored[0]} pixels, but it has {width} x {height}")
    x, y = width / stored[1], height / stored[0]
    return objects.boxes * (x, y, x, y), x * y


def read_masks(objects: Objects, kept: np.ndarray, height: int, width: int) -> np.ndarray | None:
    """The masks of the objects `kept`, bool [n, H, W], empty for those without; None if no object has one."""
    if (objects.instances is not None or objects.shapes) and len(kept) * height * width > MAX_MASK_PIXELS:
        raise ValueError(f"masks of {len(kept)} objects of {width} x {height} pixels are too large: make the image smaller")
    if objects.instances is not None:
        index = fit_mask(decode_mask(objects.instances), np.empty((height, width)))
        found: np.ndarray = index[None] == (kept + 1).astype(np.int64)[:, None, None]
        return found
    if not objects.shapes:
        return None
    masks = np.zeros((len(kept), height, width), dtype=bool)
    for row, number in enumerate(kept.tolist()):
        shape = objects.shapes[number]
        size = objects.size or (height, width)
        if isinstance(shape, Rle) and shape.size != size:
            raise ValueError(
                f"the mask of object {number} has {shape.size[1]} x {shape.size[0]} pixels, but its image {size[1]} x {size[0]}"
            )
        if shape is not None:
            try:
                masks[row] = shape_to_mask(shape, height, width, objects.size, objects.relative)
            except ValueError as error:
                raise ValueError(f"the mask of object {number}: {error}") from None
    return masks


def draw_class_mask(objects: DecodedObjects, height: int, width: int) -> np.ndarray:
    """The class of each pixel, uint8 [H, W]: 0 where no object is, 1 and so on for the classes, smaller objects on top.

    Crowds, and boxes of objects without a mask, are ignored.
    """
    out = np.zeros((height, width), dtype=np.uint8)
    masks = np.zeros((len(objects.classes), 0)) if objects.planes is None else unpack_masks(objects.planes, len(objects.classes))
    for index in np.argsort(-objects.areas, kind="stable").tolist():
        if masks[index].any():
            out[masks[index]] = IGNORE if objects.flags[index] == CROWD else objects.classes[index] + 1
        else:
            left, top, right, bottom = objects.boxes[index]
            out[int(top) : int(np.ceil(bottom)), int(left) : int(np.ceil(right))] = IGNORE
    return out


class ObjectBatch(NamedTuple):
    """The objects of B images, padded to the most that one of them has."""

    boxes: Tensor  # float32 [B, M, 4]: left, top, right, bottom in pixels
    classes: Tensor  # int64 [B, M]; UNKNOWN_CLASS: there is no object
    flags: Tensor  # uint8 [B, M]
    areas: Tensor  # float32 [B, M]
    planes: Tensor  # uint8 [B, ceil(M / 8), H, W]: bits of the masks; [B, 0, H, W] without masks

    def map(self, function: Callable[[Tensor], Tensor]) -> "ObjectBatch":
        return ObjectBatch(*map(function, self))

    def select(self, rows: Tensor) -> "ObjectBatch":
        """The objects of some images."""
        return self.map(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))


def collate_objects(items: Sequence[DecodedObjects | None], height: int, width: int) -> ObjectBatch:
    """Pad the objects of some images; None is an image that cannot be read."""
    count = max((len(each.classes) for each in items if each is not None), default=0)
    planes = max((len(each.planes) for each in items if each is not None and each.planes is not None), default=0)
    out = ObjectBatch(
        torch.zeros(len(items), count, 4),
        torch.full((len(items), count), UNKNOWN_CLASS),
        torch.zeros(len(items), count, dtype=torch.uint8),
        torch.zeros(len(items), count),
        torch.zeros(len(items), planes, height, width, dtype=torch.uint8),
    )
    for row, each in enumerate(items):
        if each is None:
            continue
        for target, values in zip(out[:4], each[:4], strict=True):
            target[row, : len(each.classes)] = torch.from_numpy(values)
        if each.planes is not None:
            bits = torch.from_numpy(each.planes)
            out.planes[row, : len(bits), : bits.shape[1], : bits.shape[2]] = bits
    return out


def pad_objects(batch: ObjectBatch, count: int, planes: int, height: int, width: int) -> ObjectBatch:
    """The same objects with room for at least `count` objects, `planes` planes and images of this size."""
    free = max(count - batch.classes.shape[1], 0)
    missing = [max(new - old, 0) for new, old in zip((planes, height, width), batch.planes.shape[1:], strict=True)]
    pad = torch.nn.functional.pad
    return ObjectBatch(
        pad(batch.boxes, (0, 0, 0, free)),
        pad(batch.classes, (0, free), value=UNKNOWN_CLASS),
        pad(batch.flags, (0, free)),
        pad(batch.areas, (0, free)),
        pad(batch.planes, (0, missing[2], 0, missing[1], 0, missing[0])),
    )


def join_objects(batches: Sequence[ObjectBatch]) -> ObjectBatch:
    """Several batches as one."""
    count = max(each.classes.shape[1] for each in batches)
    sides = [max(each.planes.shape[axis] for each in batches) for axis in (1, 2, 3)]
    padded = [pad_objects(each, count, *sides) for each in batches]
    return ObjectBatch(*(torch.cat(parts) for parts in zip(*padded, strict=True)))


def select_objects(batch: ObjectBatch, rows: Tensor, height: int, width: int) -> ObjectBatch:
    """The objects of some images, with planes of this size."""
    chosen = batch.select(rows)
    return chosen._replace(planes=chosen.planes[:, :, :height, :width].contiguous())


def empty_objects(pixels: Tensor) -> ObjectBatch:
    """No objects in images [B, 3, H, W], for a batch that measures time or memory."""
    height, width = pixels.shape[-2:]
    return collate_objects([None] * len(pixels), height, width).map(lambda tensor: tensor.to(pixels.device))


def plane_count(objects: int) -> int:
    return -(-objects // PER_PLANE)


def check_class_names(names: Sequence[str], place: str) -> tuple[str, ...]:
    """The names of object classes; UserError if there are none, too many, or one twice."""
    if not 1 <= len(names) <= MAX_OBJECT_CLASSES:
        raise UserError(f"{place} names {len(names):,} classes: 1 to {MAX_OBJECT_CLASSES:,} are supported.")
    texts = [str(name) for name in names]
    if max(map(len, texts)) > MAX_NAME:  # checked before they are copied: all can be one text, of a YAML file
        raise UserError(f"{place} has a class name of more than {MAX_NAME:,} characters: give a shorter one.")
    found = tuple(text.encode("utf-8", "replace").decode() for text in texts)
    if len(set(found)) < len(found):
        twice = next(name for name in found if found.count(name) > 1)
        raise UserError(f"{place} names the class {twice!r} twice: give each its own name.")
    return found
