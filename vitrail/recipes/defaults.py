"""Recipes of our own, for one's own pictures; size and patches are chosen by the pictures.

`laptop` trains a tiny network on a CPU in minutes; `small` trains from scratch on one GPU with a few thousand to a hundred
thousand small pictures; `finetune` starts from weights (`start.weights=`) and is what to try first with photographs.
"""

from vitrail.data.transforms.pipeline import Augmentation
from vitrail.recipes.schema import About, Average, Mixing, Objective, Optimiser, Recipe, Schedule, Start, Testing

ANY = (0, 0)

LAPTOP = Recipe(
    name="laptop",
    model="house_mini",
    batch=64,
    # No mirror images: digits and letters are not their own. For photographs: augmentation.flip=0.5.
    augmentation=Augmentation(size=ANY, scale=(0.5, 1.0), flip=0.0),
    objective=Objective(smoothing=0.1),
    optimiser=Optimiser(rate=2e-3, decay=0.05, clip=1.0),
    schedule=Schedule(length="30 epochs", warmup="10%"),
    testing=Testing(crop_ratio=1.0),
    about=About(
        "house",
        "a first run on a CPU",
        "digits: 99.4 ± 0.6 % validation, 97.4 ± 0.5 % test (5 seeds)",
        "two CPU cores, a minute",
    ),
)
SMALL = Recipe(
    name="small",
    model="house_small",
    architecture={"drop_path": 0.1},
    batch=512,
    augmentation=Augmentation(size=ANY, crop="simple", policy="rand", layers=1, erasing=0.25),
    mixing=Mixing(mixup=0.1, cutmix=1.0),
    objective=Objective(smoothing=0.1),
    optimiser=Optimiser(rate=1e-3, decay=0.05, clip=1.0),
    schedule=Schedule(length="200 epochs", warmup="5%", floor=1e-5),
    average=Average(decay=0.999, report=True, ramp=True),
    testing=Testing(crop_ratio=1.0),
    about=About(
        "house",
        "from scratch on one GPU",
        "CIFAR-10, 230 epochs: 96.3 %; Tiny ImageNet, 90 epochs, more regularised: 64.9 %, taught by that: 68.8 % (1 seed each)",
        "one GPU; CIFAR-10 in about seven minutes, reckoned from images/s alone on an H200; the run itself shared the card",
    ),
)
FINETUNE = Recipe(
    name="finetune",
    model="deit3_small_patch16",
    architecture={"drop_path": 0.1},
    batch=128,
    start=Start(zero_head=True),
    augmentation=Augmentation(size=ANY, scale=(0.35, 1.0), policy="rand", magnitude=6.0),
    mixing=Mixing(mixup=0.2),
    objective=Objective(smoothing=0.1),
    optimiser=Optimiser(rate=2e-3, decay=0.05, clip=1.0, layer_decay=0.75),
    schedule=Schedule(length="20 epochs", warmup="10%"),
    testing=Testing(crop_ratio=1.0),
    about=About(
        "house",
        "from any checkpoint, on one GPU",
        "pets, --from house_tiny: 80.1 ± 1.8 % validation, 75.9 ± 1.0 % test (6 seeds)",
        "one GPU; the pets in ten minutes on a CPU",
    ),
)
RECIPES = {recipe.name: recipe for recipe in (LAPTOP, SMALL, FINETUNE)}
