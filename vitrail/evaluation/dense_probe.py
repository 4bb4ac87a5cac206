"""Segmentation with a frozen network: a closed-form linear head (ridge regression on patch tokens), and k-NN in context.

The features are tokens of three blocks, at one third, two thirds and the end of the network. The target of a patch is the share
of each class in its pixels. Ridge regression weighs a class by the inverse square root of its frequency.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.loader import ImageReader, Problem
from vitrail.data.mask_classes import IGNORE, MaskClasses
from vitrail.data.progress import Advance
from vitrail.data.source import Source
from vitrail.errors import UserError
from vitrail.evaluation.mean_iou import PixelCounts, describe_class_pixels, summarize_pixels
from vitrail.evaluation.model import device_of
from vitrail.evaluation.predict import iterate_images, to_batch
from vitrail.evaluation.segmented_images import SegmentedImage, make_segmented
from vitrail.evaluation.semantic_masks import View, needs_window, normalize, segmentation_head, working_size
from vitrail.heads.task_heads import SegmentationConfig
from vitrail.heads.upernet import concatenate, normalize_channels
from vitrail.models.vision_transformer import VisionTransformer

RIDGE = 1e-3  # relative to the mean variance of the features
BALANCE = 0.5  # exponent of the inverse frequency of a class
NEIGHBORS, TEMPERATURE = 10, 0.1  # of the k-NN
FOLDS = 4
SUBPIXELS = 8  # of a patch side, at which masks are sampled
MAX_TOKENS = 400_000  # kept for k-NN and cross-validation; of more, every n-th
FACTORS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # of the scores, so that they are logits


@dataclass(frozen=True)
class LabeledImage:
    features: Tensor  # float32 [D, h, w]
    targets: Tensor  # float32 [C, h, w]: the share of each class in the pixels of a patch
    mask: Tensor  # uint8 [H, W]


def probe_config(model: VisionTransformer, classes: MaskClasses, short_side: int) -> SegmentationConfig:
    """The configuration of a linear head on three blocks."""
    if not model.blocks:
        raise UserError(
            f"{model.name or 'This model'} has no transformer blocks, whose tokens are the features: choose other weights, or "
            "train a head with `vitrail train DATA --recipe segment --from WEIGHTS`."
        )
    if needs_window(model):
        raise UserError(f"{model.name or 'This model'} takes images of one size only: choose other weights, or train a head.")
    depth = model.architecture.depth
    blocks = tuple(sorted({max(round(depth * part / 3) - 1, 0) for part in (1, 2, 3)}))
    return SegmentationConfig(classes.names, classes.ids, short_side, kind="linear", blocks=blocks, channels=1, auxiliary=0)


@torch.inference_mode()
def extract(model: VisionTransformer, pixels: Tensor, config: SegmentationConfig) -> Tensor:
    """Features [B, D, h, w] of uint8 images [B, 3, H, W], whose sides are rounded to whole patches."""
    patch = model.architecture.patch_size
    height, width = (max(round(side / patch), 1) * patch for side in working_size(pixels.shape[-2:], config.short_side, 1.0))
    maps = model.feature_maps(normalize(model, pixels, (height, width)), config.blocks)
    return concatenate([normalize_channels(each.float()) for each in maps])


def patch_targets(mask: Tensor, classes: int, grid: tuple[int, int]) -> Tensor:
    """The share of each class in the pixels of every patch, float32 [classes, h, w]; 0 for ignored pixels."""
    rows, columns = (
        ((torch.arange(cells * SUBPIXELS, device=mask.device) + 0.5) * side / (cells * SUBPIXELS)).long()
        for cells, side in zip(grid, mask.shape, strict=True)
    )
    sampled = mask[rows[:, None], columns].long()
    one_hot = F.one_hot(torch.where(sampled == IGNORE, classes, sampled), classes + 1)[..., :classes]
    return F.avg_pool2d(one_hot.permute(2, 0, 1)[None].float(), SUBPIXELS)[0]


def read_labeled(
    model: VisionTransformer, source: Source, config: SegmentationConfig, advance: Advance = lambda count: None
) -> tuple[list[LabeledImage], list[Problem]]:
    """The features and targets of all images with a readable mask, and the problems of the others."""
    reader, device = ImageReader(source, None, masks=True), device_of(model)
    found, problems = [], []
    for index in range(len(source)):
        image = reader.read_image(index)
        advance(1)
        if isinstance(image, Problem):
            problems.append(image)
            continue
        pixels, mask = image
        assert mask is not None
        if (mask == IGNORE).all():
            problems.append(Problem(source.location(index), "all pixels of its mask are ignored"))
            continue
        features = extract(model, to_batch(pixels, model), config)[0]
        labels = torch.from_numpy(mask).to(device)
        height, width = features.shape[-2:]
        found.append(LabeledImage(features, patch_targets(labels, config.classes, (height, width)), labels))
    if not found:
        location, reason = problems[0] if problems else Problem(source.name, "it has no images with a mask")
        raise UserError(f"No mask can be used, first {location}: {reason}.")
    return found, problems


def fit_ridge(images: list[LabeledImage]) -> tuple[Tensor, Tensor]:
    """Weights [C, D] and biases [C] of the linear head, in float64 arithmetic."""
    frequency = sum(image.targets.double().sum((1, 2)) for image in images)
    assert isinstance(frequency, Tensor)
    weight = (frequency / frequency.sum()).clamp(min=1e-6) ** -BALANCE
    gram: Tensor | float = 0.0
    right: Tensor | float = 0.0
    for image in images:
        features = F.pad(image.features.flatten(1).double(), (0, 0, 0, 1), value=1.0)  # the last one for the bias
        targets = image.targets.flatten(1).double()
        weighted = features * (weight @ targets)
        gram, right = gram + weighted @ features.T, right + weighted @ (targets / targets.sum(0).clamp(min=1e-9)).T
    assert isinstance(gram, Tensor)
    assert isinstance(right, Tensor)
    total = gram[-1, -1]
    mean, target_mean = gram[-1, :-1] / total, right[-1] / total
    covariance = gram[:-1, :-1] / total - torch.outer(mean, mean)
    covariance.diagonal().add_(RIDGE * covariance.diagonal().mean() + 1e-12)
    solution = torch.linalg.solve(covariance, right[:-1] / total - torch.outer(mean, target_mean))
    weights, biases = solution.T, target_mean - mean @ solution
    factor = min(FACTORS, key=lambda each: score_loss(images, each * weights, each * biases))
    return (factor * weights).float(), (factor * biases).float()


def score_loss(images: list[LabeledImage], weights: Tensor, biases: Tensor) -> float:
    """The cross-entropy of the labeled patches if the scores are logits."""
    total = 0.0
    for image in images:
        logits = weights.float() @ image.features.flatten(1) + biases.float()[:, None]
        total -= float((logits.log_softmax(0) * image.targets.flatten(1)).sum())
    return total


def attach_ridge(model: VisionTransformer, config: SegmentationConfig, images: list[LabeledImage]) -> VisionTransformer:
    """The model with a linear segmentation head that is fitted to the images."""
    weights, biases = fit_ridge(images)
    model.set_task_head(config)
    head = segmentation_head(model).to(device_of(model))
    with torch.no_grad():
        head.decoder.classifier.weight.copy_(weights[:, :, None, None])  # type: ignore[union-attr,operator]
        head.decoder.classifier.bias.copy_(biases)  # type: ignore[union-attr,operator]
    model.eval()
    return model


@dataclass(frozen=True)
class Memory:
    """Patches with known classes, among which the nearest neighbors of other patches are searched."""

    features: Tensor  # float32 [N, D], of length 1
    targets: Tensor  # float32 [N, C]

    @classmethod
    def of(cls, images: list[LabeledImage]) -> "Memory":
        features = torch.cat([image.features.flatten(1).T for image in images])
        targets = torch.cat([image.targets.flatten(1).T for image in images])
        known = (targets.sum(1) > 0).nonzero()[:, 0]
        chosen = known[:: -(-len(known) // MAX_TOKENS)]
        return cls(F.normalize(features[chosen], dim=1), targets[chosen])

    def predict(self, features: Tensor) -> Tensor:
        """Class scores [1, C, h, w] of features [D, h, w]: the weighted mean of the nearest patches."""
        queries = F.normalize(features.flatten(1).T, dim=1)
        parts = []
        for part in queries.split(1024):
            values, index = (part @ self.features.T).topk(min(NEIGHBORS, len(self.features)), 1)
            parts.append(((values / TEMPERATURE).softmax(1)[:, :, None] * self.targets[index]).sum(1))
        out: Tensor = torch.cat(parts).T.unflatten(1, features.shape[1:])[None]
        return out


def ridge_predictor(images: list[LabeledImage]) -> Callable[[Tensor], Tensor]:
    """Features [D, h, w] to scores [1, C, h, w] by a ridge fit to the images."""
    weights, biases = fit_ridge(images)
    return lambda features: (weights @ features.flatten(1) + biases[:, None]).unflatten(1, features.shape[1:])[None]


METHODS: dict[str, Callable[[list[LabeledImage]], Callable[[Tensor], Tensor]]] = {
    "ridge": ridge_predictor,
    "knn": lambda images: Memory.of(images).predict,
}


def cross_validate(images: list[LabeledImage], names: tuple[str, ...], method: str) -> dict[str, Any] | None:
    """mIoU and IoU of each class of images that were not used for the fit; None with fewer than two images."""
    folds = min(FOLDS, len(images))
    if folds < 2:
        return None
    counts = PixelCounts(len(names), device=images[0].mask.device)
    for fold in range(folds):
        predict = METHODS[method]([image for index, image in enumerate(images) if index % folds != fold])
        for image in images[fold::folds]:
            counts.add(image.mask[None], upsample(predict(image.features), image.mask.shape))
    matrix = counts.matrix.cpu()
    return summarize_pixels(matrix) | {"folds": folds, "per_class": describe_class_pixels(matrix, names)}


def upsample(scores: Tensor, size: Any) -> Tensor:
    """Class indices, uint8 [1, H, W], of scores [1, C, h, w]."""
    height, width = size
    return View(scores).resize_rows((height, width), torch.arange(height, device=scores.device)).argmax(1).to(torch.uint8)


def iterate_by_neighbors(
    model: VisionTransformer, config: SegmentationConfig, labeled: list[LabeledImage], source: Source
) -> Iterator[SegmentedImage | Problem]:
    """The segmentation of each image of a source by the nearest labeled patches, or the reason why it cannot be read."""
    memory = Memory.of(labeled)

    def segment_image(location: str, pixels: np.ndarray, batch: Tensor) -> SegmentedImage:
        scores = memory.predict(extract(model, batch, config)[0])
        return make_segmented(config, location, pixels, upsample(scores, pixels.shape[:2])[0])

    return iterate_images(model, source, segment_image)
