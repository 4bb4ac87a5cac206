"""Masked patch prediction of ViT: a share of the patch embeddings is corrupted, and the content of these patches is predicted.

Of the corrupted patches most are replaced by a mask token, some by other patches of the image, and some are left as they are. A
linear head on the final tokens predicts what was there: colors in 512 classes, or pixels.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.data.loader import Batch
from vitrail.data.rng import randint, sample_key, uniform
from vitrail.data.transforms.pipeline import augment
from vitrail.errors import UserError
from vitrail.evaluation.features import FeatureKind
from vitrail.heads.masked_modeling import COLORS, LEVELS, ColorHead, PixelHead, corrupt_patches, gather_patches
from vitrail.layers.patch_embed import unfold_patches
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes.schema import Recipe
from vitrail.recipes.task_options import MaskedPatchOptions
from vitrail.tasks.self_supervised import SelfSupervised, Sums

# Stems whose tokens depend on the pixels of one patch each. With the others the neighbors of a masked patch contain its pixels.
SEPARATE_STEMS = ("linear", "hmlp", "local_transformer")
DOWNSIZED = 4  # side of the downsized patch
PATIENCE = 5  # epochs after which the predictions should be better than a constant


class MaskedPatchTargets(NamedTuple):
    """C of the N patches of an image are corrupted: those at `positions`, of which the masked ones come first."""

    positions: Tensor  # int64 [B, C]
    masked: Tensor  # bool [B, N]
    source: Tensor  # int64 [B, N]: the patch whose embedding a patch gets, which is itself for most
    content: Tensor  # of the corrupted patches: colors, int64 [B, C, cells], or pixels in [0, 1], [B, C, K*P*P]


class Counts(NamedTuple):
    """Numbers of patches of an image."""

    corrupted: int
    masked: int
    replaced: int


class MaskedPatchModule(nn.Module):
    """The model, the mask token and the prediction head."""

    def __init__(self, model: VisionTransformer, head: ColorHead | PixelHead, masked: int) -> None:
        super().__init__()
        self.model, self.head, self.masked = model, head, masked
        self.mask_token = nn.Parameter(torch.empty(model.architecture.width))
        nn.init.trunc_normal_(self.mask_token, std=0.02)

    def forward(self, images: Tensor, targets: MaskedPatchTargets) -> Tensor:
        """The loss, and for colors the accuracy at the masked patches."""
        prediction = self.predict(images, targets)
        loss = self.head.losses(prediction, targets.content).mean()
        if isinstance(self.head, PixelHead):
            return loss
        hits = prediction[:, : self.masked].argmax(-1) == targets.content[:, : self.masked]
        return torch.stack([loss, hits.to(loss).mean()])

    def predict(self, images: Tensor, targets: MaskedPatchTargets) -> Tensor:
        """What the head predicts for the corrupted patches, [B, C, ...]."""
        patches, layout = self.model.embed(images)
        patches = corrupt_patches(patches, self.mask_token, targets.masked, targets.source)
        x, layout = self.model.encode(patches, layout)
        # Not `read`, which would compute the pooling too; models that pool before the norm have no norm of patch tokens.
        tokens = x if self.model.architecture.pool_norm else self.model.norm(x)
        out: Tensor = self.head(gather_patches(tokens[:, layout.prefix :], targets.positions))
        return out


class MaskedPatches(SelfSupervised):
    """Predicts the content of corrupted patches.

    Features are the mean of the patch tokens, which are what is trained. The best weights are those with the lowest loss: the
    k-NN accuracy of such features says little about fine-tuning, and is highest early in some trainings.
    """

    options_kind = MaskedPatchOptions
    options: MaskedPatchOptions
    features = FeatureKind("mean")
    module: MaskedPatchModule

    @classmethod
    def resolve_recipe(cls, recipe: Recipe, explicit: frozenset[str]) -> Recipe:
        if recipe.mixes_images or recipe.augmentation.random_erasing:
            raise UserError(
                "masked_patches predicts the pixels of single, complete images: set mixing.mixup=0, mixing.cutmix=0, "
                "token_labels.mixtoken=0 and augmentation.random_erasing=0."
            )
        if recipe.init.weights and "architecture.pooling" not in explicit:  # weights keep their own
            architecture = {field: value for field, value in recipe.architecture.items() if field != "pooling"}
            recipe = dataclasses.replace(recipe, architecture=architecture)
        return super().resolve_recipe(recipe, explicit)

    # Training

    def build_module(self, model: VisionTransformer) -> MaskedPatchModule:
        check_model(model)
        a, options = model.architecture, self.options
        self.grid, self.patch = model.grid, a.patch_size
        patches = model.grid[0] * model.grid[1]
        self.counts = corrupted, masked, replaced = count_patches(patches, options)
        self.messages.append(
            f"{corrupted} of {patches} patches are corrupted: {masked} masked, {replaced} replaced by others, "
            f"{corrupted - masked - replaced} unchanged"
        )
        self.cells = {"mean_color": 1, "downsized": DOWNSIZED, "pixels": 0}[options.target]  # per side; 0: pixels
        if self.cells > self.patch:
            raise UserError(
                f"Patches of {self.patch} pixels cannot be downsized to {DOWNSIZED} x {DOWNSIZED}: set "
                "task_options.target=mean_color or pixels."
            )
        colors = self.recipe.augmentation
        self.mean, self.std = (torch.tensor(values, device=self.device).view(-1, 1, 1) for values in (colors.mean, colors.std))
        freeze_unused(model)
        if not self.cells:
            return MaskedPatchModule(model, PixelHead(a.width, a.channels * self.patch**2), masked)
        self.logs = ("accuracy",)  # type: ignore[misc]  # depends on the target
        return MaskedPatchModule(model, ColorHead(a.width, self.cells**2), masked)

    def make_views(self, pixels: Tensor, sizes: Tensor, keys: Tensor) -> tuple[Tensor, MaskedPatchTargets]:
        images = augment(pixels, sizes, keys, self.recipe.augmentation).images
        return images, self.make_targets(images, keys)

    def make_targets(self, images: Tensor, keys: Tensor) -> MaskedPatchTargets:
        """Which patches of normalized images [B, 3, height, width] are corrupted, drawn from their keys, and their content."""
        patches = self.grid[0] * self.grid[1]
        order = uniform(keys, "mask", patches).argsort(dim=1, stable=True)
        rank = order.argsort(1)
        # Another patch for each: the one a random number of places further in the random order. It is drawn uniformly from the
        # other patches of the image, and no patch is drawn twice, so that no gradient depends on the order of three summands.
        shift = 1 + randint(keys, "replacement", patches - 1)
        other = order.gather(1, (rank + shift) % patches)
        own = torch.arange(patches, device=images.device)
        corrupted, masked, replaced = self.counts
        source = torch.where((rank >= masked) & (rank < masked + replaced), other, own)
        positions = order[:, :corrupted]
        return MaskedPatchTargets(positions, rank < masked, source, gather_patches(self.describe_patches(images), positions))

    def describe_patches(self, images: Tensor) -> Tensor:
        """The target of every patch of normalized images: colors, int64 [B, N, cells], or pixels in [0, 1], [B, N, K*P*P]."""
        pixels = (images * self.std + self.mean).clamp(0, 1)
        if not self.cells:
            return unfold_patches(pixels, self.patch)
        height, width = self.grid
        cropped = pixels[..., : height * self.patch, : width * self.patch]
        colors = quantize_colors(F.adaptive_avg_pool2d(cropped, (height * self.cells, width * self.cells)))
        return unfold_patches(colors[:, None], self.cells)

    # Validation

    def measure(self, model: VisionTransformer, batch: Batch, images: Tensor) -> Sums:
        """Sums of the loss at the corrupted patches, of what is predicted right at the masked ones, and of what is there."""
        if self.has_best_weights:  # of another step than the head and the mask token
            return {}
        targets = self.make_targets(images, sample_key(0, 0, batch.index, batch.repeat))  # the same at every validation
        prediction, masked = self.module.predict(images, targets), self.counts.masked
        losses = self.module.head.losses(prediction, targets.content)
        sums = {"loss": losses.sum(), "corrupted": losses.new_tensor(losses.numel())}
        prediction, content = prediction[:, :masked], targets.content[:, :masked]
        sums["values"] = losses.new_tensor(content.numel())
        if self.cells:
            colors = content.flatten()
            sums["hits"] = (prediction.argmax(-1) == content).sum()
            sums["colors"] = torch.zeros(COLORS, device=images.device).scatter_add_(0, colors, torch.ones_like(colors).float())
        else:
            channels = content.unflatten(-1, (3, -1)).double()
            sums["squared_error"] = (prediction - content).square().sum()
            sums["channels"] = channels.sum((0, 1, 3))
            sums["squares"] = channels.square().sum((0, 1, 3))
        return sums

    def summarize(self, sums: Sums) -> dict[str, float]:
        values = {"loss": float(sums["loss"] / sums["corrupted"])}
        count = sums["values"]
        if self.cells:
            values["accuracy"] = float(sums["hits"] / count)
            values["majority_accuracy"] = float(sums["colors"].max() / count)  # of the most frequent color
        else:
            values["error"] = math.sqrt(float(sums["squared_error"] / count))
            mean, squares = sums["channels"] * 3 / count, sums["squares"] * 3 / count
            values["constant_error"] = math.sqrt(max(float((squares - mean.square()).mean()), 0.0))  # of the mean color
        return values

    def is_better(self, values: Mapping[str, Any], best: Mapping[str, Any]) -> bool:
        return float(values["loss"]) < float(best["loss"])

    def find_collapse(self, values: Mapping[str, Any], epoch: float) -> str:
        if epoch < PATIENCE:  # until then the tokens may all be similar, as the predictions are
            return ""
        problem = super().find_collapse(values, epoch)
        if problem:
            return problem
        if self.cells and values["accuracy"] <= values["majority_accuracy"]:
            shown = f"{values['accuracy']:.1%} right, the most frequent color {values['majority_accuracy']:.1%}"
        elif not self.cells and values["error"] >= values["constant_error"]:
            shown = f"error {values['error']:.3f}, the mean color {values['constant_error']:.3f}"
        else:
            return ""
        return f"the predictions of masked patches are not better than a constant ({shown}): {self.hint_for_collapse()}."

    def hint_for_collapse(self) -> str:
        return "change optimizer.lr by a factor of 3 to 10, give a longer schedule.warmup, or lower task_options.corrupted"


def quantize_colors(pixels: Tensor) -> Tensor:
    """The color class of pixels [B, 3, height, width] in [0, 1]: 3 bits of each channel, int64 [B, height, width]."""
    red, green, blue = (pixels * LEVELS).long().clamp(max=LEVELS - 1).unbind(1)
    return (red * LEVELS + green) * LEVELS + blue


def count_patches(patches: int, options: MaskedPatchOptions) -> Counts:
    """How many of the patches are corrupted, masked and replaced: the shares of the options, rounded."""
    corrupted = round(options.corrupted * patches)
    if not 0 < corrupted < patches:
        raise UserError(
            f"task_options.corrupted={options.corrupted:g} of {patches} patches is {corrupted}: use larger images or smaller "
            "patches, or set it so that some patches are corrupted and some are not."
        )
    masked = max(round(options.masked * corrupted), 1)
    return Counts(corrupted, masked, max(min(round((options.masked + options.replaced) * corrupted), corrupted) - masked, 0))


def check_model(model: VisionTransformer) -> None:
    """Raise UserError if masking the tokens after the stem hides nothing, or nothing could fill the gaps."""
    a, name = model.architecture, model.name or "This model"
    if a.stem not in SEPARATE_STEMS:
        raise UserError(
            f"{name} has a {a.stem} stem, whose tokens overlap: those next to a masked patch contain its pixels, so there is "
            f"little to predict. Choose a model with one of the stems {', '.join(SEPARATE_STEMS)}."
        )
    if a.mixer == "none":
        raise UserError(f"{name} does not mix patches, so that nothing is known about a masked one: choose another model.")


def freeze_unused(model: VisionTransformer) -> None:
    """Freeze what only the pooled vector depends on: patch tokens are trained."""
    unused = [model.pooling, model.pre_logits, model.norm if model.architecture.pool_norm else None]
    for part in unused:
        if part is not None:
            part.requires_grad_(False)
