"""Object detection and instance segmentation. `detect` is the default for small data; papers' pages add theirs.

vitrail train voc/ --recipe detect --from vitrail_tiny
vitrail train coco/ --recipe patchconvnet_s60_to_coco --from patchconvnet_s60
"""

from vitrail.data.transforms.config import Augmentation
from vitrail.recipes.defaults import FROM_IMAGES
from vitrail.recipes.derivation import Page
from vitrail.recipes.lookup import lookup
from vitrail.recipes.schema import About, DataConfig, InitConfig, OptimizerConfig, Recipe, ScheduleConfig, ValidationConfig
from vitrail.recipes.segmentation import COLOR_JITTER, COLOR_JITTER_PROB
from vitrail.recipes.task_options import DetectionOptions, write_options


def detect(name: str) -> Recipe:
    """From any checkpoint on one GPU, for hundreds to thousands of images with boxes."""
    return Recipe(
        name=name,
        task="detection",
        task_options=write_options(DetectionOptions()),
        model="deit3_small_patch16",
        architecture={"drop_path": 0.1},
        batch_size=16,
        data=DataConfig(),  # at full size, to which the boxes belong
        augmentation=Augmentation(
            image_size=FROM_IMAGES,
            crop="scaled",
            factors=(0.6, 1.4),
            color_jitter=COLOR_JITTER,
            color_jitter_prob=COLOR_JITTER_PROB,
        ),
        optimizer=OptimizerConfig(lr=3e-4, weight_decay=0.05, clip_grad_norm=1.0, layer_decay=0.75),
        schedule=ScheduleConfig(length="40 epochs", warmup="5%", kind="linear"),
        validation=ValidationConfig(every="5 epochs", crop_ratio=1.0),
        about=About("vitrail", "boxes and masks of objects from any checkpoint, on one GPU", "not measured", "one GPU"),
    )


def published(name: str, base: str, paper: str, row: str, scores: tuple[float, float]) -> Recipe:
    """Mask R-CNN on COCO with the 3x schedule; the paper names no more, and the values are the usual ones.

    36 epochs, AdamW with lr 1e-4 and weight decay 0.05, batch 16, lr divided by 10 after epochs 27 and 33. The shorter side is
    480 to 800 pixels, the longer one at most 1333. Images of a batch have one size here: crops of 800 x 1312, the shorter side
    of which is resized to 0.6 to 1 times 800; the parts of longer images outside of the crop are not seen.
    """
    before = lookup(base)
    return Recipe(
        name=name,
        task="detection",
        task_options=write_options(
            DetectionOptions(
                max_objects=100,
                candidates=2000,
                proposals=1000,
                boxes_sampled=512,
                short_side=800,
                long_side=1333,
            )
        ),
        model=before.model,
        architecture=dict(before.architecture),
        batch_size=16,
        init=InitConfig(pretrained_recipe=base),
        augmentation=Augmentation(image_size=(800, 1312), crop="scaled", factors=(0.6, 1.0), interpolation="bilinear"),
        optimizer=OptimizerConfig(lr=1e-4, weight_decay=0.05),
        schedule=ScheduleConfig(
            length="36 epochs", warmup="500 steps", warmup_lr=1e-7, kind="step", milestones=(27 / 36, 33 / 36)
        ),
        validation=ValidationConfig(every="3 epochs", crop_ratio=1.0, interpolation="bilinear"),
        about=About(paper, row, f"{scores[0]} % box AP and {scores[1]} % mask AP on COCO"),
    )


def add_detection(page: Page, paper: str, row: str, base: str, scores: tuple[float, float]) -> None:
    """The recipe `{base}_to_coco` from the weights of the recipe `base`."""
    page.add(f"{base}_to_coco", published, base, paper, row, scores)


RECIPES = Page()
RECIPES.add("detect", detect)
