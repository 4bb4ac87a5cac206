"""The parts of the augmentation against Pillow or their definition."""

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from vitrail.data import rng
from vitrail.data.transforms import affine, color, crops, reference, resize


def images(count=4, height=37, width=53):
    """Smooth random images with noise on top, uint8 [B, 3, height, width]."""
    low = torch.nn.functional.interpolate(torch.rand(count, 3, 5, 6), (height, width), mode="bicubic").clamp(0, 1)
    return (low * 215 + torch.rand(count, 3, height, width) * 40).to(torch.uint8)


def to_pil(image):
    return Image.fromarray(image.permute(1, 2, 0).numpy())


def from_pil(image):
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)


def by_pillow(batch, function):
    return torch.stack([from_pil(function(to_pil(image))) for image in batch])


def histogram(batch):
    return color.histogram(batch, affine.full_sizes(batch))


def gap(found, expected):
    return (found.float() - expected.float()).abs().max().item()


FACTORS = torch.tensor([0.1, 0.7, 1.0, 1.9])


@pytest.mark.parametrize("name", ["Brightness", "Contrast", "Color", "Sharpness"])
def test_enhancements_equal_pillow(name):
    batch = images()
    expected = torch.stack(
        [from_pil(getattr(ImageEnhance, name)(to_pil(p)).enhance(float(f))) for p, f in zip(batch, FACTORS, strict=True)]
    )
    found = {
        "Brightness": lambda: color.apply_table(batch, color.brightness_table(FACTORS)),
        "Contrast": lambda: color.apply_table(batch, color.contrast_table(histogram(batch), FACTORS)),
        "Color": lambda: color.saturation(batch, FACTORS),
        "Sharpness": lambda: color.sharpness(batch, FACTORS),
    }[name]()
    assert gap(found, expected) == 0


def test_tables_equal_pillow_exactly():
    batch = images()
    batch[0, 0] = 7  # a channel of one value
    counts = histogram(batch)[:, :3]
    four = torch.tensor([1, 3, 4, 8])
    thresholds = torch.tensor([0, 100, 128, 256])
    assert torch.equal(color.apply_table(batch, color.autocontrast_table(counts)), by_pillow(batch, ImageOps.autocontrast))
    assert torch.equal(color.apply_table(batch, color.equalize_table(counts)), by_pillow(batch, ImageOps.equalize))
    assert torch.equal(color.apply_table(batch, color.invert_table(four)), by_pillow(batch, ImageOps.invert))
    for tables, values, function in (
        (color.posterize_table(four), four, ImageOps.posterize),
        (color.solarize_table(thresholds), thresholds, ImageOps.solarize),
    ):
        expected = torch.stack([from_pil(function(to_pil(p), int(v))) for p, v in zip(batch, values, strict=True)])
        assert torch.equal(color.apply_table(batch, tables), expected)
    added = color.apply_table(batch, color.solarize_add_table(torch.full((4,), 110)))
    assert torch.equal(added, torch.where(batch < 128, (batch.int() + 110).clamp(max=255), batch.int()).to(torch.uint8))
    assert torch.equal(
        color.luma(batch)[:, 0], torch.stack([torch.from_numpy(np.asarray(to_pil(p).convert("L")).copy()) for p in batch])
    )


@pytest.mark.parametrize("filter", ["bilinear", "bicubic"])
def test_warps_equal_pillow(filter):
    """Bit by bit: Pillow truncates the interpolated values."""
    batch = images(4, 40, 50)
    shears = torch.tensor([[[1, 0.21, 3.1], [0, 1, 0]], [[1, 0, 0], [-0.31, 1, -7.4]]])
    matrices = torch.cat([affine.rotation(torch.tensor([17.0, -30.0]), 40, 50), shears])
    fill = torch.tensor([124, 116, 104])
    method = {"bilinear": Image.BILINEAR, "bicubic": Image.BICUBIC}[filter]
    expected = torch.stack(
        [
            from_pil(to_pil(p).transform((50, 40), Image.AFFINE, m.flatten().tolist(), method, fillcolor=(124, 116, 104)))
            for p, m in zip(batch, matrices, strict=True)
        ]
    )
    assert torch.equal(affine.warp(batch, matrices, fill, filter), expected)


def test_rotation_equals_pillow():
    batch = images(4, 41, 41)  # in images of odd size, the center of the rotation is that of a pixel
    angles = torch.tensor([12.0, -27.0, 90.0, -7.3])
    expected = torch.stack([from_pil(to_pil(p).rotate(float(a), Image.BILINEAR)) for p, a in zip(batch, angles, strict=True)])
    found = affine.warp(batch, affine.rotation(angles, 41, 41), torch.zeros(3), "bilinear")
    assert torch.equal(found, expected)


def test_identity_warps_change_nothing():
    batch = images()
    identity = torch.eye(3)[:2].expand(4, 2, 3)
    for filter in ("bilinear", "bicubic"):
        assert torch.equal(affine.warp(batch, identity, torch.zeros(3), filter), batch)


def still(count):
    return torch.zeros(count, dtype=torch.bool)


@pytest.mark.parametrize("filter", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("out", [(24, 24), (64, 80)])
def test_crop_and_resize_equal_pillow(filter, out):
    """With boxes for which the order of the two passes does not depend on the version of Pillow, see docs/data.md."""
    batch = images(3, 60, 90)
    boxes = torch.tensor([[0, 0, 60, 90], [5, 11, 31, 40], [50, 80, 10, 10]])  # top, left, height, width
    rows = crops._axis(boxes[:, 0], boxes[:, 2], out[0], still(3))
    columns = crops._axis(boxes[:, 1], boxes[:, 3], out[1], torch.tensor([False, True, False]))
    found = reference.crop_resize(batch, crops.View(rows, columns), filter, None)
    method = {"bilinear": Image.BILINEAR, "bicubic": Image.BICUBIC, "lanczos": Image.LANCZOS}[filter]
    for index, (top, left, height, width) in enumerate(boxes.tolist()):
        image = to_pil(batch[index]).crop((left, top, left + width, top + height)).resize((out[1], out[0]), method)
        image = ImageOps.mirror(image) if index == 1 else image
        assert gap(found[index], from_pil(image)) == 0


def test_padding_is_never_read():
    batch = images(2, 60, 90)
    sizes = torch.tensor([[40, 50], [60, 33]])
    clean = reference.crop_resize(batch, crops.squash(sizes, (32, 32)), "bicubic", None)
    for index, (height, width) in enumerate(sizes.tolist()):
        batch[index, :, height:] = 255
        batch[index, :, :, width:] = 255
    assert torch.equal(reference.crop_resize(batch, crops.squash(sizes, (32, 32)), "bicubic", None), clean)


def test_center_crop_is_resize_and_crop():
    batch = images(2, 300, 400)
    view = crops.center_crop(torch.tensor([[300, 400], [300, 280]]), (224, 224), 0.875)
    found = reference.crop_resize(batch, view, "bicubic", None)
    for index, width in enumerate((400, 280)):
        image = to_pil(batch[index][:, :, :width])
        short = 256 / min(image.size)
        image = image.resize((int(width * short), int(300 * short)), Image.BICUBIC)
        left, top = round((image.width - 224) / 2), round((image.height - 224) / 2)
        assert gap(found[index], from_pil(image.crop((left, top, left + 224, top + 224)))) == 0


def test_simple_random_crop_reflects_at_the_border():
    batch = images(64, 32, 32)
    sizes = torch.tensor([[32, 32]]).expand(64, 2)
    key = rng.sample_key(0, 0, torch.arange(64), torch.zeros(64, dtype=torch.int64))
    view = crops.simple_random_crop(sizes, key, (32, 32))
    found = reference.crop_resize(batch, view, "bicubic", None)
    padded = torch.nn.functional.pad(batch.float(), (4, 4, 4, 4), mode="reflect").to(torch.uint8)
    for index in range(64):
        top, left = view.rows.offset[index] + 4, view.columns.offset[index] + 4
        assert torch.equal(found[index], padded[index, :, top : top + 32, left : left + 32])
    assert view.rows.offset.min() == -4
    assert view.rows.offset.max() == 4


def test_crop_statistics():
    """Area uniform in 8 % ... 100 %, aspect log-uniform in 3/4 ... 4/3, positions uniform; nothing outside the image."""
    count = 20000
    sizes = torch.tensor([[400, 400]]).expand(count, 2)
    key = rng.sample_key(3, 1, torch.arange(count), torch.zeros(count, dtype=torch.int64))
    view = crops.random_resized_crop(sizes, key, (224, 224))
    top, left, height, width = view.rows.start, view.columns.start, view.rows.length, view.columns.length
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= 400).all()
    assert (left + width <= 400).all()
    area, aspect = height * width / 400**2, (width / height).log()
    small = area < 0.6  # larger boxes are rejected more often
    assert area.min() > 0.075
    assert np.histogram(area[small], 4, (0.08, 0.6))[0] == pytest.approx([int(small.sum()) / 4] * 4, rel=0.06)
    assert np.histogram(aspect[small], 4, (math.log(3 / 4), math.log(4 / 3)))[0] == pytest.approx(
        [int(small.sum()) / 4] * 4, rel=0.06
    )
    free = (left / (400 - width).clamp(min=1))[small]
    assert np.histogram(free, 4, (0, 1))[0] == pytest.approx([int(small.sum()) / 4] * 4, rel=0.1)


def test_oblong_images_fall_back_to_the_center():
    sizes = torch.tensor([[10, 4000], [4000, 10]])
    key = rng.sample_key(0, 0, torch.arange(2), torch.zeros(2, dtype=torch.int64))
    view = crops.random_resized_crop(sizes, key, (8, 8), scale=(0.9, 1.0))
    assert view.rows.length.tolist() == [10, 13]
    assert view.columns.length.tolist() == [13, 10]
    assert view.columns.start[0] == (4000 - 13) // 2


def test_the_view_matrix_matches_the_crop():
    """In a cropped ramp of coordinates, each output pixel holds the source coordinates given by the matrix."""
    y, x = torch.meshgrid(torch.arange(120.0) + 0.5, torch.arange(200.0) + 0.5, indexing="ij")
    ramp = torch.stack([x, y, torch.zeros_like(x)])[None].expand(16, -1, -1, -1).to(torch.uint8)
    sizes = torch.tensor([[120, 200]]).expand(16, 2)
    key = rng.sample_key(0, 0, torch.arange(16), torch.zeros(16, dtype=torch.int64))
    crop = crops.random_resized_crop(sizes, key, (56, 56), scale=(0.2, 0.6))
    view = crops.flip_view(crop, torch.arange(16) % 2 == 0)
    found = reference.crop_resize(ramp, view, "bilinear", None) + 0.5
    out = torch.stack(torch.meshgrid(torch.arange(56.0) + 0.5, torch.arange(56.0) + 0.5, indexing="xy"), 0)
    places = torch.einsum("bij,jhw->bihw", view.matrix()[:, :2], torch.cat([out, torch.ones(1, 56, 56)]))
    middle = slice(8, 48)
    torch.testing.assert_close(found[:, :2, middle, middle], places[:, :, middle, middle], rtol=0, atol=1.1)


@pytest.mark.parametrize("radius", [0.0, 0.1, 0.7, 1.3, 2.0])
def test_blur(radius):
    """Against an exact Gaussian. Pillow approximates it by three box filters, within a few levels."""
    batch = images(2, 48, 40)
    sigma, sizes = torch.full((2,), radius), torch.tensor([[48, 40], [30, 25]])
    found = reference.blur(batch, sizes, sigma)
    assert resize.blur_taps(sigma, sizes[:, 0], 48).weights.sum(1).float().sub(resize.UNIT).abs().max() < 20
    for image, blurred, (height, width) in zip(batch, found, sizes.tolist(), strict=True):
        expected = from_pil(to_pil(image[:, :height, :width]).filter(ImageFilter.GaussianBlur(radius)))
        difference = (blurred[:, :height, :width].float() - expected.float()).abs()
        assert difference.mean() < 1.0
        if radius == 0:
            assert torch.equal(blurred[:, :height, :width], image[:, :height, :width])


def test_random_numbers_are_a_pure_function_of_their_key():
    index, repeat = torch.arange(50000), torch.zeros(50000, dtype=torch.int64)
    key = rng.sample_key(7, 3, index, repeat)
    assert len(key.unique()) > 49990
    numbers = rng.uniform(key, "crop", 3)
    order = torch.randperm(50000)
    assert torch.equal(rng.uniform(rng.sample_key(7, 3, index[order], repeat), "crop", 3), numbers[order])
    assert (numbers.mean(0) - 0.5).abs().max() < 0.006
    assert (numbers.var(0) - 1 / 12).abs().max() < 0.002
    for other in (
        rng.uniform(key, "flip", 3),
        rng.uniform(rng.sample_key(8, 3, index, repeat), "crop", 3),
        rng.uniform(rng.sample_key(7, 4, index, repeat), "crop", 3),
        rng.uniform(rng.sample_key(7, 3, index, repeat + 1), "crop", 3),
        rng.uniform(rng.sample_key(7, 3, index + 2**33, repeat), "crop", 3),
        numbers.roll(1, 0),
        numbers.roll(1, 1),
    ):
        assert abs(np.corrcoef(other[:, 0], numbers[:, 0])[0, 1]) < 0.02
    normal = rng.normal(key, "noise", 2)
    assert abs(normal.mean()) < 0.01
    assert normal.std() == pytest.approx(1, abs=0.01)
    whole = rng.randint(key, "choice", 15)[:, 0]
    assert whole.min() == 0
    assert whole.max() == 14
    assert torch.bincount(whole).float() == pytest.approx(torch.full((15,), 50000 / 15), rel=0.06)


def test_random_numbers_are_pinned():
    """These values must never change: a resumed run depends on them."""
    key = rng.sample_key(1, 2, torch.tensor([3, 2**40]), torch.tensor([0, 1]))
    assert rng.random_bits(key, "crop", 2).tolist() == [[3112370437, 2208522513], [1073017788, 1899793155]]
