"""BEiT (arXiv 2106.08254): predict the codes that a frozen tokenizer gives to masked patches."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.atomic_files import file_sha256
from vitrail.checkpoints.readers import BEST
from vitrail.data.loader import Batch
from vitrail.data.rng import sample_key
from vitrail.data.source import Source
from vitrail.data.transforms.masks import block_mask, locate_masked
from vitrail.data.transforms.pipeline import augment
from vitrail.errors import UserError
from vitrail.evaluation.features import FeatureKind
from vitrail.formatting import percent
from vitrail.models.config import format_size
from vitrail.models.init import init_beit_normal
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes.schema import Recipe
from vitrail.recipes.task_options import BeitOptions, complete_options, read_options
from vitrail.tasks.self_supervised import SelfSupervised, Sums
from vitrail.tasks.tokenizer import NEEDS_TOKENIZER, compute_codes, open_tokenizer

SEPARATE_PATCHES = ("linear", "hmlp", "local_transformer")  # stems in which a token depends on the pixels of its patch only
PATIENCE = 5.0  # epochs, after which a network should predict better than the most frequent code
TESTED_MASKS = 64


class BeitTargets(NamedTuple):
    mask: Tensor  # bool [B, N]
    positions: Tensor  # int64 [B, M]: the masked patches of each image, then any others
    codes: Tensor  # int64 [B, M]
    weights: Tensor  # [B, M] of the losses, which sum to 1; 0 where a patch is not masked


class BeitModule(nn.Module):
    """The model with a mask token and a linear layer to the codes; forward returns the loss and the accuracy."""

    def __init__(self, model: VisionTransformer, codes: int, mask_pixels: bool) -> None:
        super().__init__()
        self.model, self.mask_pixels = model, mask_pixels
        self.mask_token = nn.Parameter(torch.empty(model.architecture.width))
        self.head = nn.Linear(model.architecture.width, codes)
        for weight in (self.mask_token, self.head.weight):
            init_beit_normal(weight)
        nn.init.zeros_(self.head.bias)
        for unused in (model.pooling, model.pre_logits):  # DDP waits for the gradient of every trainable parameter
            if unused is not None:
                unused.requires_grad_(False)

    def predict(self, images: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """The logits of the codes [B, M, codes] of the patches at `positions` [B, M], of images masked at `mask` [B, N]."""
        model = self.model
        if self.mask_pixels:
            images = hide_pixels(images, mask.unflatten(1, model.grid), model.architecture.patch_size)
        patches, layout = model.embed(images)
        patches = torch.where(mask[..., None], self.mask_token.to(patches.dtype), patches)
        x, layout = model.encode(patches, layout)
        tokens = model.norm(x)[:, layout.prefix :]
        out: Tensor = self.head(tokens.gather(1, positions[..., None].expand(-1, -1, tokens.shape[-1])))
        return out

    def forward(self, images: Tensor, targets: BeitTargets) -> Tensor:
        logits = self.predict(images, targets.mask, targets.positions)
        weights = targets.weights.to(torch.promote_types(logits.dtype, torch.float32))
        loss = (weights * code_losses(logits, targets.codes)).sum()
        accuracy = (weights * (logits.detach().argmax(-1) == targets.codes)).sum()
        return torch.stack([loss, accuracy])


class Beit(SelfSupervised):
    """Masked image modeling. A tokenizer gives each patch a code; the network predicts the codes of the patches it cannot see.

    As in masked patch prediction the best weights are those with the lowest loss, since the k-NN accuracy of such features says
    little about fine-tuning.
    """

    options_kind = BeitOptions
    features = FeatureKind("mean")  # the class token is not trained to represent the image
    logs = ("masked_accuracy",)
    options: BeitOptions
    module: BeitModule

    def __init__(self, recipe: Recipe, source: Source, device: torch.device) -> None:
        super().__init__(recipe, source, device)
        self.tokenizer = self.teacher = open_tokenizer(self.options.tokenizer, device)

    @classmethod
    def resolve_recipe(cls, recipe: Recipe, explicit: frozenset[str]) -> Recipe:
        path = os.path.expanduser(read_options(BeitOptions, recipe).tokenizer)
        if not path:
            raise UserError(f"{recipe.name} needs a tokenizer: {NEEDS_TOKENIZER}.")
        if not os.path.exists(path):
            raise UserError(f"There is no tokenizer at {path}: {NEEDS_TOKENIZER}.")
        path = os.path.join(path, BEST) if os.path.isfile(os.path.join(path, BEST)) else path
        return complete_options(BeitOptions, super().resolve_recipe(recipe, explicit), tokenizer=os.path.abspath(path))

    @classmethod
    def dependencies(cls, recipe: Recipe) -> dict[str, str]:
        path = read_options(BeitOptions, recipe).tokenizer
        return {path: file_sha256(Path(path))} if os.path.isfile(path) else {}

    def build_module(self, model: VisionTransformer) -> BeitModule:
        options, stem = self.options, model.architecture.stem
        size, patch = model.architecture.image_size, model.architecture.patch_size
        if any(side % patch for side in size):
            raise UserError(
                f"BEiT predicts a code for each patch of {patch} x {patch} pixels, and {format_size(size)} pixels are not a "
                "multiple of that: give another image size."
            )
        self.grid, patches = model.grid, model.grid[0] * model.grid[1]
        self.count, self.min_block = round(options.masked * patches), max(round(options.min_block * patches), 1)
        self._check_masks()
        self._fit_tokenizer()
        if stem not in SEPARATE_PATCHES:
            if options.mask_place == "before_stem":
                raise UserError(
                    f"task_options.mask_place=before_stem needs a stem whose patches do not overlap "
                    f"({', '.join(SEPARATE_PATCHES)}), and in the {stem} stem they do: use after_stem, or another stem."
                )
            self.messages.append(f"patches overlap in the {stem} stem: tokens beside a masked patch contain some of its pixels")
        return BeitModule(model, self.tokenizer.architecture.classes, options.mask_place == "before_stem")

    def _check_masks(self) -> None:
        grid = f"{self.grid[0]} x {self.grid[1]} patches"
        if not 0 < self.count < self.grid[0] * self.grid[1]:
            raise UserError(f"task_options.masked={self.options.masked:g} of {grid} is {self.count}: choose another share.")
        index = torch.arange(TESTED_MASKS)
        if not self._draw_masks(sample_key(0, 0, index, index)).any(1).all():
            raise UserError(
                f"Masks do not fit into {grid}: a block has at least {self.min_block} patches and fewer rows and columns than "
                "the image; lower task_options.min_block or the patch size."
            )

    def _fit_tokenizer(self) -> None:
        """Set the size at which the tokenizer gives one code per patch."""
        patch = self.tokenizer.architecture.patch_size
        size = (self.grid[0] * patch, self.grid[1] * patch)
        self.tokenizer.resize(*size)
        if self.tokenizer.grid != self.grid:
            raise UserError(
                f"{self.options.tokenizer} has no size at which it gives {self.grid[0]} x {self.grid[1]} codes, one per patch: "
                "choose another tokenizer."
            )
        augmentation = self.recipe.augmentation
        if augmentation.crop == "simple" and size != augmentation.image_size:
            raise UserError(
                "augmentation.crop=simple would crop another part of the image for the tokenizer, which has another image size: "
                "use random_resized."
            )
        normalization = self.tokenizer.preprocessing
        self.tokenizer_view = dataclasses.replace(
            augmentation, image_size=size, interpolation="lanczos", mean=normalization.mean, std=normalization.std
        )

    def make_views(self, pixels: Tensor, sizes: Tensor, keys: Tensor) -> tuple[Tensor, BeitTargets]:
        images = augment(pixels, sizes, keys, self.recipe.augmentation).images
        view = augment(pixels, sizes, keys, self.tokenizer_view, erase=False).images  # the same crop and flip
        return images, self._make_targets(self._tokenize(view), keys)

    def run_teacher(self, images: Tensor) -> None:
        self._tokenize(images.new_zeros(len(images), 3, *self.tokenizer.architecture.image_size))

    def _draw_masks(self, keys: Tensor) -> Tensor:
        return block_mask(keys, self.grid, self.count, self.min_block, self.options.aspect).flatten(1)

    def _make_targets(self, codes: Tensor, keys: Tensor) -> BeitTargets:
        mask = self._draw_masks(keys)
        _, positions, masked = locate_masked(mask, self.count)
        if self.options.average == "batch":
            weights = masked / masked.sum()
        else:
            weights = masked / masked.sum(1, keepdim=True).clamp(min=1.0) / len(masked)
        return BeitTargets(mask, positions, codes.gather(1, positions), weights)

    def _tokenize(self, images: Tensor) -> Tensor:
        """The codes [B, N] of images in the tokenizer's own size and normalization."""
        cuda = images.device.type == "cuda"
        if cuda:
            images = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=cuda):
            return compute_codes(self.tokenizer, images)

    # Validation

    def measure(self, model: VisionTransformer, batch: Batch, images: Tensor) -> Sums:
        """Sums over the masked patches of validation images, whose masks are always the same."""
        if self.has_best_weights:  # of another step than the head and the mask token
            return {}
        view = self.tokenizer_view
        preprocessing = model.preprocessing._replace(
            image_size=view.image_size, interpolation=view.interpolation, mean=view.mean, std=view.std
        )
        codes = self._tokenize(preprocessing.apply(batch.pixels, batch.sizes))
        targets = self._make_targets(codes, sample_key(0, 0, batch.index, batch.repeat))
        logits = self.module.predict(images, targets.mask, targets.positions)
        masked = targets.weights > 0
        counts = torch.zeros(logits.shape[-1], dtype=torch.float64, device=images.device)
        return {
            "loss": (code_losses(logits, targets.codes) * masked).sum(),
            "correct": ((logits.argmax(-1) == targets.codes) & masked).sum(),
            "codes": counts.scatter_add_(0, targets.codes.flatten(), masked.flatten().double()),
        }

    def summarize(self, sums: Sums) -> dict[str, float]:
        masked = float(sums["codes"].sum())
        return {
            "loss": float(sums["loss"]) / masked,
            "masked_accuracy": float(sums["correct"]) / masked,
            "majority_code": float(sums["codes"].max()) / masked,  # accuracy of always predicting the most frequent code
        }

    def is_better(self, values: Mapping[str, Any], best: Mapping[str, Any]) -> bool:
        return float(values["loss"]) < float(best["loss"])

    def find_collapse(self, values: Mapping[str, Any], epoch: float) -> str:
        """Targets are fixed, so that features cannot become equal as in self-distillation; predictions show what is wrong."""
        majority, accuracy = float(values["majority_code"]), float(values["masked_accuracy"])
        if majority > 0.5:
            return (
                f"{percent(majority)} of the patches have the same code, which says little about the images: train the tokenizer "
                "with a larger task_options.usage_weight or more epochs."
            )
        if epoch >= PATIENCE and accuracy <= majority:
            return (
                f"the codes of masked patches are predicted no better ({percent(accuracy, 1)}) than by always choosing the most "
                f"frequent one ({percent(majority, 1)}): {self.hint_for_collapse()}."
            )
        return ""


def code_losses(logits: Tensor, codes: Tensor) -> Tensor:
    """The cross-entropy [B, M] of logits [B, M, K], in at least float32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses: Tensor = F.cross_entropy(logits.flatten(0, 1), codes.flatten(), reduction="none").unflatten(0, codes.shape)
    return losses


def hide_pixels(images: Tensor, mask: Tensor, patch: int) -> Tensor:
    """Images [B, 3, height, width] with the patches of `mask` [B, rows, columns] set to zero, the mean of normalized pixels."""
    covered = mask.repeat_interleave(patch, 1).repeat_interleave(patch, 2)
    covered = F.pad(covered, (0, images.shape[-1] - covered.shape[-1], 0, images.shape[-2] - covered.shape[-2]))
    return images.masked_fill(covered[:, None], 0.0)
