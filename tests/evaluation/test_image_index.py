"""The index of images: exact search, votes, added images and classes, its file, hostile files."""

import dataclasses
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

import vitrail
from tests.data.test_datasets import write_cifar
from tests.images import make_folder, make_image, write_invalid_image
from vitrail.cli.search import print_search
from vitrail.data.datasets.lookup import open_source
from vitrail.data.source import Labels
from vitrail.errors import UserError
from vitrail.evaluation import image_index
from vitrail.evaluation.image_index import ImageIndex, full_location, match_queries, merge, read_thumbnail, search, without_known
from vitrail.evaluation.image_search import Search
from vitrail.evaluation.index_file import ENTRY, load_index, save_index
from vitrail.evaluation.neighbor_sheet import COARSER, RIGHT, UNKNOWN, WRONG, frame_color
from vitrail.evaluation.probes.protocol import label_columns


def unit(*shape, seed=0):
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=1)


def make_index(count=7, digest="d"):
    labels = {"label": Labels(np.arange(count) % 3, ["a", "b", "c"]), "kind": Labels(np.full(count, -1), ["x"])}
    return ImageIndex(unit(count, 5), [f"/é{n}.png" for n in range(count)], [b"jpeg"] * count, labels, "w", digest)


@pytest.mark.parametrize(("count", "k"), [(1, 3), (5, 5), (128, 4), (1000, 10), (1000, 600)])
def test_the_search_is_exact(monkeypatch, count, k):
    monkeypatch.setattr(image_index, "MAX_SIMILARITIES", 3000)
    vectors, queries = unit(count, 16), unit(9, 16, seed=1)
    cosines, rows = search(vectors, queries, k)
    expected = (queries.double() @ vectors.double().T).sort(1, descending=True)
    assert cosines.shape == rows.shape == (9, min(k, count))
    torch.testing.assert_close(cosines.double(), expected.values[:, :k], rtol=0, atol=1e-6)
    assert torch.equal(rows, expected.indices[:, :k])
    assert search(vectors, queries[:0], k)[0].shape == (0, min(k, count))


def test_equal_images_are_all_found():
    vectors = unit(1, 8).expand(300, -1)
    assert sorted(search(vectors, vectors[:1], 300)[1][0].tolist()) == list(range(300))


def test_votes_use_labeled_neighbors_alone():
    index = make_index()
    index.columns["label"] = Labels(np.array([0, 0, -1, 1, -1, -1, -1]), ["a", "b"])
    cosines, rows = torch.tensor([[0.9, 0.8, 0.7], [0.9, 0.8, 0.1]]), torch.tensor([[2, 0, 3], [2, 4, 5]])
    chances = index.classify(cosines, rows, "label", temperature=0.1)
    expected = torch.tensor([np.exp(8.0), np.exp(7.0)]) / (np.exp(8.0) + np.exp(7.0))
    torch.testing.assert_close(chances[0], expected.float())
    assert not chances[1].any()


def test_a_file_is_read_as_it_was_written(tmp_path):
    index, path = make_index(), tmp_path / "a.index"
    save_index(index, path)
    again = load_index(path)
    assert torch.equal(again.vectors, index.vectors)
    assert (again.locations, again.thumbnails, again.weights, again.digest) == (index.locations, [b"jpeg"] * 7, "w", "d")
    assert again.columns["label"].names == ["a", "b", "c"]
    assert np.array_equal(again.columns["label"].values, index.columns["label"].values)


def test_classes_of_two_indexes_are_matched_by_name():
    first, second = make_index(3), make_index(4)
    second.columns = {"label": Labels(np.array([0, 1, 0, -1]), ["c", "new"])}
    both = merge(first, second)
    assert both.columns["label"].names == ["a", "b", "c", "new"]
    assert both.columns["label"].values.tolist() == [0, 1, 2, 2, 3, 2, -1]
    assert both.columns["kind"].values.tolist() == [-1] * 7
    with pytest.raises(UserError, match="not of the same weights"):
        merge(first, make_index(2, digest="other"))


def damage(path, tensors=None, **metadata):
    """Change a file that `save_index` has written."""
    stored = load_file(path)
    content = {"version": 1, "weights": "w", "digest": "d", "vector": "pooled"}
    content["columns"] = [{"name": "label", "classes": ["a", "b", "c"]}, {"name": "kind", "classes": ["x"]}]
    save_file(stored | (tensors or {}), path, {ENTRY: json.dumps(content | metadata)})


HOSTILE = [
    ({}, {"version": 2}, "another version"),
    ({"vectors": torch.zeros(7, 5)}, {}, "length 1"),
    ({"vectors": torch.full((7, 5), torch.nan)}, {}, "NaN"),
    ({"vectors": torch.zeros(7, 5, dtype=torch.float16)}, {}, "another type"),
    ({"vectors": unit(7, 5)[0]}, {}, "another shape"),
    ({"labels": torch.full((7, 2), 3)}, {}, "a label has no class"),
    ({"labels": torch.full((7, 2), -2)}, {}, "a label has no class"),
    ({"labels": torch.zeros(6, 2, dtype=torch.int64)}, {}, "another shape"),
    ({"location_ends": torch.tensor([0, 5, 3, 9, 9, 9, 9])}, {}, "out of range"),
    ({"thumbnail_ends": torch.full((7,), 1 << 40)}, {}, "out of range"),
    ({"thumbnail_ends": torch.tensor([9, -(2**63) + 8, 7, 9, -(2**63) + 8, 7, 9])}, {}, "out of range"),  # differences overflow
    ({"thumbnail_ends": torch.tensor([-4, 0, 0, 0, 0, 0, 0])}, {}, "out of range"),
    ({}, {"columns": [{"name": "label", "classes": 7}, {"name": "kind", "classes": ["x"]}]}, "class names"),
    (
        {"labels": torch.full((7, 2), -1)},
        {"columns": [{"name": "label", "classes": []}, {"name": "kind", "classes": ["x"]}]},
        "class names",
    ),
    ({}, {"columns": [{"name": "label", "classes": ["a", "b", "c"]}] * 2}, "one name"),
    ({}, {"columns": {}}, "label columns"),
    ({}, {"vector": "os.system"}, "its weights"),
    ({}, {"weights": ["x"]}, "its weights"),
]


@pytest.mark.parametrize(("tensors", "metadata", "reason"), HOSTILE)
def test_a_hostile_file_is_refused_in_one_sentence(tmp_path, tensors, metadata, reason):
    path = tmp_path / "a.index"
    save_index(make_index(), path)
    damage(path, tensors, **metadata)
    with pytest.raises(UserError, match=f"is damaged .*{reason}.*make it again"):
        load_index(path)


def test_names_of_an_index_are_not_commands_to_the_terminal(capsys):
    index = make_index()
    index.columns = {"\x1b[31mlabel": Labels(np.zeros(7, dtype=np.int64), ["\x1b]0;title\x07[bold]"])}
    print_search(Search(match_queries(index, ["\x1b[2Jquery.png"], unit(1, 5), k=2, voters=2), [], [], []))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert r"\x1b[2Jquery.png: \x1b[31mlabel \x1b]0;title\x07[bold] 100 %" in shown


def test_a_thumbnail_is_small_whatever_is_in_the_file():
    file = io.BytesIO()
    Image.new("RGB", (2000, 1000), "red").save(file, "PNG")
    index = dataclasses.replace(make_index(1), thumbnails=[file.getvalue()])
    pixels = read_thumbnail(index, 0)
    assert pixels.shape == (48, 96, 3)
    assert (pixels == (255, 0, 0)).all()


def test_memory_of_a_search_does_not_grow_with_queries_times_classes(monkeypatch):
    sizes, classify = [], ImageIndex.classify
    monkeypatch.setattr(ImageIndex, "classify", lambda *arguments: sizes.append((found := classify(*arguments)).numel()) or found)
    matches = match_queries(make_index(), ["a", "b"], unit(2, 5), k=3, voters=7)
    assert sizes == [3, 1, 3, 1]
    assert [len(match.classes["label"]) for match in matches] == [3, 3]
    assert matches[0].classes["kind"] == []


def test_a_truncated_file_and_other_files_are_refused(tmp_path):
    path = tmp_path / "a.index"
    save_index(make_index(), path)
    content = path.read_bytes()
    for size in (0, 4, 100, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(UserError, match="is damaged"):
            load_index(path)
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(UserError, match="is not an image index"):
        load_index(path)
    with pytest.raises(UserError, match="There is no index at"):
        load_index(tmp_path / "b.index")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """An untrained model: colors differ in its features."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    vitrail.save(vitrail.create("vitrail_mini", 0, 16, width=32, depth=1), path)
    return path


def test_index_add_and_search(tmp_path, weights, run_cli, cli_error):
    photos, file = make_folder(tmp_path / "photos", count=5), tmp_path / "photos.index"
    out = run_cli("index", photos, "--weights", weights, "--out", file, "--device", "cpu", "--workers", 0)
    assert "15 images, 32 numbers each (pooled), 3 classes of label" in out.stdout
    query = make_image(tmp_path / "query.png", 2)
    sheet = tmp_path / "neighbors.png"
    found = json.loads(run_cli("search", file, query, "--out", sheet, "--json", "--k", 4, "--voters", 3, "--workers", 0).stdout)
    assert [each["labels"]["label"] for each in found[0]["neighbors"]] == ["blue"] * 4
    assert found[0]["classes"]["label"][0][0] == "blue"
    assert sheet.read_bytes()[:4] == b"\x89PNG"
    exact = json.loads(run_cli("search", file, photos / "red" / "003.png", "--json", "--k", 1, "--workers", 0).stdout)[0][
        "neighbors"
    ][0]
    assert exact["location"] == str(photos / "red" / "003.png")
    assert exact["cosine"] == pytest.approx(1.0, abs=1e-5)

    yellow = [make_image(tmp_path / "more" / f"{number}.png", 3) for number in range(5)]
    added = run_cli("index", *yellow, "--add", file, "--class", "yellow", "--workers", 0)
    assert "20 images" in added.stdout
    assert "4 classes of label" in added.stdout
    query = make_image(tmp_path / "other.png", 3)
    text = run_cli("search", file, query, "--k", 3, "--voters", 3, "--workers", 0).stdout
    assert "label yellow 100 %" in text
    assert "are in the index" in cli_error("index", *yellow, "--add", file, "--workers", 0)


def test_images_of_other_splits_and_folders_are_added(tmp_path, weights, monkeypatch):
    write_cifar(tmp_path / "cifar", hundred=False, binary=False)
    for data in ("digits", tmp_path / "cifar"):
        train, test = open_source(data, "train"), open_source(data, "test")
        index = dataclasses.replace(make_index(), locations=[full_location(train, number) for number in range(len(train))])
        assert [len(without_known(part, index)) for part in (train, test)] == [0, len(test)]
    table = pyarrow.table({"image": [{"bytes": make_image(tmp_path / "a.png").read_bytes()}], "label": ["red"]})
    found = []
    for folder in ("one of two", "in"):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        pyarrow.parquet.write_table(table, "train.parquet")
        with tarfile.open("x.tar", "w") as tar:
            tar.add(tmp_path / "a.png", "key.png")
        found += [full_location(open_source(name), 0) for name in ("train.parquet", "x.tar")]
    assert found == [
        f"row 0 of {tmp_path / 'one of two' / 'train.parquet'}",
        f"key in {tmp_path / 'one of two' / 'x.tar'}",
        f"row 0 of {tmp_path / 'in' / 'train.parquet'}",
        f"key in {tmp_path / 'in' / 'x.tar'}",
    ]


def test_every_image_has_its_own_thumbnail(tmp_path, weights):
    photos = make_folder(tmp_path / "photos", count=5)
    index, _ = vitrail.index_images(photos, weights, tmp_path / "a.index", device="cpu", batch_size=4, workers=0)
    assert len(index.thumbnails) == 15
    for row, location in enumerate(index.locations):
        color = read_thumbnail(index, row).mean((0, 1))
        assert ("red", "green", "blue")[color.argmax()] == Path(location).parent.name


def test_mistakes_are_explained(tmp_path, weights, run_cli, cli_error):
    photos, file = make_folder(tmp_path / "photos", count=2), tmp_path / "photos.index"
    for arguments, message in (
        (["index", photos, "--weights", weights], "Give --weights WEIGHTS and --out FILE"),
        (["index", tmp_path / "nothing", "--weights", weights, "--out", file], "does not exist"),
        (["index", photos, "--weights", weights, "--out", file, "--vector", "projected"], "has no projector"),
    ):
        assert message in cli_error(*arguments)
    run_cli("index", photos, "--weights", weights, "--out", file, "--workers", 0)
    broken = write_invalid_image(tmp_path / "broken.png")
    other = tmp_path / "other.safetensors"
    vitrail.save(vitrail.create("vitrail_mini", 0, 16, width=32, depth=2), other)
    for arguments, message in (
        (["index", broken, "--add", file, "--vector", "mean"], "has pooled vectors, not mean: add images without --vector"),
        (["search", file, broken], "could be read"),
        (["search", file, tmp_path / "nothing.png"], "nothing.png"),
        (["search", file, photos / "red" / "000.png", "--out", tmp_path / "a.jpg"], "into a .png file"),
        (["search", file, photos / "red" / "000.png", "--weights", other], "was not made with the weights"),
        (["search", other, photos / "red" / "000.png"], "is not an image index"),
        (["search", file, photos, "--max-images", 3], "6 queries are more than 3"),
    ):
        assert message in cli_error(*arguments)
    save_index(dataclasses.replace(load_index(file), weights="hf://owner/name"), file)  # nothing is downloaded
    assert "give --weights" in cli_error("search", file, photos / "red" / "000.png")


def test_frames_show_the_finest_level_that_is_right():
    levels, query = ["family", "genus", "species"], {"family": "f", "genus": "g", "species": "s"}
    assert frame_color(query, query, levels) == RIGHT
    assert frame_color(query, query | {"species": "t"}, levels) == COARSER[0]
    assert frame_color(query, {"family": "f", "genus": "h", "species": "t"}, levels) == COARSER[1]
    assert frame_color(query, {"family": "e", "genus": "h"}, levels) == WRONG
    assert frame_color({}, query, levels) == UNKNOWN


def test_columns_of_a_source_without_labels(tmp_path):
    from vitrail.evaluation.predict import open_images

    source, _ = open_images([str(make_image(tmp_path / "a.png"))])
    assert label_columns(source) == {}
