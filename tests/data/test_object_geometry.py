"""Boxes and instance masks move as pixels do: compared with Pillow's resizing, cropping and flipping."""

import numpy as np
import pytest
import torch
from PIL import Image

from tests.shapes import make_coco
from vitrail.data.datasets.lookup import open_sources
from vitrail.data.instance_masks import pack_masks, unpack_masks
from vitrail.data.loader import ImageReader
from vitrail.data.objects import DecodedObjects, collate_objects
from vitrail.data.rng import sample_key
from vitrail.data.transforms.crops import View, flip_view, scaled_crop
from vitrail.data.transforms.object_geometry import blank_outside, has_mask, move_boxes, move_objects, sample_masks
from vitrail.data.transforms.pipeline import Augmentation, augment

SIZES = torch.tensor([[30, 40], [26, 37]])


def random_objects(count, height, width, seed):
    rng = np.random.default_rng(seed)
    masks = np.zeros((count, height, width), dtype=bool)
    boxes = np.zeros((count, 4), dtype=np.float32)
    for index in range(count):
        h, w = int(rng.integers(2, height // 2)), int(rng.integers(2, width // 2))
        top, left = int(rng.integers(0, height - h)), int(rng.integers(0, width - w))
        masks[index, top : top + h, left : left + w] = True
        boxes[index] = left, top, left + w, top + h
    values = (rng.integers(0, 3, count), np.zeros(count, dtype=np.uint8), masks.sum((1, 2)).astype(np.float32))
    return DecodedObjects(boxes, *values, pack_masks(masks)), masks


def crop_in_pillow(mask, view, row):
    """Resize by nearest neighbor, paste into the output, flip."""
    rows, columns = view
    size = int(columns.resized[row]), int(rows.resized[row])
    resized = Image.fromarray(mask).resize(size, Image.Resampling.NEAREST)
    out = Image.new("L", (columns.out, rows.out))
    out.paste(resized, (-int(columns.offset[row]), -int(rows.offset[row])))
    return np.asarray(out.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if bool(columns.flip[row]) else out) > 0


def clear_pixels(view, row):
    """Pixels whose center is not exactly between two pixels of the source, where rounding decides in Pillow."""
    clear = []
    for axis in view:
        centers = (2 * (np.arange(axis.out) + int(axis.offset[row])) + 1) * int(axis.length[row])
        between = centers % (2 * int(axis.resized[row])) != 0
        clear.append(between[::-1] if bool(axis.flip[row]) else between)
    return clear[0][:, None] & clear[1]


@pytest.mark.parametrize("factors", [(0.4, 0.9), (0.9, 2.0), (1.0, 1.0)])
def test_masks_are_moved_as_in_pillow(factors):
    pairs = [random_objects(11, *size, seed) for seed, size in enumerate(SIZES.tolist())]
    batch = collate_objects([objects for objects, _ in pairs], 30, 40)
    key = sample_key(0, 0, torch.arange(2), torch.zeros(2, dtype=torch.int64))
    view = flip_view(scaled_crop(SIZES, key, (28, 36), factors), torch.tensor([True, False]))
    moved = move_objects(batch, view, 16)
    assert moved.planes.shape == (2, 2, 28, 36)
    present = has_mask(moved.planes, 16)
    for row, (_, masks) in enumerate(pairs):
        found, clear = unpack_masks(moved.planes[row].numpy(), 11), clear_pixels(view, row)
        assert clear.mean() > 0.9
        for index in range(11):
            wanted = crop_in_pillow(masks[index].astype(np.uint8) * 255, view, row)
            assert np.array_equal(found[index] & clear, wanted & clear)
            assert bool(present[row, index]) == found[index].any()
            if moved.classes[row, index] >= 0 and wanted.any():  # the box is that of its pixels, up to their rounding
                y, x = np.nonzero(wanted)
                box = np.array([x.min(), y.min(), x.max() + 1, y.max() + 1])
                scale = float(view.columns.resized[row] / view.columns.length[row])
                assert np.abs(moved.boxes[row, index].numpy() - box).max() <= max(0.5 * scale, 0.5) + 1e-4
    assert (moved.classes[:, 11:] == -1).all()


def test_whole_factors_are_exact():
    """Twice the size, cropped and flipped: boxes have exactly the coordinates of their pixels."""
    objects, _ = random_objects(8, 20, 24, 3)
    batch = collate_objects([objects], 20, 24)
    view = flip_view(scaled_crop(torch.tensor([[20, 24]]), torch.tensor([5]), (40, 40), (1.0, 1.0)), torch.tensor([True]))
    moved = move_objects(batch, view, 8)
    for index, mask in enumerate(unpack_masks(moved.planes[0].numpy(), 8)):
        if mask.any():
            y, x = np.nonzero(mask)
            assert moved.boxes[0, index].tolist() == [x.min(), y.min(), x.max() + 1, y.max() + 1]


def test_boxes_do_not_leave_the_image():
    """Around an image that is smaller than the crop there are no objects."""
    view: View = scaled_crop(torch.tensor([[20, 20]]), torch.tensor([9]), (40, 40), (0.5, 0.5))
    (box,) = move_boxes(torch.tensor([[[-5.0, -5, 50, 50]]]), view)[0].tolist()
    left, top = -int(view.columns.offset[0]), -int(view.rows.offset[0])
    assert box == [left, top, left + 20, top + 20]


def shown_pixels(view, row):
    """Where a crop shows the image, bool [height, width]: around it the image is reflected."""
    rows, columns = view
    shown = torch.zeros(rows.out, columns.out, dtype=torch.bool)
    y, x = -int(rows.offset[row]), -int(columns.offset[row])
    shown[max(y, 0) : y + int(rows.resized[row]), max(x, 0) : x + int(columns.resized[row])] = True
    return shown.flip(1) if bool(columns.flip[row]) else shown


def test_the_mean_color_is_around_small_images():
    key = sample_key(0, 0, torch.arange(2), torch.zeros(2, dtype=torch.int64))
    view = flip_view(scaled_crop(SIZES, key, (28, 36), (0.5, 0.9)), torch.tensor([True, False]))
    found = blank_outside(torch.full((2, 3, 28, 36), 7.0), view)
    for row in range(2):
        assert torch.equal(found[row], 7.0 * shown_pixels(view, row).expand(3, -1, -1))


def test_pixels_boxes_and_masks_agree(tmp_path):
    """In augmented photographs the red and blue pixels of an object are inside of its box and its mask."""
    source = open_sources(make_coco(tmp_path / "data", 8, most=1))["train"]
    decoded = ImageReader(source, None, objects=True).read_images(np.arange(8))
    key = sample_key(0, 1, torch.arange(8), torch.zeros(8, dtype=torch.int64))
    augmentation = Augmentation(
        (48, 48), crop="scaled", factors=(0.7, 1.3), mean=(0, 0, 0), std=(1, 1, 1), interpolation="nearest"
    )
    augmented = augment(decoded.pixels.permute(0, 3, 1, 2), torch.from_numpy(decoded.sizes), key, augmentation)
    moved = move_objects(decoded.objects, augmented.view, 1)
    images = augmented.images * 255
    colored = (images.amax(1) - images.amin(1)) > 90
    for row in range(8):
        mask = torch.from_numpy(unpack_masks(moved.planes[row].numpy(), 1)[0])
        if moved.classes[row, 0] < 0:
            continue
        left, top, right, bottom = moved.boxes[row, 0].tolist()
        inside = torch.zeros(48, 48, dtype=torch.bool)
        inside[max(int(top) - 1, 0) : int(bottom) + 2, max(int(left) - 1, 0) : int(right) + 2] = True
        known = shown_pixels(augmented.view, row)
        shown = colored[row] & known
        assert not (shown & ~inside).any()
        assert (shown & mask).sum() >= 0.9 * shown.sum()
        assert (mask & ~known).sum() == 0


def test_masks_inside_of_boxes():
    mask = np.zeros((9, 16, 16), dtype=bool)
    mask[8, 4:12, 2:10] = True
    planes = torch.from_numpy(pack_masks(mask))[None]
    objects, boxes = torch.tensor([[8, 8, 0]]), torch.tensor([[[2.0, 4, 10, 12], [2.0, 4, 18, 12], [0.0, 0, 16, 16]]])
    found = sample_masks(planes, objects, boxes, 4)[0]
    assert found[0].all()
    assert found[1].tolist() == [[True, True, False, False]] * 4
    assert not found[2].any()
