"""Grafit: "Learning fine-grained image representations with coarse labels" (arXiv 2011.12982), its baseline and its transfers.

`grafit_r50` is the training on labels with which the paper compares its losses, `grafit_r50_to_{data}` what is learned from such
a trunk in 240 epochs, `…_to_{data}_384` the long form: 1000 epochs for Flowers and Cars, 300 for Food-101 and iNaturalist,
CutMix, 384 pixels. The trunk is the catalogue's ResNet-50, with GroupNorm in place of BatchNorm; the paper's long rows have a
RegNetY-8GF. Where it is silent the numbers are the usual ones of a ResNet: momentum 0.9, weight decay 1e-4, smoothing 0.1, five
epochs of warm-up. The trunk is tuned too (a sentence of Section 2.4.6 says that it is fixed: `init.scope=head`).
"""

from vitrail.data.transforms.pipeline import Augmentation
from vitrail.recipes.derivation import change, named, top1
from vitrail.recipes.schema import About, LossConfig, OptimizerConfig, Recipe, ScheduleConfig, ValidationConfig

PAPER = "Grafit, arXiv 2011.12982"

BASELINE = Recipe(
    name="grafit_r50",
    model="bit_r50x1",
    batch_size=1024,
    augmentation=Augmentation(policy="rand", magnitude=9.0, magnitude_std=0.5, num_ops=2, random_erasing=0.25),
    loss=LossConfig(label_smoothing=0.1),
    optimizer=OptimizerConfig(
        kind="sgd",
        lr=0.1,
        lr_batch_size=256,
        momentum=0.9,
        nesterov=True,
        weight_decay=1e-4,
        weight_decay_coupled=True,
        weight_decay_on="kernels",
    ),
    schedule=ScheduleConfig(length="600 epochs", warmup="5 epochs", warmup_lr=0.0),
    validation=ValidationConfig(crop_ratio=0.875),
    about=About(PAPER, "Table 2.8, baseline on fine labels", top1(79.3)),
)
RECIPES: dict[str, Recipe] = named(BASELINE)

#         top-1 of the baseline with a linear classifier (Table 2.16); long: epochs, top-1 of Grafit's RegNetY-8GF (Table 2.10)
TRANSFERS = {
    "flowers": (96.2, 1000, 99.1),
    "cars": (90.0, 1000, 94.7),
    "food101": (88.2, 300, 93.7),
    "inat18": (65.0, 300, 81.2),
    "inat19": (72.8, 300, 84.1),
}
for _data, (_score, _epochs, _long) in TRANSFERS.items():
    _recipe = change(
        BASELINE,
        f"grafit_r50_to_{_data}",
        batch_size=512,
        init={"pretrained_recipe": BASELINE.name},
        optimizer={"lr": 0.01, "lr_batch_size": 0},
        schedule={"length": "240 epochs"},
        about={"row": "Table 2.16, baseline, linear classifier", "expected": top1(_score, _data)},
    )
    RECIPES |= named(
        _recipe,
        change(
            _recipe,
            f"{_recipe.name}_384",
            augmentation={"image_size": (384, 384)},
            mixing={"cutmix": 1.0},
            schedule={"length": f"{_epochs} epochs"},
            validation={"crop_ratio": 1.0},
            about={
                "row": "Table 2.10",
                "expected": f"{_long} % with Grafit's losses and a RegNetY-8GF; not published for this trunk",
            },
        ),
    )
