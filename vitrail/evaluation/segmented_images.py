"""Segmentations of images: from files, PIL images or arrays to class masks, overlays and class shares."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from vitrail.data.loader import Problem
from vitrail.data.overlay import class_colors, draw_overlay, encode_mask, with_legend
from vitrail.data.source import Source
from vitrail.errors import UserError
from vitrail.evaluation.predict import iterate_images, open_inputs, open_transformer, require_readable
from vitrail.evaluation.semantic_masks import Protocol, predict_classes, segmentation_head
from vitrail.formatting import percent
from vitrail.heads.task_heads import SegmentationConfig
from vitrail.models.vision_transformer import VisionTransformer

if TYPE_CHECKING:
    from vitrail.evaluation.predict import ImagesInput


class ClassShare(NamedTuple):
    name: str
    pixels: int
    share: float  # of the image


@dataclass(frozen=True)
class SegmentedImage:
    """An image and the class of each of its pixels."""

    image: str  # path, or "image 3" for the fourth image of a list without a path
    pixels: np.ndarray  # uint8 [height, width, 3]
    classes: np.ndarray  # uint8 [height, width]: indices in `names`
    names: tuple[str, ...]
    ids: tuple[int, ...]  # of the classes in mask files

    @property
    def shares(self) -> list[ClassShare]:
        """The classes that occur, the largest first."""
        counts = np.bincount(self.classes.ravel(), minlength=len(self.names))
        return [
            ClassShare(self.names[index], int(counts[index]), float(counts[index] / self.classes.size))
            for index in np.argsort(-counts, kind="stable")
            if counts[index]
        ]

    def overlay(self, legend: bool = True) -> Image.Image:
        """The classes drawn over the image, with a legend of those that occur."""
        colors = class_colors(self.names)
        drawn = draw_overlay(self.pixels, self.classes, colors)
        entries = [(f"{each.name} {percent(each.share)}", colors[self.names.index(each.name)]) for each in self.shares]
        return with_legend(drawn, entries) if legend else Image.fromarray(drawn)

    def mask_png(self) -> bytes:
        """The classes as an index PNG with a palette, with the ids of the masks that the model was trained on."""
        return encode_mask(self.classes, self.ids, class_colors(self.names))

    def to_dict(self) -> dict[str, Any]:
        height, width = self.classes.shape
        return {
            "image": self.image,
            "height": height,
            "width": width,
            "classes": [
                {"id": self.ids[self.names.index(each.name)], **each._asdict(), "share": round(each.share, 6)}
                for each in self.shares
            ],
        }


def segment(
    weights: str | Path | VisionTransformer,
    images: "ImagesInput",
    scales: Sequence[float] = (1.0,),
    flip: bool = False,
    window: int | None = None,
    device: str | torch.device | None = None,
) -> list[SegmentedImage]:
    """The class of every pixel of each image, by weights of a segmentation.

    >>> result = vitrail.segment("runs/camvid-segment", "street.jpg")[0]
    >>> result.overlay().save("overlay.png")

    `images` is one of, or a list of: a path, a folder, a pattern, a PIL image, a uint8 array [H, W, 3], a uint8 tensor [3, H, W].
    `scales` and `flip` average over resized and mirrored images, `window` segments in windows of that size.
    """
    model = open_transformer(weights, device, "segmentation")
    protocol = change_protocol(model, scales, flip, window)
    source, problems = open_inputs(images)
    return require_readable(chain(problems, iterate_segmented(model, source, protocol)))


def change_protocol(
    model: VisionTransformer, scales: Sequence[float] = (1.0,), flip: bool = False, window: int | None = None
) -> Protocol:
    """The protocol of the weights with other scales, flips and windows."""
    protocol = Protocol.of(segmentation_head(model).config, scales, flip)
    if not scales or any(not 0.1 <= scale <= 8 for scale in scales):
        raise UserError("Scales are factors of the image size from 0.1 to 8, such as 0.5,1,1.5.")
    if window is None:
        return protocol
    if protocol.window and window != protocol.window:
        raise UserError(f"These weights take windows of {protocol.window} pixels only: leave the window as it is.")
    patch = model.architecture.patch_size
    if window and window < patch:
        raise UserError(f"A window has at least one patch of {patch} pixels.")
    return replace(protocol, window=window, stride=max(round(window * 2 / 3), 1) if window else 0)


def iterate_segmented(model: VisionTransformer, source: Source, protocol: Protocol) -> Iterator[SegmentedImage | Problem]:
    """The segmentation of each image of a source in order, or the reason why the image cannot be read."""
    config = segmentation_head(model).config

    def segment_image(location: str, pixels: np.ndarray, images: torch.Tensor) -> SegmentedImage:
        return make_segmented(config, location, pixels, predict_classes(model, images, protocol)[0])

    return iterate_images(model, source, segment_image)


def make_segmented(config: SegmentationConfig, location: str, pixels: np.ndarray, classes: torch.Tensor) -> SegmentedImage:
    return SegmentedImage(location, pixels, classes.cpu().numpy(), config.class_names, config.mask_ids)
