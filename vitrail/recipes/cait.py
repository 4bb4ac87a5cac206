"""CaiT: "Going deeper with image transformers" (arXiv 2103.17239).

DeiT's training for 400 epochs with a drop-path rate per model, the same in every block. Names are `cait_{model}`,
`cait_{model}_distilled` with a teacher (hard, without a token), and `…_to_{size}` for fine-tuning at a larger size, where the
teacher goes on, `…_to_{data}` for transfers, where it does not.
"""

from typing import Any

from vitrail.recipes.deit import DEIT, TEACHER, taught
from vitrail.recipes.derivation import change, dropping, named, top1
from vitrail.recipes.schema import About, DistillationConfig, Recipe

PAPER = "CaiT, arXiv 2103.17239"

CAIT = change(
    DEIT,
    "cait_s36",
    schedule={"length": "400 epochs"},
    validation={"crop_ratio": 1.0},
    about=About(PAPER),
)
#   drop-path; top-1 at 224, at 384; both with a teacher (Tables 3 and 4)
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


def larger(base: Recipe, size: int, score: float | None) -> Recipe:
    """Fine-tuning at a larger size. One list was released, that of the distilled M-48 at 448; it serves all models here."""
    drop_path = 0.3 if base.model == "cait_m48" else base.architecture["drop_path"]
    teacher = f", {TEACHER}" if base.distillation.kind != "none" else ""
    return change(
        base,
        f"{base.name}_to_{size}",
        architecture=dropping(drop_path),
        batch_size=256,
        init={"pretrained_recipe": base.name},
        augmentation={"image_size": (size, size)},
        optimizer={"lr": 5e-6, "lr_batch_size": 0},
        schedule={"length": "60 epochs", "kind": "step", "step_size": "10 epochs", "gamma": 0.5, "min_lr": 0.0},
        about={"row": ("Table 3, at 384" if size == 384 else "Table 5, at 448") + teacher, "expected": top1(score)},
    )


RECIPES: dict[str, Recipe] = {}
for _size, (_drop, _score, _larger, _taught, _taught_larger) in SIZES.items():
    # The released code starts LayerScale of XXS-36 at 1e-5, the paper's table at 1e-6.
    _start = {"layerscale_init": 1e-5} if _size == "xxs36" else {}
    _recipe = change(
        CAIT,
        f"cait_{_size}",
        model=f"cait_{_size}",
        architecture=dropping(_drop) | _start,
        about={"row": f"Tables 3 and 4, {_size}", "expected": top1(_score)},
    )
    _distilled = taught(_recipe, f"{_recipe.name}_distilled", f"Tables 3 and 4, {_size}", _taught)
    RECIPES |= named(_recipe, _distilled)
    if _larger:
        RECIPES |= named(larger(_recipe, 384, _larger), larger(_distilled, 384, _taught_larger))
for _size, _score in (("m36", 86.3), ("m48", 86.5)):
    RECIPES |= named(larger(RECIPES[f"cait_{_size}"], 448, None), larger(RECIPES[f"cait_{_size}_distilled"], 448, _score))
for _size, _score in (("xxs24", 78.5), ("m24", 84.7)):  # a token beside the class vector in class-attention
    _name, _row = f"cait_{_size}_distilled_token", f"Table B.1, {_size}, distillation token"
    RECIPES |= named(taught(RECIPES[f"cait_{_size}"], _name, _row, _score, architecture={"distillation": True}))

#          the rate is divided by, epochs
TRANSFERS = {
    "cifar10": (100, 1000),
    "cifar100": (100, 1000),
    "flowers": (10, 1000),
    "cars": (10, 1000),
    "inat18": (10, 360),
    "inat19": (10, 360),
}


def transfers(base: Recipe, row: str, scores: tuple[float, ...], **changes: Any) -> dict[str, Recipe]:
    """The rule of Section 4.4.3: as in training, with a smaller rate; `scores` in the order of TRANSFERS."""
    found = {}
    for (data, (divisor, epochs)), score in zip(TRANSFERS.items(), scores, strict=True):
        recipe = change(
            base,
            f"{base.name}_to_{data}",
            init={"pretrained_recipe": base.name},
            optimizer={"lr": round(base.optimizer.lr / divisor, 9)},
            schedule={"length": f"{epochs} epochs"},
            about={"row": row, "expected": top1(score, data), "hardware": ""},
        )
        found[recipe.name] = change(recipe, recipe.name, **changes)
    return found


for _size, _scores in {"s36": (99.2, 92.2, 98.8, 93.5, 77.1, 80.6), "m36": (99.3, 93.3, 99.0, 93.5, 76.9, 81.7)}.items():
    RECIPES |= transfers(RECIPES[f"cait_{_size}"], "Table 7", _scores, validation={"crop_ratio": 0.875})
ALONE: dict[str, Any] = {"validation": {"crop_ratio": 0.875}, "distillation": DistillationConfig()}
for _size, _scores in {"s36": (99.2, 92.2, 99.0, 94.1, 77.0, 81.4), "m36": (99.4, 93.1, 99.1, 94.2, 78.0, 81.8)}.items():
    RECIPES |= transfers(RECIPES[f"cait_{_size}_distilled"], "Table 7, from distilled weights", _scores, **ALONE)

# Table 1, the plain DeiT-S at several depths with the drop-path rate that suits each: changes of `deit_small`, and top-1.
CENTRE = {"validation.crop_ratio": 0.875}
UNIFORM = {"architecture.drop_path_schedule": "uniform"}
ABLATIONS: dict[str, tuple[str, dict[str, Any], float]] = {
    "12 blocks": ("deit_small", {"architecture.depth": 12, "architecture.drop_path": 0.05} | UNIFORM, 79.9),
    "18 blocks": ("deit_small", {"architecture.depth": 18, "architecture.drop_path": 0.1} | UNIFORM, 80.7),
    "24 blocks": ("deit_small", {"architecture.depth": 24, "architecture.drop_path": 0.2} | UNIFORM, 81.0),
    "36 blocks": ("deit_small", {"architecture.depth": 36, "architecture.drop_path": 0.25} | UNIFORM, 81.9),
    "S-36, 500 epochs": ("cait_s36", {"schedule.length": "500 epochs", "validation.crop_ratio": 0.875}, 83.42),
    # Table 10, what a test at the usual crop gives
    "S-36 distilled, crop 0.875": ("cait_s36_distilled", CENTRE, 83.7),
    "M-36 distilled, crop 0.875": ("cait_m36_distilled", CENTRE, 84.8),
    "S-36 distilled at 384, crop 0.875": ("cait_s36_distilled_to_384", CENTRE, 85.2),
    "M-36 distilled at 384, crop 0.875": ("cait_m36_distilled_to_384", CENTRE, 85.9),
}
