"""Convnets as models: feature maps, recomputing, stochastic depth, hybrids, and what a configuration may be."""

import pytest
import torch

import vitrail
from tests.convnets import small_resnet
from tests.models.test_every_model import randomize
from vitrail.layers.convnet import ConvNetConfig
from vitrail.models.registry import build
from vitrail.models.regnet import regnet

REGNET = regnet((1, 2), (16, 24), 8, root=8).replace(classes=4)


@pytest.mark.parametrize("architecture", [small_resnet((1, 1, 2), bottleneck=True), REGNET], ids=["resnet", "regnet"])
def test_feature_maps_are_those_of_the_stages(architecture):
    model = randomize(build(architecture)).eval()
    images = torch.randn(2, 3, 50, 70)
    with torch.no_grad():
        maps, features = model.feature_maps(images), model.features(images)
    assert [each.shape[1] for each in maps] == list(architecture.convnet.widths)
    strides = [architecture.convnet.stride >> index for index in reversed(range(len(maps)))]
    assert [tuple(each.shape[2:]) for each in maps] == [(-(-50 // stride), -(-70 // stride)) for stride in strides]
    assert features.grid == tuple(maps[-1].shape[2:])
    assert torch.equal(features.tokens, maps[-1].flatten(2).transpose(1, 2))
    torch.testing.assert_close(features.pooled, maps[-1].mean((2, 3)))


def test_the_feature_map_of_a_transformer_is_its_tokens():
    model = vitrail.create("deit_tiny_patch16", 3, 32, depth=1)
    images = torch.randn(2, 3, 32, 48)
    (found,) = model.feature_maps(images)
    assert torch.equal(found.flatten(2).transpose(1, 2), model.features(images).tokens)
    assert found.shape == (2, 192, 2, 3)


def test_recomputed_blocks_have_the_same_gradients():
    model = randomize(build(REGNET)).train()
    images, gradients = torch.randn(2, 3, 32, 32), []
    for recompute in (False, True):
        model.recompute = recompute
        model.zero_grad()
        model(images).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))


def test_stochastic_depth_drops_branches():
    """With a rate near one, blocks that keep the shape do nothing."""
    model = randomize(build(small_resnet((3,), classes=0).replace(drop_path=0.999, drop_path_schedule="uniform"))).train()
    x = torch.randn(4, 8, 5, 5).relu()
    torch.manual_seed(0)
    assert torch.equal(model.stem.blocks[1](x), x)
    model.eval()
    assert not torch.equal(model.stem.blocks[1](x), x)


def test_a_convnet_with_blocks_behind_it():
    changes = {"depth": 1, "heads": 2, "pos_embed": "learned", "final_norm": True, "mlp_ratio": 2.0}
    model = randomize(build(small_resnet((1, 1), bottleneck=True).replace(**changes)))
    model(torch.randn(2, 3, 64, 64)).sum().backward()
    assert [len(model.layers), len(model.blocks)] == [3, 1]
    assert model.feature_maps(torch.randn(1, 3, 64, 64))[0].shape == (1, 64, 8, 8)


def test_new_weights_make_every_block_the_identity():
    model = vitrail.create("resnet18", 3, 64)
    x = torch.randn(2, 64, 8, 8).relu()
    assert torch.equal(model.stem.blocks[1](x), x)
    assert float(model.stem.root.conv1.weight.detach().std()) == pytest.approx((2 / (64 * 49)) ** 0.5, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depths": (1, 0)}, "positive integers"),
        ({"widths": (8,)}, "need 2 values each"),
        ({"groups": (3, 3)}, "do not divide"),
        ({"block": "dense"}, "not known; choose from bottleneck, basic"),
        ({"shortcut": "none"}, "not one of"),
        ({"root_stride": 8}, "1, 2 or 4"),
        ({"eps": 0.0}, "between 0 and 1"),
        ({"squeeze": "yes"}, "true or false"),
        ({"depths": (999, 999)}, "1000 blocks"),
    ],
)
def test_impossible_configurations(changes, message):
    plain = {"depths": (1, 1), "widths": (8, 16), "inner_widths": (4, 8), "groups": (1, 1)}
    with pytest.raises(vitrail.UserError, match=message):
        ConvNetConfig(**(plain | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"convnet": None}, "need each other"),
        ({"width": 99}, "width of its last stage"),
        ({"patch_size": 4}, "total stride"),
        ({"convnet": {"depth": 3}}, "convnet has no 'depth'"),
        ({"drop_path": 0.1, "drop_path_kind": "skip"}, "drop_path_kind=each"),
    ],
)
def test_impossible_architectures(changes, message):
    with pytest.raises(vitrail.UserError, match=message):
        small_resnet().replace(**changes)
