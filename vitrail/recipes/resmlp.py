"""ResMLP: "Feedforward networks for image classification with data-efficient training" (arXiv 2105.03404).

DeiT's training with LAMB for 400 epochs, in full precision. Names are those of the models; `…_distilled` has a teacher,
`resmlp_s12_90ep` is the control with SGD, `…_21k` the pre-training, `…_to_{data}` a transfer, `…_to_ade20k` a
segmentation. The paper's text inherits a batch size of 1024 and a drop-path rate of 0.1; the released settings, used here, have
2048 and rates that grow with depth as in CaiT.

    vitrail train imagenet/ --recipe resmlp_s24
"""

from vitrail.recipes.cait import add_transfers, transfer
from vitrail.recipes.deit import LAMB, SGD, distilled
from vitrail.recipes.derivation import Page, change, top1
from vitrail.recipes.schema import About, Recipe, ScheduleConfig
from vitrail.recipes.segmentation import add_segmentation

PAPER = "ResMLP, arXiv 2105.03404"
RECIPES = Page()


def from_scratch(name: str, drop_path: float, score: float | None) -> Recipe:
    """Table 4.3, for example 79.4 % top-1 for S24; about two days on 8 V100."""
    return change(
        "deit_base",
        name,
        model=name,
        architecture={"drop_path": drop_path},
        batch_size=2048,
        precision="fp32",
        optimizer=LAMB | {"lr": 5e-3, "weight_decay": 0.2},
        schedule={"length": "400 epochs"},
        validation={"crop_ratio": 0.9},
        about=About(PAPER, "Table 4.3", top1(score), "about two days on 8 V100"),
    )


#              drop-path rate, top-1
SIZES: dict[str, tuple[float, float | None]] = {
    "s12": (0.05, 76.6),
    "s24": (0.1, 79.4),
    "s36": (0.2, None),
    "b24": (0.2, 81.0),
    "s12_patch14": (0.05, 76.9),
    "s12_patch8": (0.05, 79.1),
    "b24_patch8": (0.2, 81.0),
}
# Table 4.3: what replaces the linear map over patches, the affine maps or the mean pooling of S12.
VARIANTS = {
    "none": 56.5,
    "mlp": 77.3,
    "conv3x3_full": 77.3,
    "conv3x3_depthwise": 76.3,
    "conv3x3": 77.0,
    "layernorm": 77.7,
    "class_mlp": 77.5,
}
for _size, _row in SIZES.items():
    RECIPES.add(f"resmlp_{_size}", from_scratch, *_row)
for _variant, _score in VARIANTS.items():
    RECIPES.add(f"resmlp_s12_{_variant}", from_scratch, 0.05, _score)

# One head is trained on labels and teacher; for S36 there are only the released weights.
for _size, _source, _score in (
    ("s12", "Table 4.3, distillation", 77.8),
    ("s24", "Table 4.3, distillation", 80.8),
    ("s36", "the released weights, distillation", 81.1),
    ("b24_patch8", "Table 4.3, distillation", 83.6),
):
    RECIPES.add(f"resmlp_{_size}_distilled", distilled, f"resmlp_{_size}", _source, _score)

# "SGD, 90 epochs, a waterfall schedule, the augmentations of ResNet", with the usual values.
RECIPES.derive(
    "resmlp_s12_90ep",
    "resmlp_s12",
    architecture={"drop_path": 0.0},
    batch_size=256,
    data={"repeats": 1, "round_to": 1},
    augmentation={"policy": "none", "random_erasing": 0.0},
    mixing={"mixup": 0.0, "cutmix": 0.0},
    loss={"label_smoothing": 0.0},
    optimizer=SGD | {"lr": 0.1, "lr_batch_size": 256, "nesterov": False, "clip_grad_norm": 0.0},
    schedule=ScheduleConfig(length="90 epochs", warmup="0 epochs", kind="step", step_size="30 epochs", gamma=0.1, by_epoch=True),
    ema={"decay": 0.0},
    about={"row": "Table 4.3, old-fashioned", "expected": top1(69.2), "hardware": ""},
)
# Of the pre-training only the 60 epochs are published; the fine-tuning has the settings of DeiT III.
_about = {"row": "Table 4.3, pre-trained on ImageNet-21k", "expected": f"{top1(84.4)} after fine-tuning", "hardware": ""}
RECIPES.derive("resmlp_b24_patch8_21k", "resmlp_b24_patch8", schedule={"length": "60 epochs"}, about=_about)
RECIPES.derive(
    "resmlp_b24_patch8_21k_to_1k",
    "resmlp_b24_patch8_21k",
    init={"pretrained_recipe": "resmlp_b24_patch8_21k"},
    optimizer={"lr": 3e-4, "weight_decay": 0.02},
    schedule={"length": "50 epochs"},
    about={"expected": top1(84.4)},
)


def released_transfer(name: str, pretrained: str, data: str, score: float) -> Recipe:
    """Table 4.4 with the released settings of CIFAR: AdamW, a learning rate below min_lr."""
    return change(
        transfer(name, pretrained, data, "Table 4.4, the released settings", score),
        name,
        batch_size=768,
        augmentation={"random_erasing": 0.0},
        optimizer={"kind": "adamw", "lr": 5e-6, "weight_decay": 0.05, "clip_grad_norm": 0.0},
    )


#          CIFAR-10 CIFAR-100 Flowers Cars iNat-18 iNat-19 (Table 4.4)
for _size, _scores in {"s12": (98.1, 87.0, 97.4, 84.6, 60.2, 71.0), "s24": (98.7, 89.5, 97.9, 89.5, 64.3, 72.5)}.items():
    _base = f"resmlp_{_size}"
    add_transfers(RECIPES, _base, "Table 4.4, CaiT's rule", _scores)
    for _data, _score in zip(("cifar10", "cifar100"), _scores, strict=False):
        RECIPES.add(f"{_base}_to_{_data}", released_transfer, _base, _data, _score)

# Table 4.6: crops of 224 from images of 896 x 224, in which the map over patches keeps its size. The test has windows of 224 on
# images of the usual size, 2048 x 512; their stride is not stated, here they overlap by two thirds. The paper says "x3 schedule"
# without a number of iterations.
_protocol = {"short_side": 512, "window": 224, "stride": 75}
for _size, _score in {"s12": 35.9, "s24": 39.1, "s36": 39.1, "b24": 42.5}.items():
    add_segmentation(RECIPES, PAPER, "Table 4.6", f"resmlp_{_size}", f"resmlp_{_size}", (_score, None), crop=224, **_protocol)
