"""Boxes: overlaps, offsets and NMS against definitions in float64, and torchvision's operators on a GPU."""

import pytest
import torch

from vitrail.heads.boxes import ROUNDS, box_iou, clip_boxes, covered_share, decode_boxes, encode_boxes, nms, suppress


def random_boxes(count, seed=0, side=100.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    start = torch.rand(count, 2, generator=generator, dtype=dtype) * side
    return torch.cat([start, start + torch.rand(count, 2, generator=generator, dtype=dtype) * side / 2], 1)


def slow_iou(a, b):
    width, height = (max(0.0, float(min(a[i + 2], b[i + 2]) - max(a[i], b[i]))) for i in (0, 1))
    areas = [float((box[2] - box[0]) * (box[3] - box[1])) for box in (a, b)]
    return width * height / max(sum(areas) - width * height, 1e-9)


def slow_nms(boxes, scores, threshold):
    kept = []
    for index in sorted(range(len(boxes)), key=lambda index: -scores[index]):
        if all(slow_iou(boxes[index], boxes[other]) <= threshold for other in kept):
            kept.append(index)
    return kept


def test_overlaps():
    first, second = random_boxes(7), random_boxes(5, 1)
    wanted = torch.tensor([[slow_iou(a, b) for b in second] for a in first], dtype=torch.float64)
    torch.testing.assert_close(box_iou(first, second), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(box_iou(torch.stack([first] * 2), torch.stack([second] * 2))[1], wanted)
    inside, outside = torch.tensor([[10.0, 10, 20, 20]]), torch.tensor([[0.0, 0, 40, 15]])
    assert covered_share(inside, outside).item() == 0.5
    empty = torch.tensor([[5.0, 5, 5, 5]])
    assert box_iou(empty, empty).item() == 0


@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.7])
def test_nms_is_that_of_the_definition(threshold):
    for seed in range(4):
        boxes, scores = random_boxes(60, seed), torch.rand(60, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        assert nms(boxes, scores, threshold).tolist() == slow_nms(boxes, scores.tolist(), threshold)


def test_long_chains_and_groups():
    """Each box overlaps the next: every second one is kept, which takes a round each."""
    count = 2 * ROUNDS + 9
    start = torch.arange(count, dtype=torch.float64) * 4
    chain = torch.stack([start, torch.zeros_like(start), start + 10, torch.full_like(start, 10.0)], 1)
    wanted = [index % 2 == 0 for index in range(count)]
    assert suppress(chain, 0.4).tolist() == wanted
    assert suppress(torch.stack([chain, chain + 1000]), 0.4).tolist() == [wanted] * 2
    same, scores = torch.tensor([[0.0, 0, 10, 10]]).repeat(4, 1), torch.tensor([0.1, 0.9, 0.5, 0.9])
    assert nms(same, scores, 0.5).tolist() == [1]
    assert nms(same, scores, 0.5, torch.tensor([0, 0, 1, 1])).tolist() == [1, 3]
    assert nms(same[:0], scores[:0], 0.5).tolist() == []


def test_offsets_are_inverted():
    boxes, anchors = (random_boxes(20, seed) + torch.tensor([0, 0, 5, 5]) for seed in (0, 5))  # no growth above the limit
    weights = (10.0, 10.0, 5.0, 5.0)
    torch.testing.assert_close(decode_boxes(encode_boxes(boxes, anchors, weights), anchors, weights), boxes)
    clipped = clip_boxes(torch.tensor([[-5.0, 3, 50, 70]]), 40, 30)
    assert clipped.tolist() == [[0, 3, 30, 40]]


@pytest.mark.gpu
@pytest.mark.parametrize("threshold", [0.3, 0.7])
def test_nms_is_torchvisions(threshold):
    operators = pytest.importorskip("torchvision.ops")
    boxes, scores = random_boxes(2000, dtype=torch.float32).cuda(), torch.rand(2000, device="cuda")
    order = scores.argsort(descending=True)
    for exact in (True, False):
        kept = order[suppress(boxes[order], threshold, exact)]
        assert torch.equal(kept, operators.nms(boxes, scores, threshold))
