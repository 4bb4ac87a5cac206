"""Initial weights: the distribution of every kind of parameter is that of the authors' code."""

import fnmatch
import math

import pytest
import torch

import vitrail

# Standard deviations measured on models built by the authors' code: the DeiT repository and TokenLabeling, width 384. Parameters
# that are not listed are constant: biases 0, norms 1. Standard deviation first, then the largest value where it is bounded.
DEIT = """
prefix                0.0200
pos_embed.0.table     0.0200
stem.proj.weight      0.0208  0.0361
stem.proj.bias        0.0208  0.0361
blocks.*.qkv.weight   0.0200
blocks.*.proj.weight  0.0200
blocks.*.fc?.weight   0.0200
head*.weight          0.0200
"""
CAIT = """
pooling.queries       0.0200
pos_embed.0.table     0.0200
stem.proj.weight      0.0208  0.0361
stem.proj.bias        0.0208  0.0361
blocks.*.qkv.weight   0.0200
blocks.*.proj.weight  0.0200
blocks.*.before.weight 0.0200
blocks.*.after.weight  0.0200
blocks.*.fc?.weight   0.0200
pooling.*.?.weight    0.0200
pooling.*.proj.weight 0.0200
pooling.*.fc?.weight  0.0200
head.weight           0.0200
"""
RESMLP = """
stem.proj.weight      0.0208  0.0361
stem.proj.bias        0.0208  0.0361
blocks.*.map.weight   0.0200
blocks.*.fc?.weight   0.0200
head.weight           0.0200
"""
HMLP = """
prefix                0.0200
pos_embed.0.table     0.0200
stem.layers.0.weight  0.0833  0.1443
stem.layers.0.bias    0.0833  0.1443
stem.layers.3.weight  0.0295  0.0510
stem.layers.3.bias    0.0295  0.0510
stem.layers.6.weight  0.0295  0.0510
stem.layers.6.bias    0.0295  0.0510
blocks.*.qkv.weight   0.0200
blocks.*.proj.weight  0.0200
blocks.*.fc?.weight   0.0200
head.weight           0.0200
"""
PATCHCONVNET = """
stem.layers.0.weight  0.1120  0.1925
stem.layers.3.weight  0.0278  0.0481
stem.layers.6.weight  0.0196  0.0340
stem.layers.9.weight  0.0139  0.0241
*.enter.weight        0.0295  0.0510
*.enter.bias          0.0295  0.0510
*.spatial.weight      0.1925  0.3333
*.spatial.bias        0.1925  0.3333
*.reduce.weight       0.0295  0.0510
*.reduce.bias         0.0295  0.0510
*.expand.weight       0.0589  0.1021
*.expand.bias         0.0589  0.1021
*.leave.weight        0.0295  0.0510
*.leave.bias          0.0295  0.0510
pooling.queries       0.0200
pooling.*.?.weight    0.0200
pooling.*.proj.weight 0.0200
pooling.*.fc?.weight  0.0200
head.weight           0.0200
"""
LVVIT = """
prefix                0.0200
pos_embed.0.table     0.0200
stem.convs.0.weight   0.0479  0.0825
stem.convs.?.weight   0.0240  0.0417
stem.proj.weight      0.0090  0.0156
stem.proj.bias        0.0090  0.0156
blocks.*.qkv.weight   0.0200
blocks.*.proj.weight  0.0200
blocks.*.fc?.weight   0.0200
head*.weight          0.0200
"""
# Google's code: LeCun normal (fan_in^-1/2, cut at 2 standard deviations of the uncut distribution) for the stem and the
# pre-logits, Xavier uniform for the other matrices, which for queries, keys and values are separate; MLP biases of 1e-6.
VIT = """
pos_embed.0.table     0.0200
stem.proj.weight      0.0361  0.0821
blocks.*.qkv.weight   0.0510  0.0884
blocks.*.proj.weight  0.0510  0.0884
blocks.*.fc?.weight   0.0323  0.0559
blocks.*.fc?.bias     1e-6
pre_logits.0.weight   0.0510  0.1161
"""
HYBRID = """
pos_embed.0.table     0.0200
stem.root.weight      0.0825  0.1876
*.0.conv1.weight      0.1250  0.2843
*.0.conv2.weight      0.0417  0.0948
*.0.conv3.weight      0.1250  0.2843
*.shortcut.0.weight   0.1250  0.2843
stem.proj.weight      0.0625  0.1422
blocks.*.qkv.weight   0.0510  0.0884
blocks.*.proj.weight  0.0510  0.0884
blocks.*.fc?.weight   0.0323  0.0559
blocks.*.fc?.bias     1e-6
"""
# BEiT's pre-training code, two blocks.
BEIT = """
prefix                   0.0108  0.0200
stem.proj.weight         0.0108  0.0200
blocks.*.qkv.weight      0.0108  0.0200
blocks.0.*.proj.weight   0.0076  0.0141
blocks.1.*.proj.weight   0.0054  0.0100
blocks.*.fc1.weight      0.0108  0.0200
blocks.0.*.fc2.weight    0.0076  0.0141
blocks.1.*.fc2.weight    0.0054  0.0100
head.weight              0.0108  0.0200
"""
SHARED_BIAS = {"pos_embed": "relative_bias", "pos_embed_place": "shared"}
MODELS = {
    "deit_small_patch16": (DEIT, {"depth": 1}),
    "deit_small_distilled_patch16": (DEIT, {"depth": 1}),
    "deit3_small_patch16": (DEIT, {"depth": 1}),
    "cait_s24": (CAIT, {"depth": 1}),
    "resmlp_s12": (RESMLP, {"depth": 1}),
    "vit_small_patch16_18x2_ls": (HMLP, {"depth": 1, "stem": "hmlp"}),
    "patchconvnet_s20": (PATCHCONVNET, {"depth": 2}),
    "patchconvnet_s20_multi": (PATCHCONVNET, {"depth": 2}),
    "lvvit_s": (LVVIT, {"depth": 1}),
    "vit_small_patch16": (VIT, {"depth": 1, "pre_logits": 384}),
    "vit_base_r50_s16": (HYBRID, {"depth": 1, "width": 384, "heads": 6, "stem_layers": (1,), "patch_size": 4}),
    "vit_small_patch16_12x1_ls": (BEIT, {"depth": 2, "weight_init": "beit", **SHARED_BIAS}),
}


@pytest.mark.parametrize("name", MODELS)
def test_initial_standard_deviations(name):
    text, changes = MODELS[name]
    rows = [line.split() for line in text.strip().splitlines()]
    torch.manual_seed(0)
    model = vitrail.create(name, **changes)
    used = set()
    for key, parameter in model.named_parameters():
        row = next((row for row in rows if fnmatch.fnmatch(key, row[0])), None)
        if row is None:
            assert parameter.unique().numel() == 1, key
            continue
        used.add(row[0])
        expected, found = float(row[1]), parameter.double().square().mean().sqrt().item()
        assert found == pytest.approx(expected, rel=0.004 + 3 / math.sqrt(parameter.numel())), key
        if len(row) > 2:
            assert parameter.abs().max() <= float(row[2]) * 1.005, key
    assert used == {row[0] for row in rows}


def test_lecun_normal_of_the_released_vit():
    """0.0361 for patches of 16 x 16 x 3, which a cut at +-2 instead of 2 standard deviations would make 0.0410."""
    torch.manual_seed(0)
    weight = vitrail.create("vit_base_patch16", depth=1).stem.proj.weight
    assert weight.std().item() == pytest.approx(768**-0.5, rel=2e-3)
    assert weight.abs().max().item() == pytest.approx(2 * 768**-0.5 / 0.87962566, rel=1e-3)


def test_separable_convolutions_keep_the_default():
    """The pointwise convolution of ResMLP's ablation is a linear layer here."""
    model = vitrail.create("resmlp_s12_conv3x3", depth=1)
    point = model.blocks[0].mix.branches[0].body.point
    assert point.weight.std().item() == pytest.approx(384**-0.5 / math.sqrt(3), rel=0.02)
    assert point.bias.abs().max() > 0
