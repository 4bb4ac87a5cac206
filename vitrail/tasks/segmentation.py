"""Semantic segmentation: a class for every pixel, with a head on the patch tokens that is stored in the artifact.

The loss is the sum of the cross-entropy over labeled pixels divided by the number of all pixels, as in the usual
implementations. Unlike the mean over labeled pixels it does not depend on how a batch is divided.
"""

import shlex
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from vitrail.data.image_loader import ImageLoader
from vitrail.data.loader import Batch
from vitrail.data.mask_checks import check_masks, complete_classes
from vitrail.data.mask_classes import IGNORE, describe_classes
from vitrail.data.rng import sample_key
from vitrail.data.source import Source, Splits
from vitrail.data.transforms.mask_geometry import redraw_keys, transform_masks
from vitrail.data.transforms.pipeline import augment
from vitrail.evaluation.mean_iou import summarize_pixels
from vitrail.evaluation.pixel_evaluation import count_split, describe_counts, draw_examples
from vitrail.evaluation.semantic_masks import Protocol, segmentation_head
from vitrail.formatting import pluralize
from vitrail.heads.task_heads import SegmentationConfig, build_head
from vitrail.heads.upernet import resize_map
from vitrail.models.flops import cost
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes.schema import Recipe
from vitrail.recipes.task_options import SegmentationOptions, complete_options, read_options
from vitrail.tasks.dense import DenseModule, DenseTask, feature_shapes
from vitrail.training.compile import run_eagerly
from vitrail.training.distributed import Devices
from vitrail.training.metrics import Metric
from vitrail.training.task import Position

MIOU = Metric("miou", "mIoU", percent=True)


class SegmentationTargets(NamedTuple):
    masks: Tensor  # uint8 [B, height, width]: class indices, IGNORE where there is none


class SegmentationModule(DenseModule):
    """The model with its head, and the loss."""

    def __init__(self, model: VisionTransformer, auxiliary_weight: float) -> None:
        super().__init__(model)
        self.auxiliary_weight = auxiliary_weight

    def forward(self, images: Tensor, targets: SegmentationTargets) -> Tensor:
        head = segmentation_head(self.model)
        maps = self.model.feature_maps(images, head.config.blocks)
        loss = pixel_loss(head(maps), targets.masks)
        beside = head.auxiliary_logits(maps)
        return loss if beside is None else loss + self.auxiliary_weight * pixel_loss(beside, targets.masks)


def pixel_loss(logits: Tensor, masks: Tensor) -> Tensor:
    """Cross-entropy of logits [B, C, h, w], resized to the masks [B, H, W]: the sum over labeled pixels by all pixels."""
    resized = resize_map(logits.to(torch.promote_types(logits.dtype, torch.float32)), masks.shape[-2:])
    return F.cross_entropy(resized, masks.long(), ignore_index=IGNORE, reduction="sum") / masks.numel()


class Segmentation(DenseTask):
    """Masks as targets; the metric is the mIoU at the size of the masks."""

    metric = MIOU
    reads_masks = True
    module: SegmentationModule

    def __init__(self, recipe: Recipe, source: Source, device: torch.device) -> None:
        super().__init__(recipe, source, device)
        self.options = read_options(SegmentationOptions, recipe)
        assert source.mask_classes is not None
        self.classes = source.mask_classes
        self.messages.append(f"masks: {describe_classes(self.classes)}")
        if source.unmasked:
            self.messages.append(f"{pluralize(source.unmasked, 'image')} without a mask left out")

    @classmethod
    def resolve_recipe(cls, recipe: Recipe, explicit: frozenset[str]) -> Recipe:
        recipe = super().resolve_recipe(recipe, explicit)
        return complete_options(SegmentationOptions, recipe)

    @classmethod
    def complete_data(cls, recipe: Recipe, splits: Splits) -> None:
        complete_classes([part for part in splits if part is not None], read_options(SegmentationOptions, recipe).ignore)

    @classmethod
    def check_data(cls, recipe: Recipe, splits: Splits) -> None:
        super().check_data(recipe, splits)
        for part in (splits.train, splits.validation):
            check_masks(part)

    # Training

    def build_module(self, model: VisionTransformer) -> SegmentationModule:
        config = self.make_config(model)
        self.attach_head(model, config)
        self.protocol = Protocol.of(config)
        self.messages.append(f"validation: {self.protocol.describe()}")
        self.head_cost = head_macs(config, model) / cost(model.architecture).macs
        return SegmentationModule(model, self.options.auxiliary_weight)

    def make_config(self, model: VisionTransformer) -> SegmentationConfig:
        options, sides = self.options, self.recipe.augmentation.image_size
        window = self.choose_window(model, options.window, "windows")
        return SegmentationConfig(
            self.classes.names,
            self.classes.ids,
            options.short_side or min(sides),
            window,
            min(options.stride or max(round(window * 2 / 3), 1), window),
            options.head,
            options.channels,
            options.auxiliary,
            options.dropout,
            options.blocks,
        )

    def prepare_batch(self, batch: Batch, position: Position) -> tuple[Tensor, SegmentationTargets]:
        recipe = self.recipe
        keys = sample_key(recipe.seed, position.epoch, batch.index, batch.repeat)
        masks = batch.masks
        if masks is None:  # a batch that measures time or memory
            masks = torch.zeros_like(batch.pixels[:, 0])
        keys = redraw_keys(masks, batch.sizes, keys, recipe.augmentation, self.options.max_class_share)
        augmented = augment(batch.pixels, batch.sizes, keys, recipe.augmentation)
        return augmented.images, SegmentationTargets(transform_masks(masks, augmented))

    # Evaluation

    def evaluate(self, model: VisionTransformer, loader: ImageLoader, batch_size: int, devices: Devices) -> dict[str, Any]:
        with run_eagerly(model):
            counts, images = count_split(model, loader, batch_size, self.protocol, devices.rank, devices.world_size)
        total = devices.all_reduce_sum(torch.cat([counts.matrix.flatten().double(), counts.matrix.new_tensor([images]).double()]))
        matrix = total[:-1].view_as(counts.matrix).long()
        return summarize_pixels(matrix.cpu()) | {"images": int(total[-1])}

    def report(self, model: VisionTransformer, loader: ImageLoader, splits: Splits, batch_size: int) -> dict[str, Any]:
        """IoU of each class, the confusion of pixels, accuracy near boundaries, and some images with masks and predictions."""
        with run_eagerly(model):
            counts, _ = count_split(model, loader, batch_size, self.protocol, boundaries=True)
            examples = draw_examples(model, splits.validation, self.protocol)
        return describe_counts(counts, self.classes.names, self.protocol) | {"segmentations": examples}

    def suggest_next(self, model: VisionTransformer, folder: Path, source: str) -> str:
        predict = shlex.join(["vitrail", "predict", str(folder), "IMAGE", "--out", "overlay.png"])
        evaluate = shlex.join(["vitrail", "evaluate", str(folder), source, "--multi-scale"])
        return f"next: `{predict}` draws the classes of an image, `{evaluate}` tests at several scales"


def head_macs(config: SegmentationConfig, model: VisionTransformer) -> float:
    """Multiply-adds of the head for one image of the model's size."""
    with FakeTensorMode(), FlopCounterMode(display=False) as counter, torch.no_grad():
        maps, strides = feature_shapes(model, config.blocks)
        head = build_head(config, [each.shape[1] for each in maps], strides).eval()
        head(maps)
    return float(counter.get_total_flops()) / 2
