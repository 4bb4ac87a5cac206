"""Valid ranges of a recipe's numbers; values outside of them would make a training fail late or learn nothing."""

import math
from typing import Any

from vitrail.errors import UserError

ABOVE_ZERO = math.ulp(0.0)
BELOW_ONE = math.nextafter(1.0, 0.0)
FRACTION = (0.0, 1.0)
POSITIVE = (ABOVE_ZERO, math.inf)
NOT_NEGATIVE = (0.0, math.inf)
# For tuples, of every element. Values that are not listed may be any number.
LIMITS: dict[str, tuple[float, float]] = {
    "seed": (0, 2**63 - 1),
    "batch_size": (1, math.inf),
    "group_size": NOT_NEGATIVE,
    "data.repeats": (1, math.inf),
    "data.round_to": (1, math.inf),
    "data.validation_fraction": (0.0, BELOW_ONE),
    "data.folds": (0, 1000),
    "data.decode_scale": NOT_NEGATIVE,
    "augmentation.scale": (ABOVE_ZERO, 1.0),
    "augmentation.ratio": POSITIVE,
    "augmentation.factors": (0.05, 20.0),
    "augmentation.padding": NOT_NEGATIVE,
    "augmentation.magnitude": NOT_NEGATIVE,
    "augmentation.magnitude_std": NOT_NEGATIVE,
    "augmentation.num_ops": (1, math.inf),
    "augmentation.color_jitter": NOT_NEGATIVE,
    "augmentation.std": POSITIVE,
    **{
        f"augmentation.{name}": FRACTION
        for name in ("hflip", "color_jitter_prob", "grayscale", "blur", "solarize", "random_erasing")
    },
    "mixing.mixup": NOT_NEGATIVE,
    "mixing.cutmix": NOT_NEGATIVE,
    "mixing.switch_prob": FRACTION,
    "loss.label_smoothing": (0.0, BELOW_ONE),
    "distillation.weight": FRACTION,
    "distillation.temperature": POSITIVE,
    "distillation.label_smoothing": (0.0, BELOW_ONE),
    "token_labels.weight": NOT_NEGATIVE,
    "token_labels.mixtoken": NOT_NEGATIVE,
    "optimizer.lr": NOT_NEGATIVE,
    "optimizer.lr_batch_size": NOT_NEGATIVE,
    "optimizer.betas": (0.0, BELOW_ONE),
    "optimizer.eps": POSITIVE,
    "optimizer.momentum": (0.0, BELOW_ONE),
    "optimizer.weight_decay": NOT_NEGATIVE,
    "optimizer.clip_grad_norm": NOT_NEGATIVE,
    "optimizer.max_trust_ratio": NOT_NEGATIVE,
    "optimizer.layer_decay": (ABOVE_ZERO, 1.0),
    "schedule.warmup_lr": NOT_NEGATIVE,
    "schedule.min_lr": NOT_NEGATIVE,
    "schedule.lag_epochs": NOT_NEGATIVE,
    "schedule.gamma": FRACTION,
    "schedule.milestones": FRACTION,
    "ema.decay": (0.0, BELOW_ONE),
    "validation.patience": NOT_NEGATIVE,
    "validation.crop_ratio": (ABOVE_ZERO, 1.0),
}
ORDERED = ("augmentation.scale", "augmentation.ratio", "augmentation.factors")  # minimum, maximum
FROM_DATA = ("classes", "channels", "image_size")  # architecture fields that follow from the data


def check_limits(leaves: dict[str, Any]) -> None:
    """Raises an error for the first value that is out of range."""
    for name, (low, high) in LIMITS.items():
        value = leaves[name]
        if not all(low <= part <= high for part in (value if isinstance(value, tuple) else (value,))):
            raise UserError(f"{name} must {describe_range(low, high)}.")
    if leaves["group_size"] == 1:
        raise UserError("group_size=1 leaves nothing to mix or to normalize: give at least 2, or 0 for the whole batch.")
    for name in ORDERED:
        if leaves[name][0] > leaves[name][1]:
            raise UserError(f"{name} must be [minimum, maximum], not [{leaves[name][0]}, {leaves[name][1]}].")
    if not len(leaves["augmentation.mean"]) == len(leaves["augmentation.std"]) == 3:
        raise UserError("augmentation.mean and augmentation.std must each have three numbers: red, green and blue.")
    for field in FROM_DATA:
        if f"architecture.{field}" in leaves:
            hint = "; set augmentation.image_size instead" if field == "image_size" else ""
            raise UserError(f"architecture.{field} follows from the data and cannot be set{hint}.")


def describe_range(low: float, high: float) -> str:
    """The end of the sentence "NAME must …"."""
    if high == math.inf:
        return {0.0: "not be negative", ABOVE_ZERO: "be greater than 0"}.get(low, f"be at least {low:g}")
    if (low, high) == (0, 2**63 - 1):
        return "be an integer from 0 to 2^63 - 1"
    return f"lie in {'(0' if low == ABOVE_ZERO else f'[{low:g}'}, {'1)' if high == BELOW_ONE else f'{high:g}]'}"
