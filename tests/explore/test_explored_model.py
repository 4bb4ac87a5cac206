"""Models in the explorer: every architecture can be shown, and what is shown equals the model's own computation."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from tests.explore.models import explored, small_model
from tests.small import structures
from vitrail.data import class_matching
from vitrail.errors import UserError
from vitrail.explore import explored_model
from vitrail.explore.explored_model import ExploredModel
from vitrail.interpret.maps import relevance_map
from vitrail.models.registry import build

IMAGE = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)


@pytest.mark.parametrize("name", structures())
def test_every_architecture_can_be_explored(name):
    model = ExploredModel(build(structures()[name]).eval(), name)
    opened = model.open("c0", lambda: IMAGE)
    described = json.loads(json.dumps(model.describe()))
    patches = model.grid[0] * model.grid[1]
    assert abs(sum(probability for _, _, probability in model.predictions(opened)) - 1) < 1e-4
    for layer in described["layers"]:
        maps, prefix = model.attention(opened, layer["layer"], patches - 1)
        assert maps.values.shape == (layer["heads"], patches)
        restored = maps.values / 255 * np.array(maps.peaks)[:, None]
        assert np.allclose(restored.sum(1) + prefix, 1, atol=patches / 255)
    for method in described["methods"]:
        assert model.relevance(opened, method["name"], 2).values.shape == (1, patches)
    patch_layers = [layer for layer in described["layers"] if not layer["pooling"]]
    assert bool(described["reason"]) == (not patch_layers)


def test_the_part_of_the_image_that_the_patches_cover_is_shown():
    model = ExploredModel(small_model(image_size=(44, 60), patch_size=16), "")
    described, opened = model.describe(), model.open("c0", lambda: IMAGE)
    assert (described["grid"], described["aspect"]) == ((2, 3), 1.5)
    width, height = Image.open(io.BytesIO(opened.view)).size
    assert width == pytest.approx(448 * 48 / 60, abs=1)
    assert height == pytest.approx(width / 1.5, abs=1)


def test_the_names_of_many_classes_are_listed_once(monkeypatch):
    lists = []
    monkeypatch.setattr(class_matching, "imagenet_titles", lambda: lists.append(list("abcd" * 250)) or lists[-1])
    model = ExploredModel(build(structures()["deit_tiny_patch16"].replace(classes=1000)), "")
    assert model.names == lists[0]
    assert len(lists) == 1


def test_attention_equals_the_trace_of_the_model():
    model = explored()
    opened = model.open("c0", lambda: IMAGE)
    attention = model.model.trace(opened.recording.images).layers[1].attention[0]  # [heads, 17, 17]
    for query, token in ((-1, 0), (0, 1), (15, 16)):
        maps, prefix = model.attention(opened, 1, query)
        row = attention[:, token].detach().numpy()
        assert np.allclose(maps.peaks, row[:, 1:].max(1), atol=1e-6)
        assert np.allclose(maps.values / 255 * np.array(maps.peaks)[:, None], row[:, 1:], atol=max(maps.peaks) / 500)
        assert np.allclose(prefix, row[:, 0], atol=1e-6)
    with pytest.raises(UserError, match="There is no patch 16"):
        model.attention(opened, 1, 16)
    with pytest.raises(UserError, match="no attention"):
        model.attention(opened, 9, 0)


@pytest.mark.parametrize("pooling", ["class", "class_attention"])
def test_attention_of_the_distillation_token(pooling):
    """The second prefix token of the blocks, and the second query of a pooling."""
    model = explored("deit_tiny_distilled_patch16", pooling=pooling)
    opened, described = model.open("c0", lambda: IMAGE), model.describe()["layers"]
    layer = described[-1]["layer"]
    attention = model.model.trace(opened.recording.images).layers[layer].attention[0]
    assert described[-1]["tokens"] == ("class token", "distillation token")
    assert described[0]["tokens"] == (described[-1]["tokens"] if pooling == "class" else ())
    for query, token in ((-1, 0), (-2, 1)):
        maps, prefix = model.attention(opened, layer, query)
        row = attention[:, token].detach().numpy()
        assert np.allclose(maps.peaks, row[:, 2:].max(1), atol=1e-6)
        assert np.allclose(prefix, row[:, :2].sum(1), atol=1e-6)
    with pytest.raises(UserError, match="There is no patch -3"):
        model.attention(opened, layer, -3)


def test_maps_equal_those_of_interpret():
    model = explored()
    opened = model.open("c0", lambda: IMAGE)
    for method in model.methods:
        expected = relevance_map(model.model, opened.recording.images, method, torch.tensor([2])).flatten().detach().numpy()
        found = model.relevance(opened, method, 2)
        assert np.allclose(found.values[0] / 255 * found.peaks[0], expected, atol=max(expected.max() / 500, 1e-9))
    with pytest.raises(UserError, match="does not have this method or class"):
        model.relevance(opened, "rollout", 3)
    with pytest.raises(UserError, match="does not have this method or class"):
        model.relevance(opened, "attention:1", 0)


def test_recordings_are_bounded_by_number_and_size(monkeypatch):
    model, read = explored(), []

    def open_image(key):
        model.open(key, lambda: read.append(key) or IMAGE)

    monkeypatch.setattr(explored_model, "MAX_RECORDINGS", 2)
    for key in ("a", "b", "a", "c", "a", "b"):
        open_image(key)
    assert read == ["a", "b", "c", "b"]
    monkeypatch.setattr(explored_model, "RECORDED_BYTES", 1)
    open_image("d")
    assert list(model.opened) == ["d"]
    opened = model.opened["d"]
    before = opened.count_bytes()
    tokens = 4 * 17 * 32 * 3  # the inputs of three blocks
    assert before > tokens + opened.recording.images.nbytes + len(opened.view)
    model.relevance(opened, "rollout", -1)
    assert opened.count_bytes() == before + 16


def test_models_without_attention_say_why():
    for name, words in (("resmlp_s12", "linear layers over the patches: it has no attention"), ("resnet18", "convolutions")):
        described = explored(name).describe()
        assert words in described["reason"]
        assert described["layers"] == []
        assert [method["name"] for method in described["methods"]][-2:] == ["input_gradient", "occlusion"]


def test_models_without_a_classifier_show_attention():
    model = explored()
    model = ExploredModel(small_model().__class__(model.model.architecture.replace(classes=0)), "backbone")
    opened = model.open("c0", lambda: IMAGE)
    assert model.predictions(opened) == []
    assert "rollout" in model.methods
    assert model.relevance(opened, "rollout", -1).values.shape == (1, 16)


def test_damaged_weights_are_an_error():
    model = small_model()
    model.head.weight.data.fill_(torch.nan)
    with pytest.raises(UserError, match="NaN or Inf"):
        ExploredModel(model, "damaged")
