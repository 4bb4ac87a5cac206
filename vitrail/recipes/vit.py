"""ViT: "An image is worth 16x16 words" (arXiv 2010.11929).

Pre-training (Table 3) is `{model}_{data}[_{length}]` with the data sets `jft`, `21k` and `1k`; fine-tuning (Table 4) is
`{model}_to_{data}[_{size}]`. Values that the paper does not give are those of the released code: clipping at 1, weight decay on
kernels alone, a linear decay to 1e-5, sigmoids with a bias of -10 for the large data sets, TensorFlow's crops and bilinear
resizing without antialias, pixels in [-1, 1].

    vitrail train imagenet/ --recipe vit_base_patch16_1k
"""

from typing import Any

from vitrail.data.transforms.config import NO_ANTIALIAS, Augmentation
from vitrail.recipes.derivation import Page, change, top1
from vitrail.recipes.schema import About, InitConfig, LossConfig, OptimizerConfig, Recipe, ScheduleConfig, ValidationConfig

WIDTHS = {"base": 768, "large": 1024, "huge": 1280}
SOFTMAX: dict[str, Any] = {"loss": {"kind": "cross_entropy", "binary_sum": False}}
RECIPES = Page()

#                   epochs, learning rate, ImageNet after fine-tuning, exaFLOPs (Table 6)
JFT = {
    "vit_base_patch16": (7, 8e-4, 84.15, 224),
    "vit_base_patch32": (7, 8e-4, 80.73, 55),
    "vit_large_patch32": (7, 6e-4, 84.37, 196),
    "vit_large_patch16": (14, 4e-4, 87.12, 1567),
    "vit_huge_patch14": (14, 3e-4, 88.08, 4262),
    "bit_r50x1": (7, 1e-3, 77.54, 50),
    "bit_r50x2": (7, 1e-3, 82.12, 199),
    "bit_r101x1": (7, 8e-4, 80.67, 96),
    "bit_r152x1": (7, 6e-4, 81.88, 141),
    "bit_r152x2": (7, 6e-4, 84.97, 563),
    "vit_base_r50_s16": (7, 8e-4, 85.58, 274),
    "vit_base_r50_s32": (7, 8e-4, 84.90, 106),
    "vit_large_r50_s32": (7, 2e-4, 85.68, 246),
    "vit_large_r50_s16": (14, 4e-4, 87.12, 1668),
}
# Precision at the end of the pre-training on ImageNet-21k.
LARGE = {"base_patch16": 47.88, "base_patch32": 44.04, "large_patch16": 49.90, "large_patch32": 45.42, "huge_patch14": 49.06}
#                   top-1 at 224, after fine-tuning at 384
SMALL = {
    "vit_base_patch16": (74.79, 77.91),
    "vit_base_patch32": (69.19, 73.38),
    "vit_large_patch16": (72.59, 76.53),
    "vit_large_patch32": (66.90, 71.16),
}
# Table 5, from ImageNet-21k, and Table 2 for VTAB.
RESULTS = {
    "vit_base_patch16": {"imagenet": 83.97, "cifar100": 91.67, "cifar10": 98.95, "pets": 94.43, "flowers": 99.38},
    "vit_base_patch32": {"imagenet": 81.28, "cifar100": 91.97, "cifar10": 98.79, "pets": 93.02, "flowers": 99.11},
    "vit_large_patch16": {"imagenet": 85.15, "cifar100": 93.44, "cifar10": 99.16, "pets": 94.73, "flowers": 99.61, "vtab": 72.72},
    "vit_large_patch32": {"imagenet": 80.99, "cifar100": 93.04, "cifar10": 99.13, "pets": 93.09, "flowers": 99.19},
    "vit_huge_patch14": {"imagenet": 85.13, "cifar100": 93.82, "cifar10": 99.27, "pets": 94.82, "flowers": 99.51},
}


def pretraining(name: str, model: str, data: str, epochs: int, expected: str) -> Recipe:
    """Table 3, by default on ImageNet-21k. The head has a hidden layer as wide as the model; the ResNets have none."""
    return Recipe(
        name=name,
        model=model,
        architecture={"dropout": 0.1, "pre_logits": WIDTHS.get(model.split("_")[1], 0)},
        batch_size=4096,
        init=InitConfig(head_bias=-10.0),
        augmentation=Augmentation(
            crop="distorted_box",
            scale=(0.05, 1.0),
            ratio=(0.75, 1.33),
            interpolation=NO_ANTIALIAS,
            mean=(0.5,) * 3,
            std=(0.5,) * 3,
        ),
        loss=LossConfig(kind="binary", binary_sum=True),
        optimizer=OptimizerConfig(
            kind="adamw", lr=1e-3, betas=(0.9, 0.999), weight_decay=0.03, weight_decay_on="kernels", clip_grad_norm=1.0
        ),
        schedule=ScheduleConfig(length=f"{epochs} epochs", warmup="10000 steps", warmup_lr=0.0, kind="linear", min_lr=1e-5),
        validation=ValidationConfig(crop_ratio=1.0, resize="square", interpolation=NO_ANTIALIAS),
        about=About("ViT, arXiv 2010.11929", f"Table 3, {data}", expected),
    )


def jft(name: str, model: str, epochs: int, lr: float, score: float, cost: int) -> Recipe:
    """Tables 3 and 6: JFT-300M."""
    return change(
        pretraining(name, model, "jft", epochs, f"{top1(score)} after fine-tuning at 384"),
        name,
        architecture={"dropout": 0.0},
        optimizer={"lr": lr, "weight_decay": 0.1},
        about={"hardware": f"{cost} exaFLOPs"},
    )


def imagenet_1k(name: str, model: str, score: float, finetuned: float) -> Recipe:
    """Tables 3 and 5: ImageNet-1k from scratch."""
    return change(
        pretraining(name, model, "1k", 300, f"{top1(score)} at 224, {finetuned} % after fine-tuning at 384"),
        name,
        **SOFTMAX,
        init={"head_bias": 0.0},
        optimizer={"lr": 3e-3, "weight_decay": 0.3},
        schedule={"kind": "cosine", "min_lr": 0.0},
    )


for _model, _row in JFT.items():
    RECIPES.add(f"{_model}_jft", jft, _model, *_row)
for _model, _score in {"vit_large_patch16": 86.30, "vit_large_r50_s16": 86.60}.items():
    _about = {"expected": f"{top1(_score)} after fine-tuning at 384", "hardware": ""}
    RECIPES.derive(f"{_model}_jft_7ep", f"{_model}_jft", schedule={"length": "7 epochs"}, about=_about)
for _size, _precision in LARGE.items():
    _expected = f"{_precision} % on the 21k classes, {top1(RESULTS[f'vit_{_size}']['imagenet'])} after fine-tuning at 384"
    RECIPES.add(f"vit_{_size}_21k", pretraining, f"vit_{_size}", "21k", 90, _expected)
for _name in ("vit_large_patch16_21k", "vit_large_patch32_21k"):
    RECIPES.derive(f"{_name}_30ep", _name, schedule={"length": "30 epochs"}, about={"expected": top1(None), "hardware": ""})
for _model, (_score, _finetuned) in SMALL.items():
    RECIPES.add(f"{_model}_1k", imagenet_1k, _model, _score, _finetuned)


LEARNING_RATES = (0.001, 0.003, 0.01, 0.03)
#      steps, warmup, learning rate; the learning rates tried, and on which fraction of the training images
TARGETS: dict[str, tuple[int, int, float, tuple[float, ...], float]] = {
    "imagenet": (20000, 500, 0.03, (0.003, 0.01, 0.03, 0.06), 0.01),
    "cifar100": (10000, 500, 0.03, LEARNING_RATES, 0.02),
    "cifar10": (10000, 500, 0.01, LEARNING_RATES, 0.02),
    "pets": (500, 100, 0.03, LEARNING_RATES, 0.1),
    "flowers": (500, 100, 0.03, LEARNING_RATES, 0.1),
    "vtab": (2500, 500, 0.01, (0.01,), 0.2),  # one for all 19 tasks
}


def finetuned(name: str, model: str, data: str, score: float | None) -> Recipe:
    """Table 4: SGD at 384 pixels, from ImageNet-21k."""
    steps, warmup, lr, lr_grid, fraction = TARGETS[data]
    return change(
        f"{model}_21k",
        name,
        **SOFTMAX,
        architecture={"pre_logits": 0, "dropout": 0.1 if model in ("vit_large_patch16", "vit_huge_patch14") else 0.0},
        batch_size=512,
        init={"zero_head": True, "head_bias": 0.0, "pretrained_recipe": f"{model}_21k"},
        augmentation={"image_size": (384, 384)},
        optimizer={"kind": "sgd", "lr": lr, "momentum": 0.9, "nesterov": False, "weight_decay": 0.0},
        schedule={"kind": "cosine", "min_lr": 0.0, "length": f"{steps} steps", "warmup": f"{warmup} steps"},
        about={
            "row": f"Table 4, {data}",
            "expected": f"{top1(score, data)} from ImageNet-21k" if score else top1(None),
            "lr_grid": lr_grid,
            "validation_fraction": fraction,
        },
    )


def finetuned_from_jft(name: str, model: str, size: int, score: float) -> Recipe:
    """Table 2: fine-tuning at a larger size; the EMA of the weights is reported."""
    return change(
        f"{model}_to_imagenet",
        name,
        init={"pretrained_recipe": f"{model}_jft"},
        augmentation={"image_size": (size, size)},
        ema={"decay": 0.9999, "evaluate": True},
        about={"row": "Table 2, from JFT-300M", "expected": top1(score)},
    )


for _model, _scores in RESULTS.items():
    for _data in TARGETS:
        RECIPES.add(f"{_model}_to_{_data}", finetuned, _model, _data, _scores.get(_data))
for _model, _pixels, _score in (("vit_large_patch16", 512, 87.76), ("vit_huge_patch14", 518, 88.55)):
    RECIPES.add(f"{_model}_to_imagenet_{_pixels}", finetuned_from_jft, _model, _pixels, _score)
