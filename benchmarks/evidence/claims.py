"""Claims of the papers and how they are tested: variants that differ in one or two keys of a recipe, with the same epochs."""

from dataclasses import dataclass, field, replace
from typing import Any

PLAIN = {"model": "deit_tiny_patch16", "architecture.drop_path": 0.0}  # a ViT without convolutions
DEEP = PLAIN | {"architecture.depth": 36, "architecture.width": 96, "architecture.heads": 3}
SCALED = {"architecture.residual": "layerscale", "architecture.layerscale_init": 1e-4}


@dataclass(frozen=True)
class Claim:
    """A claim; `{teacher}`, `{labels}`, `{weights}` and `{tokenizer}` in a variant are replaced by the options of the command."""

    text: str
    paper: str  # published numbers
    data: str  # the data set it is tested on
    variants: dict[str, dict[str, Any]]
    base: dict[str, Any] = field(default_factory=dict)
    recipe: str = "small"


# Pre-training without labels on the same images, before the same training with labels.
BLOCKS = {"architecture.width": 256, "architecture.depth": 8, "architecture.heads": 4, "architecture.patch_size": 8}
DINO_STAGE = {"own_recipe": "dino_small", "own_epochs": 30, "task_options.local_crops": 4, "batch_size": 256}
BEIT_STAGE = {"own_recipe": "beit_small", "own_epochs": 40, "task_options.tokenizer": "{tokenizer}", "batch_size": 256}
MASKED_STAGE = {"own_recipe": "masked_small", "own_epochs": 40, "batch_size": 256}
RELATIVE = {"architecture.pos_embed": "relative_bias", "architecture.pos_embed_place": "shared"}
MASKING = {
    "architecture.pooling": "mean",
    "architecture.residual": "layerscale",
    "architecture.layerscale_init": 0.1,
    "architecture.weight_init": "beit",
} | RELATIVE
STEMS = {
    "linear": {},
    "hMLP": {"architecture.stem": "hmlp", "architecture.stem_norm": "layer", "architecture.stem_strides": [4, 2]},
    "convolutions": {"architecture.stem": "conv", "architecture.stem_norm": "layer"},
}
SCOPES = Claim(  # from `vitrail_tiny`, the network trained on Tiny ImageNet
    "Fine-tuning only the attention is as good as fine-tuning all weights; fine-tuning only the MLPs is worse.",
    "Three things, Table 5, ViT-S from 224 to 384, AdamW: full 82.7, attention 82.5, ffn 82.2",
    "oxford-pets",
    {scope: {"init.scope": scope} for scope in ("full", "attention", "ffn")},
    {"init.weights": "{weights}", "optimizer.lr": 5e-4},
    "finetune",
)
CLAIMS = {
    "distillation": Claim(
        "Hard distillation from a convnet is better than soft distillation, and a distillation token improves it further.",
        "DeiT, Table 3.3, ImageNet, Ti: none 72.2, soft 72.2, hard 74.3, token 74.5",
        "cifar10",
        {
            "none": {},
            "soft": {
                "distillation.kind": "soft",
                "distillation.teacher": "{teacher}",
                "distillation.temperature": 3.0,
                "distillation.weight": 0.1,
            },
            "hard": {"distillation.kind": "hard", "distillation.teacher": "{teacher}"},
            "hard, token": {
                "distillation.kind": "hard",
                "distillation.teacher": "{teacher}",
                "architecture.distillation": True,
            },
        },
        PLAIN,
    ),
    "tokens": Claim(
        "Token labels are better than one label per image, and MixToken is better than CutMix.",
        "LV-ViT, Tables 3 and 6, ImageNet, S: labels 82.4, re-labels with CutMix 82.8, token labels with MixToken 83.3",
        "tiny-imagenet",
        {
            "none": {},
            "token labels": {"token_labels.store": "{labels}", "token_labels.weight": 0.5},
            "token labels, MixToken": {
                "token_labels.store": "{labels}",
                "token_labels.weight": 0.5,
                "token_labels.mixtoken": 1.0,
                "mixing.cutmix": 0.0,
            },
        },
        {
            "model": "lvvit_t",
            "architecture.patch_size": 8,
            "architecture.stem_kernels": [3, 3, 3, 4],
            "architecture.stem_strides": [2, 1, 1, 4],
            "mixing.mixup": 0.0,
        },
    ),
    "scopes": SCOPES,
    "scopes on cifar10": replace(SCOPES, data="cifar10"),
    "layerscale": Claim(
        "LayerScale makes networks of 36 blocks trainable.",
        "CaiT, Table 1, DeiT-S of 36 blocks: none 78.9 (81.9 with more drop-path), ReZero 81.6, T-Fixup 82.1, Fixup 82.4, "
        "LayerScale 82.9",
        "cifar10",
        {
            "none": {},
            "ReZero": {"architecture.residual": "rezero"},
            "Fixup": {"architecture.residual": "fixup"},
            "T-Fixup": {"architecture.residual": "tfixup"},
            "LayerScale": SCALED,
        },
        DEEP,
    ),
    "class attention": Claim(
        "A class token inserted after the last block, with class attention, is better than one inserted at the start.",
        "CaiT, Table 2, DeiT-S without LayerScale: class token 79.9, mean 80.3, 12 + 2 blocks with class attention 80.8",
        "cifar10",
        {
            "class token": {},
            "class attention": {"architecture.pooling": "class_attention"},
            "mean": {"architecture.pooling": "mean"},
        },
        PLAIN | SCALED,
    ),
    "parallel": Claim(
        "Two parallel branches are as good as twice the number of sequential blocks.",
        "Three things, Table 2, ViT-B with LayerScale, 300 epochs: 36 x 1 83.9, 18 x 2 83.8",
        "cifar10",
        {
            "24 x 1": {"architecture.depth": 24},
            "12 x 2": {"architecture.depth": 12, "architecture.branches": 2},
            "6 x 4": {"architecture.depth": 6, "architecture.branches": 4},
        },
        PLAIN | SCALED | {"architecture.width": 128, "architecture.heads": 2},
    ),
    "recipe": Claim(
        "On ImageNet-1k a ViT-B is better with 3-Augment than with RandAugment, and with a binary loss (sigmoids) than with a "
        "softmax; a ViT-S is not. A simple crop is better than random resized crops on ImageNet-21k only.",
        "DeiT III, ImageNet-1k, ViT-B: softmax 80.9, sigmoids 82.2 (300 epochs, RandAugment); RandAugment 82.7, 3-Augment 83.1 "
        "(400 epochs, sigmoids); ViT-S: 79.8 and 79.8, 80.7 and 80.4; without resized crops ViT-S loses 0.9. ImageNet-21k, then "
        "ImageNet-1k, S, B, L: resized crops 81.6, 84.6, 86.0, simple crops 82.1, 84.8, 86.3",
        "cifar10",
        {
            "RandAugment, resized crop, softmax": {"augmentation.policy": "rand", "augmentation.crop": "random_resized"},
            "3-Augment": {"augmentation.policy": "three", "augmentation.crop": "random_resized"},
            "simple crop": {"augmentation.policy": "rand", "augmentation.crop": "simple"},
            "sigmoids": {
                "augmentation.policy": "rand",
                "augmentation.crop": "random_resized",
                "loss.kind": "binary",
                "loss.label_smoothing": 0.0,
            },
        },
        PLAIN | SCALED,
    ),
    "communication": Claim(
        "Without communication between patches the accuracy of an MLP network drops.",
        "ResMLP, S12: linear 76.6, none 56.5",
        "cifar10",
        {"none": {"architecture.mixer": "none"}, "linear": {}},
        {"model": "resmlp_s12", "architecture.patch_size": 4, "architecture.drop_path": 0.0},
    ),
    "pooling": Claim(
        "Attention pooling is at least as good as mean pooling, and gives attention maps.",
        "PatchConvNet, S60: attention 82.1, mean 81.9",
        "cifar10",
        {"mean": {"architecture.pooling": "mean"}, "attention": {}},
        {
            "model": "patchconvnet_s60",
            "architecture.patch_size": 4,
            "architecture.depth": 12,
            "architecture.width": 192,
            "architecture.drop_path": 0.0,
        },
    ),
    "stems": Claim(
        "A stem of several small steps is better than one linear projection, and hMLP achieves this without mixing patches.",
        "Three things, Table 7, ViT-B: linear 82.20 ± 0.06, convolutions 82.57, hMLP 82.54 ± 0.09",
        "cifar10",
        {
            "linear": {},
            "hMLP": {"architecture.stem": "hmlp", "architecture.stem_strides": [2, 2]},
            "convolutions": {"architecture.stem": "conv"},
        },
        PLAIN | SCALED,
    ),
    "resolution": Claim(
        "Training at a low resolution followed by a short fine-tuning at full resolution is as good, and cheaper.",
        "DeiT III, ViT-B, 400 epochs: 224 pixels 83.1; 128, then 20 epochs at 224: 83.2; 160: 83.3; 192: 83.5",
        "cifar10",
        {
            "32 pixels": {"augmentation.image_size": [32, 32]},
            "24 pixels, then 32": {
                "first": {"augmentation.image_size": [24, 24], "optimizer.lr": 1e-3, "share": 0.8},
                "augmentation.image_size": [32, 32],
                "optimizer.lr": 2e-4,
            },
        },
        PLAIN | SCALED | {"architecture.patch_size": 4},
    ),
    "pre-training": Claim(
        "Pre-training without labels, followed by the same training with labels, is better than labels alone.",
        "Three things, Table 7, ViT-B: labels 82.20 ± 0.06, BEiT and labels 83.05",
        "tiny-imagenet",
        {"labels alone": {}, "DINO, then labels": {"first": DINO_STAGE}, "BEiT, then labels": {"first": BEIT_STAGE}},
        {"model": "vit_small_patch16_12x1_ls_hmlp", "architecture.stem_norm": "layer"} | BLOCKS | MASKING,
    ),
    "pre-training of MLPs": Claim(
        "Pre-training without labels, followed by the same training with labels, is better than labels alone, also for ResMLP.",
        "ResMLP, Tables 4.2 and 4.3, S12: labels 76.6, DINO and labels 76.5; S24: 79.4 and 79.9",
        "tiny-imagenet",
        {"labels alone": {}, "DINO, then labels": {"first": DINO_STAGE | {"task_options.fixed_grid": "none"}}},
        {"model": "resmlp_s12", "architecture.patch_size": 8, "architecture.drop_path": 0.0},
    ),
    "masked patches": Claim(
        "Masked patch prediction before the training with labels is better than labels alone; predicting mean colors or "
        "downsized patches is better than the regression of all pixels.",
        "ViT, Section 4.6 and Appendix B.1.2, ViT-B/16: from scratch 77.9, masked patch prediction 79.9; all three targets "
        "work, the regression slightly worse",
        "tiny-imagenet",
        {
            "labels alone": {},
            "mean color": {"first": MASKED_STAGE},
            "downsized": {"first": MASKED_STAGE | {"task_options.target": "downsized"}},
            "pixels": {"first": MASKED_STAGE | {"task_options.target": "pixels"}},
        },
        {"model": "vit_small_patch16", "architecture.pooling": "mean"} | BLOCKS,
    ),
    "stems of masked models": Claim(
        "With masked pre-training, the hMLP stem is better than a linear one; a stem of overlapping convolutions is not.",
        "Three things, Table 7, ViT-B, labels and BEiT: linear 82.20, 83.05; convolutions 82.57, 83.04; hMLP 82.54, 83.43",
        "tiny-imagenet",
        {f"{stem}, labels alone": changes for stem, changes in STEMS.items()}
        | {f"{stem}, BEiT": changes | {"first": BEIT_STAGE} for stem, changes in STEMS.items()},
        {"model": "vit_small_patch16"} | BLOCKS | MASKING,
    ),
}
