"""Image size, patch size and batch size that follow from the data."""

import numpy as np
import pytest

from tests.images import make_folder, write_invalid_image
from vitrail.data.datasets.lookup import open_source, open_splits
from vitrail.data.source import Subset
from vitrail.errors import UserError
from vitrail.models.preprocessing import Preprocessing
from vitrail.recipes import lookup
from vitrail.recipes.data_defaults import SIZES, fit_to_data, median_side

ANY = lookup("laptop")


def digits(count):
    return Subset(open_splits("digits").train, np.arange(count))


@pytest.mark.parametrize(
    ("side", "size", "patch"),
    [(1, 8, 2), (8, 8, 2), (16, 16, 2), (28, 28, 4), (32, 32, 4), (64, 64, 8), (128, 128, 16), (161, 224, 16), (400, 224, 16)],
)
def test_size_and_patches_follow_the_images(side, size, patch, tmp_path):
    source = open_source(str(make_folder(tmp_path, ["a", "b"], 1, (side + 7, side))))
    fitted, messages = fit_to_data(ANY.set({"batch_size": 2}), source)
    assert (fitted.augmentation.image_size, fitted.architecture["patch_size"]) == ((size, size), patch)
    assert messages == [f"image size set to {size} x {size}: the images' median shorter side is {side} pixels"]


def test_the_sizes_grow_and_are_divisible():
    assert list(SIZES) == sorted(SIZES)
    assert all(size % patch == 0 and limit >= size for limit, size, patch in SIZES)


def test_values_set_by_the_user_are_kept():
    chosen = ANY.set({"augmentation.image_size": "24x32", "batch_size": 50})
    assert fit_to_data(chosen, digits(100)) == (chosen, [])
    assert fit_to_data(ANY.set({"architecture.patch_size": 4}), digits(100))[0].architecture["patch_size"] == 4
    assert "patch_size" not in fit_to_data(ANY.set({"model": "lvvit_t"}), digits(100))[0].architecture  # a stem of its own


@pytest.mark.parametrize(("size", "patch"), [(48, 4), (64, 8), (96, 8), (128, 16), (224, 16)])
def test_patches_follow_a_size_that_is_given(size, patch):
    chosen = lookup("dino_small").set({"augmentation.image_size": size, "batch_size": 4})
    fitted, messages = fit_to_data(chosen, digits(100))
    assert fitted.architecture.get("patch_size", 4) == patch
    said = [f"patch size set to {patch}: patches of 4 pixels would be more than 144"]
    assert messages == ([] if patch == 4 else said)
    trained = Preprocessing((size, size))
    assert fit_to_data(chosen, digits(100), trained) == (chosen, [])
    given = chosen.set({"architecture.patch_size": 4})
    assert fit_to_data(given, digits(100)) == (given, [])


def test_preprocessing_of_the_initial_weights_is_kept():
    trained = Preprocessing((48, 64), mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
    fitted, messages = fit_to_data(ANY.set({"batch_size": 50}), digits(100), trained)
    assert fitted.augmentation.image_size == (48, 64)
    assert (fitted.augmentation.mean, fitted.augmentation.std) == (trained.mean, trained.std)
    assert "patch_size" not in fitted.architecture
    assert messages == ["image size set to 48 x 64: the size the weights were trained at"]
    chosen = ANY.set({"augmentation.image_size": 32, "batch_size": 50})
    normalization = {"augmentation.mean": [0.5, 0.5, 0.5], "augmentation.std": [0.25, 0.25, 0.25]}
    assert fit_to_data(chosen, digits(100), trained)[0] == chosen.set(normalization)
    paper = lookup("deit_small").set({"augmentation.image_size": 32, "batch_size": 50})
    for given in (chosen.set({"augmentation.mean": [0.4, 0.4, 0.4]}), paper):
        assert fit_to_data(given, digits(100), trained)[0] == given


@pytest.mark.parametrize(("count", "batch"), [(512, 64), (511, 32), (255, 16), (64, 16)])
def test_minimum_number_of_steps_of_the_default_recipes(count, batch):
    fitted, messages = fit_to_data(ANY.set({"augmentation.image_size": 8}), digits(count))
    assert fitted.batch_size == batch
    message = (
        f"batch size reduced from 64 to {batch}: the training set has {count} images, and an epoch should have at least 8 steps"
    )
    assert messages == ([] if batch == 64 else [message])
    assert fit_to_data(fitted, digits(count)) == (fitted, [])
    paper = lookup("deit_small").set({"augmentation.image_size": 8, "batch_size": 64})
    assert fit_to_data(paper, digits(count))[0].batch_size == 64


@pytest.mark.parametrize(("count", "batch", "steps"), [(1152, 64, 18), (1151, 32, 18), (300, 32, 8), (255, 16, 8)])
def test_fine_tuning_has_more_and_smaller_steps(count, batch, steps):
    recipe = lookup("finetune").set({"augmentation.image_size": 8})
    fitted, messages = fit_to_data(recipe, digits(count), Preprocessing(image_size=(8, 8)))
    assert fitted.batch_size == batch
    reason = f"the training set has {count} images, and an epoch should have at least {steps} steps"
    assert messages == [f"batch size reduced from 128 to {batch}: {reason}"]


@pytest.mark.parametrize(("count", "batch"), [(63, 8), (20, 4), (5, 4), (3, 2), (2, 2), (1, 1)])
def test_a_batch_size_above_the_number_of_images_is_reduced(count, batch):
    fitted, messages = fit_to_data(ANY.set({"augmentation.image_size": 8}), digits(count))
    assert fitted.batch_size == batch
    assert messages == [f"batch size reduced from 64 to {batch}: the training set has {count} images"]


def test_median_side_ignores_unreadable_images(tmp_path):
    for number, side in enumerate((10, 20, 30)):
        make_folder(tmp_path / f"{number}", ["a"], 1, (side, side + 50))
    write_invalid_image(tmp_path / "3" / "a" / "bad.png")
    assert median_side(open_source(str(tmp_path))) == 20
    with pytest.raises(UserError, match=r"None of the 1 images sampled from .* is readable"):
        median_side(Subset(open_source(str(tmp_path)), np.array([3])))
