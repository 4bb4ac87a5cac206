"""ResMLP: "Feedforward networks for image classification with data-efficient training" (arXiv 2105.03404).

DeiT's training with LAMB for 400 epochs, in full precision. Names are those of the models; `…_distilled` has a teacher,
`resmlp_s12_90ep` is the old-fashioned control, `…_21k` the pre-training, `…_to_{data}` a transfer. The paper's text inherits a
batch of 1024 and a drop-path rate of 0.1; the released settings, which are here, have 2048 and rates that grow with depth as in
CaiT.
"""

from vitrail.recipes.cait import transfers
from vitrail.recipes.deit import DEIT, LAMB, taught
from vitrail.recipes.derivation import change, named, top1
from vitrail.recipes.schema import About, Recipe, ScheduleConfig

PAPER = "ResMLP, arXiv 2105.03404"

RESMLP = change(
    DEIT,
    "resmlp_s12",
    batch_size=2048,
    precision="fp32",
    optimizer=LAMB | {"lr": 5e-3, "weight_decay": 0.2},
    schedule={"length": "400 epochs"},
    validation={"crop_ratio": 0.9},
    about=About(PAPER, "Table 4.3", "", "about two days on 8 V100"),
)
#              drop-path  top-1
SIZES: dict[str, tuple[float, float | None]] = {
    "s12": (0.05, 76.6),
    "s24": (0.1, 79.4),
    "s36": (0.2, None),
    "b24": (0.2, 81.0),
    "s12_patch14": (0.05, 76.9),
    "s12_patch8": (0.05, 79.1),
    "b24_patch8": (0.2, 81.0),
}
# Table 4.3: what replaces the linear map over patches, the affine maps or the mean of S12.
VARIANTS = {
    "none": 56.5,
    "mlp": 77.3,
    "conv3x3_full": 77.3,
    "conv3x3_depthwise": 76.3,
    "conv3x3": 77.0,
    "layernorm": 77.7,
    "class_mlp": 77.5,
}


def sized(model: str, drop_path: float, score: float | None) -> Recipe:
    return change(RESMLP, model, model=model, architecture={"drop_path": drop_path}, about={"expected": top1(score)})


RECIPES = {f"resmlp_{size}": sized(f"resmlp_{size}", drop, score) for size, (drop, score) in SIZES.items()}
RECIPES |= {f"resmlp_s12_{name}": sized(f"resmlp_s12_{name}", 0.05, score) for name, score in VARIANTS.items()}

# One head learns from labels and teacher; of S36 only the released weights are known.
for _size, _row, _score in (
    ("s12", "Table 4.3, distillation", 77.8),
    ("s24", "Table 4.3, distillation", 80.8),
    ("s36", "the released weights, distillation", 81.1),
    ("b24_patch8", "Table 4.3, distillation", 83.6),
):
    RECIPES |= named(taught(RECIPES[f"resmlp_{_size}"], f"resmlp_{_size}_distilled", _row, _score))

# The control of Table 4.3: "SGD, 90 epochs, a waterfall schedule, the augmentations of ResNet"; the usual numbers of those.
RECIPES["resmlp_s12_90ep"] = change(
    RECIPES["resmlp_s12"],
    "resmlp_s12_90ep",
    architecture={"drop_path": 0.0},
    batch_size=256,
    data={"repeats": 1, "round_to": 1},
    augmentation={"policy": "none", "random_erasing": 0.0},
    mixing={"mixup": 0.0, "cutmix": 0.0},
    loss={"label_smoothing": 0.0},
    optimizer={
        "kind": "sgd",
        "lr": 0.1,
        "lr_batch_size": 256,
        "momentum": 0.9,
        "nesterov": False,
        "weight_decay": 1e-4,
        "weight_decay_coupled": True,
        "clip_grad_norm": 0.0,
    },
    schedule=ScheduleConfig(length="90 epochs", warmup="0 epochs", kind="step", step_size="30 epochs", gamma=0.1, by_epoch=True),
    ema={"decay": 0.0},
    about={"row": "Table 4.3, old-fashioned", "expected": top1(69.2), "hardware": ""},
)

# Of the path over ImageNet-21k only the 60 epochs are published; the second stage is DeiT III's.
RECIPES["resmlp_b24_patch8_21k"] = change(
    RECIPES["resmlp_b24_patch8"],
    "resmlp_b24_patch8_21k",
    schedule={"length": "60 epochs"},
    about={
        "row": "Table 4.3, pre-trained on ImageNet-21k",
        "expected": "84.4 % top-1 on ImageNet after fine-tuning",
        "hardware": "",
    },
)
RECIPES["resmlp_b24_patch8_21k_to_1k"] = change(
    RECIPES["resmlp_b24_patch8_21k"],
    "resmlp_b24_patch8_21k_to_1k",
    init={"pretrained_recipe": "resmlp_b24_patch8_21k"},
    optimizer={"lr": 3e-4, "weight_decay": 0.02},
    schedule={"length": "50 epochs"},
    about={"expected": top1(84.4)},
)

#          CIFAR-10 CIFAR-100 Flowers Cars iNat-18 iNat-19 (Table 4.4)
for _size, _scores in {"s12": (98.1, 87.0, 97.4, 84.6, 60.2, 71.0), "s24": (98.7, 89.5, 97.9, 89.5, 64.3, 72.5)}.items():
    RECIPES |= transfers(RECIPES[f"resmlp_{_size}"], "Table 4.4, CaiT's rule", _scores)
    for _data in ("cifar10", "cifar100"):  # the released settings: AdamW, a rate below the floor
        _name = f"resmlp_{_size}_to_{_data}"
        RECIPES |= named(
            change(
                RECIPES[_name],
                _name,
                batch_size=768,
                augmentation={"random_erasing": 0.0},
                optimizer={"kind": "adamw", "lr": 5e-6, "weight_decay": 0.05, "clip_grad_norm": 0.0},
                about={"row": "Table 4.4, the released settings"},
            )
        )
