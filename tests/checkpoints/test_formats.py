"""Every family through every format: what comes back is bit-equal, and what does not fit is named."""

import pytest
import torch

import vitrail
from tests.models.test_every_model import randomize
from tests.small import structures
from vitrail.checkpoints.codecs import UnsupportedByFormat
from vitrail.checkpoints.model_io import FORMATS
from vitrail.models.registry import build, lookup

SUFFIX = {"vitrail": ".safetensors", "deit": ".pth", "timm": ".safetensors", "torchvision": ".pth", "hf": "", "npz": ".npz"}


def little(name, **changes):
    """A family's member small enough to be written in a moment, with the widths that its heads are inferred from."""
    plain, architecture = lookup(name)
    sizes = {"depth": min(architecture.depth, 2), "classes": 7, "image_size": 2 * architecture.patch_size}
    if architecture.convnet:
        sizes |= {field: getattr(structures()[name], field) for field in ("convnet", "width")} if name in structures() else {}
    elif architecture.width > 256 and architecture.stem != "resnet_features":
        sizes |= {"width": 192, "heads": 3 if architecture.heads > 1 else 1}
        sizes |= {"pooling_heads": 3} if architecture.pooling_heads > 1 else {}
    if architecture.stem.startswith("resnet"):
        sizes |= {"stem_width": 32, "stem_layers": (1,) * len(architecture.stem_layers)}
    if architecture.stem == "resnet_features":
        sizes |= {"width": 1024}
    return randomize(build(architecture.replace(**(sizes | changes)), plain)).eval()


# family -> the formats that hold it
HOLDS = {
    "vit_base_patch16": {"vitrail", "hf", "npz"},
    "vit_base_r50_s16": {"vitrail", "npz"},
    "vit_tiny_r_s16_p8": {"vitrail", "npz"},
    "deit_base_patch16": {"vitrail", "deit", "timm", "hf"},
    "deit_base_distilled_patch16": {"vitrail", "deit", "timm", "hf"},
    "cait_xxs24": {"vitrail", "deit", "timm"},
    "resmlp_s12": {"vitrail", "deit", "timm"},
    "patchconvnet_s60": {"vitrail", "deit"},
    "patchconvnet_s60_multi": {"vitrail", "deit"},
    "deit3_base_patch16": {"vitrail", "deit", "timm"},
    "deit3_huge_patch14_26x2": {"vitrail", "deit", "timm"},
    "vit_small_patch16_12x1": {"vitrail", "deit", "timm"},
    "vit_small_patch16_18x2_ls": {"vitrail", "deit", "timm"},
    "vit_small_patch16_9x4": {"vitrail", "timm"},
    "vit_small_patch16_12x1_hmlp": {"vitrail", "deit"},
    "vit_small_patch16_12x1_hmlp_ln": {"vitrail", "deit"},
    "lvvit_t": {"vitrail", "deit"},
    "axial_vit_base_patch16": {"vitrail"},
    "bit_r50x1": {"vitrail"},
    "resnet18": {"vitrail", "timm", "torchvision"},
    "resnext50d_32x4d": {"vitrail", "timm"},
    "resnet50_cifar": {"vitrail", "timm", "torchvision"},
    "regnety_040": {"vitrail", "timm", "torchvision"},
    "resmlp_s12_class_mlp": {"vitrail"},
    "vit_base_patch16_12x1_local": {"vitrail"},
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", HOLDS)
def test_round_trip_or_refusal(name, format, tmp_path):
    changes = {"layerscale_init": 1.0} if name == "lvvit_t" else {}
    model = little(name, **changes)
    path = tmp_path / f"weights{SUFFIX[format]}"
    if format not in HOLDS[name]:
        with pytest.raises(UnsupportedByFormat, match=r"cannot represent .*[a-z_]+=|cannot be written in the"):
            vitrail.save(model, path, format)
        assert not path.exists()
        return
    vitrail.save(model, path, format)
    back = vitrail.load(path)
    same = {"pos_embed_resample": model.architecture.pos_embed_resample}
    same |= (
        {"image_size": model.architecture.image_size} if model.architecture.pos_embed == "none" else {}
    )  # a file without positions has no size
    assert not model.architecture.differences(back.architecture.replace(**same))
    ours, theirs = model.state_dict(), back.state_dict()
    assert list(ours) == list(theirs)
    for key in ours:
        assert torch.equal(ours[key], theirs[key]), key
    image = torch.randn(2, 3, *model.architecture.image_size)
    assert torch.equal(model(image), back(image))


@pytest.mark.parametrize("name", ["vit_base_r50_s16", "vit_tiny_r_s16_p8"])
def test_timm_hybrids_hold_a_model_with_erf_gelu(name, tmp_path):
    model = little(name, activation="gelu", stem_eps=1e-5)
    back = vitrail.load(vitrail.save(model, tmp_path / "hybrid.safetensors", "timm"))
    image = torch.randn(2, 3, *model.architecture.image_size)
    assert torch.equal(model(image), back(image))


def test_refusal_names_the_part_and_approximate_writes_numerics(tmp_path):
    model = little("vit_base_patch16")
    with pytest.raises(UnsupportedByFormat, match=r"activation=gelu_tanh .*approximate"):
        vitrail.save(model, tmp_path / "google.pth", "deit")
    vitrail.save(model, tmp_path / "google.pth", "deit", approximate=True)
    image = torch.randn(2, 3, 32, 32)
    back = vitrail.load(tmp_path / "google.pth")(image)
    assert not torch.equal(model(image), back)
    torch.testing.assert_close(model(image), back, rtol=0.05, atol=0.05)
    odd = little("deit_base_patch16", heads=6)
    with pytest.raises(UnsupportedByFormat, match="heads=6"):
        vitrail.save(odd, tmp_path / "odd.pth", "deit", approximate=True)
    with pytest.raises(
        UnsupportedByFormat, match=r"^This model cannot be written in the timm format: .* model with stem=hmlp\.$"
    ):
        vitrail.save(little("vit_tiny_patch16_12x1_hmlp"), tmp_path / "odd.pth", "timm")
    with pytest.raises(UnsupportedByFormat, match=r"mixer=talking_heads|pooling=class_attention"):
        vitrail.save(little("cait_xxs24"), tmp_path / "folder", "hf")


@pytest.mark.parametrize("name", structures())
def test_the_artifact_holds_every_structure(name, tmp_path):
    model = randomize(build(structures()[name], name)).eval()
    model.class_names = ["a", "b", "c", "d", "é"]
    model.notes["metric"] = "top-1 0.5"
    back = vitrail.load(vitrail.save(model, tmp_path / "model.safetensors"))
    assert (back.architecture, back.name, back.class_names) == (model.architecture, name, model.class_names)
    assert (back.preprocessing, back.notes) == (model.preprocessing, model.notes)
    image = torch.randn(2, 3, *model.architecture.image_size)
    assert torch.equal(model(image), back(image))


def test_rectangular_models_need_their_size_where_the_file_has_none(tmp_path):
    model = little("deit_base_patch16", image_size=(32, 80))
    path = vitrail.save(model, tmp_path / "wide.pth", "deit")
    with pytest.raises(vitrail.UserError, match="image_size"):
        vitrail.load(path)
    with pytest.raises(vitrail.UserError, match="does not match an image size"):
        vitrail.load(path, image_size=(64, 64))
    image = torch.randn(2, 3, 32, 80)
    assert torch.equal(vitrail.load(path, image_size=(32, 80))(image), model(image))
    folder = vitrail.save(model, tmp_path / "folder", "hf")
    with pytest.raises(vitrail.UserError, match="heads"):
        vitrail.load(path, image_size=(32, 80), heads=5)
    odd = little("deit_base_patch16", heads=6, image_size=(32, 80))
    folder = vitrail.save(odd, tmp_path / "folder", "hf")  # config.json keeps the heads and the size
    assert torch.equal(vitrail.load(folder)(image), odd(image))


def test_preprocessing_and_names_travel_with_a_folder(tmp_path):
    model = little("deit_base_distilled_patch16", classes=3)
    model.class_names = ["cat", "dog", "fish"]
    back = vitrail.load(vitrail.save(model, tmp_path / "folder", "hf"))
    assert back.class_names == ["cat", "dog", "fish"]
    assert back.preprocessing.resize == "shorter"
    assert back.preprocessing.crop_ratio == pytest.approx(0.875, abs=0.02)
    assert back.preprocessing.mean == model.preprocessing.mean


@pytest.mark.parametrize("wrapping", ["bare", "model", "state_dict", "module", "ddp", "compiled", "training"])
def test_wrapped_checkpoints(wrapping, tmp_path):
    import argparse

    model = little("deit3_base_patch16")
    path = tmp_path / "weights.pth"
    vitrail.save(model, path, "deit")
    state = torch.load(path)["model"]
    averaged = {key: value + 1 if value.is_floating_point() else value for key, value in state.items()}
    content = {
        "bare": state,
        "model": {"model": state},
        "state_dict": {"state_dict": state, "state_dict_ema": averaged, "epoch": 3},
        "module": {"module": state},
        "ddp": {"model": {f"module.{key}": value for key, value in state.items()}},
        "compiled": {f"_orig_mod.{key}": value for key, value in state.items()},
        "training": {
            "model": state,
            "model_ema": averaged,
            "epoch": 2,
            "args": argparse.Namespace(lr=0.1),
            "optimizer": {"state": {}},
        },
    }[wrapping]
    torch.save(content, path)
    assert torch.equal(vitrail.load(path).norm.weight, model.norm.weight)
    if wrapping in ("training", "state_dict"):
        assert torch.equal(vitrail.load(path, ema=True).norm.weight, model.norm.weight + 1)
    else:
        with pytest.raises(vitrail.UserError, match="EMA"):
            vitrail.load(path, ema=True)


def test_half_precision_files_are_read_as_float32(tmp_path):
    model = little("deit_base_patch16")
    path = tmp_path / "half.pth"
    vitrail.save(model, path, "deit")
    state = {key: value.half() for key, value in torch.load(path)["model"].items()}
    torch.save(state, path)
    back = vitrail.load(path)
    assert {parameter.dtype for parameter in back.parameters()} == {torch.float32}
    assert all(parameter.requires_grad for parameter in back.parameters())
