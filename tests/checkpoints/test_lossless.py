"""A file never becomes another model than its author meant, and nothing is lost without a word."""

import json
import stat

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor

import vitrail
from tests.checkpoints.test_formats import little
from tests.models.test_every_model import randomize
from vitrail.models.registry import build


@pytest.mark.parametrize("format", ["vitrail", "deit", "timm", "hf"])
def test_patches_of_14_outside_the_catalogue(format, tmp_path):
    """An architecture without a name loads like any other."""
    model = little("deit_base_patch16", patch_size=14, image_size=56)
    path = tmp_path / {"vitrail": "a.safetensors", "deit": "a.pth", "timm": "a.safetensors", "hf": "a"}[format]
    back = vitrail.load(vitrail.save(model, path, format))
    image = torch.randn(1, 3, 56, 56)
    assert torch.equal(model(image), back(image))


@pytest.mark.parametrize("size", [(80, 160), (32, 128)])
def test_a_rectangle_that_would_be_read_as_a_square_is_refused(size, tmp_path):
    model = little("deit3_base_patch16", image_size=size)
    with pytest.raises(vitrail.UserError, match=r"cannot represent .*image_size"):
        vitrail.save(model, tmp_path / "rectangle.pth", "deit")


def test_the_file_inside_a_folder_is_read_with_its_configuration(tmp_path):
    model = little("vit_base_patch16", heads=6)
    vitrail.save(model, tmp_path / "folder", "hf")
    image = torch.randn(1, 3, 32, 32)
    assert torch.equal(vitrail.load(tmp_path / "folder" / "model.safetensors")(image), model(image))


def test_a_classifier_beside_a_backbone_stays_and_a_projection_head_goes(tmp_path):
    model = little("deit_base_patch16")
    state = torch.load(vitrail.save(model, tmp_path / "a.pth", "deit"))["model"]
    wrapped = {key if key.startswith("head") else f"backbone.{key}": value for key, value in state.items()}
    torch.save(wrapped, tmp_path / "probe.pth")
    assert vitrail.load(tmp_path / "probe.pth").architecture.classes == 7
    dino = {key: value for key, value in wrapped.items() if not key.startswith("head")}
    dino |= {"head.mlp.0.weight": torch.zeros(3, 3), "head.last_layer.weight_v": torch.zeros(3, 3)}
    torch.save({"teacher": dino, "student": {f"module.{key}": value for key, value in dino.items()}}, tmp_path / "dino.pth")
    assert vitrail.load(tmp_path / "dino.pth").architecture.classes == 0


def test_a_written_folder_keeps_the_aspect_of_images(tmp_path):
    model = little("deit_base_patch16", image_size=64)
    vitrail.save(model, tmp_path, "hf")
    image = np.zeros((128, 256, 3), dtype=np.uint8)
    image[32:96, 96:160] = 255  # a square in the middle
    seen = AutoImageProcessor.from_pretrained(tmp_path)(Image.fromarray(image), return_tensors="pt")["pixel_values"][0, 0]
    bright = seen > seen.mean()
    assert abs(int(bright.any(1).sum()) - int(bright.any(0).sum())) <= 2
    assert vitrail.load(tmp_path).preprocessing == model.preprocessing


def test_overrides_of_an_artifact(tmp_path):
    path = vitrail.save(little("deit_base_patch16"), tmp_path / "a.safetensors")
    assert vitrail.load(path, drop_path=0.5).architecture.drop_path == 0.5
    with pytest.raises(vitrail.UserError, match="heads cannot be changed"):
        vitrail.load(path, heads=6)


def test_a_model_changed_by_hand_is_not_written(tmp_path):
    model = little("deit_base_patch16")
    vitrail.save(torch.compile(model), tmp_path / "compiled.safetensors")
    assert vitrail.load(tmp_path / "compiled.safetensors").architecture == model.architecture
    model.class_names = ["one"]
    with pytest.raises(vitrail.UserError, match="1 class names for 7"):
        vitrail.save(model, tmp_path / "names.safetensors")
    model.class_names = None
    model.head = torch.nn.Linear(192, 5)
    with pytest.raises(vitrail.UserError, match=r"head\.bias"):
        vitrail.save(model, tmp_path / "head.safetensors")


def test_tensors_that_are_not_what_they_seem(tmp_path):
    path = tmp_path / "a.pth"
    state = torch.load(vitrail.save(little("deit_base_patch16"), path, "deit"))["model"]
    for change, says in (
        ({"pos_embed": state["pos_embed"].repeat(2, 1, 1)}, "does not match"),
        ({"norm.bias": torch.zeros(1).expand(192)}, "larger than its data"),
        ({"norm.bias": torch.zeros(192, dtype=torch.int32)}, "int32"),
        ({"norm.bias": torch.zeros(192).to_sparse()}, "sparse"),
        ({"norm.bias": torch.zeros(192, dtype=torch.complex64)}, "complex"),
    ):
        torch.save(state | change, path)
        with pytest.raises(vitrail.UserError, match=says):
            vitrail.load(path)
    torch.save({"model_ema": state}, path)
    with pytest.raises(vitrail.UserError, match="--ema"):
        vitrail.load(path)


def test_an_archive_that_would_explode_is_not_opened(tmp_path):
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, **{"embedding/kernel": np.zeros((4000, 4000), dtype=np.float32)})
    with pytest.raises(vitrail.UserError, match="fifty times"):
        vitrail.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"id2label": 5},
        {"num_attention_heads": "3"},
        {"num_attention_heads": 3.0},
        {"layer_norm_eps": "1e-6"},
        {"image_size": 999},
        {"image_size": ["a", "b"]},
        {"hidden_act": "magic"},
    ],
)
def test_a_configuration_that_lies(change, tmp_path):
    vitrail.save(little("deit_base_patch16"), tmp_path, "hf")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(vitrail.UserError):
        vitrail.load(tmp_path)


def test_files_are_readable_by_others_and_links_are_written_through(tmp_path):
    model = little("deit_base_patch16")
    path = vitrail.save(model, tmp_path / "a.safetensors")
    assert stat.S_IMODE(path.stat().st_mode) & 0o044
    (tmp_path / "link.safetensors").symlink_to(path)
    vitrail.save(model, tmp_path / "link.safetensors")
    assert (tmp_path / "link.safetensors").is_symlink()


def test_headless_models_travel(tmp_path):
    for name, format in (("deit_base_distilled_patch16", "deit"), ("deit_base_distilled_patch16", "hf"), ("lvvit_t", "deit")):
        extra = {"layerscale_init": 1.0} if name == "lvvit_t" else {}
        model = little(name, classes=0, **extra)
        back = vitrail.load(vitrail.save(model, tmp_path / ("a.pth" if format == "deit" else "a"), format))
        image = torch.randn(1, 3, 32, 32)
        assert torch.equal(back(image), model(image))


def test_tracing_a_model_in_training_changes_nothing():
    model = randomize(build(little("vit_small_patch16_12x1_hmlp").architecture.replace(drop_path=0.5))).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.trace(torch.randn(2, 3, 32, 32))
    assert model.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
