"""DeiT: "Training data-efficient image transformers & distillation through attention" (arXiv 2012.12877).

A ViT with a linear head, erf GELU and, when distilled, a second token with its own head; the prediction is
the mean of the logits of both heads.
"""

from vitrail.models.config import Architecture
from vitrail.models.preprocessing import Preprocessing
from vitrail.models.vit import sized

PREPROCESSING = Preprocessing(crop_ratio=0.875)

DEIT = Architecture(drop_path_schedule="linear")

MODELS = {}
for _size in ("tiny", "small", "base"):
    MODELS[f"deit_{_size}_patch16"] = sized(DEIT, _size)
    MODELS[f"deit_{_size}_distilled_patch16"] = sized(DEIT, _size).replace(distillation=True)

ALIASES: dict[str, str] = {}
