"""Three things everyone should know about ViTs (arXiv 2203.09795): parallel branches, attention-only tuning, stems.

Recipes are named like the models, `three_{size}_{N}x{B}[_ls][_{stem}]`: 300 epochs, or 400 with LayerScale (`_ls`); where a table
has the other length too, it is said (`_400ep`, `_300ep`). `three_{size}_to_384[_attention|_mlp]` tunes all weights, those of the
attention, or those of the MLPs. The base is the procedure A2 of "ResNet strikes back".
"""

from vitrail.recipes.changing import change, named, top1
from vitrail.recipes.deit3 import tuned
from vitrail.recipes.deit3_21k import A2
from vitrail.recipes.recipe import About, Recipe

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
        optimiser={"rate": RATES[size]},
        schedule={"length": "400 epochs" if "ls" in rest else "300 epochs"},
        about=About(PAPER, "Tables 1, 2, 3 and 7", top1(score)),
    )


RECIPES = named(*(scratch(name, score) for name, score in RESULTS.items()))
for _short, _score in OTHER_LENGTH.items():
    _name, _, _length = f"three_{_short}".rpartition("_")
    _epochs = f"{_length.removesuffix('ep')} epochs"
    RECIPES |= named(change(RECIPES[_name], f"three_{_short}", schedule={"length": _epochs}, about={"expects": top1(_score)}))

# Table 5, AdamW. Rate, length and augmentation are not given; DeiT III's, by the same authors, stand in.
for _model, _scores in {
    "small_12x1": {"": 82.7, "_attention": 82.5, "_mlp": 82.2},
    "base_12x1": {"": 84.3, "_attention": 84.3, "_mlp": 84.1},
    "large_24x1": {"": 85.5, "_attention": 85.5, "_mlp": 85.2},
}.items():
    _base = RECIPES[f"three_{_model}_ls"]
    for _part, _score in _scores.items():
        _name = f"three_{_model.split('_')[0]}_to_384{_part}"
        _recipe = tuned(_base, _name, 384, _base.architecture["drop_path"], _score, "Table 5, AdamW")
        RECIPES |= named(change(_recipe, _name, start={"scope": {"": "full", "_mlp": "ffn"}.get(_part, _part.removeprefix("_"))}))
