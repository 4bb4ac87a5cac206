"""Parity with timm's own models, where timm is installed: their state dict gives their logits, and they read ours."""

import pytest
import torch

import vitrail

timm = pytest.importorskip("timm")
pytestmark = pytest.mark.timm

NAMES = [
    "vit_tiny_patch16_224",
    "vit_base_patch32_384",
    "vit_base_r50_s16_224",
    "vit_small_r26_s32_224",
    "vit_tiny_r_s16_p8_224",
    "vit_small_patch16_18x2_224",
    "deit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "deit3_small_patch16_224",
    "deit3_medium_patch16_224",
    "deit3_huge_patch14_224",
    "cait_xxs24_224",
    "cait_xxs36_384",
    "resmlp_12_224",
    "resmlp_big_24_224",
]


@pytest.mark.parametrize("name", NAMES)
def test_their_weights_give_their_logits(name, tmp_path):
    torch.manual_seed(0)
    theirs = timm.create_model(name).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, mean=0.02, std=0.05)
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    ours = vitrail.load(tmp_path / "weights.pth")
    size = theirs.default_cfg["input_size"][1:]
    image = torch.randn(2, 3, *size)
    with torch.inference_mode():
        expected, found = theirs(image), ours(image)
    assert (expected - found).abs().max() <= 1e-4 * expected.abs().max()
    assert ours.architecture.image_size == tuple(size)
    vitrail.save(ours, tmp_path / "back.safetensors", "timm")
    state = vitrail.checkpoints.readers.read(tmp_path / "back.safetensors").tensors
    theirs.load_state_dict(state)
    with torch.inference_mode():
        assert torch.equal(theirs(image), expected)


def test_their_averaged_vit(tmp_path):
    theirs = timm.create_model("vit_tiny_patch16_224", class_token=False, global_pool="avg", fc_norm=True).eval()
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    image = torch.randn(2, 3, 224, 224)
    with torch.inference_mode():
        torch.testing.assert_close(vitrail.load(tmp_path / "weights.pth")(image), theirs(image), rtol=1e-4, atol=1e-4)


CONVNETS = [
    *("resnet18", "resnet50", "resnet50d", "resnext50_32x4d", "resnext50d_32x4d", "wide_resnet50_2"),
    *("regnety_040", "regnety_080", "regnety_080_tv", "regnety_160"),
]
TORCHVISION = {
    "resnet18": "resnet18",
    "resnet50": "resnet50",
    "resnext50_32x4d": "resnext50_32x4d",
    "wide_resnet50_2": "wide_resnet50_2",
    "regnety_080_tv": "regnet_y_8gf",
    "regnety_160": "regnet_y_16gf",
}


def check_convnet(theirs, name, format, tmp_path):
    """In float64, with random weights and statistics: our logits are theirs, and what we write is their state dict."""
    torch.manual_seed(0)
    for key, value in theirs.state_dict().items():
        if key.endswith("running_var"):
            value.uniform_(0.5, 1.5)
        elif value.is_floating_point() and value.ndim == 1:
            value.uniform_(0.6, 1.2)
    theirs = theirs.eval()
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    ours = vitrail.load(tmp_path / "weights.pth")
    assert ours.name == name
    assert not ours.architecture.differences(vitrail.create(name, device="meta").architecture)
    image = torch.randn(2, 3, 130, 97, dtype=torch.float64)
    with torch.inference_mode():
        expected, found = theirs.double()(image), ours.double()(image)
    assert (expected - found).abs().max() <= 1e-10 * expected.abs().max()
    vitrail.save(ours.float(), tmp_path / "back.pth", format)
    back, before = torch.load(tmp_path / "back.pth"), torch.load(tmp_path / "weights.pth")
    assert back.keys() == before.keys()
    assert all(torch.equal(back[key], before[key]) for key in before)


@pytest.mark.parametrize("name", CONVNETS)
def test_convnets_of_timm(name, tmp_path):
    check_convnet(timm.create_model(name), name, "timm", tmp_path)


@pytest.mark.parametrize("name", TORCHVISION)
def test_convnets_of_torchvision(name, tmp_path):
    models = pytest.importorskip("torchvision.models")
    check_convnet(getattr(models, TORCHVISION[name])(), name, "torchvision", tmp_path)
