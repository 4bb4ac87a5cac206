"""What a recipe leaves to the data: the network's size, its patches, a batch that a small set can fill."""

import dataclasses

import numpy as np

from vitrail.data.decode import decoded_size
from vitrail.data.source import Source
from vitrail.errors import UserError
from vitrail.models.preprocessing import Preprocessing
from vitrail.models.registry import lookup
from vitrail.recipes.defaults import RECIPES as HOUSE
from vitrail.recipes.schema import Recipe

# Shorter side of the images up to -> the network's size and patch size.
LADDER = ((12, 8, 2), (20, 16, 2), (30, 28, 4), (48, 32, 4), (72, 64, 8), (160, 128, 16))

LEAST_STEPS, LEAST_BATCH = 8, 16  # in an epoch of our own recipes, which are for sets of any size


def fit(recipe: Recipe, source: Source, trained: Preprocessing | None = None) -> tuple[Recipe, list[str]]:
    """The recipe with size (0, 0) replaced by one that suits the images, and sentences on what was chosen.

    `trained` is how images were prepared for the weights to start from: those have learned what things look like at that size
    and in those colors, so that images are brought to it, whatever theirs is.
    """
    said = []
    if recipe.augmentation.image_size == (0, 0):
        changes: dict[str, object] = {}
        if trained is not None:
            size, why = trained.image_size, "as its weights were trained"
            changes |= {"augmentation.mean": list(trained.mean), "augmentation.std": list(trained.std)}
        else:
            side = usual_side(source)
            length, patch = next(((size, patch) for limit, size, patch in LADDER if side <= limit), (224, 16))
            size, why = (length, length), f"for images of about {side} pixels"
            stem = recipe.architecture.get("stem", lookup(recipe.model)[1].stem)
            if "patch_size" not in recipe.architecture and stem in ("linear", "conv", "basic", "hmlp"):
                changes["architecture.patch_size"] = patch
        recipe = recipe.set(changes | {"augmentation.image_size": list(size)})
        said.append(f"the network sees {size[0]} x {size[1]} pixels, {why}")
    if recipe.batch_size > len(source):
        before, batch = recipe.batch_size, 1 << int(np.log2(max(len(source) // 4, min(len(source), 4))))
        recipe = dataclasses.replace(recipe, batch_size=batch)
        said.append(f"there are fewer images than the batch of {before} takes: it is {batch} instead")
    elif recipe.name in HOUSE and recipe.batch_size == HOUSE[recipe.name].batch_size:
        batch = recipe.batch_size
        while len(source) // batch < LEAST_STEPS and batch >= 2 * LEAST_BATCH:
            batch //= 2
        if batch != recipe.batch_size:
            said.append(f"batches of {batch} instead of {recipe.batch_size}, for an epoch to have some steps")
            recipe = dataclasses.replace(recipe, batch_size=batch)
    return recipe, said


def usual_side(source: Source, sampled: int = 64) -> int:
    """The median shorter side of some images spread over the source."""
    sides = []
    for index in np.unique(np.linspace(0, len(source) - 1, sampled).astype(np.int64)):
        try:
            sides.append(min(decoded_size(source.encoded(int(index)), None)))
        except (OSError, ValueError):
            continue  # the loader accounts for unreadable images
    if not sides:
        raise UserError(f"None of the {min(len(source), sampled)} images looked at in {source.name} can be read.")
    return int(np.median(sides))
