"""Folding is algebra: in float64 the rewritten network agrees with the original to the last digits, whatever the parts."""

import copy

import pytest
import torch
from hypothesis import given, settings
from torch.nn import functional as F

from tests.models.test_every_model import any_size, randomize
from tests.models.test_grid import architectures
from tests.small import structures
from vitrail.deploy.fold import NORMS, SCALES, fold
from vitrail.deploy.folded_layers import FoldedAttention, FoldedFeedForward, FoldedResidual
from vitrail.deploy.parity import difference
from vitrail.layers.attention import TalkingHeads
from vitrail.models.config import Architecture
from vitrail.models.registry import build

SMALL = Architecture(width=32, depth=2, heads=2, classes=5, image_size=(8, 12), patch_size=4)


def answers(architecture, size=None):
    """The original's and the folded network's answers in float64, the folded network, the notes."""
    model = randomize(build(architecture)).double().eval()
    image = torch.randn(3, architecture.channels, *(size or architecture.image_size), dtype=torch.float64)
    folded, notes = fold(copy.deepcopy(model))
    with torch.no_grad():
        return model(image), folded(image), folded, notes


@settings(max_examples=60, deadline=None, derandomize=True)
@given(architecture=architectures())
def test_any_combination_of_parts(architecture):
    torch.manual_seed(0)
    original, found, _, _ = answers(architecture)
    # The ResNet's filters are standardized in float32 by the original.
    assert difference(found, original) < (1e-4 if architecture.stem == "resnet" else 1e-11)


@pytest.mark.parametrize("name", [name for name, architecture in structures().items() if any_size(architecture)])
def test_every_structure_at_another_size(name):
    architecture = structures()[name]
    size = tuple(side + architecture.patch_size for side in architecture.image_size)
    original, found, _, _ = answers(architecture, size)
    assert difference(found, original) < (1e-4 if architecture.stem.startswith("resnet") else 1e-11)


@pytest.mark.parametrize("branches", [2, 3, 4])
@pytest.mark.parametrize("residual", ["plain", "layerscale", "affine"])
@pytest.mark.parametrize("qkv_bias", [True, False])
def test_parallel_branches_become_one(branches, residual, qkv_bias):
    a = SMALL.replace(branches=branches, residual=residual, qkv_bias=qkv_bias, pos_embed_prefix=False)
    original, found, folded, notes = answers(a)
    assert difference(found, original) < 1e-11
    assert notes.done["residuals whose parallel branches became one"] == 2 * a.depth
    assert notes.done[NORMS] == 2 * branches * a.depth + 1
    assert notes.done[SCALES] == (0 if residual == "plain" else 2 * branches * a.depth)
    assert not notes.left
    mix, ffn = folded.backbone.blocks[0].mix.bodies, folded.backbone.blocks[0].ffn.bodies
    assert len(mix) == len(ffn) == 1
    assert isinstance(mix[0], FoldedAttention)
    assert isinstance(ffn[0], FoldedFeedForward)
    assert mix[0].qkv.weight.shape == (3 * branches * 32, 32)
    assert mix[0].proj.weight.shape == (32, branches * 32)
    assert ffn[0].fc1.weight.shape == (branches * 4 * 32, 32)


def test_one_attention_call_per_block(monkeypatch):
    calls = []
    real = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *parts, **rest: calls.append(parts) or real(*parts, **rest))
    folded, _ = fold(randomize(build(SMALL.replace(branches=3))).eval())
    with torch.no_grad():
        folded(torch.randn(1, 3, 8, 12))
    assert [call[0].shape[1] for call in calls] == [6, 6]  # branches x heads


def test_the_last_block_computes_only_the_class_token():
    rows = []
    folded, notes = fold(randomize(build(SMALL)).eval())
    for block in folded.backbone.blocks:
        block.ffn.bodies[0].fc1.register_forward_hook(lambda module, given, result: rows.append(result.shape[1]))
    with torch.no_grad():
        folded(torch.randn(1, 3, 8, 12))
    assert rows == [7, 1]
    assert notes.done["last blocks that compute the prefix tokens only"] == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"classes": 0},
        {"classes": 0, "pre_logits": 8},
        {"pooling": "mean", "pool_norm": True},
        {"pooling": "mean", "pool_norm": True, "dense_head": True},
        {"pooling": "mean", "norm": "batch"},
        {"dense_head": True, "distillation": True, "branches": 2},
        {"mixer": "linear", "pooling": "mean", "norm": "none"},
        {"mixer": "linear", "pooling": "class_mlp", "norm": "none", "residual": "constant", "branches": 2},
        {"mixer": "talking_heads", "branches": 2, "residual": "affine"},
        {"pos_embed": "relative_bias", "pos_embed_place": "shared", "branches": 2, "class_token_at": 1},
        {"pos_embed": "sincos", "pos_embed_place": "shared"},
    ],
    ids=lambda changes: ",".join(f"{key}={value}" for key, value in changes.items()),
)
def test_corners(changes):
    original, found, _, _ = answers(SMALL.replace(**changes))
    assert difference(found, original) < 1e-11


def test_what_stays_is_said():
    _, _, folded, notes = answers(SMALL.replace(mixer="talking_heads", branches=2))
    mix = folded.backbone.blocks[0].mix
    assert isinstance(mix, FoldedResidual)
    assert [type(body) for body in mix.bodies] == [TalkingHeads, TalkingHeads]
    assert isinstance(mix.norm, torch.nn.LayerNorm)
    assert mix.norm.weight is None
    assert any(reason.startswith("talking heads") for reason in notes.left)


def test_batch_norms_of_stems_disappear():
    for stem in ("conv", "tower", "basic", "hmlp"):
        a = SMALL.replace(stem=stem, patch_size=16, image_size=(32, 32), stem_width=8, stem_layers=(1, 2))
        original, found, folded, _ = answers(a)
        assert difference(found, original) < 1e-11
        assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in folded.modules())
