"""Semantic segmentation. `segment` is the default for small data; papers' pages add theirs with `add_segmentation`.

vitrail train camvid/ --recipe segment --from vitrail_tiny
vitrail train ade20k/ --recipe deit3_small_to_ade20k --from deit3_small
"""

from vitrail.data.transforms.config import Augmentation
from vitrail.recipes.defaults import FROM_IMAGES
from vitrail.recipes.derivation import Page
from vitrail.recipes.lookup import lookup
from vitrail.recipes.schema import About, DataConfig, InitConfig, OptimizerConfig, Recipe, ScheduleConfig, ValidationConfig
from vitrail.recipes.task_options import SegmentationOptions, write_options

# Brightness, contrast, saturation and hue of half the images, about as strong as the photometric distortion of the papers' code.
COLOR_JITTER, COLOR_JITTER_PROB = (0.125, 0.5, 0.5, 0.1), 0.5


def segment(name: str) -> Recipe:
    """From any checkpoint on one GPU, for hundreds to thousands of images with masks."""
    return Recipe(
        name=name,
        task="segmentation",
        task_options=write_options(SegmentationOptions(channels=256)),
        model="deit3_small_patch16",
        architecture={"drop_path": 0.1},
        batch_size=16,
        data=DataConfig(),  # at full size, which is that of the masks
        augmentation=Augmentation(
            image_size=FROM_IMAGES, crop="scaled", color_jitter=COLOR_JITTER, color_jitter_prob=COLOR_JITTER_PROB
        ),
        optimizer=OptimizerConfig(lr=5e-4, weight_decay=0.05, clip_grad_norm=1.0, layer_decay=0.75),
        schedule=ScheduleConfig(length="60 epochs", warmup="5%", kind="linear"),
        validation=ValidationConfig(every="5 epochs", crop_ratio=1.0),
        about=About("vitrail", "segmentation from any checkpoint, on one GPU", "not measured", "one GPU"),
    )


def published(
    name: str,
    base: str,
    channels: int,
    row: str,
    scores: tuple[float, float | None],
    crop: int,
    training: tuple[str, str],
    protocol: dict[str, int],
) -> Recipe:
    """UperNet on ADE20K with the settings of Swin: 160,000 iterations, AdamW, linear decay. The paper names no more.

    Drop path is that of the pre-training. The released configurations of the same group have an auxiliary head on the map of
    stride 16, crops in which no class fills more than three quarters, and test whole images with a shorter side as long as that
    of the crops. `protocol` are task options of another test.
    """
    before, (paper, hardware) = lookup(base), training
    single, multi = scores
    return Recipe(
        name=name,
        task="segmentation",
        task_options=write_options(SegmentationOptions(channels=channels, **protocol)),  # type: ignore[arg-type]
        model=before.model,
        architecture=dict(before.architecture),
        batch_size=16,
        init=InitConfig(pretrained_recipe=base),
        augmentation=Augmentation(
            image_size=(crop, crop),
            crop="scaled",
            interpolation="bilinear",
            color_jitter=COLOR_JITTER,
            color_jitter_prob=COLOR_JITTER_PROB,
        ),
        optimizer=OptimizerConfig(lr=6e-5, weight_decay=0.01),
        schedule=ScheduleConfig(length="160000 steps", warmup="1500 steps", warmup_lr=6e-11, kind="linear"),
        validation=ValidationConfig(every="16000 steps", crop_ratio=1.0, interpolation="bilinear"),
        about=About(
            paper, row, f"{single} % mIoU on ADE20K" + (f", {multi} % at several scales with flips" if multi else ""), hardware
        ),
    )


def add_segmentation(
    page: Page,
    paper: str,
    row: str,
    base: str,
    name: str,
    scores: tuple[float, float | None],
    channels: int = 512,
    crop: int = 512,
    **protocol: int,
) -> None:
    """The recipe `{name}_to_ade20k` from the weights of the recipe `base`."""
    page.add(f"{name}_to_ade20k", published, base, channels, row, scores, crop, (paper, ""), protocol)


RECIPES = Page()
RECIPES.add("segment", segment)
