"""PatchConvNet: "Augmenting convolutional networks with attention-based aggregation" (arXiv 2112.13692).

A convolutional stem, identical convolutional blocks, and one single-head attention that pools the patches into a class vector
(`_multi`: into one vector per class). No position embeddings, so the weights work for any image size.
"""

from vitrail.models.config import Architecture
from vitrail.models.preprocessing import Preprocessing

PREPROCESSING = Preprocessing(crop_ratio=1.0)  # not stated by the authors; the value of their papers since CaiT

PATCHCONVNET = Architecture(
    stem="conv",
    stem_norm="none",
    mixer="patchconv",
    mlp_ratio=0,
    residual="layerscale",
    pos_embed="none",
    pooling="class_attention",
    pooling_depth=1,
    heads=1,
    pooling_heads=1,
    pooling_mlp_ratio=3.0,
)
WIDTHS = {"s": 384, "b": 768, "l": 1024}
DEPTHS = {"s": (20, 36, 60, 120), "b": (36, 60, 120), "l": (60, 120)}


def patchconvnet(letter: str, depth: int) -> Architecture:
    init = 1e-4 if (letter, depth) == ("s", 60) else 1e-6
    return PATCHCONVNET.replace(width=WIDTHS[letter], depth=depth, layerscale_init=init)


MODELS = {f"patchconvnet_{letter}{depth}": patchconvnet(letter, depth) for letter, depths in DEPTHS.items() for depth in depths}
MODELS |= {f"{name}_multi": model.replace(pooling="per_class", pooling_keys="patches") for name, model in list(MODELS.items())}
MODELS |= {
    "patchconvnet_s60_mean": MODELS["patchconvnet_s60"].replace(pooling="mean"),
    "patchconvnet_s60_linear": MODELS["patchconvnet_s60"].replace(stem="linear"),
    "patchconvnet_s60_batchnorm": MODELS["patchconvnet_s60"].replace(norm="batch"),
    "patchconvnet_s60_multihead": MODELS["patchconvnet_s60"].replace(pooling_heads=8),
}

ALIASES = {name.removeprefix("patchconvnet_").capitalize(): name for name in MODELS}
