"""Maps of wrong predictions, as the reports of training and evaluation show them."""

import base64
import copy
import io

import numpy as np
import torch
from PIL import Image

import vitrail
from tests.interpret.trained import trained
from tests.small import structures
from tests.training.runs import make_run
from vitrail.data.datasets.lookup import open_source
from vitrail.interpret import mistakes
from vitrail.interpret.mistakes import draw_maps
from vitrail.layers.fused import optimize_for_training
from vitrail.models.registry import build
from vitrail.runs.report import write_report

WRONG = {"label": "cat", "prediction": "dog", "confidence": 0.9, "location": "a.jpg"}


def decode(text):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))


def test_every_image_has_a_map_of_its_prediction():
    model, source = vitrail.load("vitrail_tiny"), open_source("pets", "test")
    first, second, other = draw_maps(model, source, np.array([5, 40, 5]), np.array([3, -1, 90]))
    assert decode(first).shape == (96, 96, 3)
    assert decode(first).std() > 5
    assert (decode(first) != decode(other)).any()  # another class of the same image
    assert decode(second).shape == (96, 96, 3)
    assert model.training is False


def test_models_without_maps():
    features = build(structures()["resnet18"].replace(classes=0))
    assert draw_maps(features, open_source("digits", "test"), np.array([0]), np.array([-1])) == [""]
    assert (
        draw_maps(trained("resmlp"), open_source("digits", "test"), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
        == []
    )


def test_maps_of_a_model_with_compiled_blocks():
    """As at the end of a compiled training: the graph of compiled blocks has no gradients of what is inside of them."""
    torch._dynamo.reset()
    plain = trained("distilled")
    compiled = optimize_for_training(copy.deepcopy(plain))
    for block in compiled.blocks:
        block.compile(backend="aot_eager")  # needs no C++ compiler
    source, images, classes, messages = open_source("digits", "test"), np.array([3, 7]), np.array([2, -1]), []
    for checkpointing in (False, True):
        compiled.recompute = checkpointing
        assert draw_maps(compiled, source, images, classes, messages.append) == draw_maps(plain, source, images, classes)
    assert messages == []


def test_a_failure_costs_only_the_maps(monkeypatch):
    def fail(*_):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB.\nFurther lines.")

    monkeypatch.setattr(mistakes, "compute_map", fail)
    messages = []
    arguments = trained("distilled"), open_source("digits", "test"), np.array([3, 7]), np.array([2, 1])
    assert draw_maps(*arguments, messages.append) == ["", ""]
    assert messages == ["The mistakes are shown without maps: CUDA out of memory. Tried to allocate 2 GiB."]


def test_a_report_shows_images_with_and_without_a_map(tmp_path):
    text = draw_maps(trained("resmlp"), open_source("digits", "test"), np.array([1]), np.array([2]))[0]
    mistakes = [WRONG | {"image": text, "map": text}, WRONG | {"image": text}]
    page = write_report(make_run(tmp_path, mistakes=mistakes)).read_text()
    assert page.count('alt="map of the prediction"') == 1
