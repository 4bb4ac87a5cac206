"""The closed-form head and k-NN, compared with references from their formulas."""

import numpy as np
import pytest
import torch

import vitrail
from tests.images import make_masked_folder
from vitrail.data.datasets.lookup import open_sources
from vitrail.data.loader import ImageReader
from vitrail.data.mask_classes import numbered_classes
from vitrail.errors import UserError
from vitrail.evaluation import dense_probe
from vitrail.evaluation.dense_probe import (
    LabeledImage,
    Memory,
    attach_ridge,
    cross_validate,
    extract,
    fit_ridge,
    patch_targets,
    probe_config,
    read_labeled,
)
from vitrail.evaluation.mean_iou import count_pixels, summarize_pixels
from vitrail.evaluation.semantic_masks import Protocol, normalize, predict_classes, predict_logits


def random_images(count=3, classes=4, width=6):
    generator = torch.Generator().manual_seed(0)
    images = []
    for _ in range(count):
        targets = torch.rand(classes, 5, 4, generator=generator)
        targets[:, 0] = 0  # ignored patches
        targets = targets / targets.sum(0).clamp(min=1) * torch.rand(1, 5, 4, generator=generator)
        images.append(LabeledImage(torch.randn(width, 5, 4, generator=generator), targets, torch.zeros(1)))
    return images


def test_ridge_is_the_weighted_least_squares_solution(monkeypatch):
    monkeypatch.setattr(dense_probe, "FACTORS", (1.0,))
    images = random_images()
    x = np.concatenate([image.features.flatten(1).T.numpy() for image in images]).astype(np.float64)
    y = np.concatenate([image.targets.flatten(1).T.numpy() for image in images]).astype(np.float64)
    frequency = y.sum(0) / y.sum()
    sample = y @ frequency**-0.5
    y = y / np.maximum(y.sum(1, keepdims=True), 1e-9)
    mean, target = (sample @ x) / sample.sum(), (sample @ y) / sample.sum()
    centered, root = x - mean, np.sqrt(sample / sample.sum())[:, None]
    penalty = 1e-3 * np.mean(((root * centered) ** 2).sum(0))
    # Ridge regression as least squares with additional rows.
    rows = np.concatenate([root * centered, np.sqrt(penalty) * np.eye(x.shape[1])])
    right = np.concatenate([root * (y - target), np.zeros((x.shape[1], y.shape[1]))])
    expected = np.linalg.lstsq(rows, right, rcond=None)[0]
    weights, biases = fit_ridge(images)
    np.testing.assert_allclose(weights.numpy(), expected.T, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(biases.numpy(), target - mean @ expected, rtol=1e-4, atol=1e-6)


def test_the_scale_of_the_scores_does_not_change_the_classes(monkeypatch):
    images = random_images()
    scaled = fit_ridge(images)
    monkeypatch.setattr(dense_probe, "FACTORS", (1.0,))
    plain = fit_ridge(images)
    factor = scaled[0].norm() / plain[0].norm()
    assert factor > 1.5  # shares are much smaller than logits
    torch.testing.assert_close(scaled[1], factor * plain[1])


def test_targets_are_the_shares_of_the_pixels():
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 255]], dtype=torch.uint8).repeat_interleave(8, 0).repeat_interleave(8, 1)
    targets = patch_targets(mask, 2, (1, 2))
    assert targets[:, 0].tolist() == [[0.75, 0.0], [0.25, 0.75]]


def test_neighbors_vote():
    images = random_images(2)
    memory = Memory.of(images)
    assert len(memory.features) == 2 * 16  # without ignored patches
    # A patch of the memory has itself as its nearest neighbor.
    scores = memory.predict(images[0].features)
    similarity = torch.nn.functional.normalize(images[0].features[:, 2, 1], dim=0) @ memory.features.T
    values, index = similarity.topk(10)
    expected = (values / 0.1).softmax(0) @ memory.targets[index]
    torch.testing.assert_close(scores[0, :, 2, 1], expected)


@pytest.mark.parametrize(("name", "message"), [("resnet18", "no transformer blocks"), ("resmlp_s12", "one size only")])
def test_networks_of_other_kinds_are_refused(name, message):
    with pytest.raises(UserError, match=f"{name} .*{message}"):
        probe_config(vitrail.create(name, 0, 64), numbered_classes([0, 1]), 64)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    source = open_sources(make_masked_folder(tmp_path_factory.mktemp("boxes"), 10, (48, 40)))["train"]
    model = vitrail.load("vitrail_tiny")
    config = probe_config(model, source.mask_classes, 160)
    return source, model, config, read_labeled(model, source, config)[0]


def test_it_learns_and_the_head_is_the_fit(fitted):
    source, model, config, images = fitted
    assert config.blocks == (3, 6, 10)
    assert cross_validate(images[:1], config.class_names, "ridge") is None
    for method in ("ridge", "knn"):
        found = cross_validate(images, config.class_names, method)
        assert found["miou"] > 0.6, method
        assert found["folds"] == 4
    attach_ridge(model, config, images)
    pixels, mask = ImageReader(source, None, masks=True).read_image(0)
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    weights, biases = fit_ridge(images)
    with torch.no_grad():
        features = extract(model, image, config)
        logits = predict_logits(model, normalize(model, image, (160, 192)))
    expected = torch.einsum("cd,bdhw->bchw", weights, features) + biases[:, None, None]
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    predicted = predict_classes(model, image, Protocol.of(config))
    assert summarize_pixels(count_pixels(torch.from_numpy(mask)[None], predicted, 3))["miou"] > 0.7
