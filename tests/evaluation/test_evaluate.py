"""Evaluation of a model on a source."""

import json

import numpy as np
import pytest
import torch

import vitrail
from tests.images import make_folder, write_invalid_image
from vitrail.data.class_matching import match_classes
from vitrail.data.datasets.lookup import open_source, open_splits
from vitrail.data.source import Labels, Subset
from vitrail.errors import UserError
from vitrail.evaluation.accuracy import count_hits, summarize
from vitrail.evaluation.evaluate import (
    EvaluationOptions,
    HeldOut,
    Scores,
    adapt_model,
    calibrate,
    collect_scores,
    open_evaluation_data,
    open_loader,
    summarize_scores,
    sweep_sizes,
)
from vitrail.evaluation.model import single_head

NAMES = ["blue", "green", "red"]  # in the order that a folder gives them


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("colors"), NAMES, 6, (20, 16))


@pytest.fixture(scope="module")
def source(folder):
    return open_source(str(folder))


def small(classes=10, distilled=False, **changes):
    torch.manual_seed(0)
    name = "deit_tiny_distilled_patch16" if distilled else "deit_tiny_patch16"
    model = vitrail.create(name, classes, 16, patch_size=4, width=16, depth=1, heads=2, **changes)
    for parameter in model.parameters():  # the usual start answers almost nothing
        torch.nn.init.normal_(parameter, std=0.3)
    model.class_names = ([*NAMES, *(f"other {place}" for place in range(classes))])[:classes]
    return model.eval()


def compute(model, source, among="subset", head="both", **options):
    matching = match_classes(model.class_names, model.architecture.classes, source.classes)
    with open_loader(model, source, 0) as image_loader:
        return collect_scores(model, image_loader, matching, EvaluationOptions(among, head, **options)), matching


def test_accuracy_equals_that_of_the_trainer(source):
    model = small(3)
    scores, matching = compute(model, source, batch_size=4)
    found = summarize_scores(scores, matching, "colors", "everything")
    with open_loader(model, source, 0) as image_loader:
        hits = summarize(count_hits(model, image_loader, model.preprocessing, 5), 3)
    assert found.top1 == pytest.approx(hits.top1)
    assert found.loss == pytest.approx(hits.loss, rel=1e-5)
    assert (found.images, found.unreadable, found.unlabeled, found.top5) == (18, 0, 0, None)  # top-5 of three says nothing
    assert found.top1_error == pytest.approx((found.top1 * (1 - found.top1) / 18) ** 0.5)
    assert found.mean_per_class == pytest.approx(np.mean([each["top1"] for each in found.per_class]))
    json.dumps(found.to_dict(), allow_nan=False)


def test_among_a_few_classes_or_all(source):
    model = small()
    few, matching = compute(model, source)
    every, _ = compute(model, source, "all")
    assert (few.values.shape, every.values.shape) == ((18, 3), (18, 10))
    assert torch.equal(every.values[:, :3], few.values)
    among = summarize_scores(few, matching, "s", "test"), summarize_scores(every, matching, "s", "test", "all")
    assert among[0].top1 >= among[1].top1
    assert among[0].loss < among[1].loss
    assert (among[0].top5, among[0].confusion["names"]) == (None, NAMES)
    assert among[1].top5 is not None
    assert among[1].confusion["names"] == [*NAMES, "(another class)"]
    assert sum(map(sum, among[1].confusion["matrix"])) == 18


def test_the_heads_of_a_distilled_model(source):
    model = small(3, distilled=True)
    both, main, other = (compute(model, source, head=head)[0].values for head in ("both", "class", "distillation"))
    assert torch.allclose(both, (main + other) / 2, atol=1e-5)
    assert not torch.allclose(main, other)
    with pytest.raises(UserError, match="has no distillation head"):
        compute(small(3), source, head="distillation")
    assert torch.equal(compute(small(3), source, head="class")[0].values, compute(small(3), source)[0].values)


def test_the_fusion_of_a_model_is_restored():
    model = small(3, distilled=True)
    with single_head(model, "distillation"):
        assert model.architecture.fusion == "distillation"
    assert model.architecture.fusion == "logit_mean"


def test_unreadable_and_unlabeled_images(tmp_path):
    make_folder(tmp_path, NAMES, 2)
    write_invalid_image(tmp_path / "red" / "bad.png")
    source = open_source(str(tmp_path))
    some = Subset(source, np.arange(len(source)))
    values = source.label.values.copy()
    values[0] = -1
    some.label = Labels(values, source.label.names)
    scores, matching = compute(small(3), some)
    found = summarize_scores(scores, matching, "s", "test", valid_labels=[frozenset([0, 1, 2])] * len(source))
    assert (found.images, found.unreadable, found.unlabeled) == (5, 1, 1)
    assert found.multilabel == (1.0, 6, 0)
    some.label = Labels(np.full(len(source), -1), source.label.names)
    scores, matching = compute(small(3), some)
    with pytest.raises(UserError, match="has a label"):
        summarize_scores(scores, matching, "s", "test")
    bad = Subset(source, np.array([index for index in range(len(source)) if "bad" in source.location(index)]))
    with pytest.raises(UserError, match="could be read"):
        compute(small(3), bad)
    with pytest.raises(UserError, match="contains no images"):
        compute(small(3), Subset(source, np.zeros(0, dtype=np.int64)))


def test_nan_weights(source):
    model = small(3)
    model.head.weight.data[0] = torch.nan
    with pytest.raises(UserError, match="18 of 18 images are NaN or Inf"):
        compute(model, source)


def made(count, seed):
    rng = np.random.default_rng(seed)
    values = torch.from_numpy(rng.normal(0, 4, (count, 5))).float()
    chances = (values / 3).softmax(1).double().numpy()
    label = np.array([rng.choice(5, p=row / row.sum()) for row in chances])
    return Scores(np.arange(count), label, values, count)


def test_the_temperature_comes_from_other_images():
    found = calibrate(made(2000, 0), made(2000, 1))
    assert found.temperature == pytest.approx(3, rel=0.1)
    assert found.fitted_on == "2,000 validation images"
    assert found.ece_after < found.ece / 3
    assert found.adaptive_ece_after < found.adaptive_ece
    assert sum(each.images for each in found.bins_after) == 2000


def test_without_other_images_each_half_calibrates_the_other():
    scores = made(2000, 0)
    found = calibrate(scores)
    assert found.temperature == pytest.approx(3, rel=0.1)
    assert "two halves" in found.fitted_on
    assert found.ece_after < found.ece / 3
    known = Scores(scores.image, scores.values.argmax(1).numpy(), scores.values, 2000)
    every = calibrate(known)  # every prediction is correct
    assert (every.temperature, every.ece_after, every.bins_after) == (None, None, None)
    assert "correct" in every.fitted_on
    assert "two halves" in calibrate(scores, known).fitted_on  # no temperature can be fitted on the others
    assert calibrate(Scores(scores.image[:1], scores.label[:1], scores.values[:1], 1)).temperature is None


def test_sizes_and_crops(source):
    model = small(3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    matching = match_classes(model.class_names, 3, source.classes)
    rows = list(
        sweep_sizes(
            model, source, matching, [(16, 16), (24, 24), (16, 24)], [0.8, 1.0], EvaluationOptions(batch_size=7, workers=0)
        )
    )
    assert [(row["size"], row["crop_ratio"]) for row in rows] == [
        (size, ratio) for size in ("16", "24", "16x24") for ratio in (0.8, 1.0)
    ]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert (model.preprocessing.image_size, model.preprocessing.crop_ratio) == ((16, 16), 0.875)
    # A row is what the model resized by hand gives.
    by_hand = small(3).resize(16, 24)
    by_hand.preprocessing = by_hand.preprocessing._replace(crop_ratio=0.8)
    with open_loader(by_hand, source, 0) as image_loader:
        hits = summarize(count_hits(by_hand, image_loader, by_hand.preprocessing, 5), 3)
    assert rows[4]["top1"] == pytest.approx(hits.top1)
    assert rows[4]["loss"] == pytest.approx(hits.loss, rel=1e-5)
    (own,) = sweep_sizes(model, source, matching, [], [], EvaluationOptions(workers=0))
    assert (own["size"], own["crop_ratio"]) == ("16", 0.875)


def test_invalid_sizes_and_crops():
    model = small(3)
    with pytest.raises(UserError, match=r"at most 1, not 1\.5"):
        adapt_model(model, None, 1.5)
    with pytest.raises(UserError, match="2"):
        adapt_model(model, (2, 2), None)
    model.preprocessing = model.preprocessing._replace(resize="square")
    with pytest.raises(UserError, match="not cropped"):
        adapt_model(model, None, 0.9)


def test_default_split(tmp_path, folder):
    digits = open_evaluation_data("digits")
    assert (digits.split, len(digits.source), digits.calibration) == ("test", 360, None)
    here = open_evaluation_data("digits", held_out=HeldOut(open_splits("digits").train.classes))
    assert len(here.calibration) == 142  # those that a training sets aside
    assert len(open_evaluation_data("digits", "val").source) == 142
    assert open_evaluation_data("digits", "val").source.location(0) == open_splits("digits").validation.location(0)
    assert len(open_evaluation_data(str(folder)).source) == 18
    assert open_evaluation_data(str(folder)).split == "everything"
    assert open_evaluation_data(str(folder), held_out=HeldOut(NAMES)).split == "validation"
    for split in ("train", "val", "test"):
        make_folder(tmp_path / split, NAMES, 2)
    parts = open_evaluation_data(str(tmp_path))
    assert (parts.split, "val" in parts.calibration.location(0)) == ("test", True)
    for fold in range(3):
        held_out = open_evaluation_data(str(folder), held_out=HeldOut(NAMES, fold=(fold, 3)))
        expected = open_splits(str(folder), fold=(fold, 3)).validation
        locations = [[source.location(each) for each in range(len(source))] for source in (held_out.source, expected)]
        assert locations[0] == locations[1]
        assert len(locations[0]) == 6
    assert len(open_evaluation_data(str(folder), held_out=HeldOut(NAMES, validation_fraction=0.5)).source) == 9
    with pytest.raises(UserError, match="no split called last"):
        open_evaluation_data("digits", "last")
    with pytest.raises(UserError, match="has no test split"):
        open_evaluation_data(str(folder), "test")
