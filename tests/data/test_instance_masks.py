"""Polygons and run lengths against COCO's tools, and files that are damaged."""

import tracemalloc

import numpy as np
import pytest
from faster_coco_eval import mask as coco_masks

from vitrail.data.instance_masks import (
    Rle,
    decode_rle,
    draw_polygon,
    encode_rle,
    pack_masks,
    read_polygons,
    shape_to_mask,
    unpack_masks,
)


def test_polygons_are_those_of_coco():
    rng = np.random.default_rng(0)
    for case in range(150):
        height, width = (int(side) for side in rng.integers(4, 50, 2))
        points = rng.uniform(-6, 56, (int(rng.integers(3, 12)), 2))
        points = [points, np.round(points), np.round(points * 2) / 2][case % 3]
        wanted = coco_masks.decode(coco_masks.frPyObjects([points.reshape(-1).tolist()], height, width))[:, :, 0]
        assert np.array_equal(draw_polygon(points, height, width), wanted), case


def test_several_polygons_are_joined():
    parts = [[0, 0, 6, 0, 6, 6, 0, 6], [3, 3, 10, 3, 10, 9, 3, 9]]
    wanted = coco_masks.decode(coco_masks.merge(coco_masks.frPyObjects(parts, 12, 14)))
    assert np.array_equal(shape_to_mask(read_polygons(parts), 12, 14, None, False), wanted)
    relative = read_polygons([[0, 0, 0.5, 0, 0.5, 0.5, 0, 0.5]])
    assert shape_to_mask(relative, 12, 14, None, True).sum() == 6 * 7


def test_run_lengths_are_those_of_coco():
    rng = np.random.default_rng(1)
    for case in range(60):
        mask = rng.random(rng.integers(1, 40, 2)) < rng.random()
        if case % 5 == 0:
            mask[:] = case % 2
        wanted = coco_masks.encode(np.asfortranarray(mask.astype(np.uint8)))
        found = encode_rle(mask)
        counts = wanted["counts"]
        assert found.counts == (counts.encode() if isinstance(counts, str) else counts)
        assert np.array_equal(decode_rle(found), mask)
        flat = np.concatenate([[False], mask.T.reshape(-1)])
        runs = np.diff(np.concatenate([[0], np.flatnonzero(flat[1:] != flat[:-1]), [mask.size]]))
        assert np.array_equal(decode_rle(Rle(runs, mask.shape)), mask)


@pytest.mark.parametrize(
    "rle",
    [
        Rle(np.array([5, 5]), (2, 2)),
        Rle(np.array([-1, 5]), (2, 2)),
        Rle(np.array([1 << 60, 4]), (2, 2)),
        Rle(np.zeros(100, dtype=np.int64), (2, 2)),
        Rle(b"~~~~", (2, 2)),
        Rle(b"PPPPPPPPPPPPPPPP", (2, 2)),
        Rle(b"o" * 5000, (2, 2)),
        Rle(b"", (2, 2)),
    ],
)
def test_run_lengths_that_do_not_fit(rle):
    with pytest.raises(ValueError, match="run lengths"):
        decode_rle(rle)


@pytest.mark.parametrize(
    "points",
    [[[1, 1], [2, 2]], [[np.nan, 1], [2, 2], [3, 1]], [[1e30, 1], [2, 2], [3, 1]], [[np.inf, 1], [2, 2], [3, 1]]],
)
def test_polygons_that_are_none(points):
    with pytest.raises(ValueError, match="at least three points"):
        draw_polygon(np.array(points, dtype=np.float64), 8, 8)


def test_huge_outlines_are_refused():
    zigzag = np.array([[0, 0], [1e6, 1e6]] * 40, dtype=np.float64)
    with pytest.raises(ValueError, match="millions"):
        draw_polygon(zigzag, 8, 8)
    with pytest.raises(ValueError, match="points"):
        shape_to_mask((np.zeros((200_000, 2)),), 8, 8, None, False)
    with pytest.raises(ValueError, match="x and y"):
        read_polygons([[1, 2, 3]])


def test_memory_is_that_of_the_mask():
    tracemalloc.start()
    assert draw_polygon(np.array([[10, 10], [3900, 50], [2000, 3900.0]]), 4000, 4000).any()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * 4000 * 4000 + 2**23


def test_packed_masks():
    masks = np.random.default_rng(2).random((11, 5, 7)) < 0.5
    planes = pack_masks(masks)
    assert planes.shape == (2, 5, 7)
    assert np.array_equal(unpack_masks(planes, 11), masks)
    assert ((planes[1, 2, 3] >> 2) & 1) == masks[10, 2, 3]
