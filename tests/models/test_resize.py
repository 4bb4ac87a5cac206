"""Any size: resizing resamples every table, keeps what it must keep, and does nothing when nothing changes."""

import pytest
import scipy.ndimage
import torch
from torch.nn import functional as F

import vitrail
from tests.models.test_every_model import randomize
from tests.small import structures
from vitrail.errors import UserError
from vitrail.layers.pos_embed import resample, resize_patch_kernel
from vitrail.models.config import Architecture
from vitrail.models.registry import build

TINY = Architecture(width=32, depth=2, heads=2, classes=5, image_size=(32, 48))


@pytest.mark.parametrize("name", structures())
def test_resizing_to_the_same_size_changes_no_bit(name):
    model = randomize(build(structures()[name]))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.resize(*model.architecture.image_size)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", structures())
def test_resized_models_run_save_their_size_and_train(name):
    model = randomize(build(structures()[name])).eval()
    step = model.architecture.patch_size
    height, width = model.architecture.image_size
    trainable = [parameter.requires_grad for parameter in model.parameters()]
    model.resize(height + 2 * step, width - step)
    assert model.architecture.image_size == model.preprocessing.image_size == (height + 2 * step, width - step)
    assert model(torch.randn(1, 3, height + 2 * step, width - step)).isfinite().all()
    assert [parameter.requires_grad for parameter in model.parameters()] == trainable


@pytest.mark.parametrize("pos_embed", ["learned", "learned2d", "relative_bias", "sincos"])
def test_another_size_on_the_fly_equals_a_resized_model(pos_embed):
    place = "shared" if pos_embed == "relative_bias" else "stem"
    model = randomize(build(TINY.replace(pos_embed=pos_embed, pos_embed_place=place))).eval()
    image = torch.randn(2, 3, 64, 16)
    on_the_fly = model(image)
    torch.testing.assert_close(model.resize(64, 16)(image), on_the_fly)


def test_special_rows_are_kept():
    model = randomize(build(TINY.replace(distillation=True)))
    rows = model.pos_embed[0].table[:2].clone()
    model.resize(96, 16)
    assert torch.equal(model.pos_embed[0].table[:2], rows)
    assert model.pos_embed[0].table.shape == (2 + 6, 32)


def test_bicubic_is_the_half_pixel_rule_and_aligned_is_a_corner_aligned_zoom():
    table = torch.randn(14 * 14, 8)
    image = table.T.reshape(1, 8, 14, 14)
    half_pixel = F.interpolate(image, (24, 24), mode="bicubic", align_corners=False).flatten(2)[0].T
    torch.testing.assert_close(resample(table, (14, 14), (24, 24), "bicubic"), half_pixel)
    zoomed = scipy.ndimage.zoom(table.reshape(14, 14, 8).numpy(), (24 / 14, 24 / 14, 1), order=1)
    expected = torch.from_numpy(zoomed).flatten(0, 1)
    torch.testing.assert_close(resample(table, (14, 14), (24, 24), "aligned"), expected, rtol=1e-4, atol=1e-5)


def test_bicubic_keeps_more_of_the_norm_than_bilinear():
    """DeiT's reason for bicubic: for random embeddings, 14 -> 24, the norm falls to 0.871 against 0.693."""
    table = torch.randn(14 * 14, 20000)
    for method, share in (("bicubic", 0.871), ("bilinear", 0.693)):
        resized = resample(table, (14, 14), (24, 24), method)
        assert (resized.square().mean() / table.square().mean()).sqrt() == pytest.approx(share, abs=0.01)


def test_patch_maps_keep_constant_images():
    """ResMLP's map on another grid: a constant over the patches gives the same constant as before."""
    model = randomize(build(TINY.replace(mixer="linear", pooling="mean", pos_embed="none")))
    body = model.block(0).mix.branches[0].body
    body.map.weight.data = torch.rand(6, 1).expand(6, 6).clone()
    body.map.bias.data.zero_()
    before = body.map(torch.ones(1, 6, 1)).mean()
    model.resize(64, 96)
    after = body.map(torch.ones(1, 24, 1))
    assert body.map.weight.shape == (24, 24)
    torch.testing.assert_close(after.mean(), before, rtol=0.05, atol=0.05)


def test_a_fixed_grid_says_what_to_do():
    model = build(TINY.replace(mixer="linear", pooling="mean"))
    with pytest.raises(UserError, match=r"grid of 2 x 3; call resize\(64, 64\)"):
        model(torch.randn(1, 3, 64, 64))


def test_a_larger_patch_gives_the_same_tokens_on_a_larger_image():
    """The pseudo-inverse resize: enlarging image and patch together changes nothing in the stem."""
    model = randomize(build(TINY.replace(patch_size=8)))
    image = torch.randn(2, 3, 32, 48)
    tokens = model.embed(image)[0]
    patches = F.unfold(image, 8, stride=8).transpose(1, 2).reshape(-1, 3, 8, 8)
    larger = F.interpolate(patches, (12, 12), mode="bilinear").reshape(2, 4, 6, 3, 12, 12)
    larger = larger.permute(0, 3, 1, 4, 2, 5).reshape(2, 3, 48, 72)
    model.resize(48, 72, patch_size=12)
    assert model.architecture.patch_size == 12
    named = vitrail.create("deit_tiny_patch16", 3, (32, 32), depth=1, device="meta")
    assert named.resize(32, 32, patch_size=8).name == "deit_tiny_patch16 with depth=1, patch_size=8"
    assert named.resize(32, 32, patch_size=4).name == "deit_tiny_patch16 with depth=1, patch_size=4"
    torch.testing.assert_close(model.embed(larger)[0], tokens, rtol=1e-3, atol=1e-3)
    kernel = torch.randn(4, 3, 16, 16)
    assert torch.equal(resize_patch_kernel(kernel, 16), kernel)


def test_only_linear_patches_change_size():
    with pytest.raises(UserError, match="fixed patch size"):
        build(TINY.replace(stem="hmlp")).resize(64, 64, patch_size=8)
    with pytest.raises(UserError, match="smaller than one patch"):
        build(TINY).resize(8, 64)
