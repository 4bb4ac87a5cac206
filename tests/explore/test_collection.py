"""The images of a folder: predictions, errors, the map, and no image outside of the folder."""

import json
import shutil

import numpy as np
import pytest
import torch

from tests.explore.models import CLASSES, explored
from tests.images import make_folder, make_image, write_invalid_image
from vitrail.data.datasets.lookup import open_source
from vitrail.errors import UserError
from vitrail.evaluation.predict import predict
from vitrail.explore.collection import choose_images, project, scan


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("images") / "photos", CLASSES, 6, (40, 30))


def collect(folder, *models, limit=100, evaluation=None):
    source, notes = choose_images(open_source(folder), str(folder), limit, evaluation)
    return scan(models, source, str(folder), folder.name, notes, 4)


def test_predictions_and_errors_equal_those_of_predict(folder):
    model = explored()
    collection = collect(folder, model)
    expected = predict(model.model, [str(folder)])
    scanned = collection.scans[0]
    described = collection.describe([model])
    assert described["names"] == [each.image.removeprefix(f"{folder}/") for each in expected]
    assert described["scans"][0]["predictions"] == [each.name for each in expected]
    assert np.allclose(scanned.probability, [each.probability for each in expected], atol=1e-5)
    labels = [each.image.split("/")[-2] for each in expected]
    assert described["labels"] == labels
    assert scanned.wrong.tolist() == [each.name != label for each, label in zip(expected, labels, strict=True)]
    assert 0 < scanned.wrong.sum() < len(labels)
    json.dumps(described)


def test_classes_that_do_not_match_are_noted(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "photos")
    (tmp_path / "photos" / "red").rename(tmp_path / "photos" / "octagon")
    collection = collect(tmp_path / "photos", explored())
    assert collection.scans[0].wrong is None
    assert collection.notes == ["labels are not compared with small: its classes are others"]


def test_the_map_is_that_of_the_principal_components():
    features = torch.randn(30, 8, generator=torch.Generator().manual_seed(0)) * torch.tensor([5.0, 3, 1, 1, 1, 1, 1, 1])
    points, explained = project(features)
    centered = features.numpy().astype(np.float64) - features.numpy().mean(0)
    values, vectors = np.linalg.eigh(centered.T @ centered)
    assert np.isclose(explained, values[-2:].sum() / values.sum())
    for column, vector in enumerate((vectors[:, -1], vectors[:, -2])):
        assert abs(np.corrcoef(points[:, column], centered @ vector)[0, 1]) > 0.999999
    assert points.min(0).tolist() == [0, 0]
    assert points.max(0).tolist() == [1, 1]
    assert project(features[:1])[0].tolist() == [[0.5, 0.5]]
    assert project(torch.ones(3, 1))[0].shape == (3, 2)


def test_at_most_the_given_number_of_images(folder):
    collection = collect(folder, explored(), limit=5)
    assert len(collection.index) == 5
    assert collection.notes == ["drawn at random from 18"]


def test_links_out_of_the_folder_are_never_read(folder, tmp_path):
    photos = tmp_path / "photos"
    shutil.copytree(folder, photos)
    secret = make_image(tmp_path / "private" / "secret.png")
    (photos / "red" / "link.png").symlink_to(secret)
    (photos / "green" / "more").symlink_to(secret.parent)
    (photos / "blue" / "inside.png").symlink_to(photos / "red" / "000.png")
    collection = collect(photos, explored())
    assert len(collection.index) == 19
    assert collection.notes == ["2 links out of the folder left out"]
    (photos / "blue" / "000.png").unlink()
    (photos / "blue" / "000.png").symlink_to(secret)  # while the server runs
    row = collection.describe([explored()])["names"].index("blue/000.png")
    with pytest.raises(UserError, match="leads out of the folder"):
        collection.read(row, None)


def test_unreadable_images_are_left_out(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "photos")
    write_invalid_image(tmp_path / "photos" / "red" / "broken.png")
    collection = collect(tmp_path / "photos", explored())
    assert len(collection.index) == 18
    assert collection.notes == ["1 unreadable image left out"]
    (tmp_path / "photos" / "blue" / "000.png").write_bytes(b"changed")
    with pytest.raises(UserError, match=r"000.png cannot be read: not a JPEG"):
        collection.read(0, None)


@pytest.mark.parametrize("spelling", ["photos", "./photos", "{absolute}", "photos/../photos/"])
def test_the_folder_of_an_evaluation_may_be_written_otherwise(folder, tmp_path, monkeypatch, spelling):
    """Paths are compared, not their spelling; an image that is listed twice is shown once."""
    monkeypatch.chdir(folder.parent)
    rows = [{"image": name} for name in ("photos/red/003.png", "photos/blue/001.png", "./photos/red/003.png")]
    (tmp_path / "evaluation.json").write_text(json.dumps({"evaluations": [{"wrong": rows}]}))
    explored_as = spelling.format(absolute=folder)
    source, _ = choose_images(open_source(explored_as), explored_as, 100, tmp_path)
    assert [source.location(index).split("/")[-2:] for index in range(len(source))] == [["red", "003.png"], ["blue", "001.png"]]


def test_wrong_images_of_an_evaluation(folder, tmp_path):
    rows = [{"image": str(folder / name)} for name in ("red/003.png", "blue/001.png", "../outside.png", "/etc/passwd")]
    (tmp_path / "evaluation.json").write_text(json.dumps({"evaluations": [{"wrong": rows}]}))
    collection = collect(folder, explored(), evaluation=tmp_path)
    assert collection.describe([explored()])["names"] == ["red/003.png", "blue/001.png"]
    (tmp_path / "evaluation.json").write_text(json.dumps({"evaluations": [{"wrong": rows[2:]}]}))
    with pytest.raises(UserError, match="None of the wrong images"):
        collect(folder, explored(), evaluation=tmp_path)
    for content in ("{", "[]", '{"evaluations": 3}'):
        (tmp_path / "other.json").write_text(content)
        with pytest.raises(UserError, match=r"is not the evaluation.json that"):
            collect(folder, explored(), evaluation=tmp_path / "other.json")
