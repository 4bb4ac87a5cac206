"""ResMLP: "Feedforward networks for image classification with data-efficient training" (arXiv 2105.03404).

A linear layer over the patches and an MLP over the channels, Affine instead of norms, mean pooling. The residual scale of the
released models has no shift; `residual="affine"` adds the shift of the equations of the paper.
"""

from typing import Any

from vitrail.models.cait import layerscale_init_at_depth
from vitrail.models.config import Architecture
from vitrail.models.preprocessing import Preprocessing

PREPROCESSING = Preprocessing(crop_ratio=0.9)

RESMLP = Architecture(mixer="linear", norm="affine", residual="layerscale", pos_embed="none", pooling="mean", heads=1)
#            width depth patch
SIZES = {
    "s12": (384, 12, 16),
    "s24": (384, 24, 16),
    "s36": (384, 36, 16),
    "b24": (768, 24, 16),
    "s12_patch14": (384, 12, 14),
    "s12_patch8": (384, 12, 8),
    "b24_patch8": (768, 24, 8),
}
# Table 4.3: replacements for the linear layer, the norm and the mean.
ABLATIONS: dict[str, dict[str, Any]] = {
    "none": {"mixer": "none"},
    "mlp": {"mixer": "mlp"},
    "conv3x3": {"mixer": "separable"},  # the row that later tables call "conv3x3" is the depth-separable one
    "conv3x3_full": {"mixer": "conv"},
    "conv3x3_depthwise": {"mixer": "depthwise"},
    "layernorm": {"norm": "layer"},
    "class_mlp": {"pooling": "class_mlp", "pooling_depth": 2},
}


def resmlp(width: int, depth: int, patch: int) -> Architecture:
    init = 1e-6 if width == 768 else layerscale_init_at_depth(depth)  # of the released B24, lower than the rule
    return RESMLP.replace(width=width, depth=depth, patch_size=patch, layerscale_init=init)


MODELS = {f"resmlp_{name}": resmlp(*size) for name, size in SIZES.items()}
MODELS |= {f"resmlp_s12_{name}": MODELS["resmlp_s12"].replace(**changes) for name, changes in ABLATIONS.items()}

ALIASES = {
    "resmlp_12": "resmlp_s12",
    "resmlp_24": "resmlp_s24",
    "resmlp_36": "resmlp_s36",
    "resmlpB_24": "resmlp_b24_patch8",  # the released "B24" has 8-pixel patches
    "resmlp_big_24": "resmlp_b24_patch8",
}
