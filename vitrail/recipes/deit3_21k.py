"""DeiT III (arXiv 2204.07118), the other columns of its Table 6.1: ImageNet-21k, and the trainings it compares with.

`deit3_{model}_21k` is 240 epochs (90 for ViT-H and `…_90ep`), `…_21k_to_1k[_384]` the fine-tuning. `deit3_base_as_{paper}` trains
a ViT-B as other papers did; `deit3_small_as_a2` is the procedure A2 of "ResNet strikes back", the base of Three things.

    vitrail train imagenet-21k/ --recipe deit3_base_21k
"""

from typing import Any

from vitrail.recipes.deit import LAMB
from vitrail.recipes.deit3 import MODELS, NO_REPEATS, PAPER
from vitrail.recipes.derivation import Page, change, drop_path_fields, top1
from vitrail.recipes.schema import About, Recipe, ScheduleConfig
from vitrail.recipes.segmentation import add_segmentation

RECIPES = Page()


def pretraining(name: str, model: str, size: int, epochs: int, drop_path: float, score: float | None) -> Recipe:
    """Table 6.5: ImageNet-21k, for example 85.7 % top-1 on ImageNet-1k after 240 epochs and fine-tuning for ViT-B."""
    return change(
        "deit3_base",
        name,
        **NO_REPEATS,
        model=MODELS[model],
        architecture=drop_path_fields(drop_path),
        group_size=128 if model == "small" else 64,
        augmentation={"image_size": (size, size), "crop": "simple", "padding": 4},
        mixing={"mixup": 0.0},
        loss={"kind": "cross_entropy", "label_smoothing": 0.1},
        # The released code's; the table has 3e-3, the text 1.5e-3 with a batch size of 4096.
        optimizer={"lr": 1e-3, "weight_decay": 0.02},
        schedule={"length": f"{epochs} epochs"},
        about=About(PAPER, f"Table 6.5, {epochs} epochs", top1(score) + (" after fine-tuning" if score else "")),
    )


def finetuned(name: str, pretrained: str, size: int, drop_path: float, score: float) -> Recipe:
    """Table 6.5: fine-tuning on ImageNet-1k."""
    return change(
        pretrained,
        name,
        architecture=drop_path_fields(drop_path),
        init={"pretrained_recipe": pretrained},
        augmentation={"image_size": (size, size)},
        optimizer={"lr": 3e-4},
        schedule={"length": "50 epochs"},
        about={"row": f"Table 6.5, {size}", "expected": top1(score)},
    )


# Tables 6.5 and 6.14: pixels, epochs, drop-path, top-1 after fine-tuning on ImageNet-1k.
PRETRAINED: list[tuple[str, int, int, float, float | None]] = [
    ("small", 224, 240, 0.05, 83.1),
    ("base", 224, 240, 0.1, 85.7),
    ("large", 224, 240, 0.3, 87.0),
    ("huge", 128, 90, 0.5, 87.2),
    ("tiny", 224, 90, 0.0, None),
    ("small", 224, 90, 0.0, 82.6),
    ("base", 224, 90, 0.1, 85.2),
    ("large", 224, 90, 0.3, 86.8),
]
#         drop-path, top-1 at 224, at 384
TUNED: dict[str, tuple[float, dict[int, float]]] = {
    "small": (0.05, {224: 83.1, 384: 84.8}),
    "base": (0.15, {224: 85.7, 384: 86.7}),
    "large": (0.4, {224: 87.0, 384: 87.7}),
    "huge": (0.45, {224: 87.2}),
}
for _model, _size, _epochs, _drop, _score in PRETRAINED:
    _name = f"deit3_{_model}_21k" + ("_90ep" if _epochs == 90 and _model != "huge" else "")
    RECIPES.add(_name, pretraining, _model, _size, _epochs, _drop, _score)
for _model, (_drop, _scores) in TUNED.items():
    _base = f"deit3_{_model}_21k"
    for _size, _score in _scores.items():
        RECIPES.add(f"{_base}_to_1k" + (f"_{_size}" if _size != 224 else ""), finetuned, _base, _size, _drop, _score)

# Table 6.1, the columns of other papers; "adapted" cells are off.
RECIPES.derive(
    "deit3_base_as_vit",
    "deit_base",
    **NO_REPEATS,
    batch_size=4096,
    architecture={"drop_path": 0.0, "dropout": 0.1},
    augmentation={"policy": "none", "random_erasing": 0.0},
    mixing={"mixup": 0.0, "cutmix": 0.0},
    optimizer={"lr": 3e-3, "lr_batch_size": 0, "weight_decay": 0.1, "clip_grad_norm": 1.0},
    schedule=ScheduleConfig(length="300 epochs", warmup="4 epochs", warmup_lr=0.0),  # of ViT's paper; the warmup is "3-4"
    ema={"decay": 0.0},
    about=About(PAPER, "Table 6.1, ViT", "not published"),
)
RECIPES.derive(
    "deit3_base_as_steiner",
    "deit3_base_as_vit",
    architecture={"drop_path": 0.1},
    optimizer={"weight_decay": 0.3},
    about={"row": "Table 6.1, Steiner et al.; RandAugment and mixup are adapted to the model there"},
)
RECIPES.derive("deit3_base_as_deit", "deit_base", about=About(PAPER, "Table 6.1, DeiT", top1(81.8)))
RECIPES.derive(
    "deit3_base_as_rsb",
    "deit_base",
    batch_size=2048,
    augmentation={"magnitude": 7.0, "random_erasing": 0.0},
    mixing={"mixup": 0.2},
    loss={"kind": "binary", "label_smoothing": 0.0},
    optimizer=LAMB | {"lr": 5e-3, "weight_decay": 0.02},
    validation={"crop_ratio": 0.95},
    about=About(PAPER, "Table 6.1, Wightman et al.", "not published"),
)
RECIPES.derive(
    "deit3_small_as_a2",
    "deit3_base_as_rsb",
    model="deit_small_patch16",
    architecture={"drop_path": 0.05, "drop_path_schedule": "uniform"},
    mixing={"mixup": 0.1},  # the table prints 0.2, which is A1's
    schedule={"min_lr": 1e-6},
    about={"row": "Section 6.3.4, A2", "expected": top1(79.6)},
)

# Table 6.12: mIoU at one and at several scales.
for _model, _mious in {"base": (51.8, 52.8), "large": (53.8, 54.7)}.items():
    _base = f"deit3_{_model}_21k_90ep"
    add_segmentation(RECIPES, PAPER, "Table 6.12, pre-trained on ImageNet-21k", _base, f"deit3_{_model}_21k", _mious)

PLAIN_21K = {"architecture.residual": "plain", "mixing.mixup": 0.8, "augmentation.policy": "rand"}
SCALED_21K = PLAIN_21K | {"architecture.residual": "layerscale"}
WIDE_21K = PLAIN_21K | {"augmentation.crop": "random_resized"}
# A recipe, its changes, top-1: policies (Table 6.3), color jitter (Table 6.2), the steps over ImageNet-21k (Table 6.5).
ABLATIONS: dict[str, tuple[str, dict[str, Any], float]] = {
    "AutoAugment, ViT-B": ("deit3_base_400ep", {"augmentation.policy": "auto"}, 82.8),
    "RandAugment, ViT-B": ("deit3_base_400ep", {"augmentation.policy": "rand"}, 82.7),
    "TrivialAugment, ViT-B": ("deit3_base_400ep", {"augmentation.policy": "trivial"}, 82.3),
    "AutoAugment, ViT-L": ("deit3_large_400ep", {"augmentation.policy": "auto"}, 84.0),
    "RandAugment, ViT-L": ("deit3_large_400ep", {"augmentation.policy": "rand"}, 84.0),
    "TrivialAugment, ViT-L": ("deit3_large_400ep", {"augmentation.policy": "trivial"}, 83.6),
    "jitter alone": ("deit3_base_400ep", {"augmentation.policy": "none"}, 81.4),
    "no jitter": ("deit3_base_400ep", {"augmentation.color_jitter": (0.0, 0.0, 0.0, 0.0)}, 83.1),
    "21k: random resized crops, no LayerScale": ("deit3_base_21k_90ep", WIDE_21K, 84.6),
    "21k: no LayerScale": ("deit3_base_21k_90ep", PLAIN_21K, 84.8),
    "21k: mixup and RandAugment": ("deit3_base_21k_90ep", SCALED_21K, 85.0),
    "21k: RandAugment": ("deit3_base_21k_90ep", {"augmentation.policy": "rand"}, 85.1),
}
