"""Google's preprocessing: TensorFlow's resizing without antialias and its random crops, against values of TensorFlow 2.21."""

import numpy as np
import pytest
import torch

import vitrail
from vitrail.data import rng
from vitrail.data.transforms import crops
from vitrail.data.transforms.config import NO_ANTIALIAS
from vitrail.data.transforms.pipeline import Augmentation, augment
from vitrail.data.transforms.reference import crop_resize
from vitrail.models.preprocessing import GOOGLE, min_decode_side

IMAGE = ((torch.arange(35) ** 2 * 37) % 256).to(torch.uint8).reshape(1, 1, 5, 7).repeat(1, 3, 1, 1)
SIZES = torch.tensor([[5, 7]])
RESIZED = [[43.4166641, 106.25, 161.7500305], [199.4166565, 105.25, 131.7500305]]  # tf.image.resize(IMAGE, (2, 3))
# Mean area, its quantiles 5, 25, 50, 75 and 95 %, mean aspect ratio and mean relative position of 20,000 boxes that
# tf.image.sample_distorted_bounding_box draws with area_range=(0.05, 1.0), min_object_covered=0.
BOXES = {
    (375, 500): (0.3429, 0.0652, 0.1498, 0.3002, 0.5043, 0.7601, 1.0389, 0.1843, 0.2558),
    (500, 375): (0.3278, 0.0643, 0.1434, 0.2882, 0.4802, 0.7218, 1.0413, 0.2660, 0.1824),
    (100, 400): (0.1414, 0.0552, 0.0854, 0.1316, 0.1881, 0.2616, 1.0402, 0.1340, 0.4073),
    (32, 32): (0.3777, 0.0615, 0.1504, 0.3320, 0.5801, 0.8213, 1.0388, 0.1982, 0.1918),
}


def keys(count):
    return rng.sample_key(0, 0, torch.arange(count), torch.zeros(count, dtype=torch.int64))


def test_resizing_equals_tensorflow():
    found = crop_resize(IMAGE, crops.squash(SIZES, (2, 3)), NO_ANTIALIAS, None)
    torch.testing.assert_close(found[0, 1], torch.tensor(RESIZED), rtol=0, atol=1e-3)


@pytest.mark.parametrize("out", [(13, 9), (40, 64)])
def test_resizing_has_no_antialias(out):
    """On crops of images of any size, flipped or not; the padding is not read."""
    pixels = torch.randint(0, 256, (2, 3, 60, 90), dtype=torch.uint8)
    top, left, height, width = torch.tensor([[5, 0], [11, 2], [31, 48], [70, 40]])
    flip = torch.tensor([True, False])
    view = crops.View(crops._axis(top, height, out[0], torch.zeros_like(flip)), crops._axis(left, width, out[1], flip))
    found = crop_resize(pixels, view, NO_ANTIALIAS, None)
    for row in range(2):
        box = pixels[row : row + 1, :, top[row] : top[row] + height[row], left[row] : left[row] + width[row]].float()
        expected = torch.nn.functional.interpolate(box, out, mode="bilinear", antialias=False)
        torch.testing.assert_close(found[row : row + 1], expected.flip(3) if flip[row] else expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("size", BOXES)
def test_distorted_boxes_have_the_distribution_of_tensorflow(size):
    height, width = size
    view = crops.distorted_box(torch.tensor([size]).expand(20000, 2), keys(20000), (8, 8), (0.05, 1.0), (0.75, 1.33))
    top, left, box_h, box_w = view.rows.start, view.columns.start, view.rows.length, view.columns.length
    assert (top + box_h <= height).all()
    assert (left + box_w <= width).all()
    area = (box_h * box_w / (height * width)).numpy()
    assert area.min() >= 0.05
    positions = (top / height).mean(), (left / width).mean()
    found = [area.mean(), *np.quantile(area, (0.05, 0.25, 0.5, 0.75, 0.95)), (box_w / box_h).mean(), *positions]
    assert found == pytest.approx(BOXES[size], abs=0.006)


def test_impossible_boxes_are_the_whole_image():
    view = crops.distorted_box(torch.tensor([[10, 4000], [4000, 10], [1, 1]]), keys(3), (8, 8), (0.05, 1.0), (0.75, 1.33))
    assert view.rows.length.tolist() == [10, 4000, 1]
    assert view.columns.length.tolist() == [4000, 10, 1]
    assert view.rows.start.tolist() == view.columns.start.tolist() == [0, 0, 0]


@pytest.mark.parametrize("jitter", [0.0, 0.4])
def test_color_operations_round_the_pixels(jitter):
    """They work on integers; without them, the pixels stay as TensorFlow has them."""
    augmentation = Augmentation(
        (2, 3),
        "squash",
        interpolation=NO_ANTIALIAS,
        color_jitter=(jitter, 0.0, 0.0, 0.0),
        color_jitter_prob=0.0,
        mean=(0.0,) * 3,
        std=(1 / 255,) * 3,
    )
    expected = torch.tensor(RESIZED)
    found = augment(IMAGE, SIZES, keys(1), augmentation).images[0, 0]
    torch.testing.assert_close(found, expected.round() if jitter else expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("depth", [12, 2])
def test_npz_weights_have_googles_preprocessing(tmp_path, depth):
    """Also those of a model that is not in the catalog."""
    model = vitrail.create("vit_tiny_patch16", 3, 32, width=24 if depth == 2 else 192, depth=depth)
    loaded = vitrail.load(vitrail.save(model, tmp_path / "weights.npz", "npz"))
    assert bool(loaded.name) == (depth == 12)
    assert loaded.preprocessing == GOOGLE._replace(image_size=(32, 32))
    assert loaded.preprocessing.interpolation == NO_ANTIALIAS
    assert min_decode_side(loaded.preprocessing, loaded.notes) is None  # without antialias, the decoded size matters
    pixels = loaded.preprocess(torch.full((3, 40, 50), 255, dtype=torch.uint8))
    assert torch.equal(pixels, torch.ones(1, 3, 32, 32))
