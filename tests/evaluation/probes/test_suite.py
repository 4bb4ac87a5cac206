"""A suite: read with care, kept task by task, gone on with."""

import json
from pathlib import Path

import pytest
import torch
import yaml

import vitrail
from tests.images import make_folder
from vitrail.errors import UserError
from vitrail.evaluation.probes import suite as room
from vitrail.evaluation.probes.protocol import Settings, embed_sides, known
from vitrail.evaluation.probes.suite import PROBES, Row, group_means, read_suite, run_suite


def save_model(path, seed):
    torch.manual_seed(seed)
    return vitrail.save(vitrail.create("deit_tiny_patch16", 3, 16, patch_size=4, width=16, depth=1, heads=2), path)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suite")
    make_folder(folder / "colors", count=20)
    make_folder(folder / "two", ["a", "b"], count=20)
    for seed in (0, 1):
        save_model(folder / f"{seed}.safetensors", seed)
    return folder


def write(folder, content, name="tasks.yaml"):
    path = folder / name
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


TASKS = {
    "defaults": {"probe": "knn", "settings": {"k": 3}},
    "tasks": [
        {"source": "colors", "group": "easy"},
        {"name": "two", "source": "two", "probe": "fewshot", "group": "hard", "settings": {"shots": 2, "seeds": 2}},
        {"name": "few images", "source": "colors", "examples": 10, "group": "easy"},
    ],
}


def test_tasks_of_a_file(place):
    first, second, third = read_suite(write(place, TASKS))
    assert (first.name, first.probe, first.settings) == ("colors knn", "knn", Settings(k=3))
    assert first.source == str(place / "colors")
    assert second.settings == Settings(k=3, shots=2, seeds=2)
    assert len(third.open().memory) == 10
    assert read_suite(write(place, json.dumps(TASKS), "tasks.json")) == [first, second, third]


def test_every_result_is_the_probe_and_is_kept(place, tmp_path, monkeypatch):
    tasks = read_suite(write(place, TASKS))
    weights = [place / "0.safetensors", place / "1.safetensors"]
    loaded = []

    def load(path):
        loaded.append(path)
        return vitrail.load(path)

    rows = run_suite(tasks, weights, tmp_path, load, workers=0)
    assert [(row.task, row.weights) for row in rows] == [(task.name, str(path)) for path in weights for task in tasks]
    assert loaded == weights
    assert len(list(tmp_path.glob("*.json"))) == 6
    model, sides = vitrail.load(weights[1]), tasks[1].open()
    memory, queries = embed_sides(model, sides, tasks[1].pooling(model), workers=0)
    expected = PROBES["fewshot"](known(sides, memory, queries), tasks[1].settings)
    assert (rows[4].score, rows[4].spread) == (expected.score, expected.spread)

    monkeypatch.setattr(room, "run_task", None)  # nothing is computed again
    assert run_suite(tasks, weights, tmp_path, load, workers=0) == rows
    assert loaded == weights


def test_an_interrupted_suite_goes_on(place, tmp_path, monkeypatch):
    tasks = read_suite(write(place, TASKS))
    weights = [place / "0.safetensors"]
    whole = run_suite(tasks, weights, tmp_path / "whole", vitrail.load, workers=0)
    ran, run_task = [], room.run_task

    def interrupted(task, *rest):
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(task.name)
        return run_task(task, *rest)

    monkeypatch.setattr(room, "run_task", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_suite(tasks, weights, tmp_path / "cut", vitrail.load, workers=0)
    damaged = next((tmp_path / "cut").glob("two*.json"))
    damaged.write_text("{")
    ran.clear()
    assert run_suite(tasks, weights, tmp_path / "cut", vitrail.load, workers=0) == whole
    assert ran == ["two", "few images"]


def test_what_was_changed_is_measured_again(place, tmp_path):
    def names(content, weights="0.safetensors"):
        run_suite(read_suite(write(place, content)), [place / weights], tmp_path, vitrail.load, workers=0)
        return {file.name for file in tmp_path.iterdir()}

    task = {"name": "t", "source": "two", "probe": "knn"}
    first = names({"tasks": [task]})
    assert len(first) == 1
    assert names({"tasks": [task | {"group": "another"}]}) == first  # only where it stands in the table
    for count, (change, weights) in enumerate(
        (
            ({"settings": {"k": 2}}, "0"),
            ({"probe": "retrieval"}, "0"),
            ({"vector": "mean"}, "0"),
            ({}, "1"),
            ({"examples": 9}, "0"),
        ),
        2,
    ):
        assert len(names({"tasks": [task | change]}, f"{weights}.safetensors")) == count


def test_a_missing_source_is_told_before_anything_is_computed(place, tmp_path, monkeypatch):
    monkeypatch.setattr(room, "run_task", None)
    tasks = read_suite(write(place, {"tasks": [{"source": "colors"}, {"source": "nowhere"}]}))
    with pytest.raises(UserError, match="There is nothing at nowhere"):
        run_suite(tasks, [place / "0.safetensors"], tmp_path, vitrail.load)
    with pytest.raises(UserError, match="cannot be read"):
        run_suite(tasks[:1], [place / "gone.safetensors"], tmp_path, vitrail.load)


def test_weights_that_come_with_the_package(place, tmp_path):
    tasks = read_suite(write(place, {"tasks": [{"source": "two", "probe": "knn"}]}))
    (row,) = run_suite(tasks, [Path("vitrail_tiny")], tmp_path, vitrail.load, workers=0)
    assert row.weights == "vitrail_tiny"


def test_a_place_that_cannot_be_written_is_told_before_anything_is_computed(place, tmp_path, monkeypatch):
    tasks = read_suite(write(place, {"tasks": [{"source": "two", "probe": "knn"}]}))
    weights = [place / "0.safetensors"]
    (tmp_path / "file").write_text("")
    with monkeypatch.context() as patch:
        patch.setattr(room, "run_task", None)
        with pytest.raises(UserError, match=r"file is a file: give a folder to write to"):
            run_suite(tasks, weights, tmp_path / "file", None)
    rows = run_suite(tasks, weights, tmp_path / "kept", vitrail.load, workers=0)

    def refuse(folder):
        raise AssertionError("what is only read need not be written")

    monkeypatch.setattr(room, "check_folder", refuse)
    assert run_suite(tasks, weights, tmp_path / "kept", None) == rows


def test_trouble_names_the_task_and_the_weights(place, tmp_path):
    tasks = read_suite(write(place, {"tasks": [{"source": "two", "vector": "distillation"}]}))
    with pytest.raises(UserError, match=r"task two linear cannot be done with .*0\.safetensors: This model has no distillation"):
        run_suite(tasks, [place / "0.safetensors"], tmp_path, vitrail.load)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "has no tasks"),
        ("tasks: []", "has no tasks"),
        ("[1, 2]", "has no tasks"),
        ("tasks: [", "is not YAML"),
        ("{tasks: [{source: two}], other: 1}", "unknown key 'other'"),
        ("tasks: [two]", "Task 1 of .* is not a list"),
        ("tasks: [{name: x}]", "has no source"),
        ("tasks: [{source: 3}]", "is no text"),
        ("tasks: [{source: two, probe: lienar}]", "unknown probe 'lienar'"),
        ("tasks: [{source: two, vector: x}]", "unknown vector 'x'"),
        ("tasks: [{source: two, exmaples: 3}]", "unknown key 'exmaples'"),
        ("tasks: [{source: two, examples: 1.5}]", "at least 2"),
        ("tasks: [{source: two, settings: [1]}]", "settings of task 1"),
        ("tasks: [{source: two, settings: {kk: 1}}]", "Task 1 of .* unknown setting 'kk'"),
        ("tasks: [{source: two}, {source: two}]", "Two tasks of .* called two linear"),
        ("{defaults: 3, tasks: [{source: two}]}", "defaults of the suite"),
    ],
)
def test_files_that_make_no_sense(place, content, reason):
    with pytest.raises(UserError, match=reason):
        read_suite(write(place, content, "bad.yaml"))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_suite(tmp_path / "gone.yaml")


def test_means_of_groups(place):
    tasks = read_suite(write(place, TASKS))
    rows = [Row(task.name, "w", score, None, {}) for task, score in zip(tasks, (0.9, 0.3, 0.6), strict=True)]
    assert group_means(tasks, [*rows, rows[0]._replace(weights="v", score=0.0)], "w") == pytest.approx(
        {"easy": 0.75, "hard": 0.3, "mean": 0.6}
    )
