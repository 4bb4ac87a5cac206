"""Suites: reading, storing results per task, continuing."""

import json
from pathlib import Path

import pytest
import torch
import yaml

import vitrail
from tests.images import make_folder
from vitrail.errors import UserError
from vitrail.evaluation.probes import suite as suite_module
from vitrail.evaluation.probes.protocol import Settings, embed_probe_data, select_labeled
from vitrail.evaluation.probes.suite import PROBES, TaskResult, group_means, read_suite, run_suite


def save_model(path, seed):
    torch.manual_seed(seed)
    return vitrail.save(vitrail.create("deit_tiny_patch16", 3, 16, patch_size=4, width=16, depth=1, heads=2), path)


@pytest.fixture(scope="module")
def suite_folder(tmp_path_factory):
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


def test_tasks_of_a_file(suite_folder):
    first, second, third = read_suite(write(suite_folder, TASKS))
    assert (first.name, first.probe, first.settings) == ("colors knn", "knn", Settings(k=3))
    assert first.source == str(suite_folder / "colors")
    assert second.settings == Settings(k=3, shots=2, seeds=2)
    assert len(third.open().memory) == 10
    assert read_suite(write(suite_folder, json.dumps(TASKS), "tasks.json")) == [first, second, third]


def test_results_equal_single_probes_and_are_stored(suite_folder, tmp_path, monkeypatch):
    tasks = read_suite(write(suite_folder, TASKS))
    weights = [suite_folder / "0.safetensors", suite_folder / "1.safetensors"]
    loaded = []

    def load(path):
        loaded.append(path)
        return vitrail.load(path)

    results = run_suite(tasks, weights, tmp_path, load, workers=0)
    assert [(result.task, result.weights) for result in results] == [(task.name, str(path)) for path in weights for task in tasks]
    assert loaded == weights
    assert len(list(tmp_path.glob("*.json"))) == 6
    model, sides = vitrail.load(weights[1]), tasks[1].open()
    memory, queries = embed_probe_data(model, sides, tasks[1].feature_kind(model), workers=0)
    expected = PROBES["fewshot"](select_labeled(sides, memory, queries), tasks[1].settings)
    assert (results[4].score, results[4].sd) == (expected.score, expected.sd)

    monkeypatch.setattr(suite_module, "run_task", None)  # nothing is computed again
    assert run_suite(tasks, weights, tmp_path, load, workers=0) == results
    assert loaded == weights


def test_an_interrupted_suite_continues(suite_folder, tmp_path, monkeypatch):
    tasks = read_suite(write(suite_folder, TASKS))
    weights = [suite_folder / "0.safetensors"]
    whole = run_suite(tasks, weights, tmp_path / "whole", vitrail.load, workers=0)
    ran, run_task = [], suite_module.run_task

    def interrupted(task, *rest):
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(task.name)
        return run_task(task, *rest)

    monkeypatch.setattr(suite_module, "run_task", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_suite(tasks, weights, tmp_path / "cut", vitrail.load, workers=0)
    damaged = next((tmp_path / "cut").glob("two*.json"))
    damaged.write_text("{")
    ran.clear()
    assert run_suite(tasks, weights, tmp_path / "cut", vitrail.load, workers=0) == whole
    assert ran == ["two", "few images"]


def test_changed_tasks_are_computed_again(suite_folder, tmp_path):
    def names(content, weights="0.safetensors"):
        run_suite(read_suite(write(suite_folder, content)), [suite_folder / weights], tmp_path, vitrail.load, workers=0)
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


def test_a_missing_source_is_reported_before_any_computation(suite_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(suite_module, "run_task", None)
    tasks = read_suite(write(suite_folder, {"tasks": [{"source": "colors"}, {"source": "nowhere"}]}))
    with pytest.raises(UserError, match="nowhere does not exist"):
        run_suite(tasks, [suite_folder / "0.safetensors"], tmp_path, vitrail.load)
    with pytest.raises(UserError, match="cannot be read"):
        run_suite(tasks[:1], [suite_folder / "gone.safetensors"], tmp_path, vitrail.load)


def test_bundled_weights(suite_folder, tmp_path):
    tasks = read_suite(write(suite_folder, {"tasks": [{"source": "two", "probe": "knn"}]}))
    (result,) = run_suite(tasks, [Path("vitrail_tiny")], tmp_path, vitrail.load, workers=0)
    assert result.weights == "vitrail_tiny"


def test_an_unwritable_folder_is_reported_before_any_computation(suite_folder, tmp_path, monkeypatch):
    tasks = read_suite(write(suite_folder, {"tasks": [{"source": "two", "probe": "knn"}]}))
    weights = [suite_folder / "0.safetensors"]
    (tmp_path / "file").write_text("")
    with monkeypatch.context() as patch:
        patch.setattr(suite_module, "run_task", None)
        with pytest.raises(UserError, match=r"file is a file: give a folder to write to"):
            run_suite(tasks, weights, tmp_path / "file", None)
    results = run_suite(tasks, weights, tmp_path / "kept", vitrail.load, workers=0)

    def refuse(folder):
        raise AssertionError("what is only read need not be written")

    monkeypatch.setattr(suite_module, "check_writable_folder", refuse)
    assert run_suite(tasks, weights, tmp_path / "kept", None) == results


def test_errors_name_the_task_and_the_weights(suite_folder, tmp_path):
    tasks = read_suite(write(suite_folder, {"tasks": [{"source": "two", "vector": "distillation"}]}))
    with pytest.raises(UserError, match=r"task two linear failed with .*0\.safetensors: This model has no distillation"):
        run_suite(tasks, [suite_folder / "0.safetensors"], tmp_path, vitrail.load)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "has no tasks"),
        ("tasks: []", "has no tasks"),
        ("[1, 2]", "has no tasks"),
        ("tasks: [", "is not YAML"),
        ("{tasks: [{source: two}], other: 1}", "unknown key 'other'"),
        ("tasks: [two]", "Task 1 of .* is not a mapping"),
        ("tasks: [{name: x}]", "has no source"),
        ("tasks: [{source: 3}]", "is not text"),
        ("tasks: [{source: two, probe: lienar}]", "unknown probe 'lienar'"),
        ("tasks: [{source: two, vector: x}]", "unknown vector 'x'"),
        ("tasks: [{source: two, exmaples: 3}]", "unknown key 'exmaples'"),
        ("tasks: [{source: two, examples: 1.5}]", "at least 2"),
        ("tasks: [{source: two, settings: [1]}]", "settings that are not a mapping"),
        ("tasks: [{source: two, settings: {kk: 1}}]", "Task 1 of .* unknown setting 'kk'"),
        ("tasks: [{source: two}, {source: two}]", "Two tasks of .* have the name two linear"),
        ("{defaults: 3, tasks: [{source: two}]}", "defaults of the suite"),
    ],
)
def test_invalid_files(suite_folder, content, reason):
    with pytest.raises(UserError, match=reason):
        read_suite(write(suite_folder, content, "bad.yaml"))


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_suite(tmp_path / "gone.yaml")


def test_means_of_groups(suite_folder):
    tasks = read_suite(write(suite_folder, TASKS))
    results = [TaskResult(task.name, "w", score, None, {}) for task, score in zip(tasks, (0.9, 0.3, 0.6), strict=True)]
    assert group_means(tasks, [*results, results[0]._replace(weights="v", score=0.0)], "w") == pytest.approx(
        {"easy": 0.75, "hard": 0.3, "mean": 0.6}
    )
