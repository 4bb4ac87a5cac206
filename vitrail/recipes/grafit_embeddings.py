"""Grafit (arXiv 2011.12982): embeddings trained on coarse labels, the methods that they are compared with, and their transfers.

`grafit_small` is for one's own images. `grafit_resnet50_{data}` is the paper's training, `…_{variant}` another row of Table 2.7.
CIFAR-100 has a column of its 20 coarse labels; the 127 coarse classes of ImageNet are a file that the user gives:

    vitrail train photos/ --recipe grafit_small --from vitrail_tiny --map breeds.csv
    vitrail train cifar100/ --recipe grafit_resnet50_cifar100
    vitrail train imagenet/ --recipe grafit_resnet50_imagenet --map imagenet127.csv

Values that the paper does not give are those of BYOL and SNCA: docs/papers/grafit.md.
"""

import dataclasses
from typing import Any

from vitrail.data.transforms.config import Augmentation
from vitrail.recipes.defaults import FAST_DECODING, FROM_IMAGES
from vitrail.recipes.derivation import Page, change, top1
from vitrail.recipes.grafit import TRANSFERS, fixres, long_transfer
from vitrail.recipes.schema import About, OptimizerConfig, Recipe, ScheduleConfig, ValidationConfig
from vitrail.recipes.task_options import GrafitOptions, write_options

RECIPES = Page()
Changes = dict[str, Any]
SNCA: Changes = {"instance_weight": 0.0}
NO_PROJECTOR: Changes = {"neighbor_weight": 0.0, "projector": "none"}
CLASSES: Changes = {"neighbor_weight": 0.0, "class_weight": 1.0, "projector": "none"}
#          settings; k-NN top-1 and mAP at the fine level: CIFAR-100, ImageNet (Tables 2.4 and 2.7)
VARIANTS: dict[str, tuple[Changes, tuple[float, float], tuple[float, float]]] = {
    "": ({}, (77.7, 55.7), (69.1, 42.9)),
    "_fc": ({"projector": "linear", "outputs": 128}, (75.6, 55.0), (69.1, 44.4)),
    "_snca": (SNCA | {"projector": "linear", "outputs": 128}, (70.0, 39.7), (57.8, 30.7)),
    "_sncaplus": (SNCA, (72.2, 35.9), (55.4, 31.8)),
    "_instance": (NO_PROJECTOR, (54.3, 14.3), (41.7, 3.47)),
    "_ce_instance": (CLASSES, (76.9, 51.0), (65.0, 26.0)),
    "_clusterfit": (CLASSES | SNCA, (72.5, 23.0), (59.5, 12.7)),
}
MLP_WIDTH = 2048  # hidden layer of the classifier; not given
CLUSTERS = {"cifar100": 1500, "imagenet": 15_000}


def grafit_small(name: str) -> Recipe:
    """Any photographs or small images with a few coarse labels, or none, on one GPU; on a CPU give --minutes."""
    options = GrafitOptions(views=2, outputs=128, hidden=1024, momentum=0.99, memory_init="features")
    return Recipe(
        name=name,
        task="grafit",
        task_options=write_options(options),
        model="vitrail_small",
        architecture={"drop_path": 0.1},
        batch_size=256,
        data=FAST_DECODING,
        augmentation=Augmentation(image_size=FROM_IMAGES, scale=(0.2, 1.0), policy="rand", random_erasing=0.25),
        optimizer=OptimizerConfig(lr=5e-4, lr_batch_size=256, weight_decay=0.05, clip_grad_norm=1.0),
        schedule=ScheduleConfig(length="200 epochs", warmup="5%", min_lr=1e-5),
        validation=ValidationConfig(crop_ratio=1.0),
        about=About("vitrail", "embeddings from coarse labels, on one GPU", "not measured", "one GPU, or minutes on a CPU"),
    )


def embeddings(name: str, data: str, options: GrafitOptions, row: str, scores: tuple[float, float]) -> Recipe:
    """Table 2.7, for example 77.7 % k-NN of the 100 fine classes of CIFAR-100, of which 20 coarse labels are known."""
    recipe = change(
        baseline(name, data, scores),
        name,
        task="grafit",
        task_options=write_options(options),
        about={"row": row},
    )
    return dataclasses.replace(
        recipe, loss=dataclasses.replace(recipe.loss, label_smoothing=0.1 if options.class_weight else 0.0)
    )


def baseline(name: str, data: str, scores: tuple[float, float]) -> Recipe:
    """Table 2.7: cross-entropy on the coarse labels, for example 71.8 % k-NN of the fine classes of CIFAR-100."""
    knn, mean_precision = scores
    expected = f"{knn} % k-NN top-1 at the fine level, {mean_precision} % mAP"
    about = {"row": "Table 2.7, cross-entropy on coarse labels", "expected": expected}
    if data != "cifar100":
        return change("grafit_r50", name, model="resnet50", about=about)
    # Crops and weight decay as in SNCA's code for this data.
    return change(
        "grafit_r50",
        name,
        model="resnet50_cifar",
        data={"label": "coarse_label"},
        augmentation={"image_size": (32, 32), "scale": (0.2, 1.0)},
        optimizer={"weight_decay": 5e-4},
        validation={"crop_ratio": 1.0},
        about=about,
    )


def analysis(name: str, options: GrafitOptions, score: float) -> Recipe:
    """Table 2.2: a ResNet-18 on the coarse labels of CIFAR-100; a linear classifier of the fine ones reaches 80.4 to 80.9 %."""
    recipe = embeddings(name, "cifar100", options, "Table 2.2, trunk trained with coarse labels", (0.0, 0.0))
    expected = f"{score} % top-1 of a linear classifier of the fine classes"
    return change(recipe, name, model="resnet18_cifar", about={"expected": expected})


def transfer(name: str, base: str, pretrained: str, row: str, score: float, data: str) -> Recipe:
    """Tables 2.15 and 2.16: 240 epochs with a linear classifier, from Grafit's weights."""
    model = "resnet50" if "resnet50" in name else "regnety_080"
    about = {"row": row, "expected": top1(score, data)}
    return change(base, name, model=model, init={"pretrained_recipe": pretrained}, about=about)


def long_fixres(name: str, pretrained: str, score: float, data: str) -> Recipe:
    """Table 2.10: FixRes at 384 pixels of a RegNetY-8GF."""
    return change(fixres(name, pretrained, score), name, about={"expected": top1(score, data)})


RECIPES.add("grafit_small", grafit_small)
for _data, _views in (("cifar100", 8), ("imagenet", 4)):
    for _variant, (_changes, *_scores) in VARIANTS.items():
        _clusters = {"clusters": CLUSTERS[_data]} if _variant == "_clusterfit" else {}
        _options = GrafitOptions(views=_views, **_changes | _clusters)
        _row, _both = f"Table 2.7, {_data}{_variant}", _scores[_data == "imagenet"]
        RECIPES.add(f"grafit_resnet50_{_data}{_variant}", embeddings, _data, _options, _row, _both)
RECIPES.add("grafit_resnet50_cifar100_baseline", baseline, "cifar100", (71.8, 42.5))
RECIPES.add("grafit_resnet50_imagenet_baseline", baseline, "imagenet", (54.7, 22.7))
RECIPES.derive(
    "grafit_resnet50_cifar100_fine",
    "grafit_resnet50_cifar100",
    data={"label": ""},
    about={"row": "Table 2.13, fine labels", "expected": "83.2 % k-NN top-1 at the fine level"},
)
# The level of the labels is that of `data.label`; here that of the species. The number of views is not given.
for _data, _both in {"inat18": (67.7, 70.0), "inat19": (75.3, 77.5)}.items():
    RECIPES.add(f"grafit_resnet50_{_data}", embeddings, _data, GrafitOptions(), "Table 2.14, species to species", _both)
_TRIPLET: Changes = {"instance_weight": 0.0, "triplet_weight": 1.0, "views": 2}
for _variant, (_changes, _score) in {
    "ce": (CLASSES | SNCA, 80.4),
    "triplet": (NO_PROJECTOR | _TRIPLET, 76.5),
    "ce_triplet": (CLASSES | _TRIPLET, 80.9),
}.items():
    RECIPES.add(f"grafit_resnet18_cifar100_{_variant}", analysis, GrafitOptions(**_changes), _score)
RECIPES.derive(
    "grafit_regnety_080_imagenet",
    "grafit_resnet50_imagenet",
    model="regnety_080",
    about={"row": "Table 2.15, RegNetY-8GF", "expected": "not published"},
)
#    top-1 with a linear classifier, with an MLP: ResNet-50 (Table 2.16), RegNetY-8GF (Table 2.15)
_SCORES = {
    "flowers": ((97.6, 98.2), (99.0, 98.8)),
    "cars": ((91.4, 92.5), (94.0, 93.4)),
    "food101": ((88.9, 89.5), (92.1, 92.4)),
    "inat18": ((65.6, 69.8), (76.4, 76.8)),
    "inat19": ((74.1, 75.9), (79.8, 80.0)),
}
for _data, (_, _epochs, _long) in TRANSFERS.items():
    for _trunk, _table, (_linear, _mlp) in zip(
        ("resnet50", "regnety_080"), ("Table 2.16, Grafit", "Table 2.15, RegNetY-8GF"), _SCORES[_data], strict=True
    ):
        _name, _pretrained = f"grafit_{_trunk}_to_{_data}", f"grafit_{_trunk}_imagenet"
        _row = f"{_table}, linear classifier"
        RECIPES.add(_name, transfer, f"grafit_r50_to_{_data}", _pretrained, _row, _linear, _data)
        RECIPES.derive(
            f"{_name}_mlp",
            _name,
            architecture={"pre_logits": MLP_WIDTH, "pre_logits_kind": "batch_norm"},
            about={"row": f"{_table}, MLP classifier", "expected": top1(_mlp, _data)},
        )
    RECIPES.add(f"{_name}_{_epochs}ep", long_transfer, _name, _epochs)
    RECIPES.add(f"{_name}_{_epochs}ep_to_384", long_fixres, f"{_name}_{_epochs}ep", _long, _data)
