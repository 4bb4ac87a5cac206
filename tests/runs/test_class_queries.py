"""From one query to a query per class, as PatchConvNet is fine-tuned."""

import pytest
import torch

import vitrail
from tests.models.test_every_model import randomize
from tests.small import shrink
from vitrail.errors import UserError
from vitrail.models.registry import build, model_pages
from vitrail.recipes import lookup
from vitrail.runs.initial_model import build_initial, open_pretrained

NAMES = list("abcde")


def save_single(folder, **changes):
    architecture = shrink(model_pages()["patchconvnet_s60"].MODELS["patchconvnet_s60"]).replace(**changes)
    model = randomize(build(architecture, "patchconvnet_s60")).eval()
    model.class_names = NAMES
    return model, str(vitrail.save(model, folder / "single.safetensors"))


def convert(weights, names, size=(32, 48)):
    recipe = lookup("patchconvnet_s60_to_multi").set({"init.weights": weights, "augmentation.image_size": list(size)})
    return build_initial(recipe, names, open_pretrained(recipe)).eval()


def test_every_class_starts_as_the_single_query(tmp_path):
    """Without a key of the query itself the predictions are exactly those of the single query."""
    single, weights = save_single(tmp_path, pooling_keys="patches")
    model = convert(weights, NAMES)
    assert (model.architecture.pooling, model.architecture.pooling_keys) == ("per_class", "patches")
    assert model.pooling.queries.shape == (5, 64)
    images = torch.randn(2, 3, 32, 48)
    with torch.no_grad():
        torch.testing.assert_close(model(images), single(images), rtol=1e-4, atol=1e-5)


def test_the_key_of_the_query_is_all_that_changes(tmp_path):
    """The released single query attends to itself too: without this key, the softmax is over the patches alone."""
    single, weights = save_single(tmp_path)
    model, images = convert(weights, NAMES), torch.randn(2, 3, 32, 48)
    single.pooling.blocks[0].attention.keys = "patches"
    with torch.no_grad():
        torch.testing.assert_close(model(images), single(images), rtol=1e-4, atol=1e-5)


def test_other_classes_have_the_query_and_a_new_classifier(tmp_path):
    single, weights = save_single(tmp_path)
    model = convert(weights, ["x", "y"])
    assert torch.equal(model.pooling.queries, single.pooling.queries.expand(2, -1))
    assert model.head.weight.shape == (2, 64)


def test_other_poolings_are_not_converted(tmp_path):
    _, weights = save_single(tmp_path, pooling="mean")
    with pytest.raises(UserError, match="has pooling=mean, but pooling=per_class was requested"):
        convert(weights, NAMES)
