"""RoIAlign against its definition in float64, and torchvision's operator on a GPU."""

import math

import pytest
import torch

from vitrail.heads.regions import choose_levels, pool_regions, roi_align

STRIDES = [4.0, 8.0]


def interpolate(map, y, x):
    """A feature [C] at a point: 0 more than one cell outside, bilinear otherwise."""
    height, width = map.shape[-2:]
    if not (-1 <= y <= height and -1 <= x <= width):
        return torch.zeros(map.shape[0], dtype=map.dtype)
    y, x = min(max(y, 0.0), height - 1), min(max(x, 0.0), width - 1)
    top, left = min(int(y), height - 1), min(int(x), width - 1)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    above = map[:, top, left] * (1 - (x - left)) + map[:, top, right] * (x - left)
    below = map[:, bottom, left] * (1 - (x - left)) + map[:, bottom, right] * (x - left)
    return above * (1 - (y - top)) + below * (y - top)


def slow_align(map, box, stride, size):
    left, top, right, bottom = (float(value) / stride - 0.5 for value in box)
    out = torch.zeros(map.shape[0], size, size, dtype=map.dtype)
    for row in range(size):
        for column in range(size):
            for i in range(4):
                y = top + (bottom - top) * (row + (i // 2 + 0.5) / 2) / size
                x = left + (right - left) * (column + (i % 2 + 0.5) / 2) / size
                out[:, row, column] += interpolate(map, y, x) / 4
    return out


def pyramid(dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 16, 20), (2, 3, 8, 10))
    return [torch.randn(shape, generator=generator, dtype=dtype).to(device) for shape in shapes]


BOXES = torch.tensor(
    [
        [[3.0, 5.5, 30.2, 41.0], [-9.0, -7.0, 20.0, 13.0], [60.0, 50.0, 85.0, 70.0], [10.0, 10.0, 10.0, 10.0]],
        [[0.0, 0.0, 80.0, 64.0], [79.9, 63.9, 80.0, 64.0], [-40.0, -40.0, -20.0, -20.0], [7.7, 2.1, 9.9, 60.0]],
    ],
    dtype=torch.float64,
)


@pytest.mark.parametrize("level", [0, 1])
def test_it_is_that_of_the_definition(level):
    maps = pyramid()
    found = roi_align(maps, STRIDES, BOXES, torch.full((2, 4), level), 3)
    for image in range(2):
        for row in range(4):
            wanted = slow_align(maps[level][image], BOXES[image, row], STRIDES[level], 3)
            torch.testing.assert_close(found[image, row], wanted, rtol=1e-11, atol=1e-11)


def test_gradients_are_those_of_differences():
    maps = [each[:1, :1, :4, :4].clone().requires_grad_() for each in pyramid()]
    boxes = torch.tensor([[[1.0, 2.0, 13.0, 11.0], [3.0, 3.0, 31.0, 30.0]]], dtype=torch.float64)
    levels = torch.tensor([[0, 1]])
    assert torch.autograd.gradcheck(lambda *inputs: roi_align(inputs, STRIDES, boxes, levels, 2), maps)


def test_levels_follow_the_size():
    sides = torch.tensor([10.0, 55.9, 56.0, 111.9, 112.0, 223.0, 224.0, 447.0, 449.0, 2000.0])
    boxes = torch.stack([torch.zeros_like(sides)] * 2 + [sides] * 2, 1)
    wanted = [min(max(math.floor(4 + math.log2(float(side) / 224)) - 2, 0), 3) for side in sides]
    assert choose_levels(boxes, [4.0, 8.0, 16.0, 32.0]).tolist() == wanted


@pytest.mark.gpu
def test_it_is_torchvisions():
    operators = pytest.importorskip("torchvision.ops")
    maps, boxes = [each.requires_grad_() for each in pyramid(torch.float32, "cuda")], BOXES.float().cuda()
    levels = choose_levels(boxes, STRIDES)
    found, pooled = roi_align(maps, STRIDES, boxes, levels, 7), pool_regions(maps, STRIDES, boxes, 7)
    torch.testing.assert_close(found, pooled, rtol=1e-4, atol=1e-5)
    weights = torch.randn_like(pooled)
    gradients = [torch.autograd.grad((each * weights).sum(), maps) for each in (found, pooled)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for image in range(2):
        for row in range(4):
            level = int(levels[image, row])
            region = torch.cat([torch.zeros(1, device="cuda"), boxes[image, row]])[None]
            wanted = operators.roi_align(maps[level][image : image + 1], region, 7, 1 / STRIDES[level], 2, aligned=True)[0]
            torch.testing.assert_close(found[image, row], wanted, rtol=1e-4, atol=1e-5)
