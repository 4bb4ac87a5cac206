"""Maps, evaluations and run.json files from strangers: pipes are not opened, and a run.json cannot choose a file to read."""

import json
import os
from pathlib import Path

import pytest

from tests.cli.test_evaluate import small
from tests.images import make_folder
from vitrail import json_files
from vitrail.cli.evaluate import find_training, open_labeled
from vitrail.data.class_matching import match_classes, read_class_map
from vitrail.errors import UserError
from vitrail.explore.collection import read_wrong
from vitrail.runs.run_json import read_run_json


def test_pipes_are_not_opened(tmp_path):
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(UserError, match="is not a regular file: give a JSON file"):
        read_class_map(tmp_path / "run.json")
    with pytest.raises(UserError, match=r"is not the evaluation.json that"):
        read_wrong(tmp_path / "run.json")
    assert find_training(tmp_path / "best.safetensors") is None


def test_large_maps_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(json_files, "MAX_BYTES", 1 << 20)
    (tmp_path / "map.json").write_text(json.dumps({"a": "x" * (1 << 20)}))
    with pytest.raises(UserError, match="is larger than 1 MiB: give a smaller JSON file"):
        read_class_map(tmp_path / "map.json")
    (tmp_path / "map.json").rename(tmp_path / "run.json")
    with pytest.raises(UserError, match=r"run.json is larger than 1 MiB"):
        read_run_json(tmp_path)


@pytest.mark.parametrize("rules", [{"n" * 10**6: "a"}, {"a": "n" * 10**6}, {"a": {"n": "n" * 10**6}}, {"a": 10**4000}])
def test_long_values_of_maps_are_shortened(rules):
    with pytest.raises(UserError) as refused:
        match_classes(["a", "b"], 2, ["a", "b"], class_map=rules)
    assert len(str(refused.value)) < 300


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run directory with weights of two classes, whose data is beside it; commands start in a third folder."""
    make_folder(tmp_path / "photos", ["a", "b"], 2)
    (tmp_path / "run").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    small(tmp_path / "run" / "best.safetensors", 2, ["x", "y"])
    return tmp_path / "run"


def name_map(run: Path, path: str) -> Path:
    content = {"source": str(run.parent / "photos"), "data": {"classes": ["x", "y"]}, "recipe": {"data": {"map": path}}}
    (run / "run.json").write_text(json.dumps(content))
    return run / "best.safetensors"


@pytest.mark.parametrize("name", ["secret.csv", "here/secret", "~/secret.csv", "here/link.csv", "here/../secret.csv"])
def test_a_run_does_not_choose_a_file_to_read(name, run, cli_error, monkeypatch):
    root = run.parent
    monkeypatch.setenv("HOME", str(root))
    for file in (root / "secret.csv", root / "here" / "secret"):
        file.write_text("root,top\nuser,password1\nuser,password2\n")
    (root / "here" / "link.csv").symlink_to(root / "secret.csv")
    said = cli_error("evaluate", name_map(run, name if name.startswith("~") else str(root / name)), root / "photos")
    assert "run.json names the map" in said
    assert "give it with --map" in said
    assert "user" not in said


@pytest.mark.parametrize("folder", ["run", "photos", "here"])
def test_a_map_beside_the_run_or_the_data_is_read(folder, run):
    file = run.parent / folder / "map.csv"
    file.write_text("a,x\nb,y\n")
    data = open_labeled(str(run.parent / "photos"), None, find_training(name_map(run, str(file))))
    assert data.source.classes == ["x", "y"]


@pytest.mark.parametrize(("name", "text"), [("map.csv", "class,level\na,x\nb,y\n"), ("map.json", '{"a": "x", "b": "y"}')])
@pytest.mark.parametrize("command", ["evaluate", "disagree"])
def test_a_map_elsewhere_is_given_on_the_command_line(command, name, text, run, run_cli):
    file = run.parent / name
    file.write_text(text)
    weights = [name_map(run, str(file))] * (2 if command == "disagree" else 1)
    code, said, error = run_cli(command, *weights, run.parent / "photos", "--map", file, "--json")
    assert code == 0, error
    content = json.loads(said)
    if command == "evaluate":
        assert [row["name"] for row in content["evaluations"][0]["per_class"]] == ["x", "y"]


def test_coarser_classes_for_weights_of_any_origin(run, run_cli):
    (run.parent / "map.csv").write_text("a,x\nb,y\n")
    code, said, error = run_cli(
        "evaluate", run / "best.safetensors", run.parent / "photos", "--map", run.parent / "map.csv", "--json"
    )
    assert code == 0, error
    assert json.loads(said)["evaluations"][0]["confusion"]["names"] == ["x", "y"]
