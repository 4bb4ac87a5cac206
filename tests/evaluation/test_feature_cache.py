"""Features on disk: when they are used, and when not."""

import os
from pathlib import Path

import pytest
import torch

import vitrail
from tests.images import make_folder, make_image, write_invalid_image
from vitrail.data.datasets.lookup import open_source
from vitrail.evaluation import feature_cache
from vitrail.evaluation.feature_cache import cached_embed, remove_oldest
from vitrail.evaluation.features import FeatureKind, embed

KIND = FeatureKind()


@pytest.fixture
def computed(monkeypatch):
    """Names of the sources whose features were computed and not read."""
    calls = []
    monkeypatch.setattr(
        feature_cache, "embed", lambda model, source, *rest: calls.append(source.name) or embed(model, source, *rest)
    )
    return calls


@pytest.fixture
def model():
    return vitrail.create("vitrail_mini", 3, 16, depth=1, width=32).eval()


@pytest.fixture
def photos(tmp_path):
    root = make_folder(tmp_path / "photos", count=2)
    write_invalid_image(root / "red" / "002.png")
    return root


def files():
    return sorted(Path(os.environ["VITRAIL_CACHE"], "features").glob("*"))


def test_the_second_time_nothing_is_computed(model, photos, computed):
    first = cached_embed(model, open_source(photos), KIND)
    counted = []
    second = cached_embed(model, open_source(photos), KIND, advance=counted.append)
    assert len(computed) == len(files()) == 1
    assert counted == [7]
    assert torch.equal(first.vectors, second.vectors)
    assert torch.equal(first.image, second.image)
    assert torch.equal(first.labels, second.labels)
    assert first.problems == second.problems
    assert second.problems[0].location.endswith("red/002.png")


def test_copies_of_the_data_are_the_same_content(model, photos, computed, tmp_path):
    cached_embed(model, open_source(photos), KIND)
    photos.rename(tmp_path / "moved")
    found = cached_embed(model, open_source(tmp_path / "moved"), KIND)
    assert len(computed) == 1
    assert found.problems[0].location.startswith(str(tmp_path / "moved"))


def test_every_change_of_content_is_computed(model, photos, computed):
    cached_embed(model, open_source(photos), KIND)
    cached_embed(model, open_source(photos), KIND._replace(normalize=True))
    model.preprocessing = model.preprocessing._replace(crop_ratio=0.5)
    cached_embed(model, open_source(photos), KIND)
    with torch.no_grad():
        next(model.blocks.parameters()).flatten()[0] += 1e-3
    cached_embed(model, open_source(photos), KIND)
    make_image(photos / "red" / "000.png", 3)
    cached_embed(model, open_source(photos), KIND)
    assert len(computed) == len(files()) == 5


@pytest.mark.parametrize("content", [b"", b"damaged", b"\xff" * 100])
def test_a_damaged_file_is_replaced(model, photos, computed, content):
    first = cached_embed(model, open_source(photos), KIND)
    files()[0].write_bytes(content)
    assert torch.equal(cached_embed(model, open_source(photos), KIND).vectors, first.vectors)
    assert torch.equal(cached_embed(model, open_source(photos), KIND).vectors, first.vectors)
    assert len(computed) == 2


def test_a_cache_that_cannot_be_written_is_ignored(model, photos, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "file"))
    assert len(cached_embed(model, open_source(photos), KIND).vectors) == 6


def test_the_least_recently_used_files_are_removed(tmp_path, monkeypatch):
    for number in range(4):
        (tmp_path / f"{number}.safetensors").write_bytes(bytes(100))
        os.utime(tmp_path / f"{number}.safetensors", (1000 + number, 1000 + number))
    os.utime(tmp_path / "0.safetensors", (2000, 2000))  # used again
    monkeypatch.setattr(feature_cache, "MAX_BYTES", 250)
    remove_oldest(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0.safetensors", "3.safetensors"]


def test_probes_share_features(photos, model, computed, tmp_path, run_cli):
    weights = tmp_path / "net.safetensors"
    vitrail.save(model, weights)
    make_folder(photos / "train", count=4)
    make_folder(photos / "val", count=2)
    for name in ("red", "green", "blue"):
        for file in (photos / name).iterdir():
            file.unlink()
        (photos / name).rmdir()
    arguments = (weights, photos, "--workers", "0", "--json")
    results = [
        run_cli("probe", name, *arguments, *more) for name, more in (("knn", ()), ("linear", ()), ("knn", ("--no-cache",)))
    ]
    assert [result.returncode for result in results] == [0, 0, 0]
    assert len(computed) == len(files()) == 2  # memory and queries, once
    assert results[0].stdout == results[2].stdout
