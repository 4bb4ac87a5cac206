"""Masked patch prediction of ViT (arXiv 2010.11929, Section 4.6 and Appendix B.1.2), and a recipe for small images on one GPU.

`vit_base_patch16_masked` pre-trains on JFT-300M without labels, `…_15percent`, `…_downsized` and `…_pixels` are the variants that
the paper tried, and `…_to_imagenet` fine-tunes as in Table 4. The paper gives optimizer, learning rate, schedule, batch size and
steps; everything else is that of the pre-training with labels.

    vitrail train photos/ --recipe masked_small --out runs/masked
    vitrail train photos/ --from runs/masked
"""

import dataclasses
from typing import Any

from vitrail.data.transforms.config import Augmentation
from vitrail.recipes.defaults import FAST_DECODING, FROM_IMAGES
from vitrail.recipes.derivation import Page, change, top1
from vitrail.recipes.schema import About, LossConfig, OptimizerConfig, Recipe, ScheduleConfig, ValidationConfig
from vitrail.recipes.task_options import MaskedPatchOptions

RECIPES = Page()


def task(**options: Any) -> dict[str, Any]:
    return {"task": "masked_patches", "task_options": dataclasses.asdict(MaskedPatchOptions(**options))}


def masked(name: str, row: str, expected: str, steps: int = 1_000_000, **options: Any) -> Recipe:
    """Appendix B.1.2: 79.9 % after fine-tuning on ImageNet with 50 % of the patches corrupted and their mean color predicted."""
    return change(
        "vit_base_patch16_jft",
        name,
        **task(**options),
        architecture={"pre_logits": 0},
        init={"head_bias": 0.0},
        loss=LossConfig(),
        optimizer={"lr": 2e-4},
        schedule={"kind": "cosine", "min_lr": 0.0, "length": f"{steps} steps"},
        about={"row": f"Appendix B.1.2, {row}", "expected": expected, "hardware": ""},
    )


def masked_small(name: str) -> Recipe:
    """A plain ViT-S on small images, on one GPU; the patch tokens are trained, so it pools their mean."""
    return Recipe(
        name=name,
        **task(),
        model="vit_small_patch16",
        architecture={"pooling": "mean"},
        batch_size=512,
        data=FAST_DECODING,
        augmentation=Augmentation(image_size=FROM_IMAGES, scale=(0.3, 1.0)),
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.05, clip_grad_norm=1.0),
        schedule=ScheduleConfig(length="200 epochs", warmup="5%", min_lr=1e-5),
        validation=ValidationConfig(every="5 epochs", crop_ratio=1.0),
        about=About("vitrail", "masked patch prediction on one GPU", "not measured", "one GPU"),
    )


RECIPES.add("masked_small", masked_small)
_finetuned = f"{top1(79.9)} after fine-tuning at 384"
for _suffix, _row, _expected, _options in (
    ("", "50 % corrupted, mean color", _finetuned, {}),
    ("_100k", "100k steps, after which little is gained", top1(None), {"steps": 100_000}),
    ("_15percent", "15 % corrupted, as in BERT", top1(None), {"corrupted": 0.15}),
    ("_downsized", "4 x 4 downsized patches", top1(None), {"target": "downsized"}),
    ("_pixels", "regression of all pixels", top1(None), {"target": "pixels"}),
):
    RECIPES.add(f"vit_base_patch16_masked{_suffix}", masked, _row, _expected, **_options)
RECIPES.derive(
    "vit_base_patch16_masked_to_imagenet",
    "vit_base_patch16_to_imagenet",
    init={"pretrained_recipe": "vit_base_patch16_masked"},
    about={"row": "Section 4.6, fine-tuned as in Table 4", "expected": top1(79.9)},
)
