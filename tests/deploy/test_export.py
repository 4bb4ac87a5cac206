"""Exported files run outside of the package with the same predictions, and say what they are."""

import json
import sys

import numpy as np
import pytest
import torch

import vitrail
from tests.deploy.exports import make_model, photographs
from tests.images import make_folder
from tests.small import structures
from vitrail.checkpoints.delta import make_delta, save_delta
from vitrail.checkpoints.export_metadata import ExportMetadata
from vitrail.errors import UserError
from vitrail.evaluation.model import open_model
from vitrail.evaluation.semantic_masks import predict_logits
from vitrail.heads.embedding import EmbeddingConfig
from vitrail.heads.task_heads import SegmentationConfig
from vitrail.models.preprocessing import pad_images

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
FAMILIES = {
    "attention": "deit_tiny_patch16",
    "distilled": "deit_tiny_distilled_patch16",
    "talking heads, class-attention": "cait_xxs24",
    "linear layers over patches": "resmlp_s12",
    "convolutions": "patchconvnet_s20",
    "hybrid": "vit_tiny_r_s16_p8",
    "convnet": "resnet50",
    "tower stem, dense head": "lvvit_t",
}


def open_session(path):
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda array: torch.from_numpy(session.run(None, {session.get_inputs()[0].name: array})[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_same_logits(family, tmp_path):
    name = next(each for each in structures() if each.startswith(FAMILIES[family]))
    model = make_model(name)
    dynamic = name != "resmlp_s12" and family in ("attention", "convnet")
    result = vitrail.export(model, tmp_path / "m.onnx", input="tensor", dynamic_size=dynamic)
    assert result.certificate.images == 32
    assert result.certificate.agreement == 1.0
    height, width = model.architecture.image_size
    step = model.architecture.patch_size
    run = open_session(tmp_path / "m.onnx")
    for size in [(height, width)] + [(height + step, width + 3 * step)] * dynamic:  # the second was never seen
        images = torch.randn(3, 3, *size)
        torch.testing.assert_close(run(images.numpy()), model(images), rtol=1e-4, atol=1e-4)


def test_images_of_any_size_and_batch(image_file):
    model, path, _ = image_file
    run = open_session(path)
    for photo in photographs():
        batch = np.stack([photo, photo[:, ::-1], photo[::-1]])
        expected = model(model.preprocessing.apply(*pad_images(list(batch))))
        torch.testing.assert_close(run(batch), expected, rtol=1e-4, atol=1e-4)


def test_the_file_says_what_it_is(image_file):
    model, path, result = image_file
    content = onnx.load(path)
    metadata = ExportMetadata.from_json(content.metadata_props[0].value, path)
    assert metadata == result.metadata
    assert metadata.preprocessing == model.preprocessing
    assert metadata.class_names == model.class_names
    assert set(metadata.certificate.versions) == {"vitrail", "torch", "onnx", "onnxruntime", "opset"}
    assert [each.version for each in content.opset_import] == [20]
    assert str(path.parent).encode() not in path.read_bytes()
    assert b"site-packages" not in path.read_bytes()  # stack traces of the exporter


def test_the_package_opens_it(image_file, tmp_path):
    model, path, _ = image_file
    opened = open_model(path)
    assert opened.class_names == model.class_names
    assert opened.preprocessing == model.preprocessing
    actual, expected = vitrail.predict(path, photographs()), model.predict(photographs())
    assert [each.name for each in actual] == [each.name for each in expected]
    for one, other in zip(actual, expected, strict=True):
        assert one.probability == pytest.approx(other.probability, abs=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"layout": 2},
        {"class_names": ["a"]},
        {"class_names": 3},
        {"decode_side": -1},
        {"preprocessing": {"image_size": [32, 48], "std": [0, 0, 0]}},
        {"task": "anything"},
        {"unknown": 1},
        [],
    ],
)
def test_damaged_metadata_is_rejected(change, image_file, tmp_path):
    content = onnx.load(image_file[1])
    entry = content.metadata_props[0]
    entry.value = json.dumps(json.loads(entry.value) | change) if isinstance(change, dict) else "[" * 100_000
    onnx.save(content, tmp_path / "m.onnx")
    with pytest.raises(UserError) as caught:
        open_model(tmp_path / "m.onnx")
    assert "\n" not in str(caught.value)


def test_int8_agrees_on_real_images(tmp_path):
    result = vitrail.export("vitrail_tiny", tmp_path / "m.onnx", input="tensor", precision="int8")
    assert result.bytes < 10e6  # 23 MB in float32
    assert result.certificate.agreement >= 0.9
    assert result.certificate.max_difference < 0.05 * result.certificate.largest


def test_fp16_has_half_the_size(image_file, tmp_path):
    model, _, full = image_file
    result = vitrail.export(model, tmp_path / "m.onnx", input="tensor", precision="fp16")
    assert result.bytes < 0.6 * full.bytes
    assert 0 < result.certificate.max_difference < 0.02 * result.certificate.largest


def test_segmentation_of_any_size(tmp_path):
    model = make_model("deit_tiny_patch16", image_size=(32, 48))
    config = SegmentationConfig(("ground", "cat", "dog"), (0, 1, 2), 32, kind="fcn", channels=8)
    model.set_task_head(config).eval()
    result = vitrail.export(model, tmp_path / "m.onnx", input="tensor", dynamic_size=True)
    assert result.metadata.class_names == ["ground", "cat", "dog"]
    assert result.certificate.agreement > 0.999
    images = torch.randn(2, 3, 64, 40)
    torch.testing.assert_close(
        open_session(tmp_path / "m.onnx")(images.numpy()), predict_logits(model, images), rtol=1e-4, atol=1e-4
    )
    with pytest.raises(UserError, match="was exported for segmentation"):
        open_model(tmp_path / "m.onnx")


@pytest.mark.parametrize("to", ["onnx", "torch-export"])
def test_upernet_of_any_size(to, tmp_path):
    """The cells of its pooled grids differ in length as those of the example do not."""
    model = make_model("deit_tiny_patch16", image_size=(96, 96))
    config = SegmentationConfig(("ground", "cat", "dog"), (0, 1, 2), 96, kind="upernet", channels=8, auxiliary=0)
    model.set_task_head(config).eval()
    with torch.no_grad():
        model.task_head.decoder.classifier.weight.mul_(100)  # which is initialized with small values
    path = tmp_path / ("m.onnx" if to == "onnx" else "m.pt2")
    vitrail.export(model, path, to=to, input="tensor", dynamic_size=True)
    run = (lambda x: open_session(path)(x.numpy())) if to == "onnx" else torch.export.load(path).module()
    for size in ((256, 320), (192, 64)):
        images = torch.randn(2, 3, *size)
        with torch.no_grad():
            torch.testing.assert_close(run(images), predict_logits(model, images), rtol=1e-4, atol=1e-3)


def test_command_with_a_delta_and_features(run_cli, tmp_path):
    make_folder(tmp_path / "photos", count=2)
    base = make_model("deit_tiny_patch16")
    vitrail.save(base, tmp_path / "base.safetensors")
    tuned = vitrail.load(tmp_path / "base.safetensors")
    with torch.no_grad():
        tuned.norm.bias.add_(1.0)
    save_delta(make_delta(base, tuned), tmp_path / "delta.safetensors")
    both = f"{tmp_path / 'base.safetensors'}+{tmp_path / 'delta.safetensors'}"
    options = ["--out", tmp_path / "m.onnx", "--input", "tensor", "--features", "--images", tmp_path / "photos"]
    done = run_cli("export", both, *options)
    assert done.returncode == 0
    assert "m.onnx" in done.stdout
    assert "on 6 images of photos" in done.stdout
    images = torch.randn(2, 3, *base.architecture.image_size)
    features = open_session(tmp_path / "m.onnx")(images.numpy())
    torch.testing.assert_close(features, tuned.features(images).pooled, rtol=1e-4, atol=1e-4)
    again = run_cli("export", both, *options)
    assert again.returncode == 2
    assert "exists: give another name, or --overwrite" in again.stderr


def test_features_of_a_model_with_a_projector_are_its_embeddings(tmp_path):
    model = make_model("deit_tiny_patch16", classes=0).set_task_head(EmbeddingConfig("mlp", 6, 10)).eval()
    result = vitrail.export(model, tmp_path / "m.onnx", input="tensor")
    assert result.metadata.task == "features"
    images = torch.randn(2, 3, *model.architecture.image_size)
    embedded = model.task_head(model.features(images).pooled)
    torch.testing.assert_close(open_session(tmp_path / "m.onnx")(images.numpy()), embedded, rtol=1e-4, atol=1e-4)


WRONG = {
    "unknown target": ({"to": "coreml"}, "--to coreml is not known: choose onnx, torch-export, aoti or web"),
    "unknown input": ({"input": "video"}, "--input video is not known"),
    "unknown precision": ({"precision": "int4"}, "--precision int4 is not known"),
    "suffix": ({"to": "torch-export"}, r"ends in \.pt2"),
    "size of an image": ({"dynamic_size": True}, "--dynamic-size needs --input tensor"),
    "int8 of a program": ({"to": "torch-export", "precision": "int8", "path": "m.pt2"}, "int8 is not available with --to torch"),
    "device": ({"device": "cuda"}, "has no device"),
    "no images": ({"images": "empty"}, "empty"),
    "no folder": ({"images": "missing"}, "missing does not exist"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    options, message = WRONG[case]
    options = dict(options)
    with pytest.raises(UserError, match=message) as caught:
        vitrail.export(make_model("deit_tiny_patch16"), options.pop("path", "m.onnx"), **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "m.onnx").exists()


def test_existing_files_and_models_of_one_size(tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"mine")
    with pytest.raises(UserError, match=r"m.onnx exists: give another name, or --overwrite"):
        vitrail.export(make_model("deit_tiny_patch16"), tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx").read_bytes() == b"mine"
    with pytest.raises(UserError, match="takes one image size only: remove --dynamic-size"):
        vitrail.export(make_model("resmlp_s12"), tmp_path / "r.onnx", input="tensor", dynamic_size=True)


def test_missing_packages(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UserError, match=r"needs onnxscript: pip install 'vitrail\[export\]'"):
        vitrail.export(make_model("deit_tiny_patch16"), tmp_path / "m.onnx")


def test_torch_export(tmp_path):
    model = make_model("deit_tiny_patch16")
    result = vitrail.export(model, tmp_path / "m.pt2", to="torch-export")
    extra = {"vitrail.json": ""}
    program = torch.export.load(tmp_path / "m.pt2", extra_files=extra).module()
    assert ExportMetadata.from_json(extra["vitrail.json"], "m.pt2") == result.metadata
    for photo in photographs():
        expected = model(model.preprocessing.apply(*pad_images([photo])))
        torch.testing.assert_close(program(torch.from_numpy(photo)[None]), expected, rtol=1e-5, atol=1e-5)
