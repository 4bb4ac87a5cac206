"""Reference bands: computed from runs, found by recipe and data, and the status of a run."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainers import make_trainer
from tests.training.runs import describe, make_run
from vitrail.data.datasets.digits import PixelSource
from vitrail.data.source import Labels, Splits
from vitrail.errors import UserError
from vitrail.recipes.arguments import recipe_changes
from vitrail.runs import reference_curves, request
from vitrail.runs.reference_curves import ReferenceBand, find_reference_band, read_reference_band
from vitrail.runs.reference_curves.__main__ import default_path, main, make_reference_band, write_reference_band
from vitrail.runs.request import TrainRequest, open_data, resolve_recipe
from vitrail.runs.run_directory import describe_run
from vitrail.training.metrics import SmoothedValue, read_metrics

SHAPE = {"recipe": {}, "data": {}, "seeds": 5, "machine": "CPU"}
BAND = ReferenceBand(
    **SHAPE,
    progress=[0.2, 0.6, 1.0],
    loss_low=[1.4, 1.0, 0.8],
    loss_high=[1.61, 1.2, 1.0],
    top1_low=[None, 0.5, 0.7],
    top1_high=[None, 0.6, 0.75],
)


@pytest.mark.parametrize(
    ("progress", "loss", "top1", "status", "message"),
    [
        (0.1, 9.0, None, "within", "too early to compare with the reference band"),
        (0.2, 1.5, None, "within", "within the reference band (5 seeds)"),
        (0.2, 1.92, None, "below", "worse than the reference band (5 seeds): loss 1.92, band 1.40–1.61"),
        (0.2, 1.2, None, "above", "better than the reference band (5 seeds): loss 1.20, band 1.40–1.61"),
        (0.4, 1.3, 0.01, "within", "within the reference band (5 seeds)"),
        (0.6, 1.1, 0.55, "within", "within the reference band (5 seeds)"),
        (0.6, None, 0.45, "below", "worse than the reference band (5 seeds): top-1 45.0 %, band 50.0–60.0 %"),
        (0.8, None, 0.7, "above", "better than the reference band (5 seeds): top-1 70.0 %, band 60.0–67.5 %"),
        (1.0, 0.1, 0.1, "below", "worse than the reference band (5 seeds): top-1 10.0 %, band 70.0–75.0 %"),
        (1.0, math.nan, None, "below", "worse than the reference band (5 seeds): loss nan, band 0.800–1.00"),
        (1.0, None, None, "within", "too early to compare with the reference band"),
    ],
)
def test_band_status(progress, loss, top1, status, message):
    assert BAND.status(progress, loss, top1) == status
    assert BAND.message(progress, loss, top1) == message


@given(progress=st.floats(0.2, 1), loss=st.floats(0, 5), better=st.floats(0, 1))
def test_a_lower_loss_is_never_rated_worse(progress, loss, better):
    rank = ["below", "within", "above"].index
    assert rank(BAND.status(progress, loss - better, None)) >= rank(BAND.status(progress, loss, None))
    low, high = BAND.loss(progress)
    assert low <= high
    assert BAND.status(progress, (low + high) / 2, None) == "within"


@given(progress=st.floats(0.6, 1), top1=st.floats(0, 1), better=st.floats(0, 1))
def test_a_higher_accuracy_is_never_rated_worse(progress, top1, better):
    rank = ["below", "within", "above"].index
    assert rank(BAND.status(progress, None, top1 + better)) >= rank(BAND.status(progress, None, top1))


def test_a_band_contains_its_own_runs(tmp_path):
    runs = [make_run(tmp_path / str(seed), seed) for seed in range(3)]
    band = make_reference_band(runs)
    assert (band.seeds, band.machine, band.data["name"]) == (3, "2 × CPU", "pets")
    assert band.loss_low[0] is None, "no range before the first logging point"
    assert band.top1_low[23] is None
    assert band.top1_low[24] is not None
    for run in runs:
        smoothed = SmoothedValue()
        for line in read_metrics(run):
            progress = line["step"] / 100
            if line["kind"] == "train":
                assert band.status(progress, smoothed.add(progress, line["loss"]), None) == "within"
            else:
                assert band.status(progress, None, line["top1"]) == "within"
    assert band.status(0.5, 5.0, None) == "below"


def test_a_band_is_found_by_recipe_and_data(tmp_path, monkeypatch):
    monkeypatch.setattr(reference_curves, "FOLDER", tmp_path / "bands")
    band = make_reference_band([make_run(tmp_path / str(seed), seed) for seed in range(2)])
    assert find_reference_band(band.recipe, band.data) is None
    path = write_reference_band(band, tmp_path / "bands" / default_path(band).name)
    assert path.name == "little-pets.json"
    assert read_reference_band(path) == band
    run = describe(seed=17)
    assert (
        find_reference_band(run["recipe"] | {"name": "my own", "about": {"paper": "mine"}}, run["data"] | {"name": "elsewhere"})
        == band
    )
    assert find_reference_band(run["recipe"] | {"batch_size": 16}, run["data"]) is None
    assert (
        find_reference_band(run["recipe"] | {"schedule": run["recipe"]["schedule"] | {"length": "5 epochs"}}, run["data"]) is None
    )
    assert find_reference_band(run["recipe"], run["data"] | {"fingerprint": "other"}) is None
    older = {name: value for name, value in run["recipe"].items() if name != "mixing"}
    assert find_reference_band(older, run["data"]) == band, "a missing setting has its default"
    assert find_reference_band({"unknown": 1}, run["data"]) is None


def test_a_band_for_every_copy_of_the_data(tmp_path, monkeypatch):
    monkeypatch.setattr(reference_curves, "FOLDER", tmp_path / "bands")
    runs = [make_run(tmp_path / str(seed), seed) for seed in range(2)]
    main([*map(str, runs), "--copies", "--output", str(tmp_path / "bands" / "copies.json")])
    run = describe(seed=17)
    assert "fingerprint" in run["data"]
    assert find_reference_band(run["recipe"], run["data"]) is not None
    assert find_reference_band(run["recipe"], run["data"] | {"name": "elsewhere", "fingerprint": "another encoding"}) is not None
    assert find_reference_band(run["recipe"], run["data"] | {"train": 5}) is None
    assert find_reference_band(run["recipe"], run["data"] | {"classes": ["others"]}) is None


def test_data_without_fingerprint_is_identified_by_counts_and_classes():
    data = {"name": "a", "counts": {"train": 3}, "classes": ["x", "y"]}
    assert reference_curves.data_key(data) == reference_curves.data_key(data | {"name": "b"})
    assert reference_curves.data_key(data) != reference_curves.data_key(data | {"classes": ["x", "z"]})
    assert reference_curves.data_key({"train": 3, "classes": 2}) != reference_curves.data_key({"train": 4, "classes": 2})


def test_runs_of_different_trainings_are_rejected(tmp_path):
    first = make_run(tmp_path / "first")
    for folder, changes, message in (
        ("recipe", {"recipe": describe(1)["recipe"] | {"batch_size": 16}}, "another recipe"),
        ("data", {"data": {"fingerprint": "other"}}, "other data"),
        ("seed", {}, "same seed"),
        ("steps", {"recipe": describe(1)["recipe"], "steps": 200}, "not a finished run"),
        ("seconds", {"recipe": describe(1)["recipe"], "seconds": 0}, "not a finished run"),
        ("nan", {"recipe": describe(1)["recipe"], "shift": math.nan}, "NaN or Inf"),
    ):
        with pytest.raises(UserError, match=message):
            make_reference_band([first, make_run(tmp_path / folder, **changes)])
    with pytest.raises(UserError, match="at least two"):
        make_reference_band([first])
    with pytest.raises(UserError, match=r"no run\.json"):
        make_reference_band([first, tmp_path])


def test_runs_without_a_validation_make_a_band_of_losses(tmp_path):
    band = make_reference_band([make_run(tmp_path / str(seed), seed, validations=()) for seed in range(2)])
    assert set(band.top1_low) == {None}
    assert band.status(1.0, sum(band.loss(1.0)) / 2, 0.9) == "within"


def test_the_command(tmp_path, capsys):
    runs = [str(make_run(tmp_path / str(seed), seed)) for seed in range(2)]
    main([*runs, "--output", str(tmp_path / "band.json")])
    assert "2 seeds" in capsys.readouterr().out
    assert read_reference_band(tmp_path / "band.json").seeds == 2
    with pytest.raises(SystemExit, match="2"):
        main(runs[:1])
    assert capsys.readouterr().err == "A reference band needs at least two runs with different seeds.\n"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"recipe": {}}'])
def test_invalid_band_files_are_rejected(tmp_path, text):
    (tmp_path / "band.json").write_text(text)
    with pytest.raises(UserError, match="not a reference band"):
        read_reference_band(tmp_path / "band.json")
    with pytest.raises(ValueError, match="same length"):
        ReferenceBand(**SHAPE, progress=[], loss_low=[], loss_high=[], top1_low=[], top1_high=[])
    with pytest.raises(ValueError, match="must increase"):
        ReferenceBand(**SHAPE, progress=[1, 0.5], loss_low=[1, 1], loss_high=[1, 1], top1_low=[1, 1], top1_high=[1, 1])


def test_every_band_of_the_package_can_be_read():
    for path in reference_curves.FOLDER.glob("*.json"):
        assert read_reference_band(path).seeds > 1


def cifar(count):
    """Black images with the counts and classes of CIFAR-10, without memory of their own."""
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    black = np.broadcast_to(np.zeros((), np.uint8), (count, 32, 32, 3))
    return PixelSource("/data/cifar10", Labels(np.arange(count) % 10, names), lambda: black)


@pytest.mark.parametrize(
    ("name", "source", "recipe", "weights", "epochs"),
    [
        ("laptop-digits", "digits", "laptop", None, None),
        ("small-cifar10", "cifar10/", "small", None, 20),
    ],
)
def test_a_band_of_the_package_is_found_by_its_command(name, source, recipe, weights, epochs, monkeypatch):
    """The command in docs/default-recipes.md is the training of the band, with any seed and precision."""
    if source == "cifar10/":
        monkeypatch.setattr(request, "open_splits", lambda *_, **__: Splits(cifar(50_000), cifar(10_000), None))
    changes = recipe_changes(recipe, {"precision": "fp32"}, {"from_": weights, "epochs": epochs, "seed": 17})
    requested = TrainRequest(source, recipe, changes=changes)
    data = open_data(requested, resolve_recipe(requested, "cpu"))
    run = describe_run(source, data.splits, make_trainer(data.recipe, data.splits.train), "skip")
    assert find_reference_band(run["recipe"], run["data"]) == read_reference_band(reference_curves.FOLDER / f"{name}.json")
