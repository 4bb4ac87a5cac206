"""Triton kernels against the reference in plain torch, on a GPU or, with Triton installed, with TRITON_INTERPRET=1."""

import os

import pytest
import torch

from tests.data.test_transform_parts import images
from vitrail.data import rng
from vitrail.data.transforms import crops, mixup, policies, reference
from vitrail.data.transforms.config import INTERPOLATIONS, NO_ANTIALIAS

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from vitrail.data.transforms import kernels  # noqa: E402

SIZES = torch.tensor([[61, 83], [40, 40], [61, 30], [25, 83], [50, 64], [3, 2]])
KEY = rng.sample_key(0, 0, torch.arange(6), torch.zeros(6, dtype=torch.int64))


def padded(layout: str) -> torch.Tensor:
    """Six padded images of `SIZES`, channels last (as decoders write them) or channels first."""
    batch = images(6, 61, 83)
    return batch.to(memory_format=torch.channels_last) if layout == "channels last" else batch


def on_device(value):
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(on_device, value))
    return value


def both(name: str, *arguments):
    """Results of the reference and of the kernel."""
    return getattr(reference, name)(*arguments), getattr(kernels, name)(*map(on_device, arguments)).cpu()


def difference(found, expected, sizes=None):
    """The largest difference, without the padding."""
    delta = (found.float() - expected.float()).abs()
    if sizes is not None:
        inside = torch.zeros_like(delta, dtype=torch.bool)
        for row, (height, width) in enumerate(sizes.tolist()):
            inside[row, :, :height, :width] = True
        delta = delta[inside]
    return delta.max().item()


def test_random_numbers_are_the_same():
    for name, count in (("crop.area", 10), ("flip", 1), ("mask", 196)):
        number = rng.hash_name(name)
        assert torch.equal(kernels.random_bits(KEY.to(DEVICE), number, count).cpu(), rng.random_bits(KEY, name, count))
        assert torch.equal(kernels.uniform(KEY.to(DEVICE), number, count).cpu(), rng.uniform(KEY, name, count))
    index, repeat = torch.tensor([0, 5, 2**33 + 7, 2**31 + 1]), torch.tensor([0, 1, 2, 3])
    start = rng.hash32(12345)
    found = kernels.fold_keys(start, index.to(DEVICE), repeat.to(DEVICE)).cpu()
    expected = start
    for part in (index & rng.MASK, index >> 32, repeat):
        expected = rng.hash32(expected * 3 + part + rng.GOLDEN)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("layout", ["planes", "channels last"])
@pytest.mark.parametrize("filter", INTERPOLATIONS)
@pytest.mark.parametrize("crop", ["random", "box", "simple", "squash", "large"])
def test_crops(layout, filter, crop):
    view = {
        "random": lambda: crops.random_resized_crop(SIZES, KEY, (45, 33)),
        "box": lambda: crops.distorted_box(SIZES, KEY, (45, 33), (0.05, 1.0), (0.75, 1.33)),
        "simple": lambda: crops.simple_random_crop(SIZES, KEY, (32, 32)),
        "squash": lambda: crops.squash(SIZES, (7, 9)),
        "large": lambda: crops.squash(SIZES, (80, 100)),
    }[crop]()
    view = crops.flip_view(view, torch.arange(6) % 2 == 0)
    expected, found = both("crop_resize", padded(layout), view, filter, torch.arange(6) % 3 == 0)
    assert difference(found, expected) <= (1e-4 if filter == NO_ANTIALIAS else 0)


@pytest.mark.parametrize("layout", ["planes", "channels last"])
def test_blur(layout):
    expected, found = both("blur", padded(layout), SIZES, torch.tensor([0.0, 0.1, 0.3, 0.8, 2.0, 1.5]))
    assert difference(found, expected, SIZES) == 0


@pytest.mark.parametrize("layout", ["planes", "channels last"])
@pytest.mark.parametrize("operation", reference.OPERATIONS)
def test_operations(layout, operation):
    """The kernels have the bits of the reference, also those of warps."""
    pixels = padded(layout)
    pixels[2, 1] = 7  # a channel of one value
    drawn = torch.full((6,), reference.OPERATION_INDEX[operation])
    drawn[1] = reference.IDENTITY
    signs, magnitude = torch.tensor([1.0, -1, 1, -1, -1, 1]), torch.tensor([3.0, 9.0, 8.5, 9.9, 1.0, 9.2])
    value = policies.arguments(policies.INCREASING, drawn, magnitude, signs)
    layer = reference.Layer(drawn, value, torch.arange(6) % 3 == 0, torch.arange(6) % 2 == 0)
    expected, found = both("apply_operations", pixels, SIZES, layer)
    assert difference(found, expected, SIZES) == 0


def test_distorted_boxes_are_the_same():
    sizes, key = SIZES.repeat(500, 1), rng.sample_key(0, 0, torch.arange(3000), torch.zeros(3000, dtype=torch.int64))
    expected = crops.distorted_box(sizes, key, (8, 8), (0.05, 1.0), (0.75, 1.33))
    found = crops.distorted_box(sizes.to(DEVICE), key.to(DEVICE), (8, 8), (0.05, 1.0), (0.75, 1.33))
    for ours, axis in zip(found, expected, strict=True):
        assert torch.equal(ours.start.cpu(), axis.start)
        assert torch.equal(ours.length.cpu(), axis.length)


def test_normalize():
    pixels = padded("planes")
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    expected, found = both("normalize", pixels, mean, std, None, KEY)
    torch.testing.assert_close(found, expected)
    boxes = mixup.erasing_boxes(KEY, (61, 83), probability=0.7)
    assert 0 < (boxes.sum(1) > 0).sum() < 6
    expected, found = both("normalize", pixels, mean, std, boxes, KEY)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
