"""Which labels a training uses: columns of tables and Parquet files, maps from classes to coarser ones, one class."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.images import make_folder
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.label_choice import choose_labels
from vitrail.errors import UserError
from vitrail.evaluation.probes.protocol import open_probe_data

COARSE = {"red": "warm", "green": "cold", "blue": "cold"}


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "photos", count=6)


@pytest.fixture
def table(folder):
    rows = [f"{name}/{number:03}.png,{name},{COARSE[name]},Animalia" for name in COARSE for number in range(6)]
    path = folder / "table.csv"
    path.write_text("\n".join(["path,breed,family,kingdom", *rows]))
    return path


def write_map(tmp_path, text, name="map.csv"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_any_column_of_a_table_can_be_the_label(table):
    for column, classes in (("breed", ["blue", "green", "red"]), ("family", ["cold", "warm"])):
        splits = open_splits(table, label=column)
        assert [part.classes for part in splits[:2]] == [classes, classes]
        assert splits.train.label_name == column
    assert open_splits(table).train.label is None  # no column has the name of a label


def test_any_column_of_parquet_can_be_the_label_and_the_others_stay(folder, tmp_path):
    files = [folder / name / f"{number:03}.png" for name in COARSE for number in range(6)]
    columns = {
        "image": [{"bytes": file.read_bytes()} for file in files],
        "fine_label": [file.parent.name for file in files],
        "coarse_label": [COARSE[file.parent.name] for file in files],
        "station": [number % 3 for number in range(len(files))],
    }
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    plain = open_splits(path)
    assert (plain.train.label_name, plain.train.classes, [*plain.train.extra]) == (
        "fine_label",
        ["blue", "green", "red"],
        ["coarse_label"],
    )
    coarse = open_splits(path, label="coarse_label")
    assert (coarse.train.classes, [*coarse.train.extra]) == (["cold", "warm"], ["fine_label"])
    for first, second in zip(plain[:2], coarse[:2], strict=True):  # the same images, whatever the label
        assert np.array_equal(first.label.values, second.extra["fine_label"].values)
        assert np.array_equal(first.indices, second.indices)
    assert open_splits(path, label="station").train.classes == ["0", "1", "2"]
    assert open_splits(path, label="fine_label").train.classes == plain.train.classes


def test_seven_ranks_are_a_hierarchy_whose_finest_is_the_label(folder):
    ranks = ("kingdom", "phylum", "class", "order", "family", "genus", "species")
    rows = [[f"{name}/{number:03}.png", *["x"] * 4, COARSE[name], name, name] for name in COARSE for number in range(6)]
    path = folder / "inat.csv"
    path.write_text("\n".join(",".join(row) for row in [["path", *ranks], *rows]))
    splits = open_splits(path)
    assert (splits.train.label_name, [*splits.train.extra]) == ("species", [*ranks[:-1]])
    assert open_splits(path, label="family").train.classes == ["cold", "warm"]


def test_one_class_for_all_images(folder):
    splits = open_splits(folder, label="none")
    assert splits.train.classes == ["image"]
    assert not splits.train.label.values.any()
    assert splits.train.extra["label"].names == ["blue", "green", "red"]


@pytest.mark.parametrize(
    ("text", "name", "columns"),
    [
        ("red,warm\ngreen,cold\nblue,cold\n", "map.csv", ["coarse_label"]),
        ("fine;heat;any\nred;warm;color\ngreen;cold;color\nblue;cold;color\nbeige;warm;color\n", "map.csv", ["heat", "any"]),
        ("fine\theat\nred\twarm\ngreen\tcold\nblue\tcold", "map.tsv", ["heat"]),
        (json.dumps(COARSE), "map.json", ["coarse_label"]),
    ],
)
def test_a_map_gives_coarser_labels(folder, tmp_path, text, name, columns):
    splits = open_splits(folder, label_map=write_map(tmp_path, text, name))
    assert splits.train.classes == ["cold", "warm"]
    assert splits.train.label_name == columns[0]
    assert [*splits.train.extra] == [*columns[1:], "label"]
    fine = splits.train.extra["label"]
    names = [fine.names[value] for value in fine.values]
    assert [splits.train.classes[value] for value in splits.train.label.values] == [COARSE[name] for name in names]
    if len(columns) > 1:
        assert open_splits(folder, label="any", label_map=write_map(tmp_path, text, name)).train.classes == ["color"]


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("red,warm\ngreen,cold\n", "map.csv", r"no coarser class for 1 of the 3 classes of .*, first 'blue': add a line"),
        ("red,warm\nred,cold\ngreen,cold\nblue,cold", "map.csv", "two different rows for the class 'red'"),
        ("red\ngreen\nblue", "map.csv", "rows of 1 fields"),
        ("", "map.csv", "rows of 0 fields"),
        ("red,warm\ngreen\nblue,cold", "map.csv", "Row 2 of the map"),
        ("fine,heat,heat\nred,a,b\ngreen,a,b\nblue,a,b", "map.csv", "two of one name"),
        ("fine,label\nred,a\ngreen,a\nblue,a", "map.csv", "has a column label, which"),
        ("{", "map.json", "is not JSON"),
        ("[1]", "map.json", "is not an object of names"),
        ('{"red": {}}', "map.json", "is not an object of names"),
    ],
)
def test_a_map_that_does_not_fit_is_explained(folder, tmp_path, text, name, message):
    with pytest.raises(UserError, match=message):
        open_splits(folder, label_map=write_map(tmp_path, text, name))


@pytest.mark.parametrize("ant", ["ant,aaa\n", ""])
def test_a_map_does_not_hide_classes_that_are_not_in_the_training_split(tmp_path, ant):
    data, path = tmp_path / "animals", write_map(tmp_path, f"beagle,dog\ntabby,cat\n{ant}")
    make_folder(data / "train", ("beagle", "tabby"), count=3)
    make_folder(data / "val", ("ant", "beagle", "tabby"), count=2)
    with pytest.raises(UserError, match=r"The class ant of .*val is not a class of the training split"):
        open_splits(data, label_map=path)
    with pytest.raises(UserError, match=r"The class ant of .*val is not a class of the training split"):
        open_probe_data(str(data), label_map=path)


def test_parts_with_other_classes_and_no_defect_cannot_be_made_coarser(tmp_path):
    parts = [open_splits(make_folder(tmp_path / first, (first, "tabby"), count=4)).train for first in ("beagle", "ant")]
    with pytest.raises(UserError, match=r"The classes of .*ant are not those of .*beagle: the map .*map.csv needs the same"):
        choose_labels(parts, label_map=write_map(tmp_path, "beagle,dog\ntabby,cat\nant,insect\n"))


def test_other_mistakes_are_explained(folder, tmp_path):
    with pytest.raises(UserError, match=r"no labels called 'genus'; there are label: set data.label to one of them"):
        open_splits(folder, label="genus")
    with pytest.raises(UserError, match="There is no map at"):
        open_splits(folder, label_map=str(tmp_path / "nowhere.csv"))
    with pytest.raises(UserError, match="There is no map at"):
        open_splits(folder, label_map=str(tmp_path))
    (tmp_path / "latin.csv").write_bytes("red,chaud é\n".encode("latin-1"))
    with pytest.raises(UserError, match="is not UTF-8"):
        open_splits(folder, label_map=str(tmp_path / "latin.csv"))
    flat = tmp_path / "flat"
    make_folder(flat, classes=(".",), count=6)
    with pytest.raises(UserError, match="has no labels, which the map"):
        open_splits(flat, label_map=write_map(tmp_path, "red,warm"))
