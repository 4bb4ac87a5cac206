"""The classifier that a fine-tuning starts with, fitted to the features of frozen weights."""

import pytest
import torch
from torch.nn import functional as F

import vitrail
from tests.images import make_folder
from vitrail.data.datasets.lookup import open_sources
from vitrail.data.image_loader import ImageLoader
from vitrail.evaluation.probes.linear import fit
from vitrail.tasks.probe_head import WEIGHT_DECAYS, fit_classifier, fit_head

CPU = torch.device("cpu")


def noisy_features(count, seed):
    """Four classes, features [N, 16] with so much noise that about three quarters can be classified."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 4
    return F.one_hot(labels, 16) * 2.0 + torch.randn(count, 16, generator=generator), labels


def test_the_weight_decay_has_the_lowest_loss_on_other_images():
    vectors, labels = noisy_features(800, 0)
    others, theirs = noisy_features(4000, 1)
    fitted = fit_classifier(vectors, labels, 4, seed=0)
    probabilities = fitted.logits(others).softmax(1)
    confidence, accuracy = probabilities.max(1).values.mean(), (probabilities.argmax(1) == theirs).float().mean()
    assert accuracy > 0.7
    assert confidence == pytest.approx(float(accuracy), abs=0.03)  # calibrated
    losses = [F.cross_entropy(fit(vectors, labels, 4, each).logits(others), theirs) for each in WEIGHT_DECAYS]
    assert F.cross_entropy(fitted.logits(others), theirs) < min(losses) + 0.01
    assert losses[0] > min(losses) + 0.2  # the strongest has the same accuracy and far too low probabilities


@pytest.fixture
def colors(tmp_path):
    folder = make_folder(tmp_path / "colors", count=6)
    return ImageLoader(open_sources(folder)["train"], CPU, 0)


def test_a_classifier_of_zeros_is_fitted_to_the_images(colors):
    model = vitrail.create("vitrail_mini", classes=3, image_size=(16, 16), patch_size=4)
    torch.nn.init.zeros_(model.head.weight)
    assert fit_head(model, colors, 8, seed=0) == ["the classifier is fitted to the features of 18 training images"]
    images = torch.cat([model.preprocess(colors.source.location(index)) for index in range(18)])
    with torch.inference_mode():
        assert model.eval()(images).argmax(1).tolist() == colors.source.label.values.tolist()


def test_other_classifiers_are_left_as_they_are(colors):
    model = vitrail.create("vitrail_mini", classes=3, image_size=(16, 16), patch_size=4)
    before = torch.nn.init.ones_(model.head.weight).clone()
    assert fit_head(model, colors, 8, seed=0) == []
    assert torch.equal(model.head.weight, before)
