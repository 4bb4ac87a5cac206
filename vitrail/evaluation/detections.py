"""From images to boxes, classes and masks of objects by a detection head, by one protocol for all uses."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import UserError
from vitrail.evaluation.semantic_masks import MAX_ASPECT, enlarge_to_window, normalize, pad_to, positions
from vitrail.heads.boxes import clip_boxes, covered_share, decode_boxes, nms
from vitrail.heads.mask_rcnn import BOX_WEIGHTS, MASK_POOLED, MASK_SIDE, POOLED, make_anchors, propose
from vitrail.heads.regions import pool_regions
from vitrail.heads.task_heads import DetectionConfig, DetectionHead
from vitrail.models.vision_transformer import VisionTransformer

SCORED = 2000  # pairs of box and class of an image that are compared with each other, the highest scores
MERGED = 5000  # boxes of all tiles of an image that are compared with each other, the highest scores
PASTED = 1 << 26  # pixels of masks that are resized at a time
CONTAINED = 0.8  # of two boxes of overlapping tiles, the one with this share inside of a better one is a part of it
WINDOW_STRIDE = 0.75  # of the side of tiles


@dataclass(frozen=True)
class DetectionProtocol:
    """How images become lists of objects."""

    short_side: int  # 0: the size of the image
    long_side: int = 0  # at most; 0: four times the shorter side
    window: int = 0  # 0: whole images
    stride: int = 0
    min_score: float = 0.05
    overlap: float = 0.5
    detections: int = 100

    @classmethod
    def of(cls, config: DetectionConfig) -> "DetectionProtocol":
        sides = (config.short_side, config.long_side, config.window, config.stride)
        return cls(*sides, config.min_score, config.overlap, config.detections)

    def describe(self) -> str:
        size = f"shorter side {self.short_side} pixels" if self.short_side else "images at their own size"
        size += f", longer side at most {self.long_side}" if self.long_side else ""
        view = f"tiles of {self.window} with stride {self.stride}" if self.window else "whole images"
        kept = f"scores from {self.min_score:g} on, duplicates above an IoU of {self.overlap:g} removed"
        return f"{size}, {view}; {kept}, at most {self.detections} objects of an image; masks at the size of the image"

    def working_size(self, size: Sequence[int]) -> tuple[int, int]:
        """The size of the network's input before padding."""
        if not self.short_side:
            return size[0], size[1]
        longest = self.long_side or MAX_ASPECT * self.short_side
        factor = min(self.short_side / min(size), longest / max(size))
        height, width = (max(round(side * factor), 1) for side in size)
        return height, width


class Detections(NamedTuple):
    """The objects found in one image, the highest score first."""

    boxes: Tensor  # float32 [N, 4]: left, top, right, bottom in pixels of the image
    scores: Tensor  # float32 [N]
    classes: Tensor  # int64 [N]
    masks: Tensor | None  # float32 [N, 28, 28]: probabilities inside of the boxes

    def select(self, index: Tensor) -> "Detections":
        return Detections(*(None if each is None else each[index] for each in self))  # type: ignore[arg-type]


def detection_head(model: VisionTransformer) -> DetectionHead:
    """The detection head of a model; UserError if it has none."""
    if not isinstance(model.task_head, DetectionHead):
        raise UserError(
            f"{model.name or 'This model'} has no detection head: train one with `vitrail train DATA --recipe detect --from "
            "WEIGHTS`."
        )
    return model.task_head


@torch.no_grad()
def detect_objects(model: VisionTransformer, pixels: Tensor, protocol: DetectionProtocol) -> list[Detections]:
    """The objects of each of uint8 images [B, 3, H, W] without padding."""
    height, width = pixels.shape[-2:]
    size = enlarge_to_window(protocol.working_size((height, width)), protocol.window)
    images = normalize(model, pixels, size)
    found = detect_tiles(model, images, protocol) if protocol.window else detect_whole(model, images, protocol)
    scale = images.new_tensor([width / size[1], height / size[0]]).repeat(2)
    return [each._replace(boxes=each.boxes * scale) for each in found]


def detect_whole(model: VisionTransformer, images: Tensor, protocol: DetectionProtocol) -> list[Detections]:
    """The objects of normalized images [B, 3, h, w], in their pixels."""
    size = (images.shape[-2], images.shape[-1])
    return detect_padded(model, pad_to(images, model.architecture.patch_size), size, protocol)


def detect_padded(
    model: VisionTransformer, images: Tensor, size: tuple[int, int], protocol: DetectionProtocol
) -> list[Detections]:
    """The objects of normalized images of `size` in the upper left corners of [B, 3, h, w]."""
    head = detection_head(model)
    maps, candidates = find_candidates(model, images, size)
    found = []
    for image in range(len(images)):
        own = Detections(candidates.boxes[image], candidates.scores[image], candidates.classes[image], None)
        own = own.select(own.scores >= protocol.min_score)
        own = own.select(nms(own.boxes, own.scores, protocol.overlap, own.classes)[: protocol.detections])
        masks = predict_masks(head, [each[image : image + 1] for each in maps], own.boxes[None], own.classes[None])
        found.append(own if masks is None else own._replace(masks=masks[0]))
    return found


def find_candidates(
    model: VisionTransformer, images: Tensor, size: tuple[float | Tensor, float | Tensor]
) -> tuple[list[Tensor], Detections]:
    """Of images [B, 3, h, w] the feature maps, and boxes [B, N, 4], scores and classes [B, N], the highest scores first.

    Boxes are cut at `size`. They contain duplicates.
    """
    head = detection_head(model)
    config = head.config
    levels = head(model.feature_maps(images, config.blocks))
    anchors = [make_anchors(level, stride) for level, stride in zip(levels, head.strides, strict=True)]
    logits, offsets = head.proposal_head(levels)
    boxes, valid = propose(
        logits, offsets, anchors, size, config.candidates, config.proposals, config.proposal_overlap, exact=True
    )
    maps, proposals = levels[:4], boxes.shape[:2]
    pooled = pool_regions(maps, head.strides[:4], boxes, POOLED).to(levels[0].dtype)
    logits, offsets = head.box_head(pooled.flatten(0, 1))
    scores = logits.float().softmax(-1)[:, :-1].unflatten(0, proposals)  # [B, P, classes]
    scores = torch.where(valid[..., None], scores, 0.0).flatten(1)
    decoded = decode_boxes(offsets.float().unflatten(0, proposals), boxes[:, :, None], BOX_WEIGHTS)
    decoded = clip_boxes(decoded, *size).flatten(1, 2)  # [B, P * classes, 4]
    best, index = scores.topk(min(SCORED, scores.shape[1]), 1)
    return maps, Detections(decoded.gather(1, index[..., None].expand(-1, -1, 4)), best, index % config.classes, None)


def predict_masks(head: DetectionHead, maps: Sequence[Tensor], boxes: Tensor, classes: Tensor) -> Tensor | None:
    """Probabilities [B, N, 28, 28] of the masks of objects with boxes [B, N, 4] and classes [B, N]."""
    if head.mask_head is None:
        return None
    if not boxes.shape[1]:
        return boxes.new_zeros(len(boxes), 0, MASK_SIDE, MASK_SIDE)
    pooled = pool_regions(maps, head.strides[:4], boxes, MASK_POOLED).to(maps[0].dtype)
    logits = head.mask_head(pooled.flatten(0, 1)).float().unflatten(0, boxes.shape[:2])
    own = classes[..., None, None, None].expand(-1, -1, 1, MASK_SIDE, MASK_SIDE)
    out: Tensor = logits.gather(2, own)[:, :, 0].sigmoid()
    return out


def detect_tiles(model: VisionTransformer, images: Tensor, protocol: DetectionProtocol) -> list[Detections]:
    """As `detect_whole`, in overlapping tiles; of objects that several of them show, the best is kept."""
    height, width = images.shape[-2:]
    parts: list[list[Detections]] = [[] for _ in images]
    for top in positions(height, protocol.window, protocol.stride):
        for left in positions(width, protocol.window, protocol.stride):
            tile = images[..., top : top + protocol.window, left : left + protocol.window]
            shift = images.new_tensor([left, top, left, top])
            for own, each in zip(parts, detect_whole(model, tile, protocol), strict=True):
                own.append(each._replace(boxes=each.boxes + shift))
    return [merge_tiles(own, protocol) for own in parts]


def merge_tiles(parts: Sequence[Detections], protocol: DetectionProtocol) -> Detections:
    boxes, scores, classes = (torch.cat([each[field] for each in parts]) for field in range(3))  # type: ignore[misc]
    masks = None if parts[0].masks is None else torch.cat([each.masks for each in parts if each.masks is not None])
    whole = Detections(boxes, scores, classes, masks).select(scores.argsort(descending=True, stable=True)[:MERGED])
    whole = whole.select(nms(whole.boxes, whole.scores, protocol.overlap, whole.classes))
    inside = covered_share(whole.boxes, whole.boxes) > CONTAINED
    same = whole.classes[:, None] == whole.classes
    better = torch.arange(len(whole.boxes), device=boxes.device)
    part = (inside & same & (better[:, None] > better)).any(1)
    return whole.select(torch.nonzero(~part)[: protocol.detections, 0])


def paste_masks(masks: Tensor, boxes: Tensor, height: int, width: int) -> Tensor:
    """Masks [N, s, s] inside of boxes [N, 4] as bool [N, height, width]: interpolated bilinearly, at least 0.5."""
    y, x = (torch.arange(side, device=masks.device, dtype=torch.float32) + 0.5 for side in (height, width))
    out = torch.zeros(len(masks), height, width, dtype=torch.bool, device=masks.device)
    count = max(PASTED // (height * width), 1)
    for start in range(0, len(masks), count):
        left, top, right, bottom = boxes[start : start + count].unbind(1)
        grid_x = (x - left[:, None]) / (right - left).clamp(min=1e-6)[:, None] * 2 - 1
        grid_y = (y - top[:, None]) / (bottom - top).clamp(min=1e-6)[:, None] * 2 - 1
        grid = torch.stack(torch.broadcast_tensors(grid_x[:, None], grid_y[..., None]), -1)
        part = F.grid_sample(masks[start : start + count, None].float(), grid, mode="bilinear", align_corners=False)[:, 0]
        out[start : start + count] = part >= 0.5
    return out
