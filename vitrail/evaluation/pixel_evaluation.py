"""Evaluation of a segmentation on a source of images with masks: confusion of pixels, boundaries, and images to look at."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data.image_loader import ImageLoader
from vitrail.data.loader import ImageReader, Problem
from vitrail.data.mask_classes import IGNORE, MaskClasses
from vitrail.data.overlay import class_colors, draw_classes, draw_overlay
from vitrail.data.source import Source
from vitrail.errors import UserError
from vitrail.evaluation.confusion import thumbnail
from vitrail.evaluation.mean_iou import PixelCounts, describe_class_pixels, summarize_pixels
from vitrail.evaluation.predict import to_batch
from vitrail.evaluation.semantic_masks import Protocol, group_by_size, predict_classes, segmentation_head
from vitrail.heads.task_heads import SegmentationConfig
from vitrail.models.vision_transformer import VisionTransformer

SHOWN = 12  # images in a report
SHOWN_SIDE = 720  # pixels of an image with its mask and its prediction


def count_split(
    model: VisionTransformer,
    loader: ImageLoader,
    batch_size: int,
    protocol: Protocol,
    rank: int = 0,
    world_size: int = 1,
    boundaries: bool = False,
    table: Tensor | None = None,
    advance: Callable[[int], Any] = lambda count: None,
) -> tuple[PixelCounts, int]:
    """Confusion of the pixels of every `world_size`-th image, and the number of images.

    `table` [256] maps the class indices of the data to those of the model.
    """
    counts, images = PixelCounts(segmentation_head(model).config.classes, boundaries, loader.device), 0
    for batch in loader.iterate(batch_size, rank, world_size):
        for rows, pixels in group_by_size(batch.pixels, batch.sizes):
            predictions = predict_classes(model, pixels, protocol)
            images += len(rows)
            advance(len(rows))
            if batch.masks is not None:
                masks = batch.masks[rows, : pixels.shape[-2], : pixels.shape[-1]]
                counts.add(masks if table is None else table.to(masks.device)[masks.long()], predictions)
    return counts, images


def describe_counts(counts: PixelCounts, names: Sequence[str], protocol: Protocol) -> dict[str, Any]:
    """The protocol, IoU of each class, confusion, and accuracy near boundaries, as plain values."""
    matrix = counts.matrix.cpu()
    return {
        "protocol": protocol.describe(),
        "per_class": describe_class_pixels(matrix, names),
        "confusion": {"names": list(names), "matrix": matrix.tolist()},
        "boundaries": counts.describe_boundaries(),
    }


def match_mask_classes(config: SegmentationConfig, classes: MaskClasses, name: str) -> tuple[Tensor, list[str]]:
    """The class index of the model for each class index of the data, uint8 [256], and classes of the data that it lacks.

    Classes are matched by name; those of data without names by their ids.
    """
    named = [each for each in classes.names if each in config.class_names]
    by_name = {each: config.class_names.index(each) for each in named}
    by_id = {number: index for index, number in enumerate(config.mask_ids)}
    table, missing = torch.full((256,), IGNORE, dtype=torch.uint8), []
    for index, (each, number) in enumerate(zip(classes.names, classes.ids, strict=True)):
        target = by_name.get(each) if named else by_id.get(number) if each == f"class {number}" else None
        if target is None:
            missing.append(each)
        else:
            table[index] = target
    if len(missing) == len(classes.names):
        own = ", ".join(config.class_names[:5])
        raise UserError(f"{name} has none of the classes of the weights ({own}, …): name its ids in classes.json.")
    return table, missing


def draw_examples(
    model: VisionTransformer, source: Source, protocol: Protocol, table: Tensor | None = None
) -> list[dict[str, Any]]:
    """Images beside their mask and their prediction, spread over a source."""
    names = segmentation_head(model).config.class_names
    reader, colors = ImageReader(source, None, True), class_colors(names)
    found = []
    for index in source.spread(SHOWN).tolist():
        image = reader.read_image(index)
        if isinstance(image, Problem):
            continue
        pixels, mask = image
        if mask is None:
            continue
        mask = mask if table is None else table.numpy()[mask]
        prediction = predict_classes(model, to_batch(pixels, model), protocol)[0].cpu().numpy()
        matrix = PixelCounts(len(names))
        matrix.add(torch.from_numpy(mask)[None], torch.from_numpy(prediction)[None])
        parts = [pixels, draw_classes(mask, colors), draw_overlay(pixels, prediction, colors)]
        found.append(
            {
                "image": thumbnail(np.concatenate(parts, 1), SHOWN_SIDE),
                "location": source.location(index),
                "miou": summarize_pixels(matrix.matrix)["miou"],
            }
        )
    return found
