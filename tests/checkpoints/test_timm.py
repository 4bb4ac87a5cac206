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
