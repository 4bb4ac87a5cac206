"""AP of boxes and masks equals that of COCO's tools (faster-coco-eval), on random and on adversarial cases."""

import contextlib
import io
import json

import numpy as np
import pytest
import torch
from faster_coco_eval import COCO, COCOeval_faster
from faster_coco_eval import mask as coco_masks

from tests.shapes import make_coco
from vitrail.data import image_cache
from vitrail.data.datasets.lookup import open_sources
from vitrail.data.image_loader import ImageLoader
from vitrail.data.instance_masks import pack_masks
from vitrail.data.objects import CROWD, DIFFICULT, DecodedObjects
from vitrail.evaluation import object_evaluation
from vitrail.evaluation.average_precision import Matches, box_overlaps, summarize_precision
from vitrail.evaluation.detections import DetectionProtocol, Detections, paste_masks
from vitrail.evaluation.object_evaluation import ObjectMatches, match_split
from vitrail.heads.task_heads import DetectionConfig
from vitrail.models.registry import create

NAMES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large", "ar")
PLACES = (0, 1, 2, 3, 4, 5, 8)


def reference(objects, detections, classes, images, kind="bbox", size=(200, 200)):
    content = {
        "images": [{"id": image, "height": size[0], "width": size[1]} for image in range(images)],
        "categories": [{"id": index, "name": str(index)} for index in range(classes)],
        "annotations": [each | {"id": number} for number, each in enumerate(objects, 1)],
    }
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(content)
        evaluation = COCOeval_faster(truth, truth.loadRes(detections), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return [None if evaluation.stats[place] < 0 else float(evaluation.stats[place]) for place in PLACES]


def random_image(rng, case, classes):
    """Boxes of objects and of detections, many of which are near objects; ties of scores and of overlaps in some cases."""
    count, found = int(rng.integers(0, 9)), int(rng.integers(0, 140 if case % 10 == 0 else 25))
    objects = np.concatenate([rng.uniform(0, 120, (count, 2)), rng.uniform(1, 150, (count, 2))], 1)
    labels, crowd = rng.integers(0, classes, count), rng.random(count) < 0.2
    boxes = np.concatenate([rng.uniform(0, 120, (found, 2)), rng.uniform(1, 150, (found, 2))], 1)
    kinds, scores = rng.integers(0, classes, found), rng.random(found)
    if count and found:
        near, chosen = rng.random(found) < 0.7, rng.integers(0, count, found)
        boxes[near] = objects[chosen[near]] + rng.normal(0, rng.choice([0, 2, 8]), (near.sum(), 4))
        boxes[:, 2:] = np.maximum(boxes[:, 2:], 0.5)
        kinds[near] = np.where(rng.random(near.sum()) < 0.8, labels[chosen[near]], kinds[near])
    if case % 3 == 0:  # equal overlaps, and areas on the borders of the ranges
        objects, boxes = np.round(objects / 16) * 16, np.round(boxes / 16) * 16
        objects[:, 2:], boxes[:, 2:] = np.maximum(objects[:, 2:], 16), np.maximum(boxes[:, 2:], 16)
    if case % 2 == 0:
        scores = np.round(scores * 5) / 5
    return objects, labels, crowd, boxes, kinds, scores


def close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        assert one is None or abs(one - other) < 1e-9


@pytest.mark.parametrize("block", range(3))
def test_boxes(block):
    for case in range(10 * block, 10 * block + 10):
        rng = np.random.default_rng(case)
        images, classes, matches = int(rng.integers(1, 7)), int(rng.integers(1, 5)), Matches()
        objects, detections = [], []
        for image in range(images):
            own, labels, crowd, boxes, kinds, scores = random_image(rng, case, classes)
            areas = own[:, 2] * own[:, 3] * rng.uniform(0.5, 1, len(own))
            objects += [
                {"image_id": image, "category_id": int(k), "bbox": b.tolist(), "area": float(a), "iscrowd": int(c)}
                for b, k, c, a in zip(own, labels, crowd, areas, strict=True)
            ]
            detections += [
                {"image_id": image, "category_id": int(k), "bbox": b.tolist(), "score": float(s)}
                for b, k, s in zip(boxes, kinds, scores, strict=True)
            ]
            overlaps = box_overlaps(boxes, own, crowd)
            matches.add(image, scores, kinds, boxes[:, 2] * boxes[:, 3], labels, areas, crowd, overlaps, crowd)
        if objects and detections:
            found = summarize_precision(matches, classes)
            close([found[name] for name in NAMES], reference(objects, detections, classes, images))


def test_masks():
    rng = np.random.default_rng(3)
    matches, objects, detections = ObjectMatches(True), [], []
    for image in range(4):
        count, found = 5, 12
        centers = rng.uniform(10, 50, (count + found, 2))
        sides = rng.uniform(6, 40, (count + found, 2))
        y, x = np.mgrid[:64, :64]
        masks = (
            ((x + 0.5 - centers[:, 0, None, None]) / sides[:, 0, None, None]) ** 2
            + ((y + 0.5 - centers[:, 1, None, None]) / sides[:, 1, None, None]) ** 2
        ) < 0.25
        labels, kinds = rng.integers(0, 2, count), rng.integers(0, 2, found)
        flags = np.where(rng.random(count) < 0.2, CROWD, 0).astype(np.uint8)
        predicted = torch.rand(found, 28, 28, generator=torch.Generator().manual_seed(image)).sqrt()
        corners = torch.from_numpy(np.concatenate([centers - sides / 2, centers + sides / 2], 1)).float()
        corners[count : count + 3] = corners[:3] + 1
        scores = torch.from_numpy(np.round(rng.random(found), 1)).float()
        truth = DecodedObjects(
            corners[:count].numpy(), labels, flags, masks[:count].sum((1, 2)).astype(np.float32), pack_masks(masks[:count])
        )
        result = Detections(corners[count:], scores, torch.from_numpy(kinds), predicted)
        matches.add(image, result, truth)
        pasted = paste_masks(predicted, corners[count:], 64, 64).numpy()

        def encode(mask):
            return coco_masks.encode(np.asfortranarray(mask.astype(np.uint8)))

        objects += [
            {
                "image_id": image,
                "category_id": int(k),
                "segmentation": encode(m),
                "area": float(m.sum()),
                "iscrowd": int(f == CROWD),
                "bbox": [0, 0, 1, 1],
            }
            for m, k, f in zip(masks[:count], labels, flags, strict=True)
        ]
        detections += [
            {"image_id": image, "category_id": int(k), "segmentation": encode(m), "score": float(s)}
            for m, k, s in zip(pasted, kinds, scores, strict=True)
        ]
    found = matches.summarize(2)
    close([found[f"mask_{name}"] for name in NAMES], reference(objects, detections, 2, 4, "segm", (64, 64)))


def test_images_without_objects_count_in_batches_of_any_size(tmp_path, monkeypatch):
    """One object is found, and three false ones in images without objects. Data without masks have no mask AP."""
    monkeypatch.setattr(image_cache, "free_memory", lambda: 0)  # a cache has one number of planes for all images
    box = torch.tensor([[10.0, 10, 50, 50]])
    found = [Detections(box, torch.tensor([score]), torch.tensor([0]), torch.ones(1, 28, 28)) for score in (0.5, 0.9, 0.8, 0.7)]
    config = DetectionConfig(("box",), 64, channels=8, hidden=16)
    model = create("vitrail_mini", 0, 64, width=16, depth=1, patch_size=8).set_task_head(config).eval()
    square = np.zeros((56, 64), dtype=bool)
    square[10:50, 10:50] = True
    encoded = coco_masks.encode(np.asfortranarray(square.astype(np.uint8)))
    own = {"id": 1, "image_id": 0, "category_id": 7, "bbox": [10, 10, 40, 40], "area": 1600, "iscrowd": 0}
    truth = [own | {"category_id": 0, "segmentation": encoded}]
    detections = [
        {"image_id": image, "category_id": 0, "segmentation": encoded, "score": float(each.scores)}
        for image, each in enumerate(found)
    ]
    wanted = reference(truth, detections, 1, 4, "segm", square.shape)
    for masks in (True, False):
        folder = make_coco(tmp_path / str(masks), 4)
        content = json.loads((folder / "annotations.json").read_text())
        outline = {"segmentation": [[10, 10, 50, 10, 50, 50, 10, 50]]} if masks else {}
        (folder / "annotations.json").write_text(json.dumps(content | {"annotations": [own | outline]}))
        loader = ImageLoader(open_sources(folder)["train"], "cpu", 0, objects=True)
        for batch_size in (1, 2, 4):
            results = iter(found)
            monkeypatch.setattr(
                object_evaluation, "detect_objects", lambda model, pixels, *_, results=results: [next(results) for _ in pixels]
            )
            matches, images = match_split(model, loader, batch_size, DetectionProtocol.of(config))
            summary = matches.summarize(1)
            assert (images, summary["ap"]) == (4, pytest.approx(0.25))
            if masks:
                close([summary[f"mask_{name}"] for name in NAMES], wanted)
            else:
                assert "mask_ap" not in summary


def test_difficult_objects_are_ignored_but_are_no_crowds():
    """A second detection of a crowd is ignored too, that of a difficult object is wrong."""
    box = np.array([[10.0, 10, 50, 50]], dtype=np.float32)
    found = Detections(torch.tensor([[10.0, 10, 50, 50]] * 2), torch.tensor([0.9, 0.8]), torch.tensor([0, 0]), None)
    wrong = {}
    for flag in (CROWD, DIFFICULT):
        matches = ObjectMatches(False)
        matches.add(0, found, DecodedObjects(box, np.array([0]), np.array([flag], dtype=np.uint8), np.array([1600.0]), None))
        wrong[flag] = int((~matches.boxes.ignored[0][:, 0, 0]).sum())
        assert matches.summarize(1)["ap"] is None
    assert wrong == {CROWD: 0, DIFFICULT: 1}


def test_processes_are_joined_in_the_order_of_images():
    rng = np.random.default_rng(0)
    whole, parts = Matches(), [Matches(), Matches()]
    for image in range(6):
        own, labels, crowd, boxes, kinds, scores = random_image(rng, 2, 2)
        areas = own[:, 2] * own[:, 3]
        row = (image, scores, kinds, boxes[:, 2] * boxes[:, 3], labels, areas, crowd, box_overlaps(boxes, own, crowd), crowd)
        whole.add(*row)
        parts[image % 2].add(*row)
    joined = Matches.join([part.arrays() for part in parts])
    assert summarize_precision(joined, 2) == summarize_precision(whole, 2)
    assert summarize_precision(Matches(), 2)["ap"] is None
