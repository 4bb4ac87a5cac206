"""FixRes: "Fixing the train-test resolution discrepancy" (arXiv 1906.06423), a ResNet-50.

`fixres_resnet50` trains at 224 pixels. `fixres_resnet50_to_384` is the second step: classifier and last norm are trained on
images as in evaluation, at a larger size. It starts from any weights, also of other models and sizes:

    vitrail train imagenet/ --recipe fixres_resnet50
    vitrail train photos/ --recipe fixres_resnet50_to_384 --from runs/photos --set augmentation.image_size=288
"""

from vitrail.data.transforms.config import Augmentation
from vitrail.recipes.derivation import Page, change, top1
from vitrail.recipes.schema import About, DataConfig, OptimizerConfig, Recipe, ScheduleConfig, ValidationConfig

PAPER = "FixRes, arXiv 1906.06423"
RECIPES = Page()


def scratch(name: str) -> Recipe:
    """The ResNet-50 of the released code: 77.0 % top-1 on ImageNet.

    Its 120 epochs have 5005 steps each, which is two passes over ImageNet: 240 epochs here, with steps of the learning rate after
    60 of them instead of 30. The statistics of BatchNorm are those of the 64 images of a GPU.
    """
    return Recipe(
        name=name,
        model="resnet50",
        batch_size=512,
        group_size=64,
        data=DataConfig(repeats=3),
        augmentation=Augmentation(interpolation="bilinear", color_jitter=(0.3, 0.3, 0.3, 0.0)),
        optimizer=OptimizerConfig(
            kind="sgd",
            lr=0.16,
            momentum=0.9,
            nesterov=False,
            weight_decay=1e-4,
            weight_decay_coupled=True,
            weight_decay_on="all",
        ),
        schedule=ScheduleConfig(
            length="240 epochs", warmup="0 epochs", kind="step", step_size="60 epochs", gamma=0.1, by_epoch=True
        ),
        validation=ValidationConfig(crop_ratio=0.875, interpolation="bilinear"),
        about=About(PAPER, "Table 2, ResNet-50 at 224", top1(77.0), "8 GPUs"),
    )


def fixres(name: str) -> Recipe:
    """The second step, without augmentation: 79.0 % top-1 on ImageNet at 384 pixels."""
    return change(
        "fixres_resnet50",
        name,
        init={"scope": "last_norm", "pretrained_recipe": "fixres_resnet50"},
        data={"repeats": 1},
        augmentation=Augmentation(image_size=(384, 384), crop="center", crop_ratio=0.875, interpolation="bilinear", hflip=0.0),
        optimizer={"lr": 8e-3},
        schedule={"length": "56 epochs", "step_size": "30 epochs"},
        about={"row": "Table 2, classifier and batch norm at 384", "expected": top1(79.0)},
    )


RECIPES.add("fixres_resnet50", scratch)
RECIPES.add("fixres_resnet50_to_384", fixres)
