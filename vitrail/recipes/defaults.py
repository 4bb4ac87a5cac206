"""Recipes of our own, for one's own images; size and patches are chosen by the images.

`laptop` trains a tiny network on a CPU in minutes; `small` trains from scratch on one GPU with a few thousand to a hundred
thousand small images; `finetune` starts from weights (`init.weights=`) and is what to try first with photographs.
"""

from vitrail.data.transforms.pipeline import Augmentation
from vitrail.recipes.schema import (
    About,
    EmaConfig,
    InitConfig,
    LossConfig,
    MixingConfig,
    OptimizerConfig,
    Recipe,
    ScheduleConfig,
    ValidationConfig,
)

ANY = (0, 0)

LAPTOP = Recipe(
    name="laptop",
    model="vitrail_mini",
    batch_size=64,
    # No mirror images: digits and letters are not their own. For photographs: augmentation.hflip=0.5.
    augmentation=Augmentation(image_size=ANY, scale=(0.5, 1.0), hflip=0.0),
    loss=LossConfig(label_smoothing=0.1),
    optimizer=OptimizerConfig(lr=2e-3, weight_decay=0.05, clip_grad_norm=1.0),
    schedule=ScheduleConfig(length="30 epochs", warmup="10%"),
    validation=ValidationConfig(crop_ratio=1.0),
    about=About(
        "vitrail",
        "a first run on a CPU",
        "digits: 99.4 ± 0.6 % validation, 97.4 ± 0.5 % test (5 seeds)",
        "two CPU cores, a minute",
    ),
)
SMALL = Recipe(
    name="small",
    model="vitrail_small",
    architecture={"drop_path": 0.1},
    batch_size=512,
    augmentation=Augmentation(image_size=ANY, crop="simple", policy="rand", num_ops=1, random_erasing=0.25),
    mixing=MixingConfig(mixup=0.1, cutmix=1.0),
    loss=LossConfig(label_smoothing=0.1),
    optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.05, clip_grad_norm=1.0),
    schedule=ScheduleConfig(length="200 epochs", warmup="5%", min_lr=1e-5),
    ema=EmaConfig(decay=0.999, evaluate=True, warmup=True),
    validation=ValidationConfig(crop_ratio=1.0),
    about=About(
        "vitrail",
        "from scratch on one GPU",
        "CIFAR-10, 230 epochs: 96.3 %; Tiny ImageNet, 90 epochs, more regularized: 64.9 %, taught by that: 68.8 % (1 seed each)",
        "one GPU; CIFAR-10 in about seven minutes, reckoned from images/s alone on an H200; the run itself shared the card",
    ),
)
FINETUNE = Recipe(
    name="finetune",
    model="deit3_small_patch16",
    architecture={"drop_path": 0.1},
    batch_size=128,
    init=InitConfig(zero_head=True),
    augmentation=Augmentation(image_size=ANY, scale=(0.35, 1.0), policy="rand", magnitude=6.0),
    mixing=MixingConfig(mixup=0.2),
    loss=LossConfig(label_smoothing=0.1),
    optimizer=OptimizerConfig(lr=2e-3, weight_decay=0.05, clip_grad_norm=1.0, layer_decay=0.75),
    schedule=ScheduleConfig(length="20 epochs", warmup="10%"),
    validation=ValidationConfig(crop_ratio=1.0),
    about=About(
        "vitrail",
        "from any checkpoint, on one GPU",
        "pets, --from vitrail_tiny: 80.1 ± 1.8 % validation, 75.9 ± 1.0 % test (6 seeds)",
        "one GPU; the pets in ten minutes on a CPU",
    ),
)
RECIPES = {recipe.name: recipe for recipe in (LAPTOP, SMALL, FINETUNE)}
