"""Grafit: "Learning fine-grained image representations with coarse labels" (arXiv 2011.12982), its baseline and its transfers.

`grafit_r50` is the training on labels that the paper compares its losses with, `grafit_r50_to_{data}` a transfer of that trunk
in 240 epochs. The long form has two steps: `…_to_{data}_{epochs}ep`, 1000 epochs for Flowers and Cars and 300 for Food-101 and
iNaturalist with CutMix at 224 pixels, then `…_{epochs}ep_to_384`, FixRes at 384 pixels. The trunk is `bit_r50x1`, a ResNet-50
with GroupNorm in place of BatchNorm; the paper's long rows have a RegNetY-8GF. Values that the paper does not give are the usual
ones of a ResNet: momentum 0.9, weight decay 1e-4, label smoothing 0.1, five epochs of warmup. The trunk is trained too (a
sentence of Section 2.4.6 says that it is fixed: `init.scope=head`).

    vitrail train imagenet/ --recipe grafit_r50
"""

from vitrail.data.transforms.config import Augmentation
from vitrail.recipes.derivation import Page, change, top1
from vitrail.recipes.schema import About, LossConfig, OptimizerConfig, Recipe, ScheduleConfig, ValidationConfig

PAPER = "Grafit, arXiv 2011.12982"
RECIPES = Page()


def baseline(name: str) -> Recipe:
    """Table 2.8, the baseline on fine labels: 79.3 % top-1 on ImageNet."""
    return Recipe(
        name=name,
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


def transfer(name: str, data: str, score: float) -> Recipe:
    """Table 2.16: 240 epochs with a linear classifier."""
    return change(
        "grafit_r50",
        name,
        batch_size=512,
        init={"pretrained_recipe": "grafit_r50"},
        optimizer={"lr": 0.01, "lr_batch_size": 0},
        schedule={"length": "240 epochs"},
        about={"row": "Table 2.16, baseline, linear classifier", "expected": top1(score, data)},
    )


def long_transfer(name: str, base: str, epochs: int) -> Recipe:
    """Table 2.10, first step: more epochs and CutMix, at 224 pixels."""
    return change(
        base,
        name,
        mixing={"cutmix": 1.0},
        schedule={"length": f"{epochs} epochs"},
        about={"row": "Table 2.10, before FixRes", "expected": top1(None)},
    )


def fixres(name: str, pretrained: str, score: float) -> Recipe:
    """Table 2.10, second step: FixRes (arXiv 1906.06423) trains the classifier and the last norm on images as in evaluation.

    The settings are those that FixRes released for a ResNet-50 at 384.
    """
    expected = f"{score} % with Grafit's losses and a RegNetY-8GF; not published for this trunk"
    return change(
        pretrained,
        name,
        init={"scope": "last_norm", "pretrained_recipe": pretrained},
        augmentation=Augmentation(image_size=(384, 384), crop="center", crop_ratio=0.875, hflip=0.0),
        mixing={"cutmix": 0.0},
        loss={"label_smoothing": 0.0},
        optimizer={"lr": 8e-3, "nesterov": False, "weight_decay_on": "all"},
        schedule=ScheduleConfig(
            length="56 epochs", warmup="0 epochs", kind="step", step_size="30 epochs", gamma=0.1, by_epoch=True
        ),
        about={"row": "Table 2.10, FixRes", "expected": expected},
    )


#         top-1 of the baseline with a linear classifier (Table 2.16); long: epochs, top-1 of Grafit's RegNetY-8GF (Table 2.10)
TRANSFERS = {
    "flowers": (96.2, 1000, 99.1),
    "cars": (90.0, 1000, 94.7),
    "food101": (88.2, 300, 93.7),
    "inat18": (65.0, 300, 81.2),
    "inat19": (72.8, 300, 84.1),
}
RECIPES.add("grafit_r50", baseline)
for _data, (_score, _epochs, _long) in TRANSFERS.items():
    _name = f"grafit_r50_to_{_data}"
    RECIPES.add(_name, transfer, _data, _score)
    RECIPES.add(f"{_name}_{_epochs}ep", long_transfer, _name, _epochs)
    RECIPES.add(f"{_name}_{_epochs}ep_to_384", fixres, f"{_name}_{_epochs}ep", _long)
