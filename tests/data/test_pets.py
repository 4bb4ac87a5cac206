"""The photographs that come with the package, and the script that has made them."""

import importlib.util
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitrail
from tests.images import make_folder
from vitrail.data.datasets.lookup import open_source, open_sources, open_splits
from vitrail.data.datasets.pets import PETS
from vitrail.data.decode import decode
from vitrail.data.duplicates import exact_groups, fingerprint, near_groups

TOOL = Path(vitrail.__file__).parents[1] / "tools" / "make_pets.py"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_file_is_small_and_has_a_license():
    assert PETS.stat().st_size <= 4_000_000
    words = PETS.with_suffix(".md").read_text()
    for part in ("Oxford-IIIT Pet", "Parkhi", "Vedaldi", "Zisserman", "Jawahar", "CC BY-SA 4.0", "Changes"):
        assert part in words


def test_number_of_images_per_breed():
    parts = open_sources("pets")
    assert {split: len(part) for split, part in parts.items()} == {"train": 600, "validation": 120, "test": 300}
    for part, each in zip(parts.values(), (50, 10, 25), strict=True):
        assert part.name == "pets"
        assert len(part.classes) == 12
        assert np.bincount(part.label.values).tolist() == [each] * 12
    assert parts["test"].location(0) == "image 720 of pets"


def test_no_duplicates():
    found = [fingerprint(decode(part.encoded(index))) for part in open_sources("pets").values() for index in range(len(part))]
    exact = exact_groups(np.array([each.digest for each in found]))
    hashes, thumbnails = np.array([each.hash for each in found], dtype=np.uint64), np.stack([each.thumbnail for each in found])
    assert np.array_equal(near_groups(exact, hashes, thumbnails), np.arange(1020))


def test_images_are_square_and_in_color():
    source = open_source("pets", "test")
    pixels = [decode(source.encoded(index)) for index in range(0, 300, 25)]
    assert {each.shape for each in pixels} == {(128, 128, 3)}
    assert np.ptp(np.stack(pixels), axis=-1).mean() > 5
    assert pickle.loads(pickle.dumps(source)).encoded(7) == source.encoded(7)


def test_open_splits_uses_the_given_splits():
    assert [len(part) for part in open_splits("pets")] == [600, 120, 300]


@pytest.mark.parametrize("name", ["pets", "digits"])
def test_a_folder_of_that_name_is_used_and_reported_once(tmp_path, capfd, name):
    built_in = open_source(name).classes
    make_folder(tmp_path / name)
    assert open_source(f"./{name}").classes == ["blue", "green", "red"]
    assert capfd.readouterr().err == ""
    for _ in range(2):
        assert open_source(name).classes == ["blue", "green", "red"]
    message = f"Using the folder {name} in the current directory instead of the built-in {name}.\n"
    assert capfd.readouterr().err == message
    (tmp_path / name).rename("elsewhere")
    assert open_source(name).classes == built_in


@pytest.mark.parametrize("name", ["pets", "digits"])
def test_a_file_of_that_name(tmp_path, capfd, name):
    (tmp_path / name).write_text("")
    with pytest.raises(vitrail.UserError, match="unknown format"):
        open_source(name)
    assert f"Using the file {name} in the current directory" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["pets", "digits"])
@pytest.mark.parametrize("inside", ["run.json", "seed-0/run.json"])
def test_a_run_directory_is_not_data(tmp_path, capfd, name, inside):
    """`vitrail train pets --out pets`, and then `vitrail resume pets`."""
    (tmp_path / name / inside).parent.mkdir(parents=True)
    (tmp_path / name / inside).write_text("{}")
    assert len(open_source(name).classes) >= 10
    assert capfd.readouterr().err == ""


def test_only_one_process_reports_it(tmp_path, capfd, monkeypatch):
    make_folder(tmp_path / "pets")
    monkeypatch.setenv("LOCAL_RANK", "1")
    open_source("pets")
    assert capfd.readouterr().err == ""


@pytest.fixture
def tool(monkeypatch):
    spec = importlib.util.spec_from_file_location("make_pets", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "IMAGES_PER_BREED", {"train": 1, "validation": 1, "test": 1})
    return module


def noise(folder, breeds, count):
    """Images that do not resemble each other, wider than high."""
    for place, breed in enumerate(breeds):
        for number in range(count):
            pixels = np.random.default_rng([place, number, count]).integers(0, 256, (9, 12, 3), dtype=np.uint8)
            (folder / breed).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).resize((180, 135)).save(folder / breed / f"{number}.png")


def test_make_pets(tool, tmp_path, monkeypatch, capsys):
    breeds = [*tool.BREEDS, "a breed that is not taken"]
    noise(tmp_path / "all" / "train", breeds, 3)
    noise(tmp_path / "all" / "test", breeds, 2)
    twin = tmp_path / "all" / "train" / "pug"
    (twin / "1.png").write_bytes((twin / "0.png").read_bytes())
    monkeypatch.setattr("sys.argv", ["make_pets.py", "all", "--out", "made.parquet"])
    tool.main()
    assert "36 images" in capsys.readouterr().out
    made = open_source("made.parquet")
    assert made.classes == list(tool.BREEDS.values())
    assert np.bincount(made.label.values).tolist() == [3] * 12
    assert {decode(made.encoded(index)).shape for index in range(36)} == {(128, 128, 3)}
    everything = [fingerprint(decode(made.encoded(index))).digest for index in range(36)]
    assert len(set(everything)) == 36
    (twin / "2.png").write_bytes((twin / "0.png").read_bytes())
    with pytest.raises(SystemExit, match="fewer than 2 different images"):
        tool.main()
