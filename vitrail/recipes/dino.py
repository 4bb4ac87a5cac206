"""DINO: "Emerging Properties in Self-Supervised Vision Transformers" (arXiv 2104.14294), for ViT and, in its paper, for ResMLP.

Pre-training without labels. `dino_small` is for small data sets on one GPU; `dino_vit_small…` are the commands of the released
code; `dino_resmlp_…` is the pre-training of Table 4.2 of ResMLP, `…_to_imagenet` the training with labels that follows it.

    vitrail train photos/ --recipe dino_small
    vitrail train imagenet/ --recipe dino_resmlp_s12 && vitrail train imagenet/ --recipe dino_resmlp_s12_to_imagenet --from RUN
"""

import dataclasses

from vitrail.data.transforms.config import Augmentation
from vitrail.recipes.defaults import FAST_DECODING, FROM_IMAGES
from vitrail.recipes.derivation import Page, change, top1
from vitrail.recipes.resmlp import PAPER as RESMLP
from vitrail.recipes.schema import About, OptimizerConfig, Recipe, ScheduleConfig, ValidationConfig
from vitrail.recipes.task_options import DinoOptions, write_options

PAPER = "DINO, arXiv 2104.14294"
RECIPES = Page()
# Of the first global view; the others differ in what `task_options` name.
VIEW = Augmentation(
    scale=(0.4, 1.0),
    policy="dino",
    color_jitter=(0.4, 0.4, 0.2, 0.1),
    color_jitter_prob=0.8,
    grayscale=0.2,
    blur=1.0,
)


def dino_small(name: str) -> Recipe:
    """Any photographs or small images, a few hundred to a hundred thousand, on one GPU; on a CPU give --minutes."""
    options = DinoOptions(
        local_crops=6,
        local_blur=0.2,
        outputs=4096,
        hidden=1024,
        # The schedules of the paper are for a hundred thousand steps. Here the teacher follows faster and is as sharp throughout.
        momentum=0.99,
        teacher_temperature=0.04,
        teacher_temperature_warmup=0.0,
    )
    return Recipe(
        name=name,
        task="dino",
        task_options=write_options(options),
        model="vitrail_small",
        architecture={"drop_path": 0.1},
        batch_size=256,
        data=FAST_DECODING,
        augmentation=dataclasses.replace(VIEW, image_size=FROM_IMAGES, blur=0.5),
        optimizer=OptimizerConfig(lr=5e-4, lr_batch_size=256, weight_decay=0.04),
        schedule=ScheduleConfig(length="200 epochs", warmup="5%", min_lr=1e-6),
        validation=ValidationConfig(crop_ratio=1.0),
        about=About("vitrail", "pre-training without labels, on one GPU", "not measured", "one GPU, or minutes on a CPU"),
    )


def vit(
    name: str, length: int, batch_size: int, options: DinoOptions, row: str, knn: float, linear: float, hardware: str
) -> Recipe:
    """ViT-S/16 with the commands of the released code, for example 73.3 % k-NN after 300 epochs."""
    return Recipe(
        name=name,
        task="dino",
        task_options=write_options(options),
        model="deit_small_patch16",  # the same network: class token, learned positions, erf GELU
        architecture={"drop_path": 0.1},
        batch_size=batch_size,
        augmentation=VIEW,
        optimizer=OptimizerConfig(lr=5e-4, lr_batch_size=256, weight_decay=0.04, weight_decay_on="tensors"),
        schedule=ScheduleConfig(length=f"{length} epochs", warmup="10 epochs", warmup_lr=0.0, min_lr=1e-6),
        about=About(PAPER, row, expected(knn, linear), hardware),
    )


def expected(knn: float, linear: float) -> str:
    return f"{knn} % k-NN top-1 on ImageNet, {linear} % with a linear classifier"


SHARP = DinoOptions(local_size=96, teacher_temperature=0.04, teacher_temperature_warmup=0.0)
WARM = DinoOptions(local_size=96)  # the temperature grows from 0.04 to 0.07 in 30 epochs
BOOSTED = dataclasses.replace(WARM, norm_last_layer=False)
RECIPES.add("dino_small", dino_small)
RECIPES.add("dino_vit_small_100ep", vit, 100, 512, SHARP, "ViT-S/16, vanilla training", 69.3, 74.0, "1.75 days on 8 GPUs")
RECIPES.add("dino_vit_small", vit, 300, 1024, BOOSTED, "ViT-S/16, boosted training", 73.3, 76.0, "2.6 days on 16 GPUs")
# The README gives the result of 800 epochs, not the command: the settings of 300 epochs are used.
RECIPES.add("dino_vit_small_800ep", vit, 800, 1024, BOOSTED, "ViT-S/16, the released weights", 74.5, 77.0, "")


def resmlp(name: str, model: str, knn: float, linear: float) -> Recipe:
    """Table 4.2 of ResMLP, for example 62.6 % k-NN for S12.

    It gives the 300 epochs alone; the other settings are DINO's. Local crops are enlarged to 224 pixels (docs/papers/resmlp.md).
    """
    recipe = vit(name, 300, 1024, WARM, "Table 4.2", knn, linear, "")
    return change(recipe, name, model=model, validation={"crop_ratio": 0.9}, about={"paper": RESMLP})


#        top-1: k-NN, linear (Table 4.2); after training with labels (Table 4.3)
for _size, (_knn, _linear, _top1) in {"s12": (62.6, 67.5, 76.5), "s24": (69.4, 72.8, 79.9)}.items():
    RECIPES.add(f"dino_resmlp_{_size}", resmlp, f"resmlp_{_size}", _knn, _linear)
    RECIPES.derive(
        f"dino_resmlp_{_size}_to_imagenet",
        f"resmlp_{_size}",
        init={"pretrained_recipe": f"dino_resmlp_{_size}"},
        about={"row": "Table 4.3, pre-trained SSL (DINO)", "expected": top1(_top1), "hardware": ""},
    )
