"""BEiT, and the tokenizer whose codes it predicts."""

import dataclasses

from vitrail.data.transforms.config import Augmentation
from vitrail.recipes.defaults import FAST_DECODING, FROM_IMAGES
from vitrail.recipes.derivation import Page
from vitrail.recipes.schema import About, OptimizerConfig, Recipe, ScheduleConfig, ValidationConfig
from vitrail.recipes.task_options import TokenizerOptions

RECIPES = Page()


def tokenizer(name: str) -> Recipe:
    """Codes of 8 x 8 pixels for photographs: 14 x 14 of them at 112 pixels, as many as a ViT/16 has patches at 224."""
    return Recipe(
        name=name,
        task="tokenizer",
        task_options=dataclasses.asdict(TokenizerOptions(codes=8192)),
        model="vitrail_mini",
        architecture={"width": 256, "patch_size": 8, "stem_norm": "layer"},
        batch_size=256,
        data=FAST_DECODING,
        augmentation=Augmentation(image_size=(112, 112), interpolation="lanczos"),
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.0, clip_grad_norm=1.0),
        schedule=ScheduleConfig(length="20 epochs", warmup="5%", min_lr=1e-5),
        validation=ValidationConfig(crop_ratio=1.0, interpolation="lanczos"),
        about=About("vitrail", "a tokenizer for BEiT, photographs on one GPU", "not measured"),
    )


def tokenizer_small(name: str) -> Recipe:
    """512 codes for small images."""
    return Recipe(
        name=name,
        task="tokenizer",
        task_options=dataclasses.asdict(TokenizerOptions(codes=512, width=128)),
        model="vitrail_mini",
        architecture={"stem_norm": "layer"},
        batch_size=64,
        data=FAST_DECODING,
        augmentation=Augmentation(image_size=FROM_IMAGES, scale=(0.2, 1.0), interpolation="lanczos"),
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.0, clip_grad_norm=1.0),
        schedule=ScheduleConfig(length="20 epochs", warmup="5%", min_lr=1e-5),
        validation=ValidationConfig(crop_ratio=1.0, interpolation="lanczos"),
        about=About("vitrail", "a tokenizer for BEiT, small images", "not measured"),
    )


for _build in (tokenizer, tokenizer_small):
    RECIPES.add(_build.__name__, _build)
