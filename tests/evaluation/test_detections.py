"""From images to objects: masks at the size of the image, tiles, and detectors on trunks of any kind."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import vitrail
from vitrail.errors import UserError
from vitrail.evaluation import detections
from vitrail.evaluation.detected_images import change_tiles, detect
from vitrail.evaluation.detections import DetectionProtocol, Detections, detect_objects, merge_tiles, paste_masks
from vitrail.evaluation.object_evaluation import COMPARED, count_common, match_object_classes
from vitrail.heads.task_heads import DetectionConfig
from vitrail.models.registry import create

CONFIG = DetectionConfig(("cat", "dog"), 64, channels=8, hidden=16, candidates=40, proposals=20, min_score=0.0)


def detector(name="vitrail_mini", config=CONFIG, **changes):
    torch.manual_seed(0)
    return create(name, 0, 64, **changes).set_task_head(config).eval()


@pytest.fixture(scope="module")
def small():
    return detector(width=16, depth=1, patch_size=8)


def image(height, width, seed=0):
    return torch.randint(0, 256, (1, 3, height, width), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def test_masks_are_pasted_into_their_boxes():
    mask = torch.rand(1, 28, 28, generator=torch.Generator().manual_seed(0))
    pasted = paste_masks(mask, torch.tensor([[4.0, 6, 32, 34]]), 40, 50)[0]
    assert torch.equal(pasted[6:34, 4:32], mask[0] >= 0.5)  # a pixel per cell
    assert pasted.sum() == (mask >= 0.5).sum()
    doubled = paste_masks(mask, torch.tensor([[0.0, 0, 56, 56]]), 56, 56)[0]
    wanted = F.interpolate(mask[None], (56, 56), mode="bilinear", align_corners=False)[0, 0] >= 0.5
    inner = (slice(1, -1), slice(1, -1))
    assert torch.equal(doubled[inner], wanted[inner])
    common, first, second = count_common(pasted[None], torch.stack([pasted, ~pasted]))
    assert common.tolist() == [[first[0], 0]]
    assert first[0] + second[1] == 40 * 50


def test_masks_of_large_images_are_compared_in_parts():
    class Largest(TorchDispatchMode):
        values = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.is_floating_point():
                self.values = max(self.values, out.numel())
            return out

    generator = torch.Generator().manual_seed(0)
    first, second = (torch.rand(count, 1200, 2000, generator=generator) < 0.3 for count in (2, 3))
    with Largest() as largest:
        found = count_common(first, second)
    assert largest.values <= 3 * COMPARED
    wanted = (first[:, None] & second).sum((2, 3)), first.sum((1, 2)), second.sum((1, 2))
    assert all(np.array_equal(ours, theirs.numpy()) for ours, theirs in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("height", "width"), [(40, 60), (64, 64), (33, 130)])
def test_any_size_and_both_ways(small, height, width):
    """Boxes are inside of the image; the same image in a batch gives the same objects."""
    pixels = torch.cat([image(height, width), image(height, width, 1)])
    protocol = DetectionProtocol.of(CONFIG)
    first, second = detect_objects(small, pixels, protocol)
    (alone,) = detect_objects(small, pixels[:1], protocol)
    torch.testing.assert_close(first.boxes, alone.boxes, rtol=1e-4, atol=1e-3)
    assert len(first.scores) <= 100
    assert (first.scores[:-1] >= first.scores[1:]).all()
    assert first.masks.shape[1:] == (28, 28)
    for found in (first, second):
        assert (found.boxes >= 0).all()
        assert (found.boxes <= torch.tensor([width, height] * 2)).all()


def test_tiles_cover_large_images(small):
    protocol = change_tiles(small, 64)
    assert (protocol.short_side, protocol.window, protocol.stride) == (0, 64, 48)
    assert "tiles of 64 with stride 48" in protocol.describe()
    (found,) = detect_objects(small, image(150, 200), protocol)
    assert float(found.boxes[:, 2].max()) > 136
    (single,) = detect_objects(small, image(64, 64), protocol)
    (whole,) = detect_objects(small, image(64, 64), DetectionProtocol.of(CONFIG))
    assert set(single.scores.tolist()) <= set(whole.scores.tolist())
    with pytest.raises(UserError, match="at least one patch of 8"):
        change_tiles(small, 4)


def test_parts_of_an_object_in_other_tiles_are_left_out(monkeypatch):
    boxes = torch.tensor([[0.0, 0, 40, 40], [22.0, 0, 40, 40], [50.0, 50, 60, 60], [1.0, 1, 40, 40]])
    parts = [Detections(boxes[:2], torch.tensor([0.9, 0.5]), torch.tensor([0, 0]), None)]
    parts.append(Detections(boxes[2:], torch.tensor([0.8, 0.7]), torch.tensor([0, 1]), None))
    merged = merge_tiles(parts, DetectionProtocol(64))
    assert [round(score, 3) for score in merged.scores.tolist()] == [0.9, 0.8, 0.7]  # of another class: kept
    monkeypatch.setattr(detections, "MERGED", 2)
    best = merge_tiles(parts, DetectionProtocol(64))
    assert all(torch.equal(one, whole[:2]) for one, whole in zip(best[:3], merged[:3], strict=True))


@pytest.mark.parametrize("name", ["resnet18", "resmlp_s12"])
def test_other_trunks(name):
    changes = {"width": 16, "depth": 1, "patch_size": 8} if name == "resmlp_s12" else {}
    window = {"window": 64, "stride": 48} if name == "resmlp_s12" else {}
    config = DetectionConfig(("cat",), 64, **{"channels": 8, "hidden": 8, "candidates": 20, "proposals": 10} | window)
    model = detector(name, config, **changes)
    (found,) = vitrail.detect(model, np.zeros((70, 90, 3), dtype=np.uint8), threshold=0.0)
    assert found.pixels.shape == (70, 90, 3)
    if window:
        with pytest.raises(UserError, match="take tiles of 64 pixels only"):
            change_tiles(model, 32)


def test_results(small, tmp_path):
    (found,) = detect(small, np.zeros((40, 50, 3), dtype=np.uint8), threshold=0.0)
    first = found.objects[0]
    content = found.to_dict()
    assert content["objects"][0]["segmentation"]["size"] == [40, 50]
    left, top, right, bottom = first.box
    assert content["objects"][0]["bbox"] == pytest.approx([left, top, right - left, bottom - top], abs=0.02)
    assert content["objects"][0]["category_id"] == first.index + 1
    assert first.mask.shape == (40, 50)
    assert found.overlay().size == (50, 40)
    with pytest.raises(UserError, match="has no detection head"):
        detect(create("vitrail_mini", 3, 16, width=16, depth=1), np.zeros((8, 8, 3), dtype=np.uint8))


def test_classes_are_matched_by_name():
    table, missing = match_object_classes(CONFIG, ("dog", "car"), "data")
    assert (table.tolist(), missing) == ([1, -1], ["car"])
    with pytest.raises(UserError, match="none of the classes of the weights"):
        match_object_classes(CONFIG, ("car",), "data")
