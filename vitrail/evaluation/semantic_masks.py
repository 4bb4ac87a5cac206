"""Semantic segmentation of images of any size: whole or in windows, at several scales, and the result at the image's size.

The protocol is part of the weights (`SegmentationConfig`) and can be changed for an evaluation. In short:

1. the shorter side is resized to `short_side` times each scale, the longer one to at most four times as much;
2. the input is the whole image, padded to whole patches, or windows, whose logits are averaged where they overlap;
3. logits are resized bilinearly to the size of the image, and the highest is the class. Of several scales and flips the
   probabilities are averaged.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.transforms.backend import backend_for
from vitrail.data.transforms.crops import squash
from vitrail.errors import UserError
from vitrail.heads.task_heads import SegmentationConfig, SegmentationHead
from vitrail.heads.upernet import resize_map
from vitrail.models.inputs import FIXED_GRID
from vitrail.models.vision_transformer import VisionTransformer

MAX_ASPECT = 4  # 2048 x 512 in the papers
MULTI_SCALE = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)
BAND = 1 << 24  # logits that are resized at a time
TILE = 1 << 28  # logits of an image in windows; above this it is cut into tiles


@dataclass(frozen=True)
class Protocol:
    """How images become class masks."""

    short_side: int  # 0: the size of the image
    window: int = 0  # 0: whole images
    stride: int = 0
    scales: tuple[float, ...] = (1.0,)
    flip: bool = False

    @classmethod
    def of(cls, config: SegmentationConfig, scales: Sequence[float] = (1.0,), flip: bool = False) -> "Protocol":
        return cls(config.short_side, config.window, config.stride, tuple(scales), flip)

    def describe(self) -> str:
        size = f"shorter side {self.short_side} pixels" if self.short_side else "images at their own size"
        view = f"windows of {self.window} with stride {self.stride}" if self.window else "whole images"
        scales = f"scale{'s' if len(self.scales) > 1 else ''} {', '.join(f'{scale:g}' for scale in self.scales)}"
        flip = ", averaged with the flipped image" if self.flip else ""
        return f"{size}, {view}, {scales}{flip}; logits resized bilinearly to the size of the mask"


def segmentation_head(model: VisionTransformer) -> SegmentationHead:
    """The segmentation head of a model; UserError if it has none."""
    if not isinstance(model.task_head, SegmentationHead):
        raise UserError(
            f"{model.name or 'This model'} has no segmentation head: train one with `vitrail train DATA --recipe segment --from "
            "WEIGHTS`, or fit one with `vitrail segment`."
        )
    return model.task_head


def needs_window(model: VisionTransformer) -> bool:
    """Whether a model has weights for each patch, so that it takes images of one size only."""
    return model.architecture.mixer in FIXED_GRID


def predict_logits(model: VisionTransformer, images: Tensor) -> Tensor:
    """Normalized images [B, 3, h, w] to logits [B, classes, h', w'] of the head's resolution."""
    head = segmentation_head(model)
    out: Tensor = head(model.feature_maps(images, head.config.blocks))
    return out


@torch.no_grad()
def predict_classes(model: VisionTransformer, pixels: Tensor, protocol: Protocol) -> Tensor:
    """Class indices, uint8 [B, H, W], of uint8 images [B, 3, H, W] without padding."""
    size = tuple(pixels.shape[-2:])
    height, width = working_size(size, protocol.short_side, max(protocol.scales))
    if protocol.window and segmentation_head(model).config.classes * height * width > TILE:
        return predict_tiles(model, pixels, protocol)
    return predict_whole(model, pixels, protocol)


def predict_whole(model: VisionTransformer, pixels: Tensor, protocol: Protocol) -> Tensor:
    """As `predict_classes`, with the logits of all views in memory."""
    head, size = segmentation_head(model), tuple(pixels.shape[-2:])
    views = [view for scale in protocol.scales for view in predict_views(model, pixels, protocol, scale)]
    classes = torch.empty(len(pixels), *size, dtype=torch.uint8, device=pixels.device)
    rows = max(BAND // (len(pixels) * head.config.classes * size[1]), 1)
    for top in range(0, size[0], rows):
        band = range(top, min(top + rows, size[0]))
        parts = [view.resize_rows(size, torch.arange(band.start, band.stop, device=pixels.device)) for view in views]
        scores = parts[0] if len(parts) == 1 else torch.stack([part.softmax(1) for part in parts]).mean(0)
        classes[:, top : top + rows] = scores.argmax(1)
    return classes


@dataclass(frozen=True)
class View:
    """Logits [B, C, h, w], of which the part `extent` (rows, columns) from the upper left corner on covers the image."""

    logits: Tensor
    extent: tuple[float | Tensor, float | Tensor] = (1.0, 1.0)

    def resize_rows(self, size: Sequence[int], band: Tensor) -> Tensor:
        """The rows `band` [n] of the logits resized bilinearly to `size`, [B, C, n, width]."""
        rows, next_rows, part_y = neighbors(self.logits.shape[2], self.extent[0], size[0], band, self.logits)
        across = torch.arange(size[1], device=self.logits.device)
        columns, next_columns, part_x = neighbors(self.logits.shape[3], self.extent[1], size[1], across, self.logits)
        lines = torch.lerp(self.logits[:, :, rows], self.logits[:, :, next_rows], part_y[:, None])
        return torch.lerp(lines[..., columns], lines[..., next_columns], part_x)


def neighbors(cells: int, extent: float | Tensor, size: int, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The two cells around the centers of output pixels, and the weight of the second."""
    center = (positions + 0.5) * (cells * extent / size) - 0.5
    first = center.floor()
    low, high = (index.long().clamp(0, cells - 1) for index in (first, first + 1))
    return low, high, (center - first).clamp(0, 1).to(like.dtype)


def predict_views(model: VisionTransformer, pixels: Tensor, protocol: Protocol, scale: float) -> Iterator[View]:
    """The logits of the images at one scale, and of the flipped images."""
    size = enlarge_to_window(working_size(pixels.shape[-2:], protocol.short_side, scale), protocol.window)
    images = normalize(model, pixels, size)
    for flipped in (False, True) if protocol.flip else (False,):
        inputs = images.flip(-1) if flipped else images
        if protocol.window:
            logits, extent = slide(model, inputs, protocol.window, protocol.stride), (1.0, 1.0)
        else:
            padded = pad_to(inputs, model.architecture.patch_size, flipped)
            logits = predict_logits(model, padded).float()
            extent = size[0] / padded.shape[-2], size[1] / padded.shape[-1]
        yield View(logits.flip(-1) if flipped else logits, extent)


def working_size(size: Sequence[int], short_side: int, scale: float) -> tuple[int, int]:
    """The size of the network's input before padding."""
    factor = min(short_side / min(size), MAX_ASPECT * short_side / max(size)) if short_side else 1.0
    height, width = (max(round(side * factor * scale), 1) for side in size)
    return height, width


def enlarge_to_window(size: tuple[int, int], window: int) -> tuple[int, int]:
    """A size enlarged so that one window fits into it; a window of 0 changes nothing.

    The longer side is enlarged to at most `MAX_ASPECT` windows: a strip does not keep its aspect ratio.
    """
    factor, longest = max(window / min(size), 1.0), max(*size, MAX_ASPECT * window)
    height, width = (min(max(round(side * factor), window), longest) for side in size)
    return height, width


def normalize(model: VisionTransformer, pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize uint8 [B, 3, H, W] to `size` and normalize, float32."""
    preprocessing, backend = model.preprocessing, backend_for(pixels)
    sizes = torch.tensor([pixels.shape[-2:]], device=pixels.device).expand(len(pixels), -1).contiguous()
    resized = pixels
    if tuple(pixels.shape[-2:]) != size:
        resized = backend.crop_resize(pixels, squash(sizes, size), preprocessing.interpolation, None)
    out: Tensor = backend.normalize(resized, preprocessing.mean, preprocessing.std, None, sizes)
    return out


def pad_to(images: Tensor, multiple: int, left: bool = False) -> Tensor:
    """Pad with the mean color at the bottom and on the right, or on the left, to a multiple of the patch size."""
    height, width = images.shape[-2:]
    bottom, side = -height % multiple, -width % multiple
    return F.pad(images, (side, 0, 0, bottom) if left else (0, side, 0, bottom))


def slide(model: VisionTransformer, images: Tensor, window: int, stride: int) -> Tensor:
    """The mean of the logits of all windows, [B, C, h, w]; the last window of a line ends at the border."""
    height, width = images.shape[-2:]
    total = images.new_zeros(len(images), segmentation_head(model).config.classes, height, width)
    count = images.new_zeros(1, 1, height, width)
    for top in positions(height, window, stride):
        for left in positions(width, window, stride):
            part = (..., slice(top, top + window), slice(left, left + window))
            logits = predict_logits(model, images[part])
            total[part] += resize_map(logits.float(), (window, window))
            count[part] += 1
    return total / count


def positions(side: int, window: int, stride: int) -> list[int]:
    """Where the windows of a line start."""
    last = max(side - window, 0)
    return [min(start, last) for start in range(0, last + stride, stride)] if last else [0]


def predict_tiles(model: VisionTransformer, pixels: Tensor, protocol: Protocol) -> Tensor:
    """As `predict_classes`, of an image whose logits do not fit into memory: in tiles that overlap by one window."""
    height, width = pixels.shape[-2:]
    scale = working_size((height, width), protocol.short_side, 1.0)[0] / height
    # Tiles have the scale of the image, so they are resized here and not by their own shorter side.
    classes = segmentation_head(model).config.classes
    side = math.isqrt(TILE // (classes * math.ceil(max(protocol.scales) ** 2)))
    margin = math.ceil(protocol.window / scale / min(protocol.scales) / 2)
    core = max(int(side / scale) - 2 * margin, margin)
    out = torch.empty(len(pixels), height, width, dtype=torch.uint8, device=pixels.device)
    for top in range(0, height, core):
        for left in range(0, width, core):
            first_row, first_column = max(top - margin, 0), max(left - margin, 0)
            tile = pixels[..., first_row : top + core + margin, first_column : left + core + margin]
            own = dataclasses.replace(
                protocol, short_side=max(round(min(tile.shape[-2:]) * scale), 1) if protocol.short_side else 0
            )
            found = predict_whole(model, tile, own)  # also of a tile that has to be larger to contain whole windows
            row, column = top - first_row, left - first_column
            out[:, top : top + core, left : left + core] = found[:, row : row + core, column : column + core]
    return out


def group_by_size(pixels: Tensor, sizes: Tensor) -> Iterator[tuple[list[int], Tensor]]:
    """Rows and images [b, 3, H, W] of a padded batch that have the same size."""
    groups: dict[tuple[int, int], list[int]] = {}
    for row, (height, width) in enumerate(sizes.tolist()):
        groups.setdefault((height, width), []).append(row)
    for (height, width), rows in groups.items():
        yield rows, pixels[rows, :, :height, :width]
