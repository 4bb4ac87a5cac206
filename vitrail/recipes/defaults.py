"""Default recipes, for images of any kind; image size and patch size are chosen from the images.

`laptop` trains a tiny network on a CPU in minutes; `small` trains from scratch on one GPU with a few thousand to a hundred
thousand small images; `finetune` starts from weights (`--from`) and is what to try first with photographs.

    vitrail train photos/
    vitrail train photos/ --from vitrail_tiny
"""

from vitrail.data.transforms.config import Augmentation
from vitrail.recipes.derivation import Page
from vitrail.recipes.schema import (
    About,
    DataConfig,
    DistillationConfig,
    EmaConfig,
    InitConfig,
    LossConfig,
    MixingConfig,
    OptimizerConfig,
    Recipe,
    ScheduleConfig,
    ValidationConfig,
)

FROM_IMAGES = (0, 0)
FAST_DECODING = DataConfig(decode_scale=1.5)  # the recipes of papers decode at full size
BOTH_HEADS = DistillationConfig(without_teacher="both")  # of a distilled model: both count in evaluation


def laptop(name: str) -> Recipe:
    """A first run on a CPU: the built-in digits in a minute on two cores."""
    return Recipe(
        name=name,
        model="vitrail_mini",
        batch_size=64,
        data=FAST_DECODING,
        # No horizontal flip: mirrored digits and letters are not the same. For photographs: augmentation.hflip=0.5.
        augmentation=Augmentation(image_size=FROM_IMAGES, scale=(0.5, 1.0), hflip=0.0),
        loss=LossConfig(label_smoothing=0.1),
        distillation=BOTH_HEADS,
        optimizer=OptimizerConfig(lr=2e-3, weight_decay=0.05, clip_grad_norm=1.0),
        schedule=ScheduleConfig(length="30 epochs", warmup="10%"),
        validation=ValidationConfig(crop_ratio=1.0),
        about=About(
            "vitrail",
            "a first run on a CPU",
            "digits: 99.4 ± 0.6 % validation, 97.4 ± 0.5 % test (5 seeds)",
            "two CPU cores, a minute",
        ),
    )


def small(name: str) -> Recipe:
    """From scratch on one GPU: CIFAR-10 in about seven minutes on an H200."""
    return Recipe(
        name=name,
        model="vitrail_small",
        architecture={"drop_path": 0.1},
        batch_size=512,
        data=FAST_DECODING,
        augmentation=Augmentation(image_size=FROM_IMAGES, crop="simple", policy="rand", num_ops=1, random_erasing=0.25),
        mixing=MixingConfig(mixup=0.1, cutmix=1.0),
        loss=LossConfig(label_smoothing=0.1),
        distillation=BOTH_HEADS,
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.05, clip_grad_norm=1.0),
        schedule=ScheduleConfig(length="200 epochs", warmup="5%", min_lr=1e-5),
        ema=EmaConfig(decay=0.999, evaluate=True, warmup=True),
        validation=ValidationConfig(crop_ratio=1.0),
        about=About(
            "vitrail",
            "from scratch on one GPU",
            "CIFAR-10, 230 epochs: 96.3 %; Tiny ImageNet, 90 epochs, more regularized: 64.9 %, distilled from that: 68.8 % "
            "(1 seed each)",
            "one GPU; CIFAR-10 in about seven minutes, estimated from images/s alone on an H200; the run itself shared the GPU",
        ),
    )


def finetune(name: str) -> Recipe:
    """From any checkpoint on one GPU, or on a CPU for small data sets."""
    return Recipe(
        name=name,
        model="deit3_small_patch16",
        architecture={"drop_path": 0.1},
        batch_size=128,
        data=FAST_DECODING,
        init=InitConfig(zero_head=True, probe_head=True),
        augmentation=Augmentation(image_size=FROM_IMAGES, scale=(0.35, 1.0), policy="rand", magnitude=6.0),
        mixing=MixingConfig(mixup=0.2),
        loss=LossConfig(label_smoothing=0.1),
        distillation=BOTH_HEADS,
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.05, clip_grad_norm=1.0, layer_decay=0.75),
        schedule=ScheduleConfig(length="20 epochs", warmup="10%"),
        validation=ValidationConfig(at_start=True, select_by="latest", crop_ratio=1.0),
        about=About(
            "vitrail",
            "the default for photographs, from any checkpoint",
            "five sets of 420 to 1,069 photographs, --from vitrail_tiny, five minutes on two CPU cores: docs/first-use.md",
            "one GPU, or minutes on a CPU",
        ),
    )


RECIPES = Page()
for _build in (laptop, small, finetune):
    RECIPES.add(_build.__name__, _build)
