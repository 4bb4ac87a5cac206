"""Segmentations: the loss, trainings that are killed, resumed and divided, artifacts, and what cannot be trained on."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import vitrail
from tests.images import make_folder, make_masked_folder, write_mask
from tests.tasks.trainings import SEGMENTATION
from vitrail.data.contact_sheet import overlay_sheet
from vitrail.data.datasets.lookup import open_sources, open_splits
from vitrail.data.decode import decode_mask
from vitrail.data.image_loader import ImageLoader
from vitrail.data.inspection import inspect
from vitrail.data.inspection_report import findings
from vitrail.data.loader import ImageReader
from vitrail.data.mask_classes import IGNORE
from vitrail.errors import UserError
from vitrail.evaluation.mean_iou import count_pixels, summarize_pixels
from vitrail.evaluation.segmented_images import segment
from vitrail.heads.task_heads import SegmentationConfig
from vitrail.recipes import lookup
from vitrail.runs.initial_model import build_initial
from vitrail.runs.request import TrainRequest, open_data, resolve_recipe
from vitrail.tasks.segmentation import Segmentation, SegmentationTargets, head_macs, pixel_loss
from vitrail.training.distributed import Devices

LINEAR = {"task_options.head": "linear", "augmentation.image_size": [32, 32], "optimizer.layer_decay": 1.0}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_masked_folder(tmp_path_factory.mktemp("boxes"), 24)


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    changes = SEGMENTATION | {"schedule.length": "60 steps", "validation.every": "30 steps", "optimizer.lr": 1e-2} | LINEAR
    folder = tmp_path_factory.mktemp("run") / "run"
    return vitrail.train(data, "segment", out=folder, changes=changes, workers=0, device="cpu")


def newest_checkpoint(folder):
    return load_file(max((folder / "checkpoints").glob("*.safetensors")))


def test_the_loss_is_the_sum_over_labeled_pixels_by_all_pixels():
    logits, masks = torch.randn(2, 3, 4, 4, dtype=torch.float64), torch.randint(0, 3, (2, 8, 8), dtype=torch.uint8)
    masks[:, 2:4] = IGNORE
    resized = F.interpolate(logits, (8, 8), mode="bilinear", align_corners=False)
    total = sum(
        -float(resized[image, :, y, x].log_softmax(0)[int(masks[image, y, x])])
        for image in range(2)
        for y in range(8)
        for x in range(8)
        if masks[image, y, x] != IGNORE
    )
    assert float(pixel_loss(logits, masks)) == pytest.approx(total / masks.numel(), rel=1e-12)
    # Halves of a batch with different numbers of labeled pixels have the mean of their losses.
    halves = [pixel_loss(logits[row : row + 1], masks[row : row + 1]) for row in range(2)]
    torch.testing.assert_close(pixel_loss(logits, masks), sum(halves) / 2)


def test_it_learns_and_is_reported(finished):
    run = json.loads((finished.folder / "run.json").read_text())
    assert finished.best["miou"] > 0.6
    assert run["metric"]["name"] == "miou"
    assert [row["name"] for row in run["per_class"]] == ["ground", "red", "blue"]
    assert len(run["segmentations"]) == 2
    assert run["recipe"]["task_options"]["auxiliary_weight"] == 0.4  # all options are recorded
    page = (finished.folder / "report.html").read_text()
    for text in ("mIoU", "Images, masks and predictions", "within 1 of a boundary", "IoU"):
        assert text in page


def test_the_artifact_predicts_alone(finished, data):
    validation = open_splits(data).validation
    matrix = torch.zeros(3, 3, dtype=torch.int64)
    model = vitrail.load(finished.artifact)
    for index in range(len(validation)):
        pixels, mask = ImageReader(validation, None, masks=False).read_image(index)[0], validation.mask(index)
        (found,) = segment(model, pixels)
        matrix += count_pixels(torch.from_numpy(validation.mask_classes.read(mask)), torch.from_numpy(found.classes), 3)
    assert summarize_pixels(matrix)["miou"] == pytest.approx(finished.best["miou"], abs=1e-3)
    assert model.task_head.config.short_side == 32
    assert model.architecture.classes == 0


def test_a_run_is_resumed_from_its_directory(finished, data, tmp_path):
    """Classes without names and ignored ids are found again."""
    changes = SEGMENTATION | {"schedule.length": "2 steps", "validation.every": "2 steps", "task_options.ignore": [2]}
    folder = make_masked_folder(tmp_path / "unnamed", 8)
    (folder / "classes.json").unlink()
    first = vitrail.train(folder, "segment", out=tmp_path / "run", changes=changes, workers=0, device="cpu")
    assert vitrail.load(first.artifact).task_head.config.class_names == ("class 0", "class 1")
    again = vitrail.resume(tmp_path / "run", workers=0, device="cpu")
    assert again.best["miou"] == first.best["miou"]
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    run["recipe"]["data"]["decode_scale"] = 1.5  # refused for new runs
    (tmp_path / "run" / "run.json").write_text(json.dumps(run))
    shutil.rmtree(tmp_path / "run" / "checkpoints")  # they have the recipe, too
    assert vitrail.resume(tmp_path / "run", workers=0, device="cpu").finished


def test_smaller_decoding_is_not_advised(tmp_path):
    masked = {"data.decode_scale": 0, "augmentation.image_size": [16, 16]}
    requests = {
        "segment": TrainRequest(str(make_masked_folder(tmp_path / "boxes", 8, (100, 80))), "segment", changes=SEGMENTATION),
        "masked_small": TrainRequest(str(tmp_path / "boxes"), "masked_small", changes=masked),
    }
    found = {name: open_data(each, resolve_recipe(each, "cpu")).messages for name, each in requests.items()}
    advised = {name for name, messages in found.items() if any("data.decode_scale=1.5" in each for each in messages)}
    assert advised == {"masked_small"}


@pytest.mark.parametrize("scope", ["full", "head"])
def test_it_continues_and_freezes(finished, data, tmp_path, scope):
    changes = {name: value for name, value in SEGMENTATION.items() if not name.startswith(("model", "architecture"))}
    changes |= LINEAR | {"schedule.length": "2 steps", "validation.every": "2 steps", "init.scope": scope}
    tuned = vitrail.train(data, "segment", from_=finished.folder, out=tmp_path / "run", changes=changes, workers=0, device="cpu")
    before, after = vitrail.load(finished.artifact).state_dict(), vitrail.load(tuned.artifact).state_dict()
    trunk = [name for name in before if not name.startswith("task_head") and not name.endswith("num_batches_tracked")]
    assert all(torch.equal(before[name], after[name]) for name in trunk) == (scope == "head")
    head = "task_head.decoder.classifier.weight"
    assert 0 < (before[head] - after[head]).abs().max() < 0.01  # the head of the weights was the start


def test_a_classifier_can_start_from_a_segmentation(finished, tmp_path):
    folder = make_folder(tmp_path / "photos", count=6)
    short = {"schedule.length": "2 steps", "validation.every": "2 steps", "precision": "fp32", "batch_size": 4}
    tuned = vitrail.train(folder, "finetune", from_=finished.folder, out=tmp_path / "run", changes=short, workers=0, device="cpu")
    model = vitrail.load(tuned.artifact)
    assert (model.architecture.classes, model.task_head) == (3, None)


def test_what_cannot_be_trained_on(tmp_path, data):
    def fails(source, changes, message):
        with pytest.raises(UserError, match=message):
            vitrail.train(source, "segment", out=tmp_path / "run", changes=SEGMENTATION | changes, workers=0, device="cpu")

    fails("digits", {}, "digits has no masks")
    fails(data, {"mixing.mixup": 0.5}, "does not mix or erase")
    fails(data, {"data.decode_scale": 1.5}, r"^Segmentation reads images at the size .*: set data\.decode_scale=0\.$")
    fails(data, {"task_options.chanels": 3}, "the nearest are channels")
    fails(data, {"task_options.blocks": [9]}, "it has no block 9")
    fails(data, {"task_options.ignore": [0, 1, 2]}, "no class")


def test_masks_of_0_and_255(tmp_path):
    """Without names 255 is ignored and one class is left; with names it is a class."""
    folder = make_masked_folder(tmp_path / "data", 8, classes=("ground", "red"))
    (folder / "classes.json").unlink()
    for path in (folder / "masks").iterdir():
        write_mask(path, np.where(np.array(Image.open(path)) == 1, 255, 0).astype(np.uint8))
    remedy = 'name the other ids in classes.json, as {"0": "background", "255": "object"}.'
    changes = SEGMENTATION | {"schedule.length": "2 steps", "validation.every": "2 steps"}
    with pytest.raises(UserError, match=rf"have one class only \(id 0; ignored 255\): {re.escape(remedy)}$"):
        vitrail.train(folder, "segment", out=tmp_path / "run", changes=changes, workers=0, device="cpu")
    report = inspect("data", open_sources(folder), workers=0)
    assert f"The masks of train have one class only, id 0: {remedy}" in list(findings(report))
    assert overlay_sheet(open_sources(folder)["train"], "data").width > 0
    (folder / "classes.json").write_text('{"0": "background", "255": "object"}')
    report = inspect("data", open_sources(folder), workers=0)
    assert [(row["name"], row["images"]) for row in report.splits["train"].mask_report.classes] == [
        ("background", 8),
        ("object", 8),
    ]
    assert not any("mask" in each for each in findings(report))
    run = vitrail.train(folder, "segment", out=tmp_path / "run", changes=changes, workers=0, device="cpu")
    assert vitrail.load(run.artifact).task_head.config.mask_ids == (0, 255)
    (found,) = vitrail.segment(run.artifact, folder / "images" / "000.png")
    found = dataclasses.replace(found, classes=np.array([[0, 1]], dtype=np.uint8))
    assert decode_mask(found.mask_png()).tolist() == [[0, 255]]


def test_resmlp_trains_on_its_window(data, tmp_path):
    changes = SEGMENTATION | {"model": "resmlp_s12", "schedule.length": "2 steps", "validation.every": "2 steps"}
    run = vitrail.train(data, "segment", out=tmp_path / "run", changes=changes, workers=0, device="cpu")
    config = vitrail.load(run.artifact).task_head.config
    assert (config.window, config.stride) == (16, 11)
    assert dataclasses.asdict(config)["short_side"] == 16
    (found,) = vitrail.segment(run.artifact, np.zeros((30, 44, 3), dtype=np.uint8))
    assert found.classes.shape == (30, 44)


SMALL = {"model": "vitrail_mini", "architecture.width": 16, "architecture.heads": 2, "architecture.patch_size": 4}
TABLES = {"model": "deit3_tiny_patch16", "architecture.pos_embed": "relative_bias", "architecture.pos_embed_place": "layers"}


@pytest.mark.parametrize(
    "changes",
    [
        SMALL | {"architecture.depth": 2},
        SMALL | {"architecture.depth": 3, "task_options.blocks": [1, 0], "task_options.head": "fcn"},
        SMALL | TABLES | {"architecture.depth": 3, "task_options.blocks": [1]},
        SMALL
        | {"model": "deit_tiny_patch16", "architecture.class_token_at": 2, "architecture.depth": 3, "task_options.blocks": [1]},
        {"model": "resnet18"},
    ],
    ids=["final tokens", "blocks", "position tables", "late class token", "convnet"],
)
def test_every_trained_parameter_has_a_gradient(data, changes):
    """Several processes wait for all of them."""
    common = {name: value for name, value in SEGMENTATION.items() if not name.startswith(("model", "architecture"))}
    recipe = lookup("segment").set(common | {"augmentation.image_size": [32, 32]} | changes)
    task = Segmentation(recipe, open_splits(data).train, torch.device("cpu"))
    task.attach(build_initial(recipe, None, None))
    masks = torch.zeros(4, 32, 32, dtype=torch.uint8)
    task.module.train()(torch.randn(4, 3, 32, 32), SegmentationTargets(masks)).backward()
    parameters = dict(task.module.named_parameters())
    assert not [name for name, each in parameters.items() if each.requires_grad != (each.grad is not None)]
    assert sum(each.requires_grad for each in parameters.values()) > 10


def test_evaluation_does_not_compile(data):
    """Images of many sizes would compile the blocks again and again."""
    recipe, splits = lookup("segment").set(SEGMENTATION | LINEAR), open_splits(data)
    task = Segmentation(recipe, splits.train, torch.device("cpu"))
    model = build_initial(recipe, None, None)
    task.attach(model)
    compiled = []
    for block in model.layers:
        block.compile(backend=lambda graph, inputs: compiled.append(graph) or graph.forward)
    loader = ImageLoader(splits.validation, "cpu", 0, masks=True)
    found = task.evaluate(model.eval(), loader, 2, Devices(torch.device("cpu")))
    task.report(model, loader, splits, 2)
    assert found["images"] == len(splits.validation)
    assert not compiled


@pytest.mark.parametrize("name", ["resnet18", "deit3_tiny_patch16"])
def test_the_cost_of_the_head(name):
    config = SegmentationConfig(("a", "b"), (0, 1), 64, channels=8, auxiliary=0)
    model = vitrail.create(name, 0, 64).set_task_head(config).eval()
    with torch.no_grad():
        maps = model.feature_maps(torch.zeros(1, 3, 64, 64))
        with FlopCounterMode(display=False) as counter:
            model.task_head(maps)
    assert head_macs(config, model) == counter.get_total_flops() / 2
