"""Three things everyone should know about ViTs (arXiv 2203.09795): parallel branches, attention-only tuning, stems.

Recipes are named like the models, `three_{size}_{N}x{B}[_ls][_{stem}]`: 300 epochs, or 400 with LayerScale (`_ls`); where a table
has the other length too, it is said (`_400ep`, `_300ep`). `three_{size}_to_{384|data}[_attention|_mlp][_sgd]` tunes all weights,
those of the attention, or those of the MLPs. The base is the procedure A2 of "ResNet strikes back".
"""

from vitrail.recipes.deit import INATURALIST, SGD
from vitrail.recipes.deit3 import tuned
from vitrail.recipes.deit3_21k import A2
from vitrail.recipes.derivation import DATA, change, named, top1
from vitrail.recipes.schema import About, Recipe

PAPER = "Three things, arXiv 2203.09795"

RATES = {"tiny": 4e-3, "small": 4e-3, "base": 3e-3, "large": 3e-3}
DROP_PATH = {"tiny": 0.0, "small": 0.05, "base": 0.1, "large": 0.4}
DEEP = {"36x1": 0.3, "18x2": 0.3, "48x1": 0.3, "24x2": 0.3}  # not published; CaiT's of that width and as many blocks
# Tables 1, 2, 3 and 7.
RESULTS = {
    "tiny_12x1": 72.7,
    "small_12x1": 79.7,
    "base_12x1": 82.2,
    "large_24x1": 83.0,
    "tiny_12x1_ls": 73.5,
    "small_12x1_ls": 80.7,
    "base_12x1_ls": 82.7,
    "large_24x1_ls": 84.0,
    "base_36x1": 82.9,
    "base_36x1_ls": 84.1,
    "base_18x2": 83.3,
    "base_18x2_ls": 84.1,
    "small_48x1": 82.3,
    "small_24x2": 82.6,
    "base_13x1": 82.35,
    "base_12x1_linear_bn": 82.31,
    "base_12x1_linear_gelu": 81.55,
    "base_12x1_linear_bn_gelu": 82.38,
    "base_12x1_conv": 82.57,
    "base_12x1_conv_ln": 82.50,
    "base_12x1_local": 82.26,
    "base_12x1_hmlp": 82.54,
    "base_12x1_hmlp_ln": 82.50,
}
# The other length of Tables 2 and 3.
OTHER_LENGTH = {
    "base_36x1_400ep": 83.4,
    "base_36x1_ls_300ep": 83.9,
    "base_18x2_400ep": 83.4,
    "base_18x2_ls_300ep": 83.8,
    "large_24x1_ls_300ep": 83.4,
}


def scratch(name: str, score: float) -> Recipe:
    size, blocks, *rest = name.split("_")
    return change(
        A2,
        f"three_{name}",
        model="_".join(["vit", size, "patch16", blocks, *rest]),
        architecture={"drop_path": DEEP.get(blocks, DROP_PATH[size])},
        optimizer={"lr": RATES[size]},
        schedule={"length": "400 epochs" if "ls" in rest else "300 epochs"},
        about=About(PAPER, "Tables 1, 2, 3 and 7", top1(score)),
    )


RECIPES = named(*(scratch(name, score) for name, score in RESULTS.items()))
for _short, _score in OTHER_LENGTH.items():
    _name, _, _length = f"three_{_short}".rpartition("_")
    _epochs = f"{_length.removesuffix('ep')} epochs"
    RECIPES |= named(change(RECIPES[_name], f"three_{_short}", schedule={"length": _epochs}, about={"expected": top1(_score)}))

MODELS = {"small": "small_12x1", "base": "base_12x1", "large": "large_24x1"}
SCOPES = {"": "full", "_attention": "attention", "_mlp": "ffn"}
# Table 5: all weights, those of the attention, those of the MLPs; with AdamW, with SGD.
LARGER = {
    "small": ((82.7, 82.5, 82.2), (82.6, 82.3, 82.0)),
    "base": ((84.3, 84.3, 84.1), (84.3, 84.2, 84.0)),
    "large": ((85.5, 85.5, 85.2), (85.4, 85.3, 85.1)),
}
# Rates, length and augmentation are not given; DeiT III's, by the same authors, stand in, for SGD the rate of DeiT's transfers.
for _size, _columns in LARGER.items():
    _base = RECIPES[f"three_{MODELS[_size]}_ls"]
    for _part, _score, _other in zip(SCOPES, *_columns, strict=True):
        _name = f"three_{_size}_to_384{_part}"
        _recipe = tuned(_base, _name, 384, _base.architecture["drop_path"], _score, "Table 5, AdamW")
        _recipe = change(_recipe, _name, init={"scope": SCOPES[_part]})
        _about = {"row": "Table 5, SGD", "expected": top1(_other)}
        _steps = change(_recipe, f"{_name}_sgd", optimizer=SGD.optimizer, about=_about)
        RECIPES |= named(_recipe, _steps)

# Table 6, which gives no settings: DeiT's released ones stand in, SGD and, for iNaturalist, AdamW.
TARGETS = ("inat18", "inat19", "cifar10", "cifar100", "cars", "flowers")
TRANSFERS = {
    "small": (68.0, 73.9, 98.9, 90.5, 89.7, 96.8),
    "small_attention": (60.6, 68.7, 98.7, 89.1, 89.8, 96.9),
    "small_mlp": (64.4, 72.5, 98.9, 90.1, 88.3, 96.1),
    "base": (74.1, 78.2, 99.3, 92.5, 92.7, 97.8),
    "base_attention": (71.1, 75.7, 99.2, 91.8, 92.8, 98.5),
    "base_mlp": (73.3, 77.3, 99.3, 92.1, 88.9, 97.5),
    "large": (75.9, 79.7, 99.3, 93.2, 93.8, 98.3),
    "large_attention": (75.3, 78.7, 99.2, 92.7, 93.8, 98.4),
    "large_mlp": (75.4, 79.3, 99.2, 93.0, 93.0, 97.6),
}
for _row, _scores in TRANSFERS.items():
    _size, _, _part = _row.partition("_")
    _base, _suffix = RECIPES[f"three_{MODELS[_size]}_ls"], f"_{_part}" if _part else ""
    for _data, _score in zip(TARGETS, _scores, strict=True):
        _how = INATURALIST if _data.startswith("inat") else SGD
        _drop = _base.architecture["drop_path"] if _how is INATURALIST else 0.0
        RECIPES |= named(
            change(
                _how,
                f"three_{_size}_to_{_data}{_suffix}",
                model=_base.model,
                architecture=_base.architecture | {"drop_path": _drop},
                init={"pretrained_recipe": _base.name, "scope": SCOPES[_suffix]},
                validation=_base.validation,
                about=About(PAPER, f"Table 6, {DATA[_data]}", top1(_score, _data)),
            )
        )
