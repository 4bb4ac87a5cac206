"""Evaluation of a detector on a source of images with objects: COCO's AP of boxes and masks, and images to look at."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data.image_loader import ImageLoader
from vitrail.data.instance_masks import unpack_masks
from vitrail.data.loader import ImageReader, Problem
from vitrail.data.object_drawing import draw_annotated, draw_objects
from vitrail.data.objects import CROWD, DecodedObjects, ObjectBatch, plane_count
from vitrail.data.overlay import class_colors
from vitrail.data.source import Source
from vitrail.errors import UserError
from vitrail.evaluation.average_precision import Matches, box_overlaps, divide_overlaps, summarize_precision
from vitrail.evaluation.confusion import thumbnail
from vitrail.evaluation.detections import DetectionProtocol, Detections, detect_objects, detection_head, paste_masks
from vitrail.evaluation.predict import to_batch
from vitrail.evaluation.semantic_masks import group_by_size
from vitrail.heads.task_heads import DetectionConfig
from vitrail.models.vision_transformer import VisionTransformer

COMPARED = 1 << 20  # pixels of masks at a time; sums below 2**24 are exact in float32
SHOWN = 12  # images in a report
SHOWN_SIDE = 720  # pixels of an image beside its prediction
SHOWN_SCORE = 0.5  # lowest score of a drawn object


class ObjectMatches:
    """The matches of boxes and, where both the data and the head have them, of masks."""

    def __init__(self, masks: bool) -> None:
        self.boxes, self.masks = Matches(), Matches() if masks else None

    def add(self, image: int, found: Detections, objects: DecodedObjects) -> None:
        """Match the detections of an image with its objects, whose planes may be missing."""
        crowd, ignored = objects.flags == CROWD, objects.flags > 0
        scores, classes = found.scores.double().cpu().numpy(), found.classes.cpu().numpy()
        boxes, own = (to_sides(each) for each in (found.boxes.double().cpu().numpy(), objects.boxes.astype(np.float64)))
        truth = (objects.classes, objects.areas.astype(np.float64), ignored)
        areas = boxes[:, 2] * boxes[:, 3]
        self.boxes.add(image, scores, classes, areas, *truth, box_overlaps(boxes, own, crowd), crowd)
        if self.masks is not None and found.masks is not None and objects.planes is not None:
            planes = objects.planes
            masks = unpack_masks(planes, len(objects.classes))
            pasted = paste_masks(found.masks, found.boxes, *masks.shape[1:])
            common, sizes, own_sizes = count_common(pasted, torch.from_numpy(masks).to(pasted.device))
            overlaps = divide_overlaps(common, sizes, own_sizes, crowd)
            self.masks.add(image, scores, classes, sizes, *truth, overlaps, crowd)

    def gather(self, all_gather: Callable[[Any], list[Any]]) -> "ObjectMatches":
        """The matches of all processes."""
        joined = ObjectMatches(self.masks is not None)
        joined.boxes = Matches.join(all_gather(self.boxes.arrays()))
        if self.masks is not None:
            joined.masks = Matches.join(all_gather(self.masks.arrays()))
        return joined

    def summarize(self, classes: int) -> dict[str, Any]:
        """AP of boxes, and of masks under `mask_…`; `per_class` has both."""
        found = summarize_precision(self.boxes, classes)
        if self.masks is not None:
            masks = summarize_precision(self.masks, classes)
            rows = zip(found["per_class"], masks.pop("per_class"), strict=True)
            found["per_class"] = [row | {"mask_ap": other["ap"]} for row, other in rows]
            found |= {f"mask_{name}": value for name, value in masks.items()}
        return found


def to_sides(boxes: np.ndarray) -> np.ndarray:
    """Boxes as left, top, width and height."""
    return np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1)


def count_common(first: Tensor, second: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pixels in common [D, G] of masks [D, H, W] and [G, H, W], and of each; exact, in float64."""
    flat, other = first.flatten(1), second.flatten(1)
    common = torch.zeros(len(flat), len(other), dtype=torch.float64, device=flat.device)
    for part, own in zip(flat.split(COMPARED, 1), other.split(COMPARED, 1), strict=True):
        common += (part.float() @ own.float().T).double()
    counts = (common, flat.sum(1), other.sum(1))
    return tuple(each.double().cpu().numpy() for each in counts)  # type: ignore[return-value]


def match_split(
    model: VisionTransformer,
    loader: ImageLoader,
    batch_size: int,
    protocol: DetectionProtocol,
    rank: int = 0,
    world_size: int = 1,
    table: Tensor | None = None,
    advance: Callable[[int], Any] = lambda count: None,
) -> tuple[ObjectMatches, int]:
    """Matches of every `world_size`-th image of a loader, and their number; `table` maps classes of the data to the model's."""
    head = detection_head(model)
    matches, images = ObjectMatches(head.mask_head is not None and loader.source.has_instances), 0
    for batch in loader.iterate(batch_size, rank, world_size):
        for rows, pixels in group_by_size(batch.pixels, batch.sizes):
            found = detect_objects(model, pixels, protocol)
            images += len(rows)
            advance(len(rows))
            if batch.objects is not None:
                for row, own in zip(rows, found, strict=True):
                    objects = read_row(batch.objects, row, pixels.shape[-2], pixels.shape[-1])
                    matches.add(int(batch.index[row]), own, map_classes(objects, table))
    return matches, images


def read_row(objects: ObjectBatch, row: int, height: int, width: int) -> DecodedObjects:
    """The objects of one image of a batch, with empty masks where it has none."""
    count = int((objects.classes[row] >= 0).sum())
    boxes, classes, flags, areas = (each[row, :count].cpu().numpy() for each in objects[:4])
    if objects.planes.shape[1]:
        planes = objects.planes[row, :, :height, :width].cpu().numpy()
    else:  # no image of the batch has masks
        planes = np.zeros((plane_count(count), height, width), dtype=np.uint8)
    return DecodedObjects(boxes, classes, flags, areas, planes)


def map_classes(objects: DecodedObjects, table: Tensor | None) -> DecodedObjects:
    """The objects with the classes of the model; those it does not have keep -1 and are matched by nothing."""
    return objects if table is None else objects._replace(classes=table.numpy()[objects.classes])


def match_object_classes(config: DetectionConfig, names: Sequence[str], place: str) -> tuple[Tensor, list[str]]:
    """The class of the model for each class of the data, by name, and the classes of the data that it lacks."""
    table = torch.tensor([config.class_names.index(name) if name in config.class_names else -1 for name in names])
    missing = [name for name in names if name not in config.class_names]
    if len(missing) == len(names):
        own = ", ".join(config.class_names[:5])
        raise UserError(f"{place} has none of the classes of the weights ({own}, …).")
    return table, missing


def draw_examples(model: VisionTransformer, source: Source, protocol: DetectionProtocol) -> list[dict[str, Any]]:
    """Images with their objects beside the same images with predictions, spread over a source."""
    names = detection_head(model).config.class_names
    reader, colors = ImageReader(source, None, objects=True), class_colors(names)
    found = []
    for index in source.spread(SHOWN).tolist():
        image = reader.read_annotated(index)
        if isinstance(image, Problem) or image.objects is None:
            continue
        pixels, objects = image.pixels, image.objects
        size = pixels.shape[:2]
        truth = draw_annotated(pixels, objects, source.object_classes)
        (result,) = detect_objects(model, to_batch(pixels, model), protocol)
        result = result.select(result.scores >= SHOWN_SCORE)
        kinds = result.classes.tolist()
        labels = [f"{names[kind]} {value:.2f}" for kind, value in zip(kinds, result.scores.tolist(), strict=True)]
        pasted = None if result.masks is None else paste_masks(result.masks, result.boxes, *size).cpu().numpy()
        drawn = draw_objects(pixels, result.boxes.cpu().numpy(), labels, [colors[kind] for kind in kinds], pasted)
        found.append({"image": thumbnail(np.concatenate([truth, drawn], 1), SHOWN_SIDE), "location": source.location(index)})
    return found


def describe_precision(summary: dict[str, Any], names: Sequence[str], protocol: DetectionProtocol) -> dict[str, Any]:
    """The protocol and the AP of each class, as plain values."""
    rows = [{"name": name} | row for name, row in zip(names, summary["per_class"], strict=True)]
    return {"protocol": protocol.describe(), "per_class": rows}
