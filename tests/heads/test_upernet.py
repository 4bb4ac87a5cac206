"""Heads for dense prediction: the parameters of the papers' tables, maps of one and of several scales."""

import dataclasses

import pytest
import torch

from vitrail.errors import UserError
from vitrail.heads.task_heads import SegmentationConfig, SegmentationHead, read_config, write_config
from vitrail.heads.upernet import LEVELS, FcnHead, LinearHead, Neck, UperNetHead
from vitrail.models.registry import create

ADE20K = SegmentationConfig(tuple(map(str, range(150))), tuple(range(1, 151)), 512)
SMALL = SegmentationConfig(("a", "b", "c"), (0, 1, 7), 32, channels=8, auxiliary=4)

# Printed parameters in millions: Table 5.3 of PatchConvNet, whose trunks keep their pooling and 1000 classes, and Table 6.12 of
# DeiT III, whose trunks have no classifier and positions of a crop of 512 pixels.
PRINTED = [
    ("patchconvnet_s60", 512, 1000, 57.1),
    ("patchconvnet_b60", 512, 1000, 140.6),
    ("patchconvnet_b120", 512, 1000, 229.8),
    ("patchconvnet_l120", 512, 1000, 383.7),
    ("deit3_tiny_patch16", 192, 0, 10.9),
    ("deit3_small_patch16", 384, 0, 41.7),
    ("deit3_base_patch16", 512, 0, 127.7),
    ("deit3_large_patch16", 512, 0, 353.6),
]


@pytest.mark.parametrize(("name", "channels", "classes", "printed"), PRINTED)
def test_parameters_of_the_tables(name, channels, classes, printed):
    with torch.device("meta"):
        model = create(name, classes, (512, 512)).set_task_head(dataclasses.replace(ADE20K, channels=channels))
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1) == printed


@pytest.mark.parametrize("stride", [4, 8, 14, 16, 32])
def test_the_neck_makes_a_pyramid_of_one_map(stride):
    side = 448 // stride
    maps = Neck([6], [stride])([torch.randn(2, 6, side, side)])
    exact = 2 ** round(torch.tensor(stride / 4).log2().item()) * side  # patches of 14 pixels are taken for 16
    assert [each.shape[-1] for each in maps] == [exact * 4 // level for level in LEVELS]


@pytest.mark.parametrize("kind", ["linear", "fcn", "upernet"])
def test_heads_take_maps_of_a_pyramid(kind):
    """As those of a convnet: other channels and strides at each level."""
    channels, strides = [4, 6, 8, 10], [4, 8, 16, 32]
    maps = [torch.randn(2, width, 64 // stride, 96 // stride) for width, stride in zip(channels, strides, strict=True)]
    head = SegmentationHead(dataclasses.replace(SMALL, kind=kind), channels, strides)
    assert head(maps).shape == (2, 3, 16, 24)
    beside = head.auxiliary_logits(maps)
    assert (beside is None) == (kind != "upernet")
    assert beside is None or beside.shape == (2, 3, 4, 6)  # stride 16


def test_upernet_differs_from_a_linear_head_by_context():
    """A pixel far away changes the logits of UperNet and FCN, and not those of a linear head."""
    torch.manual_seed(0)
    maps = torch.randn(1, 8, 8, 8)
    changed = maps.clone()
    changed[:, :, 7, 7] += 5
    for head, local in ((LinearHead([8], 3), True), (FcnHead([8], 8, 3), True), (UperNetHead([8], [16], 8, 3), False)):
        before, after = (head.eval()([each])[:, :, 0, 0] for each in (maps, changed))
        assert torch.equal(before, after) == local, type(head)


def test_a_configuration_survives_json():
    head = SegmentationHead(SMALL, [8], [4])
    assert read_config(write_config(head)) == SMALL
    assert read_config({**write_config(head), "class_names": ["x", "y", "z"]}).class_names == ("x", "y", "z")


@pytest.mark.parametrize(
    "changes",
    [
        {"task": "dance"},
        {"kind": "transformer"},
        {"class_names": []},
        {"class_names": ["a"] * 400, "mask_ids": list(range(400))},
        {"mask_ids": [0, 0, 1]},
        {"mask_ids": [0, 1, 256]},
        {"channels": 10**9},
        {"channels": "many"},
        {"blocks": [-1]},
        {"window": 64},
        {"dropout": 1.0},
        {"surplus": 1},
    ],
)
def test_a_damaged_configuration_is_refused(changes):
    with pytest.raises(UserError):
        read_config(write_config(SegmentationHead(SMALL, [8], [4])) | changes)
