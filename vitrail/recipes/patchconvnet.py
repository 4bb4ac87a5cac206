"""PatchConvNet: "Augmenting convolutional networks with attention-based aggregation" (arXiv 2112.13692).

DeiT's augmentations with LAMB. Names are those of the models; `…_batchnorm` has that norm, `…_to_{size}` is a larger size,
`…_21k` and `…_21k_to_1k[_{size}]` the path over ImageNet-21k, `…_to_{data}[_320]` a transfer. The text says that gradients are
not clipped; the released LAMB is Apex's, which clips at 1, and so do these recipes.
"""

from typing import Any

from vitrail.recipes.cait import transfers
from vitrail.recipes.deit import DEIT, LAMB
from vitrail.recipes.derivation import change, dropping, named, top1
from vitrail.recipes.schema import About, Recipe

PAPER = "PatchConvNet, arXiv 2112.13692"

PATCHCONVNET = change(
    DEIT,
    "patchconvnet_s60",
    batch_size=2048,
    augmentation={"random_erasing": 0.0},
    optimizer=LAMB | {"lr": 3e-3},
    schedule={"length": "400 epochs"},
    validation={"crop_ratio": 1.0},  # not stated anywhere
    about=About(PAPER),
)
ONCE: dict[str, Any] = {"data": {"repeats": 1, "round_to": 1}}  # images are repeated on ImageNet-1k from scratch alone

#      drop-path  LayerNorm, BatchNorm (Table 5.8)
SIZES = {
    "s20": (0.0, 78.7, 78.8),
    "s36": (0.05, 80.7, 81.2),
    "s60": (0.15, 82.1, 82.4),
    "s120": (0.2, 83.2, 83.4),
    "b36": (0.2, 82.8, 83.5),
    "b60": (0.3, 83.5, 83.9),
    "b120": (0.4, 84.1, 84.3),
}
# Table 5.7, changes of S60: mean pooling, patches by one linear map, eight heads, a query per class from scratch.
BATCH_NORM = {"norm": "batch", "drop_path_kind": "each"}  # whose statistics are those of the whole batch
VARIANTS = {"mean": 81.9, "linear": 80.0, "multihead": 81.9, "multi": 81.1}
# Table 5.2; no rate is given for L, which has that of B here.
LARGE: dict[str, tuple[float, dict[int, float]]] = {
    "s60": (0.15, {224: 82.9, 288: 84.0, 384: 84.6, 512: 85.0}),
    "b60": (0.3, {224: 85.0, 288: 85.7, 384: 86.1}),
    "l60": (0.3, {224: 85.6, 288: 86.1, 384: 86.4}),
    "b120": (0.4, {224: 86.0, 288: 86.6, 384: 86.9}),
    "l120": (0.4, {224: 86.1, 288: 86.6, 384: 87.1}),
}


def scratch(size: str, drop_path: float) -> Recipe:
    model = f"patchconvnet_{size}"
    decay = 0.01 if size.startswith("s") else 0.05
    return change(PATCHCONVNET, model, model=model, architecture=dropping(drop_path), optimizer={"weight_decay": decay})


def larger(base: Recipe, name: str, size: int, score: float | None, row: str) -> Recipe:
    """Section 5.2.3: ten epochs at a larger size, with a drop-path rate that is 0.1 lower."""
    return change(
        base,
        name,
        **ONCE,
        architecture=dropping(lower(base)),
        batch_size=1024,
        init={"pretrained_recipe": base.name},
        augmentation={"image_size": (size, size)},
        optimizer={"lr": 1e-5, "weight_decay": 0.01},
        schedule={"length": "10 epochs"},
        about={"row": row, "expected": top1(score)},
    )


def lower(base: Recipe) -> float:
    return round(max(base.architecture["drop_path"] - 0.1, 0.0), 2)


RECIPES: dict[str, Recipe] = {}
for _size, (_drop, _layer, _batch) in SIZES.items():
    _recipe = change(scratch(_size, _drop), f"patchconvnet_{_size}", about={"row": "Table 5.8", "expected": top1(_layer)})
    RECIPES |= named(
        _recipe,
        change(_recipe, f"{_recipe.name}_batchnorm", architecture=BATCH_NORM, about={"expected": top1(_batch)}),
        larger(_recipe, f"{_recipe.name}_to_384", 384, None, "Section 5.2.3"),
    )
for _name, _score in VARIANTS.items():
    _model = f"patchconvnet_s60_{_name}"
    _about = {"row": "Table 5.7", "expected": top1(_score)}
    RECIPES |= named(change(RECIPES["patchconvnet_s60"], _model, model=_model, about=_about))

for _size, (_drop, _scores) in LARGE.items():
    # Or a batch of 4096 with a rate of 4e-3.
    _recipe = change(
        scratch(_size, _drop),
        f"patchconvnet_{_size}_21k",
        **ONCE,
        optimizer={"weight_decay": 0.01},
        schedule={"length": "90 epochs"},
        about={"row": "Table 5.2", "expected": f"{top1(_scores[384])} after fine-tuning at 384"},
    )
    RECIPES |= named(_recipe)
    for _pixels in (224, 288, 384):
        RECIPES |= named(
            change(
                _recipe,
                f"{_recipe.name}_to_1k" + (f"_{_pixels}" if _pixels != 224 else ""),
                architecture=dropping(lower(_recipe)),
                batch_size=1024,
                init={"pretrained_recipe": _recipe.name},
                augmentation={"image_size": (_pixels, _pixels)},
                optimizer={"lr": 5e-4},
                schedule={"length": "100 epochs"},
                about={"row": f"Table 5.2, {_pixels}", "expected": top1(_scores[_pixels])},
            )
        )
RECIPES |= named(larger(RECIPES["patchconvnet_s60_21k_to_1k_384"], "patchconvnet_s60_21k_to_1k_512", 512, 85.0, "Table 5.2, 512"))

#           CIFAR-10 CIFAR-100 Flowers Cars iNat-18 iNat-19 (Table 5.5), and the same at 320
for _size, _scores_224, _scores_320 in (
    ("s60", (99.2, 91.4, 98.8, 94.0, 72.9, 78.1), (99.1, 91.4, 98.9, 94.5, 76.8, 81.4)),
    ("b120", (99.2, 91.1, 99.0, 94.4, 74.3, 79.5), (99.1, 91.2, 99.1, 94.8, 79.6, 82.5)),
):
    _base = RECIPES[f"patchconvnet_{_size}"]
    RECIPES |= transfers(_base, "Table 5.5, CaiT's rule", _scores_224, **ONCE)
    for _recipe in transfers(_base, "Table 5.5 at 320", _scores_320, **ONCE, augmentation={"image_size": (320, 320)}).values():
        RECIPES |= named(change(_recipe, f"{_recipe.name}_320"))
