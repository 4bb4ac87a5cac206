"""Names that are not UTF-8, commands to the terminal in names, and labels that are not plain."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

import vitrail
from tests.data.test_datasets import png, write_tar
from vitrail.atomic_files import check_writable
from vitrail.data.datasets.lookup import open_source, open_sources
from vitrail.errors import UserError
from vitrail.formatting import escape_control
from vitrail.runs.run_directory import git_state

CLASSES = (b"caf\xe9", b"plain", b"\x1b[2J")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder whose name, class names and file names are not UTF-8, with an unreadable image in each class."""
    root = os.path.join(os.fsencode(tmp_path_factory.mktemp("names")), b"photos\xff")
    for label, name in enumerate(CLASSES):
        os.makedirs(os.path.join(root, name))
        for number in range(4):
            with open(os.path.join(root, name, b"\xe9%d.png" % number), "wb") as file:
                file.write(png(50 * label + number, 8) if number else b"no image")
    return os.fsdecode(root)


@pytest.fixture(scope="module")
def run(photos: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"schedule.length": "1 steps", "architecture.depth": 1, "schedule.warmup": "0 steps"}
    return vitrail.train(
        photos, "laptop", out=tmp_path_factory.mktemp("runs") / "run", changes=changes, device="cpu", workers=0
    ).folder


def test_a_training_finishes(run: Path, photos: str) -> None:
    """Every file of the run is written, and the locations in them can be opened."""
    content = json.loads((run / "run.json").read_text())
    assert content["source"] == photos
    assert content["mistakes"]
    assert all(os.path.exists(mistake["location"]) for mistake in content["mistakes"])
    assert "caf\ufffd" in vitrail.load(run).class_names
    page = (run / "report.html").read_text(encoding="utf-8")
    assert r"\udcff" in page
    assert vitrail.resume(run, device="cpu").finished


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_commands_print_any_name(run, photos, tmp_path, encoding, run_cli, monkeypatch) -> None:
    """Standard output rejects what it cannot encode, and names may contain commands to the terminal: both are escaped."""
    monkeypatch.chdir(tmp_path)
    options = ("--device", "cpu", "--workers", "0")
    commands = {
        ("data", "inspect", photos, "--workers", "0", "--out", "sheet.png"): 0,
        ("predict", run, photos, *options): 1,
        ("evaluate", run, photos, *options, "--out", "evaluation"): 0,
        ("disagree", run, run, photos, *options): 0,
        ("data", "pack", photos, "packed", "--workers", "0"): 0,
        ("predict", run, photos, *options, "--out", "predictions.csv"): 1,
        ("embed", run, photos, *options, "--out", "features.parquet"): 1,
        ("embed", run, photos, *options, "--out", "features.npy"): 1,
        ("compare", run): 0,
        ("train", photos, "--out", "photos\udcff"): 2,
    }
    for command, code in list(commands.items())[: None if encoding == "utf-8" else 3]:
        with open(1, "w", encoding=encoding, closefd=False) as stdout:
            monkeypatch.setattr(sys, "stdout", stdout)
            done = run_cli(*command)
        assert done.returncode == code, done
        assert "\x1b[2J" not in done.stdout + done.stderr, command
        assert "Traceback" not in done.stderr
    if encoding == "utf-8":
        images = json.loads((tmp_path / "features.json").read_text())
        assert all(map(os.path.exists, images["images"])) or "?" in images["images"][0]
        assert parquet.read_table(tmp_path / "features.parquet").num_rows == len(images["images"]) == 9


def test_a_folder_of_parquet_files(photos: str, tmp_path: Path) -> None:
    folder = os.path.join(os.fsencode(tmp_path), b"\xe9")
    os.mkdir(folder)
    table = pa.table({"image": [png(1), png(2)], "label": ["a", "b"]})
    with open(os.path.join(folder, b"train\xe9.parquet"), "wb") as file:
        parquet.write_table(table, file)
    source = open_source(os.fsdecode(folder))
    assert source.encoded(1) == png(2)
    assert "\udce9" in source.location(1)


def test_weights_need_a_utf8_path(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not valid UTF-8, which safetensors requires: choose another name"):
        check_writable(tmp_path / "photos\udcff")


def test_escapes() -> None:
    assert escape_control("a\x1b[2J\udce9\n", "\n") == "a\\x1b[2J\\udce9\n"


@pytest.mark.parametrize("label", ["[" * 100_000, "[" * 900 + "]" * 900, '{"label": ' * 900 + "1" + "}" * 900])
def test_nested_labels_in_a_tar(tmp_path: Path, label: str) -> None:
    path = write_tar(tmp_path / "a.tar", [("a.png", png(1)), ("a.json", label.encode())])
    try:
        assert open_source(path).label is None
    except UserError as error:
        assert "'a.json' in" in str(error)  # noqa: PT017


def test_lone_surrogates_in_labels(tmp_path: Path) -> None:
    """JSON can contain half of a character, which no file can be named or written with."""
    members = [("a.png", png(1)), ("a.json", b'{"label": "x\\ud800"}'), ("b.png", png(2)), ("b.json", b'{"label": "y"}')]
    assert open_source(write_tar(tmp_path / "a.tar", members)).classes == ["x?", "y"]
    features = {"image": {"_type": "Image"}, "label": {"names": ["\ud800", "b"], "_type": "ClassLabel"}}
    table = pa.table({"image": [png(1), png(2)], "label": [0, 1]})
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert open_source(tmp_path / "a.parquet").classes == ["?", "b"]


@pytest.mark.parametrize("label", [pa.array([0, 2**64 - 1], pa.uint64()), pa.array([b"\xff", b"a"]).view(pa.string())])
def test_labels_that_cannot_be_converted(tmp_path: Path, label: pa.Array) -> None:
    parquet.write_table(pa.table({"image": [png(1), png(2)], "label": label}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"The column label of .* is damaged"):
        open_sources(tmp_path / "a.parquet")


def test_images_of_no_pixels() -> None:
    model = vitrail.create("deit_tiny_patch16", 2, 16, depth=1)
    for image in (torch.zeros(3, 0, 8, dtype=torch.uint8), torch.zeros(3, 8, 8), torch.zeros(1, 8, 8, dtype=torch.uint8)):
        with pytest.raises(UserError, match=r"instead of uint8 \[height, width, 3\]"):
            model.preprocess(image)
    with pytest.raises(UserError, match="An image is a path, a PIL image, an array or a tensor, not None"):
        model.preprocess(None)


def test_the_git_configuration_of_a_data_folder_runs_nothing(tmp_path, monkeypatch):
    """`git status` would run the command of core.fsmonitor."""
    folder, marker = tmp_path / "photos", tmp_path / "marker"
    folder.mkdir()
    (folder / "file").write_text("text")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    for arguments in (("init", "-q"), ("add", "file"), (*identity, "commit", "-qm", "first")):
        subprocess.run(["git", *arguments], cwd=folder, check=True)
    subprocess.run(["git", "config", "core.fsmonitor", f"touch {marker}; false"], cwd=folder, check=True)
    monkeypatch.chdir(folder)
    assert len(git_state()) == 40
    assert not marker.exists()
