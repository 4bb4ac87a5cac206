"""BEiT (arXiv 2106.08254) with the stems of Three things (arXiv 2203.09795, Table 7), and the tokenizer whose codes it predicts.

`tokenizer` and `tokenizer_small` train a tokenizer on images of any kind; `beit_small` pre-trains a ViT-S on small images. The
others are named like the recipes with labels, `beit_base_{N}x1[_{stem}]`: 300 epochs of pre-training, and
`beit_base_{N}x1[_{stem}]_to_imagenet`: 100 epochs of fine-tuning. Values that Three things does not give are those of BEiT's
released code for ImageNet-1k.

    vitrail tokenizer train photos/ --out tok.safetensors
    vitrail train photos/ --recipe beit_small --tokenizer tok.safetensors
"""

import dataclasses

from vitrail.data.transforms.config import Augmentation
from vitrail.recipes.defaults import FAST_DECODING, FROM_IMAGES
from vitrail.recipes.derivation import Page, change, top1
from vitrail.recipes.schema import About, OptimizerConfig, Recipe, ScheduleConfig, ValidationConfig
from vitrail.recipes.task_options import BeitOptions, TokenizerOptions
from vitrail.recipes.three_things import PAPER

RECIPES = Page()
RELATIVE = {"pos_embed": "relative_bias", "pos_embed_place": "shared"}
# Table 7: the name of the recipe with labels, top-1 after fine-tuning.
STEMS = {
    "base_12x1": 83.05,
    "base_12x1_linear_bn": 82.98,
    "base_12x1_linear_gelu": 83.09,
    "base_12x1_linear_bn_gelu": 82.99,
    "base_13x1": 83.26,
    "base_12x1_conv": 83.04,
    "base_12x1_conv_ln": 83.06,
    "base_12x1_local": 82.38,
    "base_12x1_hmlp": 83.43,
    "base_12x1_hmlp_ln": 83.24,
}


def tokenizer(name: str) -> Recipe:
    """8192 codes of 8 x 8 pixels for photographs: 14 x 14 of them at 112 pixels, as many as a ViT/16 has patches at 224."""
    return Recipe(
        name=name,
        task="tokenizer",
        task_options=dataclasses.asdict(TokenizerOptions()),
        model="vitrail_mini",
        architecture={"width": 256, "patch_size": 8, "stem_norm": "layer"},
        batch_size=256,
        data=FAST_DECODING,
        augmentation=Augmentation(image_size=(112, 112), interpolation="lanczos"),
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.0, clip_grad_norm=1.0),
        schedule=ScheduleConfig(length="20 epochs", warmup="5%", min_lr=1e-5),
        validation=ValidationConfig(crop_ratio=1.0, interpolation="lanczos"),
        about=About("vitrail", "a tokenizer for BEiT: photographs, one GPU", "not measured"),
    )


def tokenizer_small(name: str) -> Recipe:
    """512 codes for small images, one for each patch that `beit_small` gives them; minutes on a CPU for a thousand images."""
    base = tokenizer(name)
    return dataclasses.replace(
        base,
        task_options=dataclasses.asdict(TokenizerOptions(codes=512, width=128)),
        architecture={"stem_norm": "layer"},  # the patch size is chosen from the images
        batch_size=64,
        augmentation=dataclasses.replace(base.augmentation, image_size=FROM_IMAGES, scale=(0.2, 1.0)),
        about=About("vitrail", "a tokenizer for BEiT: small images", "not measured"),
    )


def beit_small(name: str) -> Recipe:
    """A ViT-S with the hMLP stem for small images on one GPU, without a class token: mean pooling from the start."""
    return Recipe(
        name=name,
        task="beit",
        task_options=dataclasses.asdict(BeitOptions()),
        model="vit_small_patch16_12x1_ls_hmlp",
        architecture={
            "stem_norm": "layer",
            "pooling": "mean",
            "layerscale_init": 0.1,
            "drop_path": 0.1,
            "weight_init": "beit",
            **RELATIVE,
        },
        batch_size=512,
        data=FAST_DECODING,
        augmentation=Augmentation(image_size=FROM_IMAGES, scale=(0.2, 1.0)),
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.05, clip_grad_norm=3.0),
        schedule=ScheduleConfig(length="200 epochs", warmup="5%", warmup_lr=0.0, min_lr=1e-5),
        validation=ValidationConfig(crop_ratio=1.0),
        about=About("vitrail", "BEiT for small images, one GPU", "not measured"),
    )


def pretraining(name: str, variant: str, score: float) -> Recipe:
    """Table 7, 300 epochs. The color jitter is in the paper and in the first and current versions of the code."""
    return Recipe(
        name=name,
        task="beit",
        task_options=dataclasses.asdict(BeitOptions()),
        model=f"vit_{variant.replace('_', '_patch16_', 1)}",
        architecture={
            "residual": "layerscale",
            "layerscale_init": 0.1,
            "drop_path": 0.1,
            "drop_path_schedule": "linear",
            "weight_init": "beit",
            **RELATIVE,
        },
        batch_size=2048,
        group_size=128,
        augmentation=Augmentation(color_jitter=(0.4, 0.4, 0.4, 0.0)),
        optimizer=OptimizerConfig(lr=1.5e-3, weight_decay=0.05, clip_grad_norm=3.0),
        schedule=ScheduleConfig(length="300 epochs", warmup="10 epochs", warmup_lr=0.0, min_lr=1e-5),
        about=About(PAPER, "Table 7, BeiT", f"{top1(score)} after fine-tuning", "16 V100"),
    )


def finetuned(name: str, pretrained: str, score: float) -> Recipe:
    """Table 7, 100 epochs. The classifier is initialized with weights of 2e-5 in the code, here with zeros."""
    base = RECIPES[pretrained]()
    return change(
        "deit_base",
        name,
        model=base.model,
        # Mean pooling before a new norm, with the class token still in the blocks; each block has its copy of the relative bias.
        architecture=base.architecture
        | {"pooling": "mean", "pool_norm": True, "keep_class_token": True, "pos_embed_place": "layers"},
        group_size=128,
        data={"repeats": 1, "round_to": 1},
        init={"zero_head": True, "pretrained_recipe": pretrained},
        optimizer={"lr": 4e-3, "lr_batch_size": 0, "layer_decay": 0.65},
        schedule=ScheduleConfig(length="100 epochs", warmup="20 epochs", warmup_lr=0.0, min_lr=1e-6),
        ema={"decay": 0.0},
        about=About(PAPER, "Table 7, BeiT + FT", top1(score), "8 V100"),
    )


for _build in (tokenizer, tokenizer_small, beit_small):
    RECIPES.add(_build.__name__, _build)
for _variant, _score in STEMS.items():
    RECIPES.add(f"beit_{_variant}", pretraining, _variant, _score)
    RECIPES.add(f"beit_{_variant}_to_imagenet", finetuned, f"beit_{_variant}", _score)
