"""Detection: assignment, sampling and losses, a detector that learns, trainings that are killed, resumed and divided."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import vitrail
from tests.images import make_folder
from tests.shapes import make_coco, make_yolo
from tests.tasks.trainings import DETECTION
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.image_loader import ImageLoader
from vitrail.data.sampler import EpochSampler
from vitrail.errors import UserError
from vitrail.heads.boxes import box_iou, encode_boxes
from vitrail.recipes import lookup
from vitrail.recipes.task_options import DetectionOptions
from vitrail.runs.initial_model import build_initial
from vitrail.tasks.detection import Detection, DetectionTargets, box_losses, mask_loss, proposal_losses
from vitrail.tasks.detection_targets import Sample, assign, sample
from vitrail.training.task import Position

LEARNING = {
    "schedule.length": "90 steps",
    "validation.every": "90 steps",
    "batch_size": 8,
    "group_size": 0,
    "architecture.drop_path": 0.0,
    "augmentation.factors": [0.9, 1.1],
    "augmentation.color_jitter": [0, 0, 0, 0],
    "optimizer.lr": 4e-3,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_coco(tmp_path_factory.mktemp("shapes"), 40)


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    return vitrail.train(data, "detect", out=folder, changes=DETECTION | LEARNING, workers=0, device="cpu")


def newest_checkpoint(folder):
    return load_file(max((folder / "checkpoints").glob("*.safetensors")))


def make_targets(boxes, classes, flags=None, planes=None):
    images, count = torch.tensor(classes).shape
    flags = torch.zeros(images, count, dtype=torch.uint8) if flags is None else torch.tensor(flags, dtype=torch.uint8)
    planes = torch.zeros(images, 0, 8, 8, dtype=torch.uint8) if planes is None else planes
    return DetectionTargets(torch.tensor(boxes), torch.tensor(classes), flags, planes, torch.arange(images) + 5)


def test_assignment_is_that_of_the_definition():
    generator = torch.Generator().manual_seed(0)
    start = torch.rand(2, 40, 2, generator=generator) * 50
    boxes = torch.cat([start, start + 5 + torch.rand(2, 40, 2, generator=generator) * 40], 2)
    objects = boxes[:, :5] + torch.randn(2, 5, 4, generator=generator)
    used, ignored = torch.tensor([[1, 1, 0, 1, 0], [0] * 5]).bool(), torch.tensor([[0, 0, 0, 0, 1], [0] * 5]).bool()
    labels, nearest = assign(boxes, objects, used, ignored, 0.3, 0.7, best=True)
    for image in range(2):
        overlaps = box_iou(boxes[image], objects[image])
        kept = [index for index in range(5) if used[image, index]]
        best = {index: float(overlaps[:, index].max()) for index in kept}
        for row in range(40):
            values = [float(overlaps[row, index]) for index in kept]
            positive = any(v >= 0.7 or v == best[i] for v, i in zip(values, kept, strict=True))
            left, top = torch.maximum(boxes[image, row, :2], objects[image, 4, :2]).tolist()
            right, bottom = torch.minimum(boxes[image, row, 2:], objects[image, 4, 2:]).tolist()
            area = float((boxes[image, row, 2:] - boxes[image, row, :2]).prod())
            avoided = bool(ignored[image, 4]) and max(right - left, 0) * max(bottom - top, 0) / area > 0.5
            wanted = 1 if positive else -1 if max(values, default=0) >= 0.3 or avoided else 0
            assert int(labels[image, row]) == wanted
            if positive:
                assert int(nearest[image, row]) == kept[int(np.argmax(values))]


def test_samples_depend_on_the_image_alone():
    labels = torch.tensor([[1] * 6 + [0] * 20 + [-1] * 4, [0] * 30, [-1] * 28 + [1, 0]])
    keys = torch.tensor([3, 4, 5])
    chosen = sample(labels, keys, "boxes", 8, 2)
    assert chosen.positive.tolist()[0] == [True] * 2 + [False] * 6
    assert [int(row.sum()) for row in chosen.valid] == [8, 8, 2]
    for image in range(3):
        alone = sample(labels[image : image + 1], keys[image : image + 1], "boxes", 8, 2)
        assert all(torch.equal(one[image], other[0]) for one, other in zip(chosen, alone, strict=True))
        rows = chosen.rows[image][chosen.valid[image]]
        assert len(set(rows.tolist())) == len(rows)
        assert (labels[image][rows] >= 0).all()
    drawn = {tuple(sample(labels, keys + shift, "boxes", 8, 2).rows[0].tolist()) for shift in range(5)}
    assert len(drawn) == 5


def test_losses_are_those_of_the_definition():
    boxes = [[[2.0, 2, 30, 30], [40.0, 8, 60, 50]], [[0.0, 0, 0, 0], [5.0, 5, 50, 40]]]
    targets = make_targets(boxes, [[0, 1], [-1, 1]])
    generator = torch.Generator().manual_seed(1)
    anchors = torch.tensor([[0.0, 0, 32, 32], [38, 6, 62, 52], [100, 100, 120, 120], [4, 4, 52, 42], [0, 0, 8, 8]])
    logits, offsets = torch.randn(2, 5, generator=generator), torch.randn(2, 5, 4, generator=generator)
    options = DetectionOptions(anchors_sampled=5)
    found = proposal_losses(logits, offsets, anchors, targets, options)
    objectness = distance = 0.0
    for image, positives in ((0, {0: 0, 1: 1}), (1, {3: 1})):
        overlaps = box_iou(anchors, targets.boxes[image])
        for row in range(5):
            highest = float(overlaps[row][targets.classes[image] >= 0].max())
            if row in positives:
                wanted = encode_boxes(targets.boxes[image, positives[row]], anchors[row], (1.0,) * 4)
                distance += float((offsets[image, row] - wanted).abs().sum())
            elif highest >= 0.3:
                continue
            label = torch.tensor(float(row in positives))
            objectness += float(F.binary_cross_entropy_with_logits(logits[image, row], label))
    assert float(found[0]) == pytest.approx(objectness / 10, rel=1e-5)
    assert float(found[1]) == pytest.approx(distance / 10, rel=1e-5)

    chosen = Sample(
        torch.zeros(1, 3, dtype=torch.int64), torch.tensor([[True, False, False]]), torch.tensor([[True, True, False]])
    )
    one = make_targets(boxes[:1], [[0, 1]])
    scores, moves = torch.randn(3, 3, generator=generator), torch.randn(3, 2, 4, generator=generator)
    own = torch.tensor([[[38.0, 6, 62, 52], [0, 0, 9, 9], [0, 0, 9, 9]]])
    entropy, distance = box_losses(scores, moves, own, chosen, torch.tensor([[1, 0, 0]]), one)
    wanted = F.cross_entropy(scores[:1], torch.tensor([1])) + F.cross_entropy(scores[1:2], torch.tensor([2]))
    assert float(entropy) == pytest.approx(float(wanted) / 3, rel=1e-6)
    goal = encode_boxes(one.boxes[0, 1], own[0, 0], (10.0, 10.0, 5.0, 5.0))
    assert float(distance) == pytest.approx(float((moves[0, 1] - goal).abs().sum()) / 3, rel=1e-6)


def test_masks_are_compared_inside_of_boxes():
    planes = torch.zeros(1, 1, 64, 64, dtype=torch.uint8)
    planes[0, 0, 8:24, 8:24] = 2  # object 1
    targets = make_targets([[[0.0, 0, 9, 9], [8.0, 8, 24, 24]]], [[0, 1]], planes=planes)
    boxes, objects, positive = (
        torch.tensor([[[8.0, 8, 24, 24]] * 3]),
        torch.tensor([[1, 0, 1]]),
        torch.tensor([[True, True, False]]),
    )
    logits = torch.full((3, 2, 28, 28), 30.0)
    logits[:, 0] = -30.0
    assert float(mask_loss(logits, boxes, objects, positive, targets)) < 1e-6  # object 0 has no mask and is not counted
    assert float(mask_loss(-logits, boxes, objects, positive, targets)) > 10
    assert float(mask_loss(-logits, boxes, objects, torch.zeros_like(positive), targets)) == 0


def prepared(data, changes):
    """A task with its module, and the first batch of its training."""
    recipe, splits = lookup("detect").set(DETECTION | changes), open_splits(data)
    task = Detection(recipe, splits.train, torch.device("cpu"))
    task.attach(build_initial(recipe, None, None))
    loader = ImageLoader(splits.train, "cpu", 0, objects=True)
    (batch,) = loader.train_loader(EpochSampler(len(splits.train), 4, 0), (0,), 1).iterate_steps(0, 1)
    return task, *task.prepare_batch(batch, Position(0, 8, 0, 0))


def test_losses_do_not_depend_on_the_division(data):
    """Halves of a batch have the mean of the losses of their images."""
    task, images, targets = prepared(data, {"architecture.drop_path": 0.0})
    task.module.eval()
    assert targets.boxes.shape == (4, 9, 4)
    assert targets.planes.shape == (4, 2, 64, 64)
    with torch.no_grad():
        whole = task.module(images, targets)
        halves = [
            task.module(images[part], DetectionTargets(*(each[part] for each in targets))) for part in (slice(2), slice(2, 4))
        ]
    torch.testing.assert_close(whole, sum(halves) / 2, rtol=1e-4, atol=1e-5)
    assert float(whole[0]) == pytest.approx(float(whole[1:].sum()), rel=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(task.module(images, targets)).all()


def test_a_step_never_waits_for_values(data, monkeypatch):
    """Fake tensors have no values: an operator that depends on them, which a CUDA graph cannot contain, raises."""
    monkeypatch.setattr("vitrail.heads.boxes.torch.equal", lambda first, second: False)  # called on a CPU only
    task, images, targets = prepared(data, {"architecture.drop_path": 0.0, "task_options.candidates": 20})
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        targets = DetectionTargets(*(mode.from_tensor(each) for each in targets))
        losses = task.module(mode.from_tensor(images), targets)
    assert losses.shape == (6,)


def test_no_objects_without_boxes_are_shown(data):
    """Around an image that is smaller than the crop there is the mean color, and not its reflection."""
    _, images, targets = prepared(data, {"augmentation.factors": [0.5, 0.5]})
    outside = (images == 0).all(1).flatten(1).float().mean(1)
    assert outside.min() > 0.7  # the image has 32 x 37 of 64 x 64 pixels
    assert outside.max() < 0.73
    assert (targets.classes >= 0).any()


def test_it_learns_and_is_reported(finished):
    run = json.loads((finished.folder / "run.json").read_text())
    assert finished.best["ap50"] > 0.7
    assert finished.best["mask_ap50"] > 0.7
    assert run["metric"]["name"] == "ap"
    assert [row["name"] for row in run["per_class"]] == ["box", "triangle"]
    assert run["per_class"][0]["objects"] > 0
    assert len(run["detections"]) == 4
    assert run["recipe"]["task_options"]["proposals"] == 30
    assert "duplicates above an IoU of 0.5 removed" in run["protocol"]
    page = (finished.folder / "report.html").read_text()
    for text in ("box AP", "Images with their objects, and with predictions", "mask AP"):
        assert text in page


def test_the_artifact_predicts_alone(finished, data):
    found = vitrail.detect(finished.artifact, data / "images" / "000.png", threshold=0.05)[0]
    assert 0 < len(found.objects) <= 100
    assert found.objects[0].score >= found.objects[-1].score
    assert found.objects[0].mask.shape == (56, 64)
    assert found.overlay().size == (64, 56)
    model = vitrail.load(finished.artifact)
    assert model.task_head.config.short_side == 64
    with pytest.raises(UserError, match="detect objects: call"):
        vitrail.predict(model, data / "images" / "000.png")
    with pytest.raises(UserError, match="has no segmentation head"):
        vitrail.segment(model, data / "images" / "000.png")


def test_it_continues_with_a_frozen_trunk(finished, data, tmp_path):
    changes = {name: value for name, value in DETECTION.items() if not name.startswith(("model", "architecture"))}
    changes |= {"schedule.length": "2 steps", "validation.every": "2 steps", "init.scope": "head"}
    tuned = vitrail.train(data, "detect", from_=finished.folder, out=tmp_path / "run", changes=changes, workers=0, device="cpu")
    before, after = vitrail.load(finished.artifact).state_dict(), vitrail.load(tuned.artifact).state_dict()
    trunk = [name for name in before if not name.startswith("task_head")]
    assert all(torch.equal(before[name], after[name]) for name in trunk)
    head = "task_head.box_head.classifier.weight"
    assert 0 < (before[head] - after[head]).abs().max() < 0.01  # the head of the weights was the start


def test_boxes_without_masks_and_convnets(tmp_path):
    folder = make_yolo(tmp_path / "data", 12, polygons=False)
    changes = {name: value for name, value in DETECTION.items() if not name.startswith(("model", "architecture"))}
    changes |= {"model": "resnet18", "schedule.length": "2 steps", "validation.every": "2 steps"}
    run = vitrail.train(folder, "detect", out=tmp_path / "run", changes=changes, workers=0, device="cpu")
    config = vitrail.load(run.artifact).task_head.config
    assert not config.masks
    assert "mask_ap" not in run.best


def test_what_cannot_be_trained_on(tmp_path, data):
    def fails(source, changes, message):
        with pytest.raises(UserError, match=message):
            vitrail.train(source, "detect", out=tmp_path / "run", changes=DETECTION | changes, workers=0, device="cpu")

    fails("digits", {}, "digits has no boxes")
    fails(make_folder(tmp_path / "photos", count=4), {}, "has no boxes")
    fails(data, {"mixing.cutmix": 0.5}, "does not mix or erase")
    fails(data, {"data.decode_scale": 1.5}, r"^Detection reads images at the size .*: set data\.decode_scale=0\.$")
    fails(data, {"augmentation.policy": "rand"}, "moves boxes with crops and flips only")
    fails(data, {"task_options.chanels": 3}, "the nearest are channels")
    fails(data, {"task_options.blocks": [0, 1]}, "the numbers of four blocks")
    fails(make_yolo(tmp_path / "boxes", 12, polygons=False), {"task_options.masks": "on"}, "boxes but no masks")
