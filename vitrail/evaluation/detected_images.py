"""Objects in images: from files, PIL images or arrays to boxes, classes and masks, overlays and COCO results."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from vitrail.data.instance_masks import Rle, decode_rle, encode_rle
from vitrail.data.loader import Problem
from vitrail.data.object_drawing import draw_objects
from vitrail.data.overlay import class_colors
from vitrail.data.source import Source
from vitrail.errors import UserError
from vitrail.evaluation.detections import (
    WINDOW_STRIDE,
    DetectionProtocol,
    Detections,
    detect_objects,
    detection_head,
    paste_masks,
)
from vitrail.evaluation.predict import iterate_images, open_inputs, open_transformer, require_readable
from vitrail.models.vision_transformer import VisionTransformer

if TYPE_CHECKING:
    from vitrail.evaluation.predict import ImagesInput

DRAWN_SCORE = 0.5


@dataclass(frozen=True)
class DetectedObject:
    """An object of an image."""

    name: str
    index: int  # of its class
    score: float
    box: tuple[float, float, float, float]  # left, top, right, bottom in pixels
    shape: Rle | None  # its mask as run lengths

    @property
    def mask(self) -> np.ndarray | None:
        """Its mask, bool [height, width]."""
        return None if self.shape is None else decode_rle(self.shape)

    def to_dict(self) -> dict[str, Any]:
        """In COCO's form of results; categories are numbered from 1."""
        left, top, right, bottom = self.box
        box = [round(value, 2) for value in (left, top, right - left, bottom - top)]
        found: dict[str, Any] = {"category_id": self.index + 1, "category": self.name, "score": round(self.score, 5), "bbox": box}
        if self.shape is not None:
            assert isinstance(self.shape.counts, bytes)
            found["segmentation"] = {"size": list(self.shape.size), "counts": self.shape.counts.decode("ascii")}
        return found


@dataclass(frozen=True)
class DetectedImage:
    """An image and its objects, the highest score first."""

    image: str  # path, or "image 3" for the fourth image of a list without a path
    pixels: np.ndarray  # uint8 [height, width, 3]
    objects: tuple[DetectedObject, ...]
    names: tuple[str, ...]  # of all classes

    def overlay(self) -> Image.Image:
        """The boxes, names, scores and masks drawn over the image."""
        colors = class_colors(self.names)
        masks = [each.mask for each in self.objects]
        known = [mask for mask in masks if mask is not None]
        drawn = draw_objects(
            self.pixels,
            np.array([each.box for each in self.objects]).reshape(-1, 4),
            [f"{each.name} {each.score:.2f}" for each in self.objects],
            [colors[each.index] for each in self.objects],
            np.stack(known) if known else None,
        )
        return Image.fromarray(drawn)

    def to_dict(self) -> dict[str, Any]:
        height, width = self.pixels.shape[:2]
        objects = [each.to_dict() for each in self.objects]
        return {"image": self.image, "height": height, "width": width, "objects": objects}


def detect(
    weights: str | Path | VisionTransformer,
    images: "ImagesInput",
    threshold: float = DRAWN_SCORE,
    window: int | None = None,
    device: str | torch.device | None = None,
) -> list[DetectedImage]:
    """The objects of each image with a score of at least `threshold`, by weights of a detection.

    >>> result = vitrail.detect("runs/voc-detect", "street.jpg")[0]
    >>> result.overlay().save("overlay.png")

    `images` is one of, or a list of: a path, a folder, a pattern, a PIL image, a uint8 array [H, W, 3], a uint8 tensor [3, H, W].
    `window` detects in overlapping tiles of that size, for small objects in large images.
    """
    model = open_transformer(weights, device, "detection")
    protocol = change_tiles(model, window)
    source, problems = open_inputs(images)
    return require_readable(chain(problems, iterate_detected(model, source, protocol, threshold)))


def change_tiles(model: VisionTransformer, window: int | None) -> DetectionProtocol:
    """The protocol of the weights with tiles of another size, 0 for whole images; tiles have the scale of the image itself."""
    protocol = DetectionProtocol.of(detection_head(model).config)
    if window is None or window == protocol.window:
        return protocol
    if protocol.window:
        raise UserError(f"These weights take tiles of {protocol.window} pixels only: leave the window as it is.")
    patch = model.architecture.patch_size
    if window < patch:
        raise UserError(f"A tile has at least one patch of {patch} pixels.")
    return replace(protocol, short_side=0, long_side=0, window=window, stride=max(round(window * WINDOW_STRIDE), 1))


def iterate_detected(
    model: VisionTransformer, source: Source, protocol: DetectionProtocol, threshold: float = 0.0
) -> Iterator[DetectedImage | Problem]:
    """The objects of each image of a source in order, or the reason why the image cannot be read."""
    names = detection_head(model).config.class_names

    def detect_image(location: str, pixels: np.ndarray, images: torch.Tensor) -> DetectedImage:
        (found,) = detect_objects(model, images, protocol)
        found = found.select(found.scores >= threshold)
        return DetectedImage(location, pixels, tuple(list_objects(found, names, *pixels.shape[:2])), names)

    return iterate_images(model, source, detect_image)


def list_objects(found: Detections, names: tuple[str, ...], height: int, width: int) -> Iterator[DetectedObject]:
    for row, (score, index) in enumerate(zip(found.scores.tolist(), found.classes.tolist(), strict=True)):
        left, top, right, bottom = found.boxes[row].tolist()
        shape = None
        if found.masks is not None:  # one at a time: all masks of a large image may not fit into memory
            own = paste_masks(found.masks[row : row + 1], found.boxes[row : row + 1], height, width)
            shape = encode_rle(own[0].cpu().numpy())
        yield DetectedObject(names[index], index, score, (left, top, right, bottom), shape)
