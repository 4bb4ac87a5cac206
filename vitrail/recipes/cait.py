"""CaiT: "Going deeper with image transformers" (arXiv 2103.17239).

DeiT's training for 400 epochs with a drop-path rate per model, the same in every block. Names are `cait_{model}`,
`cait_{model}_distilled` with a teacher (hard, without a token), `…_to_{size}` for fine-tuning at a larger size, where the teacher
is kept, and `…_to_{data}` for transfers, where it is not.

    vitrail train imagenet/ --recipe cait_s24
"""

from typing import Any

from vitrail.recipes.deit import TEACHER, distilled
from vitrail.recipes.derivation import Page, change, drop_path_fields, top1
from vitrail.recipes.lookup import lookup
from vitrail.recipes.schema import About, DistillationConfig, Recipe

PAPER = "CaiT, arXiv 2103.17239"
RECIPES = Page()


def from_scratch(name: str, size: str, drop_path: float, score: float | None) -> Recipe:
    """Tables 3 and 4, for example 83.3 % top-1 for S-36."""
    # The released code initializes LayerScale of XXS-36 to 1e-5, the paper's table says 1e-6.
    layerscale = {"layerscale_init": 1e-5} if size == "xxs36" else {}
    return change(
        "deit_base",
        name,
        model=f"cait_{size}",
        architecture=drop_path_fields(drop_path) | layerscale,
        schedule={"length": "400 epochs"},
        validation={"crop_ratio": 1.0},
        about=About(PAPER, f"Tables 3 and 4, {size}", top1(score)),
    )


def finetuned(name: str, pretrained: str, size: int, score: float | None) -> Recipe:
    """Fine-tuning at a larger size. Only those of the distilled M-48 at 448 were released; they serve for all models."""
    base = lookup(pretrained)
    drop_path = 0.3 if base.model == "cait_m48" else base.architecture["drop_path"]
    teacher = f", {TEACHER}" if base.distillation.kind != "none" else ""
    return change(
        base,
        name,
        architecture=drop_path_fields(drop_path),
        batch_size=256,
        init={"pretrained_recipe": pretrained},
        augmentation={"image_size": (size, size)},
        optimizer={"lr": 5e-6, "lr_batch_size": 0},
        schedule={"length": "60 epochs", "kind": "step", "step_size": "10 epochs", "gamma": 0.5, "min_lr": 0.0},
        about={"row": ("Table 3, at 384" if size == 384 else "Table 5, at 448") + teacher, "expected": top1(score)},
    )


#   drop-path rate; top-1 at 224, at 384; both with a teacher (Tables 3 and 4)
SIZES: dict[str, tuple[float, float | None, float | None, float | None, float | None]] = {
    "xxs24": (0.05, 77.6, 80.4, 78.4, 80.9),
    "xxs36": (0.1, 79.1, 81.8, 79.7, 82.2),
    "xs24": (0.05, 81.8, 83.8, 82.0, 84.1),
    "xs36": (0.1, 82.6, 84.3, 82.9, 84.8),
    "s24": (0.1, 82.7, 84.3, 83.5, 85.1),
    "s36": (0.2, 83.3, 85.0, 84.0, 85.4),
    "s48": (0.3, 83.5, 85.1, 83.9, 85.3),
    "m24": (0.2, 83.4, 84.5, 84.7, 85.8),
    "m36": (0.3, 83.8, 84.9, 85.1, 86.1),
    "m48": (0.4, None, None, None, None),
}
for _size, (_drop, _score, _larger, _distilled, _distilled_larger) in SIZES.items():
    _base = f"cait_{_size}"
    RECIPES.add(_base, from_scratch, _size, _drop, _score)
    RECIPES.add(f"{_base}_distilled", distilled, _base, f"Tables 3 and 4, {_size}", _distilled)
    if _larger:
        RECIPES.add(f"{_base}_to_384", finetuned, _base, 384, _larger)
        RECIPES.add(f"{_base}_distilled_to_384", finetuned, f"{_base}_distilled", 384, _distilled_larger)
for _base, _score in (("cait_m36", 86.3), ("cait_m48", 86.5)):
    RECIPES.add(f"{_base}_to_448", finetuned, _base, 448, None)
    RECIPES.add(f"{_base}_distilled_to_448", finetuned, f"{_base}_distilled", 448, _score)
for _size, _score in (("xxs24", 78.5), ("m24", 84.7)):  # a distillation token beside the class token in class-attention
    _row, _token = f"Table B.1, {_size}, distillation token", {"distillation": True}
    RECIPES.add(f"cait_{_size}_distilled_token", distilled, f"cait_{_size}", _row, _score, architecture=_token)

#          divisor of the learning rate, epochs
TRANSFERS = {
    "cifar10": (100, 1000),
    "cifar100": (100, 1000),
    "flowers": (10, 1000),
    "cars": (10, 1000),
    "inat18": (10, 360),
    "inat19": (10, 360),
}


def transfer(name: str, pretrained: str, target: str, row: str, score: float, **changes: Any) -> Recipe:
    """The rule of Section 4.4.3: the settings of the pre-training with a lower learning rate."""
    base, (divisor, epochs) = lookup(pretrained), TRANSFERS[target]
    return change(
        base,
        name,
        init={"pretrained_recipe": pretrained},
        optimizer={"lr": round(base.optimizer.lr / divisor, 9)},
        schedule={"length": f"{epochs} epochs"},
        about={"row": row, "expected": top1(score, target), "hardware": ""},
        **changes,
    )


def add_transfers(page: Page, pretrained: str, row: str, scores: tuple[float, ...], suffix: str = "", **changes: Any) -> None:
    """The six transfers of a recipe; `scores` in the order of TRANSFERS."""
    for target, score in zip(TRANSFERS, scores, strict=True):
        page.add(f"{pretrained}_to_{target}{suffix}", transfer, pretrained, target, row, score, **changes)


CENTER_CROP: dict[str, Any] = {"validation": {"crop_ratio": 0.875}}
NO_TEACHER: dict[str, Any] = CENTER_CROP | {"distillation": DistillationConfig()}
for _size, _scores in {"s36": (99.2, 92.2, 98.8, 93.5, 77.1, 80.6), "m36": (99.3, 93.3, 99.0, 93.5, 76.9, 81.7)}.items():
    add_transfers(RECIPES, f"cait_{_size}", "Table 7", _scores, **CENTER_CROP)
for _size, _scores in {"s36": (99.2, 92.2, 99.0, 94.1, 77.0, 81.4), "m36": (99.4, 93.1, 99.1, 94.2, 78.0, 81.8)}.items():
    add_transfers(RECIPES, f"cait_{_size}_distilled", "Table 7, from distilled weights", _scores, **NO_TEACHER)

# Table 1, the plain DeiT-S at several depths, each with its best drop-path rate: changes of `deit_small`, and top-1.
CROP = {"validation.crop_ratio": 0.875}
UNIFORM = {"architecture.drop_path_schedule": "uniform"}
ABLATIONS: dict[str, tuple[str, dict[str, Any], float]] = {
    "12 blocks": ("deit_small", {"architecture.depth": 12, "architecture.drop_path": 0.05} | UNIFORM, 79.9),
    "18 blocks": ("deit_small", {"architecture.depth": 18, "architecture.drop_path": 0.1} | UNIFORM, 80.7),
    "24 blocks": ("deit_small", {"architecture.depth": 24, "architecture.drop_path": 0.2} | UNIFORM, 81.0),
    "36 blocks": ("deit_small", {"architecture.depth": 36, "architecture.drop_path": 0.25} | UNIFORM, 81.9),
    "S-36, 500 epochs": ("cait_s36", {"schedule.length": "500 epochs"} | CROP, 83.42),
    # Table 10, evaluation at the usual crop
    "S-36 distilled, crop 0.875": ("cait_s36_distilled", CROP, 83.7),
    "M-36 distilled, crop 0.875": ("cait_m36_distilled", CROP, 84.8),
    "S-36 distilled at 384, crop 0.875": ("cait_s36_distilled_to_384", CROP, 85.2),
    "M-36 distilled at 384, crop 0.875": ("cait_m36_distilled_to_384", CROP, 85.9),
}
