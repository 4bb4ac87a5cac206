"""What a recipe leaves to the data: image size, patch size, and a batch size that a small data set can fill."""

import dataclasses

import numpy as np

from vitrail.data.decode import decode, decoded_size
from vitrail.data.source import Source
from vitrail.data.transforms.config import IMAGENET_MEAN, IMAGENET_STD
from vitrail.errors import UserError
from vitrail.models.preprocessing import Preprocessing
from vitrail.models.registry import lookup
from vitrail.recipes.lookup import EMPTY, summaries
from vitrail.recipes.schema import Recipe

# Largest shorter side of the images, image size and patch size of the network.
SIZES = ((12, 8, 2), (20, 16, 2), (30, 28, 4), (48, 32, 4), (72, 64, 8), (160, 128, 16))
LARGEST = (224, 16)
MAX_PATCHES = 144  # of an image size that the user gives; more than twice those above need another patch size
STEMS = ("linear", "conv", "basic", "hmlp")  # whose patch size can be chosen

SMALLEST_CROP, LARGEST_CROP, CROP_STEP = 224, 512, 32  # pixels of the crops of segmentations

LARGE_SIDES = 3  # a JPEG with sides of twice decode_scale=1.5 times the image size is decoded at half size or less
MIN_DECODED, MIN_COLOR = 64, 3.0  # pixels of the shorter side; mean difference of the channels from gray
MEASURED, COLORED = 64, 16  # images whose sides, and whose colors, are measured
MIN_STEPS, MIN_BATCH_SIZE = 8, 16  # per epoch, of the default recipes, which are for data sets of any size
FINETUNING_STEPS, FINETUNING_BATCH_SIZE = 18, 32  # fine-tuning gains by more and smaller steps, down to this batch size


def fit_to_data(
    recipe: Recipe, source: Source, trained: Preprocessing | None = None, reason: str = "the size the weights were trained at"
) -> tuple[Recipe, list[str]]:
    """The recipe with image size (0, 0) replaced by one that suits the images, and messages about what was changed.

    `trained` is the preprocessing of the initial weights. Their image size is kept (for that `reason`), and the default recipes
    keep their mean and standard deviation at any image size, unless the recipe has others than ImageNet's.
    """
    messages = []
    known, network = summaries().get(recipe.name, EMPTY), lookup(recipe.model)[1]
    has_patch_choice = "patch_size" not in recipe.architecture and recipe.architecture.get("stem", network.stem) in STEMS
    size_is_open, normalization = recipe.augmentation.image_size == (0, 0), (recipe.augmentation.mean, recipe.augmentation.std)
    if trained is not None and (size_is_open or known.paper == "vitrail") and normalization == (IMAGENET_MEAN, IMAGENET_STD):
        recipe = recipe.set({"augmentation.mean": list(trained.mean), "augmentation.std": list(trained.std)})
    if size_is_open:
        changes: dict[str, object] = {}
        if trained is not None:
            size = trained.image_size
            if recipe.augmentation.crop == "scaled":
                size, reason = crop_size(source)
        else:
            side = median_side(source)
            length, patch = next(((size, patch) for limit, size, patch in SIZES if side <= limit), LARGEST)
            size, reason = (length, length), f"the images' median shorter side is {side} pixels"
            if recipe.augmentation.crop == "scaled":
                (size, reason), patch = crop_size(source), LARGEST[1]
            if has_patch_choice:
                changes["architecture.patch_size"] = patch
        recipe = recipe.set(changes | {"augmentation.image_size": list(size)})
        messages.append(f"image size set to {size[0]} x {size[1]}: {reason}")
    elif trained is None and known.paper == "vitrail" and has_patch_choice:
        patch = choose_patch_size(recipe.augmentation.image_size, network.patch_size)
        if patch != network.patch_size:
            recipe = recipe.set({"architecture.patch_size": patch})
            messages.append(f"patch size set to {patch}: patches of {network.patch_size} pixels would be more than {MAX_PATCHES}")
    batch_size, reason = recipe.batch_size, f"the training set has {len(source)} images"
    if batch_size > len(source):
        batch_size = 1 << int(np.log2(max(len(source) // 4, min(len(source), 4))))
    elif known.paper == "vitrail" and batch_size == known.batch_size:
        limits = [(MIN_STEPS, MIN_BATCH_SIZE)] + ([(FINETUNING_STEPS, FINETUNING_BATCH_SIZE)] if trained is not None else [])
        for steps, smallest in limits:
            while len(source) // batch_size < steps and batch_size >= 2 * smallest:
                batch_size //= 2
                reason = f"the training set has {len(source)} images, and an epoch should have at least {steps} steps"
    if batch_size != recipe.batch_size:
        messages.append(f"batch size reduced from {recipe.batch_size} to {batch_size}: {reason}")
        recipe = dataclasses.replace(recipe, batch_size=batch_size)
    return recipe, messages


def describe_decoding(recipe: Recipe, source: Source) -> list[str]:
    """Advice on large images that are decoded at full size."""
    if recipe.data.decode_scale or median_side(source) <= LARGE_SIDES * min(recipe.augmentation.image_size):
        return []
    return ["images are decoded at full size, as in the released code; data.decode_scale=1.5 decodes large JPEGs faster"]


def choose_patch_size(size: tuple[int, int], patch: int) -> int:
    """`patch`, or the next power of two with at most `MAX_PATCHES` patches, up to that of the largest images."""
    while patch < LARGEST[1] and size[0] * size[1] > MAX_PATCHES * patch**2:
        patch *= 2
    return patch


def crop_size(source: Source) -> tuple[tuple[int, int], str]:
    """The size of the crops of a segmentation, twice that of small images: a patch should cover a small part of an image."""
    side = median_side(source)
    length = min(max(round(2 * side / CROP_STEP) * CROP_STEP, SMALLEST_CROP), LARGEST_CROP)
    return (length, length), f"twice the images' median shorter side of {side} pixels, from {SMALLEST_CROP} to {LARGEST_CROP}"


def has_colors(source: Source) -> bool:
    """Whether most of some images spread over the source have colors."""
    colored = []
    for index in source.spread(COLORED).tolist():
        try:
            pixels = decode(source.encoded(index), MIN_DECODED).astype(np.int16)
        except (OSError, ValueError):
            continue
        colored.append(np.abs(pixels - pixels.mean(-1, keepdims=True)).mean() > MIN_COLOR)
    return bool(sum(colored) * 2 > len(colored))


def median_side(source: Source) -> int:
    """The median shorter side of some images spread over the source."""
    sides = []
    for index in source.spread(MEASURED).tolist():
        try:
            sides.append(min(decoded_size(source.encoded(index))))
        except (OSError, ValueError):
            continue  # the loader reports unreadable images
    if not sides:
        raise UserError(f"None of the {min(len(source), MEASURED)} images sampled from {source.name} is readable.")
    return int(np.median(sides))
