"""Exported segmentations and detections: what images and boxes mean, and the same outputs as the package."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import vitrail
from tests.deploy.exports import make_model, photographs
from tests.deploy.test_image_input import SETTINGS
from tests.deploy.test_image_input import photographs as photographs_of_many_sizes
from vitrail.deploy.dense_outputs import frame_image
from vitrail.deploy.export import resize_model
from vitrail.deploy.exported_outputs import make_network
from vitrail.deploy.image_input import FramedImages
from vitrail.deploy.output_differences import make_differences
from vitrail.errors import UserError
from vitrail.evaluation.detections import DetectionProtocol, detect_objects
from vitrail.evaluation.model import open_model
from vitrail.evaluation.semantic_masks import Protocol, predict_classes
from vitrail.heads import boxes
from vitrail.heads.task_heads import DetectionConfig, SegmentationConfig

SHARPENED = ("box_head.classifier", "box_head.offsets", "proposal_head", "mask_head.classifier")


def make_segmenter(size):
    model = make_model("deit_tiny_patch16", image_size=size)
    config = SegmentationConfig(("ground", "cat", "dog"), (0, 1, 2), min(size), kind="fcn", channels=8)
    return model.set_task_head(config).eval()


def make_detector(size, **changes):
    """A detector with random weights that are large enough for objects to differ."""
    model = make_model("deit_tiny_patch16", image_size=size)
    config = DetectionConfig(("cat", "dog"), min(size), channels=8, hidden=16, candidates=40, proposals=20, **changes)
    model.set_task_head(config).eval()
    with torch.no_grad():
        for name, parameter in model.task_head.named_parameters():
            if name.startswith(SHARPENED) and parameter.ndim > 1:
                parameter.mul_(10)
    return model


def select(outputs, image):
    """The objects of an image of a batch, as `expected` returns them."""
    boxes, scores, classes, count, *masks = (torch.as_tensor(each)[image] for each in outputs)
    assert all((each[count:] == 0).all() for each in (boxes, scores, classes, *masks))
    return [each[:count] for each in (boxes, scores, classes, *masks)]


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", SETTINGS)
def test_whole_images_in_a_frame(name):
    """The same bits as the package's resizing, whatever the shape of the image."""
    module, model = FramedImages(SETTINGS[name]).eval(), SimpleNamespace(preprocessing=SETTINGS[name])
    for photo in (*photographs_of_many_sizes(), np.zeros((700, 3, 3), np.uint8)):
        normalized, size = module(torch.from_numpy(photo)[None])
        expected, expected_size = frame_image(model, photo)
        assert tuple(size.tolist()) == expected_size
        frame, factor = SETTINGS[name].image_size, max(photo.shape[0] / size[0], photo.shape[1] / size[1])
        assert any(own == side for own, side in zip(expected_size, frame, strict=True))
        assert factor >= max(photo.shape[0] / frame[0], photo.shape[1] / frame[1]) - 1e-9
        torch.testing.assert_close(normalized, expected, rtol=0, atol=0)


@pytest.mark.parametrize("input", ["image", "tensor"])
def test_objects_of_a_batch_are_padded(input):
    model = make_detector((64, 64))
    network = make_network(model, "detection", input)
    photos = [np.ascontiguousarray(photo[:60, :64]) for photo in photographs()]
    batch = torch.from_numpy(np.stack(photos)) if input == "image" else torch.cat([network.normalize(photo) for photo in photos])
    with torch.no_grad():
        outputs = network(batch)
        assert network.outputs == ("boxes", "scores", "classes", "count", "masks")
        assert [tuple(each.shape) for each in outputs] == [(4, 40, 4), (4, 40), (4, 40), (4,), (4, 40, 28, 28)]
        assert len(set(outputs[3].tolist())) > 1
        for index, photo in enumerate(photos):
            assert_same(select(outputs, index), network.expected(photo))


@pytest.mark.parametrize("size", [(64, 64), (64, 96)])
def test_frames_of_the_shape_of_the_image(size):
    """Without an empty part in the frame, objects and classes are those of `vitrail.detect` and `vitrail.segment`."""
    photo = np.ascontiguousarray(photographs()[0][:80, :70].repeat(2, 0)[: size[0] + 6].repeat(2, 1)[:, : size[1] + 9])
    photo = photo[: size[0] + 6, : (size[0] + 6) * size[1] // size[0]]
    pixels = torch.from_numpy(photo).permute(2, 0, 1)[None]
    model, segmenter = make_detector((64, 64)), make_segmenter((64, 64))
    (found,) = detect_objects(model, pixels, DetectionProtocol.of(model.task_head.config))
    expected = predict_classes(segmenter, pixels, Protocol.of(segmenter.task_head.config))
    with torch.no_grad():
        outputs = make_network(resize_model(model, size), "detection", "image")(torch.from_numpy(photo)[None])
        assert_same(select(outputs, 0), found)
        classes, logits = make_network(resize_model(segmenter, size), "segmentation", "image")(torch.from_numpy(photo)[None])
    assert model.architecture.image_size == (64, 64)
    assert logits.shape[1:] == (3, 16, size[1] // 4)
    assert classes.dtype == torch.uint8
    assert (classes == expected).float().mean() > 0.999


def test_images_in_classes_out(tmp_path):
    ort = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = make_segmenter((32, 48))
    result = vitrail.export(model, tmp_path / "m.onnx")
    assert result.certificate.agreement > 0.999
    session, network = ort.InferenceSession(tmp_path / "m.onnx"), make_network(model, "segmentation", "image")
    for photo in (*photographs(2), np.zeros((1, 1, 3), np.uint8), np.full((300, 7, 3), 200, np.uint8)):
        classes, logits = session.run(["classes", "logits"], {"images": np.stack([photo, photo[::-1]])})
        assert classes.shape == (2, *photo.shape[:2])
        expected, expected_logits = network.expected(photo)
        assert (classes[:1] == expected.numpy()).mean() > 0.999
        torch.testing.assert_close(torch.from_numpy(logits[:1]), expected_logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow  # torch's converter takes most of the time
def test_images_in_objects_out(tmp_path, monkeypatch):
    ort = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    monkeypatch.setattr(boxes, "ROUNDS", 8)  # enough for these few boxes
    model = make_detector((64, 96))
    result = vitrail.export(model, tmp_path / "m.onnx")
    assert result.certificate.agreement >= 0.99
    assert result.certificate.objects > 100
    assert result.metadata.class_names == ["cat", "dog"]
    assert "objects are the same" in str(result.certificate)
    session, network = ort.InferenceSession(tmp_path / "m.onnx"), make_network(model, "detection", "image")
    for photo in photographs():
        outputs = session.run(network.outputs, {"images": np.stack([photo, photo])})
        for index in range(2):
            assert_same(select(outputs, index), network.expected(photo))
    with pytest.raises(UserError, match="was exported for detection, which this package runs from weights only") as caught:
        open_model(tmp_path / "m.onnx")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_boxes_of_a_torch_program(tmp_path, monkeypatch):
    monkeypatch.setattr(boxes, "ROUNDS", 8)
    model = make_detector((32, 48), masks=False)
    result = vitrail.export(model, tmp_path / "m.pt2", to="torch-export", input="tensor")
    assert result.certificate.agreement == 1.0
    program, network = torch.export.load(tmp_path / "m.pt2").module(), make_network(model, "detection", "tensor")
    for photo in photographs():
        assert_same(select(program(network.normalize(photo)), 0), network.expected(photo))


def test_objects_are_compared():
    network = make_network(make_detector((32, 32), masks=False), "detection", "tensor")
    expected = [torch.tensor([[0.0, 0, 50, 100], [10, 10, 30, 30]]), torch.tensor([0.9, 0.6]), torch.tensor([0, 1])]

    def compare(*changes, count=2, precision="fp32"):
        boxes, scores, classes = (torch.cat([each, torch.zeros_like(each)])[None].clone() for each in expected)
        for name, index, value in changes:
            {"boxes": boxes, "scores": scores, "classes": classes}[name][0, index] += value
        differences = make_differences(network, precision)
        differences.add([boxes, scores, classes, torch.tensor([count])], expected)
        return differences

    same = compare(("boxes", 1, torch.tensor([0.05, 0, 0, 0])))
    assert (same.agreement, same.objects, same.problem("fp32")) == (1.0, 2, "")
    assert same.largest_difference == pytest.approx(0.05, abs=1e-5)
    for change in (("boxes", 1, 0.2), ("scores", 0, 0.01), ("classes", 1, -1)):
        assert compare(change).agreement == 0.5
        assert "only 50.0% are the same" in compare(change).problem("fp32")
    assert compare(("boxes", 1, 0.2), precision="fp16").agreement == 1.0
    assert compare(count=1).agreement == pytest.approx(2 / 3)
    assert compare(count=0).agreement == 0.0


def test_wrong_options_for_detections(tmp_path):
    model = make_detector((32, 32), masks=False)
    with pytest.raises(UserError, match="one image size: remove --dynamic-size"):
        vitrail.export(model, tmp_path / "m.onnx", input="tensor", dynamic_size=True)
    with pytest.raises(UserError, match="--image-size 32x42 is not a whole number of patches of "):
        vitrail.export(model, tmp_path / "m.onnx", image_size=(32, 42))
    with pytest.raises(UserError, match="at most 4,194,304 pixels"):
        vitrail.export(model, tmp_path / "m.onnx", image_size=16000)
    with pytest.raises(UserError, match="this model computes detection: choose --to onnx"):
        vitrail.export(model, tmp_path / "site", to="web")
    with torch.no_grad():
        model.task_head.box_head.classifier.bias.fill_(torch.nan)
    with pytest.raises(UserError, match="NaN or Inf"):
        vitrail.export(model, tmp_path / "m.pt2", to="torch-export", input="tensor")
    assert not list(tmp_path.iterdir())
