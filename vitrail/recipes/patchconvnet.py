"""PatchConvNet: "Augmenting convolutional networks with attention-based aggregation" (arXiv 2112.13692).

DeiT's augmentations with LAMB. Names are those of the models; `…_batchnorm` has batch norm, `…_to_{size}` is a larger size,
`…_21k` and `…_21k_to_1k[_{size}]` the pre-training on ImageNet-21k and its fine-tuning, `…_to_{data}[_320]` a transfer,
`…_to_ade20k` a segmentation, `…_to_coco` a detection, `…_to_multi` the fine-tuning of a query per class. The text says that
gradients are not clipped; the released LAMB is Apex's, which clips at 1, and so do these recipes.

    vitrail train imagenet/ --recipe patchconvnet_s60
"""

from typing import Any

from vitrail.recipes.cait import add_transfers
from vitrail.recipes.deit import LAMB
from vitrail.recipes.derivation import Page, change, drop_path_fields, top1
from vitrail.recipes.detection import add_detection
from vitrail.recipes.lookup import lookup
from vitrail.recipes.schema import About, Recipe
from vitrail.recipes.segmentation import add_segmentation

PAPER = "PatchConvNet, arXiv 2112.13692"
# Batch norm's statistics are those of the full batch, so no images are left out of a block.
BATCH_NORM = {"norm": "batch", "drop_path_kind": "each"}
NO_REPEATS: dict[str, Any] = {"data": {"repeats": 1, "round_to": 1}}  # images are repeated only on ImageNet-1k from scratch
RECIPES = Page()


def from_scratch(name: str, size: str, drop_path: float, row: str, expected: str) -> Recipe:
    """Table 5.8, for example 82.1 % top-1 for S60. The validation crop is not stated in the paper."""
    return change(
        "deit_base",
        name,
        model=f"patchconvnet_{size}",
        architecture=drop_path_fields(drop_path),
        batch_size=2048,
        augmentation={"random_erasing": 0.0},
        optimizer=LAMB | {"lr": 3e-3, "weight_decay": 0.01 if size.startswith("s") else 0.05},
        schedule={"length": "400 epochs"},
        validation={"crop_ratio": 1.0},
        about=About(PAPER, row, expected),
    )


def finetuned(name: str, pretrained: str, size: int, score: float | None, row: str) -> Recipe:
    """Section 5.2.3: ten epochs at a larger size, with a drop-path rate that is 0.1 lower.

    Of the schedule the paper gives the learning rate alone. The warmup of five epochs, the delay of one epoch and min_lr are the
    defaults of the authors' engine; the released fine-tunings of DeiT III state the same warmup.
    """
    base = lookup(pretrained)
    return change(
        base,
        name,
        **NO_REPEATS,
        architecture=drop_path_fields(lower_drop_path(base)),
        batch_size=1024,
        init={"pretrained_recipe": pretrained},
        augmentation={"image_size": (size, size)},
        optimizer={"lr": 1e-5, "weight_decay": 0.01},
        schedule={"length": "10 epochs", "warmup": "5 epochs", "lag_epochs": 1, "min_lr": 1e-5},
        about={"row": row, "expected": top1(score)},
    )


def with_class_queries(name: str, pretrained: str, score: float) -> Recipe:
    """A query per class, from the weights with one query: 82.0 % by the README of the authors' repository.

    Section 5.2.1 says that learning rate and batch size are reduced, without values: here a tenth of the learning rate and half
    of the batch size, for ten epochs, with the rest of the fine-tuning at larger sizes.
    """
    return change(
        lookup(pretrained),
        name,
        **NO_REPEATS,
        model=f"{pretrained}_multi",
        architecture={"pooling": "per_class", "pooling_keys": "patches"},
        batch_size=1024,
        init={"pretrained_recipe": pretrained},
        optimizer={"lr": 3e-4},
        schedule={"length": "10 epochs", "warmup": "5 epochs", "lag_epochs": 1, "min_lr": 1e-5},
        about={"row": "Section 5.2.1; README", "expected": top1(score)},
    )


def pretraining_21k(name: str, size: str, drop_path: float, score: float) -> Recipe:
    """Table 5.2: 90 epochs on ImageNet-21k; the paper also has a batch size of 4096 with a learning rate of 4e-3."""
    return change(
        from_scratch(name, size, drop_path, "Table 5.2", f"{top1(score)} after fine-tuning at 384"),
        name,
        **NO_REPEATS,
        optimizer={"weight_decay": 0.01},
        schedule={"length": "90 epochs"},
    )


def finetuned_21k(name: str, pretrained: str, size: int, score: float) -> Recipe:
    """Table 5.2: fine-tuning on ImageNet-1k after ImageNet-21k."""
    base = lookup(pretrained)
    return change(
        base,
        name,
        architecture=drop_path_fields(lower_drop_path(base)),
        batch_size=1024,
        init={"pretrained_recipe": pretrained},
        augmentation={"image_size": (size, size)},
        optimizer={"lr": 5e-4},
        schedule={"length": "100 epochs"},
        about={"row": f"Table 5.2, {size}", "expected": top1(score)},
    )


def lower_drop_path(base: Recipe) -> float:
    drop_path: float = base.architecture["drop_path"]
    return round(max(drop_path - 0.1, 0.0), 2)


#      drop-path rate, top-1 with layer norm, with batch norm (Table 5.8)
SIZES = {
    "s20": (0.0, 78.7, 78.8),
    "s36": (0.05, 80.7, 81.2),
    "s60": (0.15, 82.1, 82.4),
    "s120": (0.2, 83.2, 83.4),
    "b36": (0.2, 82.8, 83.5),
    "b60": (0.3, 83.5, 83.9),
    "b120": (0.4, 84.1, 84.3),
}
for _size, (_drop, _layer, _batch) in SIZES.items():
    _base = f"patchconvnet_{_size}"
    RECIPES.add(_base, from_scratch, _size, _drop, "Table 5.8", top1(_layer))
    RECIPES.derive(f"{_base}_batchnorm", _base, architecture=BATCH_NORM, about={"expected": top1(_batch)})
    RECIPES.add(f"{_base}_to_384", finetuned, _base, 384, None, "Section 5.2.3")
# Table 5.7, changes of S60: mean pooling, a linear patch embedding, eight heads, a query per class from scratch.
for _variant, _score in {"mean": 81.9, "linear": 80.0, "multihead": 81.9, "multi": 81.1}.items():
    _name, _about = f"patchconvnet_s60_{_variant}", {"row": "Table 5.7", "expected": top1(_score)}
    RECIPES.derive(_name, "patchconvnet_s60", model=_name, about=_about)
RECIPES.add("patchconvnet_s60_to_multi", with_class_queries, "patchconvnet_s60", 82.0)

# Table 5.2; no drop-path rate is given for L, which has that of B here.
LARGE: dict[str, tuple[float, dict[int, float]]] = {
    "s60": (0.15, {224: 82.9, 288: 84.0, 384: 84.6}),
    "b60": (0.3, {224: 85.0, 288: 85.7, 384: 86.1}),
    "l60": (0.3, {224: 85.6, 288: 86.1, 384: 86.4}),
    "b120": (0.4, {224: 86.0, 288: 86.6, 384: 86.9}),
    "l120": (0.4, {224: 86.1, 288: 86.6, 384: 87.1}),
}
for _size, (_drop, _results) in LARGE.items():
    _base = f"patchconvnet_{_size}_21k"
    RECIPES.add(_base, pretraining_21k, _size, _drop, _results[384])
    for _pixels, _score in _results.items():
        RECIPES.add(f"{_base}_to_1k" + (f"_{_pixels}" if _pixels != 224 else ""), finetuned_21k, _base, _pixels, _score)
_base = "patchconvnet_s60_21k_to_1k"
RECIPES.add(f"{_base}_512", finetuned, f"{_base}_384", 512, 85.0, "Table 5.2, 512")

#           CIFAR-10 CIFAR-100 Flowers Cars iNat-18 iNat-19 (Table 5.5), and the same at 320
AT_320: dict[str, Any] = NO_REPEATS | {"augmentation": {"image_size": (320, 320)}}
for _size, _scores_224, _scores_320 in (
    ("s60", (99.2, 91.4, 98.8, 94.0, 72.9, 78.1), (99.1, 91.4, 98.9, 94.5, 76.8, 81.4)),
    ("b120", (99.2, 91.1, 99.0, 94.4, 74.3, 79.5), (99.1, 91.2, 99.1, 94.8, 79.6, 82.5)),
):
    add_transfers(RECIPES, f"patchconvnet_{_size}", "Table 5.5, CaiT's rule", _scores_224, **NO_REPEATS)
    add_transfers(RECIPES, f"patchconvnet_{_size}", "Table 5.5 at 320", _scores_320, "_320", **AT_320)

#      mIoU at one and at several scales (Table 5.3), after ImageNet-1k and ImageNet-21k
for _base, _scores in {
    "s60": (46.0, 46.9),
    "b60": (48.1, 48.6),
    "b120": (49.4, 50.3),
    "s60_21k": (48.4, 49.3),
    "b60_21k": (50.5, 51.1),
    "b120_21k": (51.9, 52.8),
    "l120_21k": (52.2, 52.9),
}.items():
    add_segmentation(RECIPES, PAPER, "Table 5.3", f"patchconvnet_{_base}", f"patchconvnet_{_base}", _scores)

#      AP of boxes and of masks (Table 5.6)
for _base, _aps in {"s60": (46.4, 41.3), "s120": (47.0, 41.9)}.items():
    add_detection(RECIPES, PAPER, "Table 5.6", f"patchconvnet_{_base}", _aps)
