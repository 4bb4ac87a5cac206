"""What a recipe leaves to the images."""

import numpy as np
import pytest

from tests.images import make_folder, spoil
from vitrail.data.datasets.lookup import open_source, open_splits
from vitrail.data.source import Subset
from vitrail.errors import UserError
from vitrail.models.preprocessing import Preprocessing
from vitrail.recipes import lookup
from vitrail.recipes.data_defaults import LADDER, fit, usual_side

ANY = lookup("laptop")


def digits(count):
    return Subset(open_splits("digits").train, np.arange(count))


@pytest.mark.parametrize(
    ("side", "size", "patch"),
    [(1, 8, 2), (8, 8, 2), (16, 16, 2), (28, 28, 4), (32, 32, 4), (64, 64, 8), (128, 128, 16), (161, 224, 16), (400, 224, 16)],
)
def test_size_and_patches_follow_the_images(side, size, patch, tmp_path):
    source = open_source(str(make_folder(tmp_path, ["a", "b"], 1, (side + 7, side))))
    fitted, said = fit(ANY.set({"batch_size": 2}), source)
    assert (fitted.augmentation.image_size, fitted.architecture["patch_size"]) == ((size, size), patch)
    assert said == [f"the network sees {size} x {size} pixels, for images of about {side} pixels"]


def test_the_ladder_grows_and_is_divisible():
    assert list(LADDER) == sorted(LADDER)
    assert all(size % patch == 0 and limit >= size for limit, size, patch in LADDER)


def test_what_the_user_has_chosen_stays():
    chosen = ANY.set({"augmentation.image_size": "24x32", "batch_size": 50})
    assert fit(chosen, digits(100)) == (chosen, [])
    assert fit(ANY.set({"architecture.patch_size": 4}), digits(100))[0].architecture["patch_size"] == 4
    assert "patch_size" not in fit(ANY.set({"model": "lvvit_t"}), digits(100))[0].architecture  # a stem of its own


def test_weights_know_their_size_and_colors():
    trained = Preprocessing((48, 64), mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
    fitted, said = fit(ANY.set({"batch_size": 50}), digits(100), trained)
    assert fitted.augmentation.image_size == (48, 64)
    assert (fitted.augmentation.mean, fitted.augmentation.std) == (trained.mean, trained.std)
    assert "patch_size" not in fitted.architecture
    assert said == ["the network sees 48 x 64 pixels, as its weights were trained"]
    chosen = ANY.set({"augmentation.image_size": 32, "batch_size": 50})
    assert fit(chosen, digits(100), trained)[0] == chosen


@pytest.mark.parametrize(("count", "batch"), [(512, 64), (511, 32), (255, 16), (64, 16)])
def test_an_epoch_of_our_own_recipes_has_some_steps(count, batch):
    fitted, said = fit(ANY.set({"augmentation.image_size": 8}), digits(count))
    assert fitted.batch_size == batch
    assert said == ([] if batch == 64 else [f"batches of {batch} instead of 64, for an epoch to have some steps"])
    assert fit(fitted, digits(count)) == (fitted, [])
    paper = lookup("deit_small").set({"augmentation.image_size": 8, "batch_size": 64})
    assert fit(paper, digits(count))[0].batch_size == 64


@pytest.mark.parametrize(("count", "batch"), [(63, 8), (20, 4), (5, 4), (3, 2), (2, 2), (1, 1)])
def test_a_batch_that_the_images_can_fill(count, batch):
    fitted, said = fit(ANY.set({"augmentation.image_size": 8}), digits(count))
    assert fitted.batch_size == batch
    assert said == [f"there are fewer images than the batch of 64 takes: it is {batch} instead"]


def test_the_usual_side_is_the_median_of_what_can_be_read(tmp_path):
    for number, side in enumerate((10, 20, 30)):
        make_folder(tmp_path / f"{number}", ["a"], 1, (side, side + 50))
    spoil(tmp_path / "3" / "a" / "bad.png")
    assert usual_side(open_source(str(tmp_path))) == 20
    with pytest.raises(UserError, match=r"None of the 1 images looked at in .* can be read"):
        usual_side(Subset(open_source(str(tmp_path)), np.array([3])))
