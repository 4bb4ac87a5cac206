"""Mask R-CNN: parameters of the paper's table, the pyramid of any trunk, proposals, and configurations in files."""

import dataclasses

import pytest
import torch

import vitrail
from vitrail.errors import UserError
from vitrail.heads.mask_rcnn import PyramidNeck, make_anchors, propose
from vitrail.heads.task_heads import DetectionConfig, build_head, read_config, write_config
from vitrail.models.registry import create

SMALL = {"channels": 8, "hidden": 16, "candidates": 20, "proposals": 10}


def config(classes=2, **changes):
    return DetectionConfig(tuple(f"class {index}" for index in range(classes)), 32, **SMALL | changes)


@pytest.mark.parametrize(("name", "printed"), [("patchconvnet_s60", 44.9), ("patchconvnet_s120", 67.4)])
def test_parameters_are_those_of_table_5_6(name, printed):
    """With the trunk and without pooling and classifier; the neck of two deconvolutions is 0.01 M below rounding to 44.9."""
    with torch.device("meta"):
        model = create(name, 1000)
        model.set_task_head(DetectionConfig(tuple(map(str, range(80))), 800))
    parts = dict.fromkeys(("trunk", "unused", "neck", "heads"), 0)
    for key, parameter in model.named_parameters():
        group = "neck" if key.startswith("task_head.neck") else "heads" if key.startswith("task_head") else "trunk"
        parts["unused" if key.startswith(("pooling", "head")) else group] += parameter.numel()
    assert round(parts["heads"] / 1e6, 2) == 20.30
    assert parts["neck"] == 2 * (384 * 384 * 4 + 384) + 2 * 384
    total = (parts["trunk"] + parts["neck"] + parts["heads"]) / 1e6
    assert abs(total - printed) < 0.07


def test_a_pyramid_of_any_trunk():
    neck = PyramidNeck([6], [16])
    levels = neck([torch.randn(1, 6, 4, 5)])
    assert [tuple(level.shape[-2:]) for level in levels] == [(16, 20), (8, 10), (4, 5), (2, 2)]
    assert neck.strides == [4, 8, 16, 32]
    head = build_head(config(), [4, 8, 16, 32], [4, 8, 16, 32])
    maps = [torch.randn(1, 2 ** (2 + step), 16 >> step, 16 >> step) for step in range(4)]
    assert [tuple(level.shape) for level in head(maps)] == [(1, 8, side, side) for side in (16, 8, 4, 2, 1)]
    assert build_head(config(), [6], [14]).strides == [3.5, 7, 14, 28, 56]
    with pytest.raises(UserError, match="final tokens or maps of four"):
        build_head(config(), [4, 8], [4, 8])


def test_anchors_are_centered_on_cells():
    anchors = make_anchors(torch.zeros(1, 1, 2, 3), 8.0)
    assert anchors.shape == (18, 4)
    assert anchors[1].tolist() == [4 - 32, 4 - 32, 4 + 32, 4 + 32]
    centers = (anchors[:, :2] + anchors[:, 2:]) / 2
    assert centers[1::3].tolist() == [[4, 4], [12, 4], [20, 4], [4, 12], [12, 12], [20, 12]]
    sides = anchors[:3, 2:] - anchors[:3, :2]
    torch.testing.assert_close(sides.prod(1), torch.full((3,), 64.0**2))


def test_proposals_are_the_best_without_duplicates():
    level = torch.zeros(1, 1, 4, 4)
    anchors = [make_anchors(level, 16.0)]
    logits = [torch.linspace(0, 1, 48).expand(2, -1).contiguous()]
    boxes, valid = propose(logits, [torch.zeros(2, 48, 4)], anchors, (64, 64), 30, 100, 0.5, True)
    assert boxes.shape == (2, 30, 4)
    kept = boxes[0][valid[0]]
    from vitrail.heads.boxes import box_iou

    overlaps = box_iou(kept, kept)
    assert (overlaps.triu(1) <= 0.5).all()
    assert torch.equal(boxes[0], boxes[1])
    assert (kept >= 0).all()
    assert (kept <= 64).all()
    tiny, ok = propose(logits, [torch.full((2, 48, 4), -1e4)], anchors, (64, 64), 30, 5, 0.5, True)
    assert tiny.shape == (2, 5, 4)
    assert not ok.any()


def test_the_artifact_contains_the_head(tmp_path):
    model = create("vitrail_mini", 0, 16, width=16, depth=1, patch_size=4).set_task_head(config(masks=False, overlap=0.6))
    loaded = vitrail.load(vitrail.save(model, tmp_path / "model.safetensors"))
    assert loaded.task_head.config == model.task_head.config
    assert loaded.task_head.mask_head is None
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name])
    assert read_config(write_config(model.task_head)) == model.task_head.config


@pytest.mark.parametrize(
    "change",
    [
        {"class_names": ()},
        {"class_names": (1,)},
        {"channels": 0},
        {"hidden": 1 << 30},
        {"proposals": "many"},
        {"min_score": 2.0},
        {"overlap": 1},
        {"window": 32},
        {"short_side": -1},
        {"blocks": (0,) * 65},
        {"colour": 3},
    ],
)
def test_damaged_configurations(change):
    with pytest.raises(UserError):
        read_config({"task": "detection"} | dataclasses.asdict(config()) | change)
