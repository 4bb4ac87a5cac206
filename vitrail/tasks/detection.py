"""Object detection and instance segmentation by Mask R-CNN, with a head that is stored in the artifact.

Losses are sums over sampled boxes divided by a fixed number, image by image: they do not depend on how a batch is divided. Which
boxes are sampled is drawn from the key of the image. Tensors have fixed sizes, and a step does not wait for the device.
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
from vitrail.data.object_checks import check_objects
from vitrail.data.objects import empty_objects
from vitrail.data.rng import sample_key
from vitrail.data.source import Source, Splits
from vitrail.data.transforms.object_geometry import blank_outside, has_mask, move_objects, sample_masks
from vitrail.data.transforms.pipeline import augment
from vitrail.errors import UserError
from vitrail.evaluation.detections import WINDOW_STRIDE, DetectionProtocol, detection_head
from vitrail.evaluation.object_evaluation import describe_precision, draw_examples, match_split
from vitrail.heads.boxes import encode_boxes
from vitrail.heads.mask_rcnn import (
    BOX_WEIGHTS,
    MASK_POOLED,
    MASK_SIDE,
    POOLED,
    PROPOSAL_WEIGHTS,
    Proposals,
    make_anchors,
    propose,
)
from vitrail.heads.regions import pool_regions
from vitrail.heads.task_heads import DetectionConfig, DetectionHead, build_head
from vitrail.models.flops import cost
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes.schema import Recipe
from vitrail.recipes.task_options import DetectionOptions, complete_options, read_options
from vitrail.tasks.dense import DenseModule, DenseTask, feature_shapes
from vitrail.tasks.detection_targets import Sample, assign, gather_boxes, sample
from vitrail.training.compile import run_eagerly
from vitrail.training.distributed import Devices
from vitrail.training.metrics import Metric
from vitrail.training.task import Position

AP = Metric("ap", "box AP", percent=True)
VALIDATED = ("ap", "ap50", "ap75", "mask_ap", "mask_ap50")
POLICIES = ("none", "three", "dino")  # of augmentations that change colors only
OBJECT_SHARE, ANCHOR_SHARE = 0.25, 0.5  # of the sampled boxes and anchors, at most, that contain an object
ANCHOR_LOW, ANCHOR_HIGH, BOX_IOU = 0.3, 0.7, 0.5  # IoU below and above which anchors are background and objects; of boxes


class DetectionTargets(NamedTuple):
    """The objects of a batch of crops, M of each image."""

    boxes: Tensor  # float32 [B, M, 4] in pixels
    classes: Tensor  # int64 [B, M]; negative: there is none
    flags: Tensor  # uint8 [B, M]: not 0: neither trained nor background
    planes: Tensor  # uint8 [B, P, height, width]: bits of the masks
    keys: Tensor  # int64 [B]: random keys of the images


class DetectionModule(DenseModule):
    """The model with its head, and the losses: the sum, then proposals (objectness, boxes), boxes (class, place), masks."""

    def __init__(self, model: VisionTransformer, options: DetectionOptions) -> None:
        super().__init__(model)
        self.options = options

    def forward(self, images: Tensor, targets: DetectionTargets) -> Tensor:
        head, options = detection_head(self.model), self.options
        levels = head(self.model.feature_maps(images, head.config.blocks))
        logits, offsets = head.proposal_head(levels)
        anchors = [make_anchors(level, stride) for level, stride in zip(levels, head.strides, strict=True)]
        losses = list(proposal_losses(torch.cat(logits, 1), torch.cat(offsets, 1), torch.cat(anchors), targets, options))
        size = (images.shape[-2], images.shape[-1])
        overlap = head.config.proposal_overlap
        found = propose(logits, offsets, anchors, size, options.candidates, options.proposals, overlap, exact=False)
        boxes, chosen, objects = sample_boxes(found, targets, options)
        maps, strides = levels[:4], head.strides[:4]
        pooled = pool_regions(maps, strides, boxes, POOLED)
        scores, moves = head.box_head(pooled.flatten(0, 1))
        losses += box_losses(scores, moves, boxes, chosen, objects, targets)
        if head.mask_head is not None:
            count = max(int(options.boxes_sampled * OBJECT_SHARE), 1)  # those with an object are first
            boxes, objects, positive = boxes[:, :count], objects[:, :count], chosen.positive[:, :count]
            pooled = pool_regions(maps, strides, boxes, MASK_POOLED)
            losses.append(mask_loss(head.mask_head(pooled.flatten(0, 1)), boxes, objects, positive, targets))
        return torch.stack([sum(losses, losses[0].new_zeros(())), *losses])


def usable(targets: DetectionTargets) -> tuple[Tensor, Tensor]:
    """Which objects are to be found and which are to be avoided, bool [B, M] each."""
    present = targets.classes >= 0
    return present & (targets.flags == 0), present & (targets.flags > 0)


def proposal_losses(
    logits: Tensor, offsets: Tensor, anchors: Tensor, targets: DetectionTargets, options: DetectionOptions
) -> tuple[Tensor, Tensor]:
    """Losses of logits [B, A] and offsets [B, A, 4] of anchors [A, 4]: objectness, and L1 distance of the boxes."""
    count = options.anchors_sampled
    with torch.no_grad():
        labels, objects = assign(anchors[None], targets.boxes, *usable(targets), ANCHOR_LOW, ANCHOR_HIGH, best=True)
        chosen = sample(labels, targets.keys, "anchors", count, max(int(count * ANCHOR_SHARE), 1))
        goals = gather_boxes(targets.boxes, objects.gather(1, chosen.rows))
        wanted = encode_boxes(goals, anchors[chosen.rows], PROPOSAL_WEIGHTS)
    scores = logits.float().gather(1, chosen.rows)
    objectness = F.binary_cross_entropy_with_logits(scores, chosen.positive.float(), reduction="none")
    found = offsets.float().gather(1, chosen.rows[..., None].expand(-1, -1, 4))
    distance = (found - wanted).abs().sum(-1)
    total = len(logits) * count
    return (objectness * chosen.valid).sum() / total, torch.where(chosen.positive, distance, 0.0).sum() / total


def sample_boxes(found: Proposals, targets: DetectionTargets, options: DetectionOptions) -> tuple[Tensor, Sample, Tensor]:
    """Boxes [B, R, 4] for the second stage, proposals and objects themselves; which have an object, and which object [B, R]."""
    used, ignored = usable(targets)
    boxes = torch.cat([found.boxes, targets.boxes], 1)
    labels, objects = assign(boxes, targets.boxes, used, ignored, BOX_IOU, BOX_IOU)
    labels = torch.where(torch.cat([found.valid, used], 1), labels, -1)
    count = options.boxes_sampled
    chosen = sample(labels, targets.keys, "boxes", count, max(int(count * OBJECT_SHARE), 1))
    return gather_boxes(boxes, chosen.rows), chosen, objects.gather(1, chosen.rows)


def box_losses(
    logits: Tensor, offsets: Tensor, boxes: Tensor, chosen: Sample, objects: Tensor, targets: DetectionTargets
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of logits [B * R, classes + 1], and L1 distance of offsets [B * R, classes, 4] of the right class."""
    background = logits.shape[1] - 1
    classes = torch.where(chosen.positive, targets.classes.gather(1, objects), background).flatten()
    entropy = F.cross_entropy(logits.float(), classes, reduction="none") * chosen.valid.flatten()
    wanted = encode_boxes(gather_boxes(targets.boxes, objects), boxes, BOX_WEIGHTS).flatten(0, 1)
    own = classes.clamp(max=background - 1)[:, None, None].expand(-1, 1, 4)
    distance = (offsets.float().gather(1, own)[:, 0] - wanted).abs().sum(-1)
    total = chosen.rows.numel()
    return entropy.sum() / total, torch.where(chosen.positive.flatten(), distance, 0.0).sum() / total


def mask_loss(logits: Tensor, boxes: Tensor, objects: Tensor, positive: Tensor, targets: DetectionTargets) -> Tensor:
    """Binary cross-entropy of the mask of the right class of logits [B * K, classes, 28, 28]: mean over the boxes of an image."""
    wanted = sample_masks(targets.planes, objects, boxes, MASK_SIDE).flatten(0, 1)
    counted = positive & has_mask(targets.planes, targets.classes.shape[1]).gather(1, objects)
    classes = torch.where(counted, targets.classes.gather(1, objects), 0).flatten()
    own = logits.float().gather(1, classes[:, None, None, None].expand(-1, 1, *logits.shape[-2:]))[:, 0]
    entropy = F.binary_cross_entropy_with_logits(own, wanted.float(), reduction="none").mean((1, 2)).view_as(counted)
    per_image = torch.where(counted, entropy, 0.0).sum(1) / counted.sum(1).clamp(min=1)
    return per_image.mean()


class Detection(DenseTask):
    """Boxes and masks as targets; the metric is COCO's AP of boxes."""

    metric = AP
    reads_objects = True
    module: DetectionModule

    def __init__(self, recipe: Recipe, source: Source, device: torch.device) -> None:
        super().__init__(recipe, source, device)
        self.options = read_options(DetectionOptions, recipe)
        self.classes = source.object_classes
        self.masks = self.options.masks == "on" or (self.options.masks == "auto" and source.has_instances)
        self.logs = ("objectness", "proposals", "classes", "boxes", *(("masks",) if self.masks else ()))  # type: ignore[misc]
        masks = "with masks" if self.masks else "without masks" + (", which are not learned" if source.has_instances else "")
        self.messages += [f"objects: {len(self.classes)} classes, {masks}", *source.object_notes]

    @classmethod
    def resolve_recipe(cls, recipe: Recipe, explicit: frozenset[str]) -> Recipe:
        recipe = super().resolve_recipe(recipe, explicit)
        if recipe.augmentation.policy not in POLICIES or recipe.augmentation.crop_last:
            raise UserError(
                f"Detection moves boxes with crops and flips only: set augmentation.policy to {', '.join(POLICIES)}, and "
                "augmentation.crop_last=false."
            )
        return complete_options(DetectionOptions, recipe)

    @classmethod
    def check_data(cls, recipe: Recipe, splits: Splits) -> None:
        super().check_data(recipe, splits)
        for part in (splits.train, splits.validation):
            check_objects(part)
        if splits.train.object_classes != splits.validation.object_classes:
            raise UserError(f"The splits of {splits.train.name} have different classes of objects: use one list for all of them.")
        if read_options(DetectionOptions, recipe).masks == "on" and not splits.train.has_instances:
            raise UserError(f"{splits.train.name} has boxes but no masks of objects: leave task_options.masks at auto.")

    # Training

    def build_module(self, model: VisionTransformer) -> DetectionModule:
        config = self.make_config(model)
        self.attach_head(model, config)
        self.protocol = DetectionProtocol.of(config)
        self.messages.append(f"validation: {self.protocol.describe()}")
        self.head_cost = head_macs(config, model, self.options.boxes_sampled) / cost(model.architecture).macs
        return DetectionModule(model, self.options)

    def make_config(self, model: VisionTransformer) -> DetectionConfig:
        options, sides = self.options, self.recipe.augmentation.image_size
        window = self.choose_window(model, options.window, "tiles")
        return DetectionConfig(
            self.classes,
            options.short_side or min(sides),
            options.long_side,
            window,
            min(options.stride or max(round(window * WINDOW_STRIDE), 1), window),
            self.masks,
            options.channels,
            options.hidden,
            options.candidates,
            options.proposals,
            blocks=options.blocks,
        )

    def prepare_batch(self, batch: Batch, position: Position) -> tuple[Tensor, DetectionTargets]:
        recipe = self.recipe
        keys = sample_key(recipe.seed, position.epoch, batch.index, batch.repeat)
        objects = batch.objects
        if objects is None:  # a batch that measures time or memory
            objects = empty_objects(batch.pixels)
        augmented = augment(batch.pixels, batch.sizes, keys, recipe.augmentation)
        planes = objects.planes if self.masks else objects.planes[:, :0]
        if self.masks and not planes.shape[1]:  # no image of this batch has a mask
            planes = planes.new_zeros(len(planes), 1, *batch.pixels.shape[-2:])
        moved = move_objects(objects._replace(planes=planes), augmented.view, self.options.max_objects)
        images = blank_outside(augmented.images, augmented.view)
        return images, DetectionTargets(moved.boxes, moved.classes, moved.flags, moved.planes, keys)

    # Evaluation

    def evaluate(self, model: VisionTransformer, loader: ImageLoader, batch_size: int, devices: Devices) -> dict[str, Any]:
        with run_eagerly(model):
            matches, images = match_split(model, loader, batch_size, self.protocol, devices.rank, devices.world_size)
        found = matches.gather(devices.all_gather).summarize(len(self.classes))
        values = {name: found[name] for name in VALIDATED if found.get(name) is not None}
        return {"ap": 0.0} | values | {"images": sum(devices.all_gather(images))}

    def report(self, model: VisionTransformer, loader: ImageLoader, splits: Splits, batch_size: int) -> dict[str, Any]:
        """AP of each class, and some images with their objects and predictions."""
        with run_eagerly(model):
            matches, _ = match_split(model, loader, batch_size, self.protocol)
            examples = draw_examples(model, splits.validation, self.protocol)
        described = describe_precision(matches.summarize(len(self.classes)), self.classes, self.protocol)
        return described | {"detections": examples}

    def suggest_next(self, model: VisionTransformer, folder: Path, source: str) -> str:
        predict = shlex.join(["vitrail", "predict", str(folder), "IMAGE", "--out", "overlay.png"])
        evaluate = shlex.join(["vitrail", "evaluate", str(folder), source])
        return f"next: `{predict}` draws the objects of an image, `{evaluate}` prints AP by size and class"


def head_macs(config: DetectionConfig, model: VisionTransformer, boxes: int) -> float:
    """Multiply-adds of the head in training for one image of the model's size: the pyramid, and all sampled boxes."""
    with FakeTensorMode(), FlopCounterMode(display=False) as counter, torch.no_grad():
        maps, strides = feature_shapes(model, config.blocks)
        head = build_head(config, [each.shape[1] for each in maps], strides).eval()
        assert isinstance(head, DetectionHead)
        levels = head(maps)
        head.proposal_head(levels)
        head.box_head(torch.zeros(boxes, config.channels, POOLED, POOLED))
        if head.mask_head is not None:
            head.mask_head(torch.zeros(max(int(boxes * OBJECT_SHARE), 1), config.channels, MASK_POOLED, MASK_POOLED))
    return float(counter.get_total_flops()) / 2
