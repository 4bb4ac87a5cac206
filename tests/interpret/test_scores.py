"""Scores of maps: each against its definition, and methods against baselines on images whose objects are known."""

import numpy as np
import pytest
import torch

from tests.images import make_masked_folder
from tests.interpret.test_recording import recorded
from tests.models.test_trace import TINY
from vitrail.data.datasets.lookup import open_sources
from vitrail.data.mask_classes import MaskClasses, make_classes
from vitrail.errors import UserError
from vitrail.evaluation.statistics import summarize
from vitrail.interpret import scores
from vitrail.interpret.scores import MEASURES, foreground_table, keep_object, probability_curve, score_maps, score_methods
from vitrail.models.registry import build


def test_pointing_and_iou():
    """A map of 2 x 3 patches of 16 pixels; the object fills the right third of the first image and two patches of the second."""
    recording, _, _ = recorded(TINY)
    maps = torch.zeros(2, 2, 3)
    maps[0, 0, 2], maps[0, 1, 2], maps[1, 0, 0] = 2, 1, 1
    masks = torch.zeros(2, 32, 48, dtype=torch.uint8)
    masks[0, :, 32:], masks[1, 16:, :] = 1, 1
    masks[:, :2] = 255
    found = score_maps(recording, maps, masks, recording.logits.argmax(1))
    assert found[:, 0].tolist() == [1, 0]
    values = torch.nn.functional.interpolate(maps[:, None], (32, 48), mode="bilinear")[:, 0].numpy()
    for image in range(2):
        valid = masks[image].numpy() != 255
        covered = (values[image] > values[image][valid].mean()) & valid
        inside = masks[image].numpy() == 1
        assert float(found[image, 1]) == pytest.approx((covered & inside).sum() / (covered | inside).sum(), abs=1e-6)


def test_pixels_without_a_patch_have_no_relevance():
    """Images of 40 x 60 pixels have 2 x 3 patches of 16; the first has its object in the rest, the second in a patch."""
    recording, _, _ = recorded(TINY.replace(image_size=(40, 60)))
    maps, masks = torch.zeros(2, 2, 3), torch.zeros(2, 40, 60, dtype=torch.uint8)
    maps[:, 1, 2] = 1
    masks[0, 32:], masks[0, :, 48:], masks[1, 16:32, 32:48] = 1, 1, 1
    found = score_maps(recording, maps, masks, recording.logits.argmax(1))
    assert found[:, 0].tolist() == [0, 1]
    assert found[0, 1] == 0
    assert found[1, 1] > 0.3


def test_equally_relevant_pixels_point_by_their_share():
    """A plateau of two patches, of which one is an object, and a map of zeros; the object is the right half."""
    recording, _, _ = recorded(TINY.replace(image_size=(16, 64)))
    maps = torch.zeros(2, 1, 4)
    maps[0, 0, 1:3] = 0.7
    masks = torch.zeros(2, 16, 64, dtype=torch.uint8)
    masks[:, :, 32:] = 1
    found = score_maps(recording, maps, masks, recording.logits.argmax(1))
    assert found[:, 0].tolist() == [0.5, 0.5]


def test_curves_hide_and_show_the_most_relevant_patches_first():
    recording, model, images = recorded(TINY)
    maps = torch.tensor([[[0.5, 0.1, 0.9], [0.2, 0.3, 0.4]]]).expand(2, -1, -1)
    order = [2, 0, 5, 4, 3, 1]
    classes = torch.tensor([3, 1])

    def probability(hidden):
        changed = images.clone()
        for patch in hidden:
            changed[..., patch // 3 * 16 : patch // 3 * 16 + 16, patch % 3 * 16 : patch % 3 * 16 + 16] = 0
        with torch.no_grad():
            return model(changed).softmax(1)[torch.arange(2), classes]

    deletion = torch.stack([probability(order[:count]) for count in range(7)], 1)
    insertion = torch.stack([probability(order[count:]) for count in range(7)], 1)
    torch.testing.assert_close(probability_curve(recording, maps, classes, False, 6), deletion, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(probability_curve(recording, maps, classes, True, 6), insertion, rtol=1e-4, atol=1e-6)


def test_equally_relevant_patches_are_hidden_in_a_fixed_random_order(monkeypatch):
    """Of 8 x 12 patches 12 are relevant, and hidden first; the others are all over the image at every step."""
    recording, _, _ = recorded(TINY.replace(patch_size=4))
    maps = torch.zeros(2, 8, 12)
    maps[:, 7] = 1
    seen = []
    monkeypatch.setattr(scores, "predict_logits", lambda _, images: seen.append(images[0, 0] == 0) or torch.zeros(2, 5))
    for _ in range(2):
        probability_curve(recording, maps, torch.tensor([3, 1]), False, 8)
    assert torch.equal(torch.stack(seen[:8]), torch.stack(seen[8:]))
    hidden = torch.stack(seen[:8])[:, ::4, ::4]
    assert hidden.sum((1, 2)).tolist() == [12, 24, 36, 48, 60, 72, 84, 96]
    assert hidden[0, 7].all()
    left, upper = hidden[3, :7, :6].float().mean(), hidden[3, :3].float().mean()  # 36 of 84: 43 %
    assert 0.3 < left < 0.56
    assert 0.3 < upper < 0.56


@pytest.fixture(scope="module")
def boxes(tmp_path_factory):
    return make_masked_folder(tmp_path_factory.mktemp("boxes"), 12, (48, 32), ("background", "red", "blue"))


def test_a_method_that_finds_the_objects_is_better_than_the_baselines(boxes):
    """A linear classifier of the mean of the patches, whose evidence is the red channel, trained by nothing."""
    model = build(TINY.replace(depth=1, pooling="mean", pos_embed="none", patch_size=4, classes=2)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.norm.weight.fill_(1)
        model.stem.proj.weight.copy_(torch.randn(model.stem.proj.weight.shape, generator=torch.Generator().manual_seed(0)) / 16)
        tokens = {}
        for name, color in {"red": (2.0, -1.5, -1.2), "gray": (0.0, 0.1, 0.3)}.items():
            image = torch.tensor(color)[None, :, None, None].expand(1, 3, 32, 48)
            tokens[name] = model.features(image).tokens[0, 0]
        model.head.weight[1] = tokens["red"] - tokens["gray"]
        model.head.bias[1] = 100  # always predicted
    scores = {each.method: each for each in score_methods(model, open_sources(str(boxes))["train"], ["evidence"], images=12)}
    assert list(scores) == ["evidence", "center", "random"]
    assert scores["evidence"].n == 12
    assert scores["evidence"].pointing == 1.0
    assert scores["evidence"].pointing_interval[0] == pytest.approx(0.757, abs=0.01)  # Wilson: 12 of 12
    assert scores["evidence"].iou.low > scores["random"].iou.high
    assert scores["evidence"].iou.mean > scores["center"].iou.mean
    difference = scores["evidence"].to_center["iou"]
    assert difference.mean == pytest.approx(scores["evidence"].iou.mean - scores["center"].iou.mean)
    assert difference.low > 0
    assert all(each == summarize([0.0] * 12) for each in scores["center"].to_center.values())
    assert not any(map(scores["center"].exceeds_center, MEASURES))
    lower = scores["center"]._replace(to_center=dict.fromkeys(MEASURES, summarize([-0.2, -0.1, -0.15])))
    assert [measure for measure in MEASURES if lower.exceeds_center(measure)] == ["deletion"]
    assert scores["evidence"].to_dict()["to_center"]["insertion"]["n"] == 12


def test_only_the_object_of_the_predicted_class_counts():
    """Where the image has it: of the second, all objects are kept. Ignored pixels stay ignored."""
    indices = torch.tensor([[[0, 1, 2, 255]], [[0, 1, 1, 255]], [[0, 1, 2, 255]]])
    masks = torch.tensor([[[0, 1, 1, 255]], [[0, 1, 1, 255]], [[0, 1, 1, 255]]], dtype=torch.uint8)
    kept = keep_object(masks, indices, torch.tensor([2, 2, -1]))
    assert kept[:, 0].tolist() == [[0, 0, 1, 255], [0, 1, 1, 255], [0, 1, 1, 255]]


def test_mask_classes_are_found_by_the_name_of_the_predicted_class(boxes, monkeypatch):
    """Always predicted: "Blue", a mask class, then "background", which is no object, then no names."""
    model = build(TINY.replace(depth=1, pooling="mean", patch_size=4, classes=3)).eval()
    with torch.no_grad():
        model.head.bias[2] = 100
    seen = []
    monkeypatch.setattr(
        scores, "score_maps", lambda _, maps, masks, classes: seen.append(masks == 1) or torch.zeros(len(maps), 4)
    )
    found = []
    for names in (["a", "b", "Blue"], ["a", "b", "background"], None):
        model.class_names = names
        seen.clear()
        score_methods(model, open_sources(str(boxes))["train"], [], images=12)
        found.append(seen[0].clone())
    assert torch.equal(found[1], found[2])
    assert (found[0] <= found[1]).all()
    assert found[0].flatten(1).sum(1).lt(found[1].flatten(1).sum(1)).any()


def test_which_pixels_are_objects():
    trimap = foreground_table(MaskClasses(("class 1", "class 2", "class 3"), (1, 2, 3)), "pets")
    assert trimap[:4].tolist() == [1, 0, 255, 255]
    named = foreground_table(make_classes({0: "Background", 1: "cat", 2: "dog"}), "voc")
    assert named[[0, 1, 2, 255]].tolist() == [0, 1, 1, 255]
    numbered = foreground_table(make_classes({0: "class 0", 5: "class 5"}), "masks")
    assert numbered[:2].tolist() == [0, 1]
    with pytest.raises(UserError, match="The masks of streets have no class named background"):
        foreground_table(make_classes({0: "road", 1: "car"}), "streets")


def test_data_without_masks_or_objects(tmp_path):
    model = build(TINY).eval()
    with pytest.raises(UserError, match="mask"):
        score_methods(model, open_sources("digits")["train"], ["rollout"], images=2)
    empty = make_masked_folder(tmp_path / "empty", 3, (48, 32), ("background",))
    with pytest.raises(UserError, match=r"None of the 3 images of .* has a mask with an object"):
        score_methods(model, open_sources(str(empty))["train"], ["rollout"], images=3)
    assert np.isfinite(
        score_methods(
            model,
            open_sources(str(make_masked_folder(tmp_path / "full", 3, (48, 32), ("background", "a"))))["train"],
            ["rollout"],
            3,
        )[0].iou.mean
    )
