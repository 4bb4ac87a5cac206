"""LV-ViT: "All tokens matter: token labeling for training better vision transformers" (arXiv 2104.10858).

The columns of Table 2: `lvvit_{model}` is the standard training, `lvvit_s_relabel…` takes the image's target from an annotator's
map (`token_labels.store`), `…_tokens` the targets of the patches too, with MixToken in place of CutMix; `…_to_{size}` is
fine-tuning with them. The cooldown of ten epochs is part of the training from scratch, whose EMA of the weights is reported.

    vitrail train imagenet/ --recipe lvvit_s_tokens --labels maps/
"""

from typing import Any

from vitrail.recipes.derivation import Page, change, top1
from vitrail.recipes.schema import About, DataConfig, Recipe, TokenLabelConfig

PAPER = "LV-ViT, arXiv 2104.10858"
HARDWARE = "less than 3 days on 8 V100"
ANNOTATOR = "annotator NFNet-F6"
# The paper gives the patches' loss a weight of 0.5, the released code 1. A class that is not in a map has a logit of 0.
TOKENS = TokenLabelConfig(weight=1.0, target="relabel", outside="zero", mixtoken=1.0)
RELABEL = TokenLabelConfig(target="relabel", outside="zero")
# With maps the released loader flips, applies RandAugment to the full image and crops last; without maps it is timm's.
WITH_MAPS = {"crop_last": True}
RECIPES = Page()


def base(name: str, model: str, row: str, score: float | None, hardware: str = "") -> Recipe:
    """The settings that all recipes of this page share."""
    return change(
        "deit_base",
        name,
        model=model,
        seed=42,
        group_size=128,
        data=DataConfig(),
        augmentation={"interpolation": "random"},
        mixing={"erase_after": True},  # images are mixed while they are collated, and erased on the device
        optimizer={"lr": 1e-3, "lr_batch_size": 1024},
        schedule={"lag_epochs": 0, "cooldown": "10 epochs"},
        ema={"decay": 0.99992, "evaluate": True},
        about=About(PAPER, row, top1(score), hardware),
    )


def standard(name: str, size: str, drop_path: float, crop: float, score: float | None) -> Recipe:
    """Table 2, standard training: 82.4 % top-1 for S. The patches' head is not trained, so its weight is 0 in evaluation."""
    return change(
        base(name, f"lvvit_{size}", "Table 2, standard", score, HARDWARE if size == "s" else ""),
        name,
        architecture={"drop_path": drop_path, "dense_weight": 0.0},
        validation={"crop_ratio": crop},
    )


def token_labeling(name: str, size: str, drop_path: float, crop: float, score: float | None) -> Recipe:
    """Tables 2 and 8, token labeling: 83.3 % top-1 for S. L has the released command's learning rate and three operations."""
    large = size == "l"
    row = f"Tables 2 and 8, token labeling, {ANNOTATOR}"
    return change(
        base(name, f"lvvit_{size}", row, score, HARDWARE if size == "s" else ""),
        name,
        architecture={"drop_path": drop_path},
        augmentation=WITH_MAPS | {"num_ops": 3 if large else 2},
        mixing={"mixup": 0.0, "cutmix": 0.0},
        token_labels=TOKENS,
        optimizer={"lr_batch_size": 1024 if large else 640},
        validation={"crop_ratio": crop},
    )


def large(name: str, size: int, row: str, score: float) -> Recipe:
    """L trained at a larger size: 85.3 % top-1 at 288, 86.2 % at 448. The released command has 224."""
    about = {"row": f"{row}, L trained at {size}, {ANNOTATOR}", "expected": top1(score)}
    return change("lvvit_l_tokens", name, augmentation={"image_size": (size, size)}, about=about)


def finetuned(name: str, pretrained: str, size: int, score: float) -> Recipe:
    """Table 10. The released command has no EMA, no length (DeiT's 30 epochs are used) and a learning rate equal to min_lr."""
    return change(
        pretrained,
        name,
        batch_size=512,
        group_size=64,
        init={"pretrained_recipe": pretrained},
        augmentation={"image_size": (size, size)},
        optimizer={"lr": 5e-6, "lr_batch_size": 0, "weight_decay": 1e-8},
        schedule={"length": "30 epochs", "cooldown": "0 epochs", "min_lr": 5e-6},
        ema={"decay": 0.0, "evaluate": False},
        about={"row": f"Table 10, {ANNOTATOR}", "expected": top1(score), "hardware": ""},
    )


#     drop-path rate, validation crop, top-1 with the data set's labels and with token labels
SIZES: dict[str, tuple[float, float, float | None, float | None]] = {
    "t": (0.1, 0.9, None, 79.1),
    "s": (0.1, 0.9, 82.4, 83.3),
    "m": (0.2, 1.0, None, 84.0),
    "l": (0.3, 1.0, None, None),
}
for _size, (_drop, _crop, _standard, _tokens) in SIZES.items():
    RECIPES.add(f"lvvit_{_size}", standard, _size, _drop, _crop, _standard)
    RECIPES.add(f"lvvit_{_size}_tokens", token_labeling, _size, _drop, _crop, _tokens)
_about = {"row": f"Tables 2 and 6, re-labeling with CutMix, {ANNOTATOR}", "expected": top1(82.8)}
RECIPES.derive("lvvit_s_relabel", "lvvit_s", augmentation=WITH_MAPS, mixing={"mixup": 0.0}, token_labels=RELABEL, about=_about)
_name, _about = "lvvit_s_relabel_mixtoken", {"row": f"Table 6, re-labeling with MixToken, {ANNOTATOR}", "expected": top1(83.0)}
RECIPES.derive(_name, "lvvit_s_relabel", mixing={"cutmix": 0.0}, token_labels={"mixtoken": 1.0}, about=_about)
RECIPES.add("lvvit_l_tokens_288", large, 288, "Tables 8 and 10", 85.3)
RECIPES.add("lvvit_l_tokens_448", large, 448, "Table 10", 86.2)
RECIPES.add("lvvit_deit_small", base, "deit_small_patch16", "Table 3, DeiT-Small", 79.9)
RECIPES.add("lvvit_s_to_384", finetuned, "lvvit_s_tokens", 384, 84.4)
RECIPES.add("lvvit_m_to_384", finetuned, "lvvit_m_tokens", 384, 85.4)
RECIPES.add("lvvit_l_to_448", finetuned, "lvvit_l_tokens_288", 448, 85.9)

DEEPER = {"architecture.depth": 16}
THINNER = DEEPER | {"architecture.mlp_ratio": 3.0}
# Table 3, from DeiT-Small to LV-ViT-S by the data set's own labels; then Table 7, by token labels.
ABLATIONS: dict[str, tuple[str, dict[str, Any], float]] = {
    "16 blocks": ("lvvit_deit_small", DEEPER, 81.2),
    "MLP ratio 3": ("lvvit_deit_small", THINNER, 81.1),
    "convolutional stem": ("lvvit_deit_small", THINNER | {"architecture.stem": "tower"}, 82.2),
    "scaled residuals": ("lvvit_s", {}, 82.4),
    # Table 7
    "tokens": ("lvvit_s_tokens", {}, 83.3),
    "tokens, no MixToken": ("lvvit_s_tokens", {"token_labels.mixtoken": 0.0}, 81.3),
    "tokens, mixup": ("lvvit_s_tokens", {"mixing.mixup": 0.8}, 83.1),
    "tokens, no erasing": ("lvvit_s_tokens", {"augmentation.random_erasing": 0.0}, 83.0),
    "tokens, no RandAugment": ("lvvit_s_tokens", {"augmentation.policy": "none"}, 82.8),
    "tokens, weight 0.5": ("lvvit_s_tokens", {"token_labels.weight": 0.5}, 83.3),  # as the paper's text has it
}
