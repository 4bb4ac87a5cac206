"""Teachers from files, folders, names and modules, and error messages."""

import json
import os
import pickle
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import vitrail
from tests.convnets import small_resnet, timm_state
from tests.small import structures
from tests.teachers.test_teacher import HALF, TimmLike
from vitrail.models.preprocessing import Preprocessing
from vitrail.models.registry import build
from vitrail.teachers import open_teacher

SMALL = small_resnet()


def little(name="deit_tiny_patch16"):
    model = build(structures()[name], name=name).eval()
    model.class_names = [f"thing {index}" for index in range(5)]
    model.preprocessing = model.preprocessing._replace(mean=(0.1, 0.2, 0.3))
    return model


def plain():
    return nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)).eval()


@pytest.mark.parametrize("folder", [False, True])
def test_a_vitrail_artifact_or_the_folder_of_its_run(folder, tmp_path):
    model = little()
    vitrail.save(model, tmp_path / "best.safetensors")
    teacher = open_teacher(str(tmp_path if folder else tmp_path / "best.safetensors"), device="cpu")
    images = torch.randn(2, 3, *model.architecture.image_size)
    with torch.no_grad():
        torch.testing.assert_close(teacher(images), model(images))
    assert (teacher.classes, teacher.class_names, teacher.preprocessing) == (5, model.class_names, model.preprocessing)
    assert teacher.name == "deit_tiny_patch16"


def test_a_released_vision_transformer(tmp_path):
    model = build(structures()["deit_tiny_patch16"].replace(width=192, heads=3, image_size=(16, 16), patch_size=4)).eval()
    vitrail.save(model, tmp_path / "deit.pth", "deit")
    teacher = open_teacher(tmp_path / "deit.pth", classes=list("abcde"))
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(teacher(images), model(images))
    assert teacher.class_names == list("abcde")


def test_a_module_with_its_preprocessing():
    module = plain()
    teacher = open_teacher(module, preprocessing=HALF)
    images = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(teacher(images), module(images).detach())
    assert (teacher.classes, teacher.class_names, teacher.preprocessing) == (4, None, HALF)
    for ask in (teacher.dense, teacher.features):
        with pytest.raises(vitrail.UserError, match="use a convnet or a Vitrail model"):
            ask(images)


def test_a_module_of_transformers():
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=7)
    module = transformers.ResNetForImageClassification(config)
    teacher = open_teacher(module, preprocessing=HALF)
    assert teacher.classes == 7
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(teacher(images), module.eval()(images).logits)


def test_preprocessing_in_other_units():
    given = {"image_size": 8, "mean": [104, 117, 124], "std": [1, 2, 4], "order": "bgr", "range": 255}
    teacher = open_teacher(plain(), preprocessing=given, classes=4)
    assert teacher.preprocessing.image_size == (8, 8)
    pixels = torch.randint(0, 256, (2, 3, 8, 8)).float()
    expected = (pixels.flip(1) - torch.tensor([104.0, 117, 124])[:, None, None]) / torch.tensor([1.0, 2, 4])[:, None, None]
    torch.testing.assert_close(teacher.adapt(pixels / 255, (0, 0, 0), (1, 1, 1)), expected, rtol=1e-4, atol=1e-3)


def test_other_settings_are_kept(tmp_path):
    torch.save(timm_state(SMALL), tmp_path / "it.pth")
    teacher = open_teacher(tmp_path / "it.pth", preprocessing={"crop_ratio": 0.95}, size=48)
    assert teacher.preprocessing == Preprocessing(crop_ratio=0.95, interpolation="bilinear")
    assert teacher.adapt(torch.zeros(1, 3, 64, 64)).shape == (1, 3, 48, 48)


KERAS = small_resnet((1, 1, 1, 1), bottleneck=True)


def test_settings_of_a_kind_are_kept(tmp_path):
    """The order is BGR unless the preprocessing contains another one."""
    torch.save(timm_state(KERAS), tmp_path / "it.pth")

    def opened(**prepared):
        return open_teacher(tmp_path / "it.pth", kind="resnet_keras", preprocessing=prepared or None)

    plain = opened()
    assert plain.channel_order == "bgr"
    for some in ({"crop_ratio": 1.0}, {"image_size": 64}, {"resize": "square"}):
        teacher = opened(**some)
        assert (teacher.channel_order, teacher.preprocessing.mean) == ("bgr", plain.preprocessing.mean)
    assert open_teacher(tmp_path / "it.pth", kind="resnet_keras", preprocessing=HALF).channel_order == "bgr"
    turned = opened(order="rgb")
    assert (turned.channel_order, turned.preprocessing) == ("rgb", plain.preprocessing)
    own = opened(mean=[103.939, 116.779, 123.68], range=255)  # in the network's own order
    assert own.channel_order == "bgr"
    assert own.preprocessing.mean == pytest.approx(plain.preprocessing.mean)
    with pytest.raises(vitrail.UserError, match='"range": 255'):
        opened(mean=[103.939, 116.779, 123.68])


def test_statistics_that_contradict_the_preprocessing(tmp_path):
    """The batch norm of a network trained on values up to 255."""
    network = build(KERAS)
    images = torch.rand(16, 3, 64, 64)
    outside = torch.rand(16, 3, 1, 1).expand(-1, -1, 64, 64)
    for scale, usual in ((4.5, True), (255.0, False)):  # as of deviation 0.225, and as they are
        network.train()
        network.stem.root.norm1.momentum = None
        network.stem.root.norm1.reset_running_stats()
        with torch.no_grad():
            network.features((0.2 * images + 0.8 * outside - 0.45) * scale)
        torch.save(timm_state(network), tmp_path / "it.pth")
        if usual:
            assert open_teacher(tmp_path / "it.pth").channel_order == "rgb"
            continue
        with pytest.raises(vitrail.UserError, match=r"other values .* \(resnet_keras\) .* in .*it\.pth\.teacher\.json\.$"):
            open_teacher(tmp_path / "it.pth")
        for said in ({"kind": "resnet_keras"}, {"kind": "checkpoint"}, {"preprocessing": {"std": [1, 1, 1], "range": 255}}):
            assert open_teacher(tmp_path / "it.pth", **said).classes == 4


def test_sidecar_of_a_file(tmp_path):
    torch.save(timm_state(KERAS), tmp_path / "it.pth")
    (tmp_path / "names.txt").write_text("a\nb\nc\nd\n")
    said = {"kind": "resnet_keras", "classes": "names.txt", "preprocessing": {"crop_ratio": 1.0}, "size": [40, 48]}
    (tmp_path / "it.pth.teacher.json").write_text(json.dumps(said))
    teacher = open_teacher(tmp_path / "it.pth")
    assert (teacher.channel_order, teacher.class_names, teacher.size) == ("bgr", list("abcd"), (40, 48))
    assert teacher.network.model.architecture.convnet.stride_in_1x1
    assert teacher.preprocessing.crop_ratio == 1.0
    other = open_teacher(tmp_path / "it.pth", classes=list("wxyz"), preprocessing={"image_size": 64}, kind="checkpoint", size=32)
    assert (other.channel_order, other.class_names, other.size) == ("rgb", list("wxyz"), (32, 32))
    assert other.preprocessing[:2] == ((64, 64), 1.0)  # arguments go first, and what they do not say stays
    (tmp_path / "it.pth.teacher.json").write_text('{"classes": ["k", "l", "m", "n"], "size": null}')
    assert open_teacher(tmp_path / "it.pth").class_names == list("klmn")


def test_name_too_long_for_a_sidecar(tmp_path):
    torch.save(timm_state(KERAS), tmp_path / ("n" * 250))
    assert open_teacher(tmp_path / ("n" * 250)).classes == 4


def test_sidecar_of_a_folder(tmp_path):
    vitrail.save(little(), tmp_path / "best.safetensors")
    (tmp_path / "teacher.json").write_text('{"size": 32, "classes": ["a", "b", "c", "d", "e"]}')
    teacher = open_teacher(tmp_path)
    assert (teacher.class_names, teacher.size) == (list("abcde"), (32, 32))
    assert open_teacher(tmp_path / "best.safetensors").size is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "not a JSON object"),
        ('{"knd": "onnx"}', "the unknown entry 'knd'; did you mean kind"),
        ('{"kind": "robot"}', "Unknown kind of teacher 'robot'"),
        ('{"classes": "none.txt"}', "There is no file .*none.txt"),
        ('{"classes": "../none.txt"}', "a file in the same folder"),
        ('{"classes": true}', "classes must be a list of names"),
        ('{"classes": [1, 2, 3, 4]}', "classes must be a list of names"),
        ('{"classes": 5}', "has 4 classes, but 5 were given"),
        ('{"size": [1, 2, 3]}', "size must be a number of pixels"),
        ('{"size": 1.5}', "size must be a number of pixels"),
        ('{"preprocessing": "plain"}', "a Preprocessing or a dictionary"),
    ],
)
def test_invalid_sidecar_files(text, says, tmp_path):
    torch.save(timm_state(KERAS), tmp_path / "it.pth")
    (tmp_path / "it.pth.teacher.json").write_text(text)
    with pytest.raises(vitrail.UserError, match=says) as caught:
        open_teacher(tmp_path / "it.pth")
    assert "\n" not in str(caught.value)


class Refusing(nn.Module):
    def forward(self, images):
        raise ValueError("no images, please\nreally")


@pytest.mark.parametrize(
    ("what", "options", "says"),
    [
        ("nowhere.pth", {}, "no file nowhere.pth"),
        (plain(), {}, "A module needs its preprocessing"),
        (plain(), {"preprocessing": HALF, "classes": list("abc")}, "has 4 classes, but 3 were given"),
        (plain(), {"preprocessing": HALF, "classes": 5}, "has 4 classes, but 5"),
        (plain(), {"preprocessing": HALF, "kind": "densenet"}, "Unknown kind of teacher 'densenet'"),
        (plain(), {"preprocessing": "imagenet"}, "a Preprocessing or a dictionary"),
        (plain(), {"preprocessing": {"men": [0.5]}}, "did you mean mean"),
        (plain(), {"preprocessing": {"mean": [0.5]}}, "one value per channel"),
        (plain(), {"preprocessing": {"std": [0.5, 0, 0.5]}}, "above 0"),
        (plain(), {"preprocessing": {"mean": "grey"}}, "one value per channel"),
        (plain(), {"preprocessing": {"order": "grb"}}, "rgb or bgr"),
        (plain(), {"preprocessing": {"range": 0, "mean": [1, 2, 3]}}, "range"),
        (plain(), {"preprocessing": HALF, "device": "abacus"}, "abacus"),
        (nn.Conv2d(3, 4, 3), {"preprocessing": HALF}, r"not logits \[2, classes\]"),
        (Refusing(), {"preprocessing": HALF}, r"fails on images of shape .* \(no images, please\)"),
        ("timm:resnet50@nowhere.pth", {}, "no file nowhere.pth|needs timm"),
    ],
)
def test_invalid_teachers(what, options, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(vitrail.UserError, match=says) as caught:
        open_teacher(what, **options)
    assert "\n" not in str(caught.value)


def test_an_unknown_network_in_a_file(tmp_path):
    torch.save({"stem.conv1.gain": torch.zeros(3)}, tmp_path / "nfnet.pth")
    with pytest.raises(vitrail.UserError, match=r"first tensor is 'stem.conv1.gain'.*timm:NAME@"):
        open_teacher(tmp_path / "nfnet.pth")
    (tmp_path / "text.pth").write_text("not a checkpoint at all")
    with pytest.raises(vitrail.UserError, match="is not a safetensors"):
        open_teacher(tmp_path / "text.pth")


def test_a_model_without_a_classifier():
    with pytest.raises(vitrail.UserError, match="no classifier"):
        open_teacher(build(structures()["deit_tiny_patch16"].replace(classes=0)))


class Exploit:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_a_pickle_is_not_run(tmp_path):
    torch.save({"state_dict": Exploit(tmp_path / "ran")}, tmp_path / "it.pth")
    with pytest.raises(vitrail.UserError, match="run code"):
        open_teacher(tmp_path / "it.pth")
    assert not (tmp_path / "ran").exists()


def fake_timm(monkeypatch, make):
    timm, data = types.ModuleType("timm"), types.ModuleType("timm.data")
    timm.create_model = make
    data.resolve_data_config = lambda options, model: {
        "input_size": (3, 8, 12),
        "crop_pct": 0.9,
        "mean": (0.5, 0.5, 0.5),
        "std": (0.25, 0.25, 0.25),
        "interpolation": "bilinear",
    }
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setitem(sys.modules, "timm.data", data)


def test_timm_by_name_with_the_weights_of_a_file(tmp_path, monkeypatch):
    requested = []
    fake_timm(monkeypatch, lambda name, **options: requested.append((name, options)) or TimmLike("first"))
    module = TimmLike("first")
    torch.save({"state_dict": module.state_dict()}, tmp_path / "it.pth")
    teacher = open_teacher(f"timm:dm_nfnet_f6@{tmp_path / 'it.pth'}", classes=list("abcd"))
    assert requested == [("dm_nfnet_f6", {"pretrained": False, "num_classes": 4})]
    images = torch.randn(2, 3, 8, 12)
    torch.testing.assert_close(teacher(images), module(images).detach())
    assert teacher.preprocessing == Preprocessing((8, 12), 0.9, "shorter", "bilinear", (0.5,) * 3, (0.25,) * 3)
    with pytest.raises(vitrail.UserError, match="4 classes, but 3"):
        open_teacher("timm:dm_nfnet_f6", classes=3)
    assert requested[-1] == ("dm_nfnet_f6", {"pretrained": True})
    torch.save({**module.state_dict(), "fc.bias": torch.zeros(9)}, tmp_path / "it.pth")
    with pytest.raises(vitrail.UserError, match=r"does not match timm's dm_nfnet_f6 \(size mismatch for fc.bias") as caught:
        open_teacher(f"timm:dm_nfnet_f6@{tmp_path / 'it.pth'}")
    assert "\n" not in str(caught.value)


def test_timm_that_fails(tmp_path, monkeypatch):
    def refuse(name, **options):
        raise RuntimeError(f"Unknown model ({name})\nmore")

    fake_timm(monkeypatch, refuse)
    with pytest.raises(vitrail.UserError, match=r"cannot create resnet999 \(Unknown model \(resnet999\)\)"):
        open_teacher("timm:resnet999")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(vitrail.UserError, match="needs timm"):
        open_teacher("timm:resnest50d")


@pytest.mark.timm
@pytest.mark.parametrize(
    "name", ["resnet18", "regnety_002", "nfnet_l0", "convnext_atto", "swin_tiny_patch4_window7_224", "vit_tiny_patch16_224"]
)
def test_timms_own_models(name, tmp_path):
    timm = pytest.importorskip("timm")
    module = timm.create_model(name, num_classes=7).eval()
    torch.save(module.state_dict(), tmp_path / "it.pth")
    teacher = open_teacher(f"timm:{name}@{tmp_path / 'it.pth'}", classes=7)
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        expected = module(images)
    torch.testing.assert_close(teacher(images), expected, rtol=1e-4, atol=1e-4)
    dense = teacher.dense(images)
    assert dense.shape[:2] == (2, 7)
    assert teacher.features(images).shape[0] == 2
    if name in ("resnet18", "regnety_002"):
        torch.testing.assert_close(dense.mean((2, 3)), expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(open_teacher(tmp_path / "it.pth").dense(images), dense, rtol=1e-3, atol=1e-4)


def test_onnxruntime_is_imported_only_when_used(tmp_path, monkeypatch):
    (tmp_path / "it.onnx").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(vitrail.UserError, match="pip install onnx onnxruntime"):
        open_teacher(tmp_path / "it.onnx", preprocessing=HALF)


@pytest.mark.parametrize("shape", [["batch", 3, "height", "width"], [2, 3, 8, 8], ["batch", 3, 8, 8]])
def test_an_onnx_file(shape, tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    weight = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    helper = onnx.helper
    graph = helper.make_graph(
        [
            helper.make_node("GlobalAveragePool", ["images"], ["pooled"]),
            helper.make_node("Flatten", ["pooled"], ["flat"]),
            helper.make_node("MatMul", ["flat", "weight"], ["logits"]),
        ],
        "teacher",
        [helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, [shape[0], 4])],
        [onnx.numpy_helper.from_array(weight, "weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "it.onnx")
    teacher = open_teacher(tmp_path / "it.onnx", preprocessing=HALF, classes=list("abcd"))
    assert teacher.size == ((8, 8) if shape[2] == 8 else None)
    images = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(teacher(images), images.mean((2, 3)) @ torch.from_numpy(weight), rtol=1e-4, atol=1e-5)
    (tmp_path / "bad.onnx").write_bytes(pickle.dumps(b"no graph"))
    with pytest.raises(vitrail.UserError, match="cannot be opened as an ONNX file"):
        open_teacher(tmp_path / "bad.onnx", preprocessing=HALF)


def test_networks_are_imported_only_when_used():
    """A training without a teacher imports the lookup, but none of the networks of other projects."""
    code = (
        "import sys, vitrail.teachers.lookup, vitrail.teachers.label_store\n"
        "unused = ('vitrail.models.convnets', 'vitrail.teachers.onnx', 'vitrail.teachers.torch_export', 'onnxruntime',\n"
        "          'vitrail.checkpoints.conversion', 'vitrail.checkpoints.formats')\n"
        "assert not [name for name in sys.modules if name.startswith(unused)]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
