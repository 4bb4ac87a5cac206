"""Commands that evaluate take every checkpoint that a teacher can be opened from."""

import json

import numpy as np
import pytest
import torch

import vitrail
from tests.convnets import small_resnet, timm_state
from tests.images import make_folder
from tests.teachers.test_lookup import fake_timm
from vitrail.bench.candidates import open_candidate
from vitrail.bench.peak import Peak
from vitrail.data.class_matching import match_classes
from vitrail.data.datasets.lookup import open_source
from vitrail.evaluation.evaluate import adapt_model, collect_scores, open_loader
from vitrail.evaluation.features import FeatureKind, check_kind, embed
from vitrail.evaluation.model import compute_logits, open_model
from vitrail.models.efficientnet import EfficientNet, EfficientNetConfig, Stage
from vitrail.models.preprocessing import Preprocessing, pad_images, to_pixels
from vitrail.models.registry import build
from vitrail.models.regnet import regnet
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.teachers import Teacher, open_teacher
from vitrail.teachers.fixed_shape import FixedShapeNetwork

NAMES = ["blue", "green", "red"]
STAGES = tuple(Stage(1, width, 3, 2) for width in (4, 6, 8, 10, 12, 14, 16))
NETWORKS = {
    "regnet": build(regnet((1, 1), (8, 16), 4, root=8).replace(classes=3)),
    "resnet": build(small_resnet(width=4, classes=3)),
    "efficientnet": EfficientNet(EfficientNetConfig(STAGES, 4, 16, 3)),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Weights in the layouts of other projects, with the same class names, and images."""
    folder = tmp_path_factory.mktemp("others")
    torch.manual_seed(0)
    for name, network in NETWORKS.items():
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        content = network.state_dict() if name == "efficientnet" else timm_state(network)
        torch.save({"model": content} if name == "regnet" else content, folder / f"{name}.pth")
        sidecar = {"classes": NAMES, "preprocessing": {"image_size": 32}}
        (folder / f"{name}.pth.teacher.json").write_text(json.dumps(sidecar))
    make_folder(folder / "data", NAMES, 6, (40, 32))
    return folder


@pytest.mark.parametrize("name", NETWORKS)
def test_evaluate(place, name, run_cli):
    sweep = ("--sizes", "32,48", "--crop-ratios", "0.9") if name == "regnet" else ()
    done = run_cli("evaluate", place / f"{name}.pth", place / "data", "--json", *sweep)
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert (content["model"], content["evaluations"][0]["matched"]) == (f"{name}.pth", "the same classes")
    assert [row["size"] for row in content["sweep"]] == (["32", "48"] if sweep else [])
    # The same predictions as those of the teacher, from the same files.
    teacher, source = open_teacher(place / f"{name}.pth"), open_source(place / "data")
    pixels, sizes = pad_images([to_pixels(source.location(index)) for index in range(len(source))])
    found = teacher(teacher.preprocessing.apply(pixels, sizes)).argmax(1).numpy()
    assert content["evaluations"][0]["top1"] == pytest.approx((found == source.label.values).mean())


def test_disagree_probe_embed_and_predict(place, run_cli, tmp_path):
    model = vitrail.create("deit_tiny_patch16", 3, 16, patch_size=4, width=16, depth=1, heads=2)
    model.class_names = NAMES
    own = vitrail.save(model, tmp_path / "own.safetensors")
    done = run_cli("disagree", own, place / "regnet.pth", place / "resnet.pth", place / "data", "--json", "--heads")
    assert json.loads(done.stdout)["names"] == ["label", "own.safetensors", "regnet.pth", "resnet.pth"], done.stderr
    for probe, vector in (("knn", "pooled"), ("fewshot", "penultimate")):
        found = json.loads(
            run_cli(
                "probe", probe, place / "regnet.pth", place / "data", "--json", "--k" if probe == "knn" else "--shots", 2
            ).stdout
        )
        assert (found["features"], found["feature_kind"]["vector"]) == (16, vector)
    assert run_cli("embed", place / "resnet.pth", place / "data", "--out", tmp_path / "features.npy").returncode == 0
    assert np.load(tmp_path / "features.npy").shape == (18, 8)
    (line,) = run_cli("predict", place / "efficientnet.pth", place / "data" / "red" / "000.png", "--json").stdout.splitlines()
    assert {each["name"] for each in json.loads(line)["classes"]} == set(NAMES)


def test_features_are_the_input_of_the_classifier(place):
    model, source = open_model(place / "regnet.pth", "cpu"), open_source(place / "data")
    features, logits = (embed(model, source, FeatureKind(vector), workers=0).vectors for vector in ("pooled", "logits"))
    torch.testing.assert_close(NETWORKS["regnet"].head(features), logits)
    for kind in (FeatureKind("class"), FeatureKind(before_norm=True)):
        with pytest.raises(vitrail.UserError, match="choose pooled, penultimate or logits"):
            check_kind(model, kind)


def test_bench(place, run_cli, monkeypatch):
    monkeypatch.setattr("vitrail.bench.timing.ROUND_SECONDS", 0.0)
    monkeypatch.setattr(
        "vitrail.bench.peak.measure_peak", lambda device, precisions: Peak(64, {"fp32": 1e11}, {"fp32": 0.0}, 5e9, 0.0)
    )
    done = run_cli(
        *("bench", place / "regnet.pth", "--device", "cpu", "--batch-size", 1, "--rounds", 1, "--json", "-"),
        *("--task", "inference,train", "--size", "32,48"),
    )
    assert done.returncode == 0, done.stderr
    small, large, *training = json.loads(done.stdout)["measurements"]
    network = NETWORKS["regnet"]
    assert small["parameters"] == sum(parameter.numel() for parameter in network.parameters())
    assert 2 < large["macs"] / small["macs"] < 2.5
    assert all(each["seconds"] for each in (small, large, *training))
    result = run_cli("bench", place / "regnet.pth", "--device", "cpu", "--depth", 2)
    assert (result.returncode, "remove --depth" in result.stderr) == (2, True)


def test_models_of_timm(monkeypatch, place, run_cli):
    network = NETWORKS["regnet"]
    fake_timm(monkeypatch, lambda name, **options: network)
    model = open_model("timm:regnet_small", "cpu")
    images = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(compute_logits(model, images), network.eval()(images))


class MeanColor(FixedShapeNetwork):
    """A program without parameters that returns only logits, as that of an ONNX file."""

    fixed_size = (8, 8)

    def run(self, images):
        assert tuple(images.shape[2:]) == (8, 8)
        return images.mean((2, 3))


def test_programs_return_only_logits(place, monkeypatch):
    model = Teacher(MeanColor(), Preprocessing((8, 8), 1.0), 3, NAMES, name="it.onnx")
    source = open_source(place / "data")
    with open_loader(model, source, 0) as loader:
        scores = collect_scores(model, loader, match_classes(model.class_names, 3, source.classes))
    assert (scores.prediction == scores.label).all()  # the first class is red, whatever its name
    with pytest.raises(vitrail.UserError, match="supports only images of 8"):
        adapt_model(model, (16, 16), None)
    with pytest.raises(vitrail.UserError, match="only logits"):
        embed(model, source, workers=0)
    monkeypatch.setattr("vitrail.bench.candidates.open_model", lambda *given: model)
    with pytest.raises(vitrail.UserError, match="give weights instead"):
        open_candidate("it.onnx", is_file=True)


def test_an_onnx_file(place, tmp_path, run_cli):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    helper = onnx.helper
    nodes = [helper.make_node("GlobalAveragePool", ["images"], ["pooled"]), helper.make_node("Flatten", ["pooled"], ["logits"])]
    shapes = [("images", ["batch", 3, 8, 8]), ("logits", ["batch", 3])]
    inputs, outputs = ([helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)] for name, shape in shapes)
    graph = helper.make_graph(nodes, "network", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "it.onnx")
    settings = {"classes": ["red", "green", "blue"], "preprocessing": {"image_size": 8, "crop_ratio": 1.0}}
    (tmp_path / "it.onnx.teacher.json").write_text(json.dumps(settings))
    done = run_cli("evaluate", tmp_path / "it.onnx", place / "data", "--json")
    found = json.loads(done.stdout)["evaluations"][0]
    assert (found["matched"], found["images"]) == ("by name", 18)
    for arguments in (("probe", "knn", tmp_path / "it.onnx", place / "data"), ("bench", tmp_path / "it.onnx", "--device", "cpu")):
        done = run_cli(*arguments)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done


def test_vision_transformers_are_opened_as_before(tmp_path, cli_error):
    model = vitrail.create("deit_tiny_patch16", 0, 16, patch_size=4, width=16, depth=1, heads=2)  # without a classifier
    assert isinstance(open_model(vitrail.save(model, tmp_path / "it.safetensors"), "cpu"), VisionTransformer)
    torch.save({"strange": torch.zeros(2)}, tmp_path / "it.pth")
    assert "not a supported vision transformer, ResNet, RegNet" in cli_error("predict", tmp_path / "it.pth", "x.png")
