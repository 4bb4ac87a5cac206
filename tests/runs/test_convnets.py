"""A small convnet as any other model: trained, resumed, fine-tuned by FixRes, evaluated, distilled, converted."""

import json

import pytest
import torch
from safetensors.torch import load_file

import vitrail
from tests.convnets import small_resnet
from vitrail.checkpoints.delta import attach, make_delta
from vitrail.models.registry import build
from vitrail.training.batch_norm import frozen_norms
from vitrail.training.scope import apply_scope

CONVNET = small_resnet((1, 1), bottleneck=True, root_stride=1)
FIELDS = {field: CONVNET.to_dict()[field] for field in ("convnet", "width", "patch_size")}
CHANGES = {f"architecture.{field}": value for field, value in FIELDS.items()}
CHANGES |= {"model": "resnet50_cifar", "batch_size": 32, "schedule.length": "2 epochs", "optimizer.lr": 8e-3}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("convnet") / "run"
    changes = {"ema.decay": 0.9, "architecture.drop_path": 0.1, "optimizer.layer_decay": 0.9}
    done = vitrail.train("digits", recipe="laptop", out=folder, device="cpu", changes=CHANGES | changes)
    assert done.best["top1"] > 0.3
    return folder


def test_the_artifact_is_a_convnet(run):
    model = vitrail.load(run / "best.safetensors")
    assert model.architecture.convnet == CONVNET.convnet
    assert [len(model.layers), len(model.blocks)] == [2, 0]
    assert json.loads((run / "run.json").read_text())["architecture"]["convnet"]["block"] == "bottleneck"


def test_fixres_trains_the_classifier_and_the_last_norm(run, tmp_path):
    before = load_file(run / "best.safetensors")
    changes = {"augmentation.image_size": 16, "schedule.length": "1 epochs", "batch_size": 32, "group_size": 0}
    vitrail.train("digits", recipe="fixres_resnet50_to_384", from_=run, out=tmp_path / "run", device="cpu", changes=changes)
    after = load_file(tmp_path / "run" / "best.safetensors")
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    last = {f"stem.blocks.1.norm3.{part}" for part in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    assert changed == last | {"head.weight", "head.bias"}
    tuned = vitrail.load(tmp_path / "run" / "best.safetensors")
    assert tuned.architecture.image_size == (16, 16)
    base = vitrail.load(run / "best.safetensors")
    delta = make_delta(base, tuned)
    assert set(delta.tensors) == changed
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(attach(base, delta)(images), tuned(images))


def test_frozen_norms_are_those_outside_the_scope():
    model = build(CONVNET)
    assert not frozen_norms(model)
    apply_scope(model, "last:1")
    names = {id(module): name for name, module in model.named_modules()}
    found = {names[id(norm)] for norm in frozen_norms(model)}
    assert found == {"stem.root.norm1", *(f"stem.blocks.0.{name}" for name in ("shortcut.norm", "norm1", "norm2", "norm3"))}


def test_commands(run, run_cli, tmp_path):
    best = run / "best.safetensors"
    found = json.loads(run_cli("evaluate", best, "digits", "--json").stdout)
    assert found["evaluations"][0]["top1"] > 0.3
    found = json.loads(run_cli("probe", "knn", best, "digits", "--json").stdout)
    assert found["features"] == CONVNET.width
    done = run_cli("convert", best, tmp_path / "weights.pth", "--check")
    assert (done.returncode, "(timm)" in done.stdout) == (0, True), done.stderr
    assert "layer2.0.conv3.weight" in torch.load(tmp_path / "weights.pth")
    done = run_cli("info", best)
    assert "a convnet" in done.stdout
    assert "root_stride" in done.stdout


def test_it_is_distilled(run, tmp_path):
    """From a convnet, to a convnet."""
    changes = CHANGES | {"schedule.length": "1 epochs", "distillation.kind": "soft"}
    vitrail.train("digits", recipe="laptop", teacher=run, out=tmp_path / "run", device="cpu", changes=changes)
    assert (tmp_path / "run" / "best.safetensors").exists()


def test_optimized(run):
    model = vitrail.load(run / "best.safetensors")
    optimized = vitrail.optimize(model)
    assert any("batch norms folded" in text for text in optimized.report.applied)
    images = torch.randn(3, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(optimized(images), model(images), rtol=1e-4, atol=1e-4)
