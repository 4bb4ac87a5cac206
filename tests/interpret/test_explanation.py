"""`vitrail.explain`: predictions and maps of images, and one sentence for what cannot be explained."""

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.small import structures
from vitrail.data.datasets.lookup import open_source
from vitrail.errors import UserError
from vitrail.interpret.explanation import class_index
from vitrail.models.registry import build


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Two of the bundled photographs as files."""
    folder, source = tmp_path_factory.mktemp("photographs"), open_source("pets", "test")
    for index in (0, 20):
        (folder / f"{index}.jpg").write_bytes(source.encoded(index))
    return folder


def test_explanations_have_the_predictions_of_predict(photographs):
    model = vitrail.load("vitrail_tiny")
    explanations = vitrail.explain(model, photographs, ["evidence", "rollout", "input_gradient", "attention:3:1"], top=3)
    predictions = vitrail.predict(model, photographs, top=3)
    for explanation, prediction in zip(explanations, predictions, strict=True):
        assert explanation.prediction.image == prediction.image
        assert [c.name for c in explanation.prediction.classes] == [c.name for c in prediction.classes]
        assert explanation.prediction.probability == pytest.approx(prediction.probability, abs=1e-5)
        assert explanation.target == explanation.prediction.classes[0]
        assert list(explanation.maps) == ["evidence", "rollout", "input_gradient", "attention:3:1"]
        for values in explanation.maps.values():
            assert values.dtype == np.float32
            assert values.shape == model.grid
            assert values.min() >= 0
    pixels = model.preprocess(str(photographs / "0.jpg"))[0]
    mean, std = (torch.tensor(value)[:, None, None] for value in (model.preprocessing.mean, model.preprocessing.std))
    shown = torch.from_numpy(explanations[0].image).permute(2, 0, 1) / 255
    assert (shown - (pixels * std + mean)).abs().max() < 0.003


def test_a_class_can_be_chosen(photographs):
    names = vitrail.load("vitrail_tiny").class_names
    first, second = vitrail.explain("vitrail_tiny", photographs, ["evidence"], classes=[names[7].upper(), 3])
    assert (first.target.index, second.target.index) == (7, 3)
    same = vitrail.explain("vitrail_tiny", photographs / "0.jpg", ["evidence"], classes=7)[0]
    assert np.allclose(same.maps["evidence"], first.maps["evidence"], atol=1e-5)


def test_images_of_explanations_are_what_the_patches_cover():
    model = build(structures()["deit_tiny_patch16"].replace(image_size=(44, 60), patch_size=16))
    (explanation,) = vitrail.explain(model, Image.new("RGB", (60, 44), "red"), ["attention"])
    assert explanation.maps["attention"].shape == (2, 3)
    assert explanation.image.shape == (32, 48, 3)


def test_class_names_that_differ_in_case():
    model = build(structures()["deit_tiny_patch16"])
    model.class_names = ["Polish", "polish", "POLISH", "a", "b"]
    assert [class_index(model, name) for name in ("polish", "Polish", "POLISH", "pOLISH", "B")] == [1, 0, 2, 0, 4]


def test_the_default_method_is_the_best_one(photographs):
    model = build(structures()["cait_xxs24"])
    (explanation,) = vitrail.explain(model, Image.new("RGB", (40, 30), "red"))
    assert list(explanation.maps) == ["class_attention"]
    assert len(explanation.prediction.classes) == 5


def test_what_cannot_be_explained(photographs, tmp_path):
    (tmp_path / "page.jpg").write_text("<html>")
    model = build(structures()["deit_tiny_patch16"])
    for images, message in [
        (tmp_path / "nothing.jpg", "nothing.jpg cannot be read: no such file"),
        (tmp_path / "page.jpg", "page.jpg cannot be read: "),
    ]:
        with pytest.raises(UserError, match=message):
            vitrail.explain(model, images)
    image = photographs / "0.jpg"
    for options, message in [
        ({"classes": "zebra"}, "no class 'zebra': give the name of one of its classes, such as 'class 0', or a number"),
        ({"classes": 5}, "no class 5: it has 5 classes"),
        ({"classes": [1, 2]}, "2 classes for 1 images"),
        ({"methods": ["attention:9"]}, "Layer 9 does not exist"),
    ]:
        with pytest.raises(UserError, match=message):
            vitrail.explain(model, image, **options)
    with pytest.raises(UserError, match="no class 'egyptian cat': give the name of one of its classes, such as"):
        vitrail.explain("vitrail_tiny", image, classes="egyptian cat")
    with pytest.raises(UserError, match="no classifier, so there is no class to explain: train one with"):
        vitrail.explain(build(structures()["deit_tiny_patch16"].replace(classes=0)), image, classes=1)
    with pytest.raises(UserError, match="no classifier, and its last layer no attention to show instead: train a classifier"):
        vitrail.explain(build(structures()["resmlp_s12"].replace(classes=0)), image)


def test_weights_without_a_classifier(photographs):
    model = build(structures()["deit_tiny_patch16"].replace(classes=0))
    first, second = vitrail.explain(model, photographs)
    assert (first.target, first.prediction.classes, first.prediction.image) == (None, [], str(photographs / "0.jpg"))
    assert list(first.maps) == ["attention"]
    assert np.abs(first.maps["attention"] - second.maps["attention"]).max() > 1e-6
