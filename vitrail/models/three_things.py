"""Three things everyone should know about ViTs (arXiv 2203.09795): parallel branches, attention-only tuning, stems.

Names are a pattern: `vit_{size}_patch{P}_{N}x{B}` is N blocks of B parallel branches of each kind, any N and B;
`_ls` adds LayerScale; `_hmlp`, `_hmlp_ln`, `_conv`, `_conv_ln`, `_local`, `_linear_bn`, `_linear_gelu`,
`_linear_bn_gelu` choose the stem.
"""

import re

from vitrail.errors import UserError
from vitrail.models.config import Architecture
from vitrail.models.preprocessing import Preprocessing
from vitrail.models.vit import SIZES

PREPROCESSING = Preprocessing(crop_ratio=0.95)

# As in the released code, only patches have position embeddings.
PLAIN = Architecture(pos_embed_prefix=False)
STEMS = {
    "hmlp": {"stem": "hmlp"},
    "hmlp_ln": {"stem": "hmlp", "stem_norm": "layer"},
    "conv": {"stem": "conv"},
    "conv_ln": {"stem": "conv", "stem_norm": "layer"},
    "local": {"stem": "local_transformer"},
    "linear_bn": {"stem_norm": "batch"},
    "linear_gelu": {"stem_activation": "gelu"},
    "linear_bn_gelu": {"stem_norm": "batch", "stem_activation": "gelu"},
}
ALL_SIZES = SIZES | {"medium": (512, 12, 8), "giant": (1408, 40, 16), "gigantic": (1664, 48, 16)}
PATTERN = re.compile(
    r"vit_(?P<size>tiny|small|medium|base|large|huge|giant|gigantic)_patch(?P<patch>\d+)"
    r"_(?P<depth>\d+)x(?P<branches>\d+)(?P<ls>_ls)?(?:_(?P<stem>" + "|".join(sorted(STEMS, key=len, reverse=True)) + "))?"
)


def parse(name: str) -> Architecture | None:
    """The architecture of a name that follows the pattern, else None."""
    match = PATTERN.fullmatch(name)
    if match is None or not int(match["depth"]) or not int(match["branches"]):
        return None
    width, _, heads = ALL_SIZES[match["size"]]
    changes = dict(STEMS[match["stem"]]) if match["stem"] else {}
    changes |= {"residual": "layerscale"} if match["ls"] else {}
    return PLAIN.replace(
        width=width,
        heads=heads,
        depth=int(match["depth"]),
        branches=int(match["branches"]),
        patch_size=int(match["patch"]),
        **changes,
    )


def name_for(a: Architecture) -> str:
    """The name of an architecture by the pattern, or ""."""
    sizes = {width: size for size, (width, _, _) in ALL_SIZES.items()}
    if a.width not in sizes:
        return ""
    for stem in ("", *(f"_{stem}" for stem in STEMS)):
        name = (
            f"vit_{sizes[a.width]}_patch{a.patch_size}_{a.depth}x{a.branches}{'_ls' if a.residual == 'layerscale' else ''}{stem}"
        )
        try:
            known = parse(name)
        except UserError:  # this stem does not support the patch size
            continue
        if known and not set(known.differences(a)) - {"classes", "image_size", "pos_embed_resample"}:
            return name
    return ""


_PAIRS = {
    "tiny": ("12x1", "24x1", "12x2"),
    "small": ("12x1", "24x1", "12x2", "36x1", "18x2", "12x3", "9x4", "48x1", "24x2", "60x1", "30x2", "20x3", "15x4"),
    "base": ("12x1", "13x1", "24x1", "12x2", "36x1", "18x2", "12x3", "9x4"),
    "large": ("24x1", "12x2"),
}
_NAMES = [f"vit_{size}_patch16_{pairs}" for size, several in _PAIRS.items() for pairs in several]
_NAMES += [f"{name}_ls" for name in _NAMES]
_NAMES += [f"vit_base_patch16_12x1_{stem}" for stem in STEMS]
_NAMES += [f"vit_{size}_patch16_12x1{ls}_hmlp" for size in ("tiny", "small") for ls in ("", "_ls")] + [
    "vit_large_patch16_24x1_hmlp"
]
MODELS = {name: model for name in _NAMES if (model := parse(name))}

ALIASES = {
    "deit_small_patch16_36": "vit_small_patch16_36x1",
    "deit_small_patch16_36_LS": "vit_small_patch16_36x1_ls",
    "deit_small_patch16_18x2": "vit_small_patch16_18x2",
    "deit_small_patch16_18x2_LS": "vit_small_patch16_18x2_ls",
    "deit_base_patch16_36x1": "vit_base_patch16_36x1",
    "deit_base_patch16_36x1_LS": "vit_base_patch16_36x1_ls",
    "deit_base_patch16_18x2": "vit_base_patch16_18x2",
    "deit_base_patch16_18x2_LS": "vit_base_patch16_18x2_ls",
    "deit_giant_40_patch14_LS": "vit_giant_patch14_40x1_ls",
    "deit_Giant_48_patch14_LS": "vit_gigantic_patch14_48x1_ls",
}
