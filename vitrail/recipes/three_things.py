"""Three things everyone should know about ViTs (arXiv 2203.09795): parallel branches, attention-only fine-tuning, stems.

Recipes are named like the models, `three_{size}_{N}x{B}[_ls][_{stem}]`: 300 epochs, or 400 with LayerScale (`_ls`); where a table
has the other length too, the name has it (`_400ep`, `_300ep`). `three_{size}_to_{384|data}[_attention|_mlp][_sgd]` fine-tunes all
weights, those of the attention, or those of the MLPs. The base is the procedure A2 of "ResNet strikes back".

    vitrail train imagenet/ --recipe three_base_18x2_ls
"""

from vitrail.recipes import deit3
from vitrail.recipes.deit import transfer_settings
from vitrail.recipes.derivation import DATA, Page, change, top1
from vitrail.recipes.lookup import lookup
from vitrail.recipes.schema import About, Recipe

PAPER = "Three things, arXiv 2203.09795"
RECIPES = Page()

LEARNING_RATES = {"tiny": 4e-3, "small": 4e-3, "base": 3e-3, "large": 3e-3}
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


def from_scratch(name: str, variant: str, score: float) -> Recipe:
    """Tables 1, 2, 3 and 7, for example 82.2 % top-1 for B-12x1 and 84.1 % for B-18x2 with LayerScale."""
    size, blocks, *rest = variant.split("_")
    return change(
        "deit3_small_as_a2",
        name,
        model="_".join(["vit", size, "patch16", blocks, *rest]),
        architecture={"drop_path": DEEP.get(blocks, DROP_PATH[size])},
        optimizer={"lr": LEARNING_RATES[size]},
        schedule={"length": "400 epochs" if "ls" in rest else "300 epochs"},
        about=About(PAPER, "Tables 1, 2, 3 and 7", top1(score)),
    )


for _variant, _score in RESULTS.items():
    RECIPES.add(f"three_{_variant}", from_scratch, _variant, _score)
for _variant, _score in OTHER_LENGTH.items():
    _base, _, _length = f"three_{_variant}".rpartition("_")
    _schedule = {"length": f"{_length.removesuffix('ep')} epochs"}
    RECIPES.derive(f"three_{_variant}", _base, schedule=_schedule, about={"expected": top1(_score)})

MODELS = {"small": "small_12x1", "base": "base_12x1", "large": "large_24x1"}
SCOPES = {"": "full", "_attention": "attention", "_mlp": "ffn"}
# Table 5: all weights, those of the attention, those of the MLPs; with AdamW, with SGD.
LARGER = {
    "small": ((82.7, 82.5, 82.2), (82.6, 82.3, 82.0)),
    "base": ((84.3, 84.3, 84.1), (84.3, 84.2, 84.0)),
    "large": ((85.5, 85.5, 85.2), (85.4, 85.3, 85.1)),
}


def finetuned(name: str, pretrained: str, scope: str, score: float) -> Recipe:
    """Table 5, AdamW. Learning rate, length and augmentation are not given; those of DeiT III, by the same authors, are used."""
    drop_path = lookup(pretrained).architecture["drop_path"]
    return deit3.finetuned(name, pretrained, 384, drop_path, score, "Table 5, AdamW", scope)


def finetuned_sgd(name: str, base: str, score: float) -> Recipe:
    """Table 5, SGD, with the learning rate of DeiT's transfers."""
    optimizer = lookup("deit_base_to_cifar10").optimizer
    return change(base, name, optimizer=optimizer, about={"row": "Table 5, SGD", "expected": top1(score)})


for _size, _columns in LARGER.items():
    for _part, _adamw, _sgd in zip(SCOPES, *_columns, strict=True):
        _name = f"three_{_size}_to_384{_part}"
        RECIPES.add(_name, finetuned, f"three_{MODELS[_size]}_ls", SCOPES[_part], _adamw)
        RECIPES.add(f"{_name}_sgd", finetuned_sgd, _name, _sgd)


def transfer(name: str, pretrained: str, data: str, scope: str, score: float) -> Recipe:
    """Table 6, which gives no settings: DeiT's released ones are used."""
    base = lookup(pretrained)
    recipe = change("deit_base", name, **transfer_settings(data))
    drop_path = base.architecture["drop_path"] if data.startswith("inat") else 0.0
    return change(
        recipe,
        name,
        model=base.model,
        architecture=base.architecture | {"drop_path": drop_path},
        init={"pretrained_recipe": pretrained, "scope": scope},
        validation=base.validation,
        about=About(PAPER, f"Table 6, {DATA[data]}", top1(score, data)),
    )


# Table 6: top-1 by data set.
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
    _suffix = f"_{_part}" if _part else ""
    for _data, _score in zip(TARGETS, _scores, strict=True):
        _base = f"three_{MODELS[_size]}_ls"
        RECIPES.add(f"three_{_size}_to_{_data}{_suffix}", transfer, _base, _data, SCOPES[_suffix], _score)
