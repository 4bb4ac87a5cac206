"""Features: every kind of vector, with its labels."""

import numpy as np
import pytest
import torch

import vitrail
from tests.images import make_folder, write_invalid_image
from vitrail.data.datasets.lookup import open_source
from vitrail.data.image_loader import ImageLoader
from vitrail.data.source import Labels, Subset
from vitrail.evaluation.features import VECTORS, FeatureKind, embed
from vitrail.heads.embedding import EmbeddingConfig
from vitrail.models.config import Architecture
from vitrail.models.vision_transformer import VisionTransformer

SMALL = {"image_size": 16, "patch_size": 4, "width": 16, "depth": 2, "heads": 2}


def small(**changes):
    return VisionTransformer(Architecture(**(SMALL | {"classes": 3, "image_size": (16, 16)} | changes))).eval()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return open_source(str(make_folder(tmp_path_factory.mktemp("colors"), count=5, size=(20, 24))))


def images_of(model, source):
    image_loader = ImageLoader(source, workers=0, log=lambda sentence: None)
    (batch,) = image_loader.iterate(100)
    return model.preprocessing.apply(batch.pixels, batch.sizes)


def test_pooled_is_what_the_classifier_reads(source):
    model = small()
    found = embed(model, source, batch_size=4, workers=0)
    assert found.vectors.shape == (15, 16)
    assert found.vectors.dtype == torch.float32
    assert found.image.tolist() == list(range(15))
    assert found.labels.tolist() == source.label.values.tolist()
    with torch.no_grad():
        assert torch.allclose(found.vectors, model.features(images_of(model, source)).pooled, atol=1e-5)


def test_every_vector_against_the_parts_of_the_model(source):
    model = small(distillation=True, pre_logits=12).set_task_head(EmbeddingConfig("mlp", 6, 10)).eval()
    with torch.no_grad():
        images = images_of(model, source)
        features = model.features(images)
        raw, layout = model.encode(*model.embed(images))
        expected = {
            "pooled": features.prefix[:, 0],
            "class": features.prefix[:, 0],
            "distillation": features.prefix[:, 1],
            "mean": features.tokens.mean(1),
            "class_mean": torch.cat([features.prefix[:, 0], features.tokens.mean(1)], 1),
            "penultimate": model.pre_logits(features.pooled),
            "logits": model(images),
            "projected": model.task_head(features.pooled),
        }
        before = {"class": raw[:, 0], "distillation": raw[:, 1], "mean": raw[:, 2:].mean(1), "pooled": raw[:, 0]}
    assert set(expected) == set(VECTORS)
    assert layout.prefix == 2
    for name, vectors in expected.items():
        assert torch.allclose(embed(model, source, FeatureKind(name), workers=0).vectors, vectors, atol=1e-5), name
    for name, vectors in before.items():
        assert torch.allclose(embed(model, source, FeatureKind(name, before_norm=True), workers=0).vectors, vectors, atol=1e-5), (
            name
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"pooling": "mean"},
        {"pooling": "mean", "pool_norm": True},
        {"pooling": "class_attention", "pooling_depth": 1, "pooling_heads": 2},
        {"pooling": "per_class", "pooling_depth": 1, "pooling_heads": 2},
    ],
)
def test_other_poolings(source, changes):
    model = small(**changes)
    with torch.no_grad():
        images = images_of(model, source)
        pooled = model.features(images).pooled
        raw, layout = model.encode(*model.embed(images))
    pooled = pooled.mean(1) if changes["pooling"] == "per_class" else pooled
    assert torch.allclose(embed(model, source, workers=0).vectors, pooled, atol=1e-5)
    if changes["pooling"] == "mean":
        assert torch.allclose(embed(model, source, FeatureKind("mean"), workers=0).vectors, pooled, atol=1e-5)
        bare = embed(model, source, FeatureKind("mean", before_norm=True), workers=0).vectors
        assert torch.allclose(bare, raw[:, layout.prefix :].mean(1), atol=1e-5)
    with torch.no_grad():  # the norm of what comes before it is what comes after it
        bare = embed(model, source, FeatureKind(before_norm=True), workers=0).vectors
        if changes["pooling"] in ("class_attention",) or changes.get("pool_norm"):
            assert torch.allclose(model.norm(bare[:, None])[:, 0], pooled, atol=1e-5)


def test_unit_length_and_bfloat16(source):
    model = small()
    plain, unit = embed(model, source, workers=0), embed(model, source, FeatureKind(normalize=True), workers=0)
    assert torch.allclose(unit.vectors.norm(dim=1), torch.ones(15), atol=1e-6)
    assert torch.allclose(unit.vectors * plain.vectors.norm(dim=1, keepdim=True), plain.vectors, atol=1e-5)
    rough = embed(model, source, FeatureKind(bf16=True), workers=0).vectors
    assert rough.dtype == torch.float32
    assert 0 < (rough - plain.vectors).abs().max() < 0.1


def test_batch_size_workers_and_loader_do_not_change_features(source):
    model = small()
    one = embed(model, source, batch_size=100, workers=0)
    for other in (
        embed(model, source, batch_size=4, workers=2),
        embed(model, ImageLoader(source, workers=0, log=lambda sentence: None), batch_size=7),
    ):
        assert torch.allclose(other.vectors, one.vectors, atol=1e-5)
        assert torch.equal(other.image, one.image)
        assert torch.equal(other.labels, one.labels)


def test_further_labels_and_the_mode_of_the_model(source):
    some = Subset(source, np.array([3, 14, 7]))
    some.extra = {"coarse_label": Labels(np.array([1, -1, 0]), ["a", "b"])}
    model = small().train()
    counts = []
    found = embed(model, some, workers=0, batch_size=2, advance=counts.append)
    assert found.extra["coarse_label"].tolist() == [1, -1, 0]
    assert found.labels.tolist() == [0, 2, 1]
    assert model.training
    assert counts == [2, 1]
    picked = found.select(found.extra["coarse_label"] >= 0)
    assert (picked.image.tolist(), picked.labels.tolist()) == ([0, 2], [0, 1])


def test_unreadable_images_are_skipped_and_reported(tmp_path):
    make_folder(tmp_path, ["a", "b"], 2)
    write_invalid_image(tmp_path / "a" / "001.png")
    found = embed(small(), open_source(str(tmp_path)), workers=0)
    assert found.image.tolist() == [0, 2, 3]
    assert found.labels.tolist() == [0, 1, 1]
    assert [problem.location for problem in found.problems] == [str(tmp_path / "a" / "001.png")]
    for file in tmp_path.glob("*/*.png"):
        write_invalid_image(file)
    with pytest.raises(vitrail.UserError, match="No image of"):
        embed(small(), open_source(str(tmp_path)), workers=0)


def test_vectors_that_a_model_does_not_have(source):
    mean = small(pooling="mean", classes=0)
    for vector, reason in (
        ("class", "no class token"),
        ("class_mean", "no class token"),
        ("distillation", "no distillation token"),
        ("logits", "no classifier"),
        ("nonsense", "no vector called 'nonsense'"),
    ):
        with pytest.raises(vitrail.UserError, match=reason):
            embed(mean, source, FeatureKind(vector), workers=0)
    with pytest.raises(vitrail.UserError, match="after the final norm"):
        embed(small(), source, FeatureKind("penultimate", before_norm=True), workers=0)
    with pytest.raises(vitrail.UserError, match="no single input vector"):
        embed(small(pooling="per_class", pooling_depth=1, pooling_heads=2), source, FeatureKind("penultimate"), workers=0)


def test_nan_features_are_rejected(source):
    model = small()
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    with pytest.raises(vitrail.UserError, match="of 15 of 15 images are NaN or Inf"):
        embed(model, source, workers=0)
