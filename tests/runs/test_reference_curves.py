"""Reference bands: made of runs, found by content, clear about what is good."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.runs import describe, make_run
from vitrail.cli.train import leaves_of
from vitrail.data.datasets.digits import PixelSource
from vitrail.data.source import Labels, Splits
from vitrail.errors import UserError
from vitrail.runs import prepare, reference_curves
from vitrail.runs.reference_curves import Band, find_band, read_band
from vitrail.runs.reference_curves.__main__ import default_path, main, make_band, write_band
from vitrail.runs.run_directory import describe as describe_run
from vitrail.training.distributed import Devices
from vitrail.training.metrics import Smoothed, read_metrics
from vitrail.training.trainer import Options

SHAPE = {"recipe": {}, "data": {}, "seeds": 5, "machine": "CPU"}
BAND = Band(
    **SHAPE,
    progress=[0.2, 0.6, 1.0],
    loss_low=[1.4, 1.0, 0.8],
    loss_high=[1.61, 1.2, 1.0],
    top1_low=[None, 0.5, 0.7],
    top1_high=[None, 0.6, 0.75],
)


@pytest.mark.parametrize(
    ("progress", "loss", "top1", "verdict", "sentence"),
    [
        (0.1, 9.0, None, "within", "too early to compare with the reference band"),
        (0.2, 1.5, None, "within", "on track: within the band of 5 seeds"),
        (0.2, 1.92, None, "below", "worse than the band of 5 seeds: loss 1.92, band 1.40–1.61"),
        (0.2, 1.2, None, "above", "better than the band of 5 seeds: loss 1.20, band 1.40–1.61"),
        (0.4, 1.3, 0.01, "within", "on track: within the band of 5 seeds"),
        (0.6, 1.1, 0.55, "within", "on track: within the band of 5 seeds"),
        (0.6, None, 0.45, "below", "worse than the band of 5 seeds: top-1 45.0 %, band 50.0–60.0 %"),
        (0.8, None, 0.7, "above", "better than the band of 5 seeds: top-1 70.0 %, band 60.0–67.5 %"),
        (1.0, 0.1, 0.1, "below", "worse than the band of 5 seeds: top-1 10.0 %, band 70.0–75.0 %"),
        (1.0, math.nan, None, "below", "worse than the band of 5 seeds: loss nan, band 0.800–1.00"),
        (1.0, None, None, "within", "too early to compare with the reference band"),
    ],
)
def test_verdict(progress, loss, top1, verdict, sentence):
    assert BAND.verdict(progress, loss, top1) == verdict
    assert BAND.sentence(progress, loss, top1) == sentence


@given(progress=st.floats(0.2, 1), loss=st.floats(0, 5), better=st.floats(0, 1))
def test_a_lower_loss_is_never_judged_worse(progress, loss, better):
    rank = ["below", "within", "above"].index
    assert rank(BAND.verdict(progress, loss - better, None)) >= rank(BAND.verdict(progress, loss, None))
    low, high = BAND.loss(progress)
    assert low <= high
    assert BAND.verdict(progress, (low + high) / 2, None) == "within"


@given(progress=st.floats(0.6, 1), top1=st.floats(0, 1), better=st.floats(0, 1))
def test_a_higher_accuracy_is_never_judged_worse(progress, top1, better):
    rank = ["below", "within", "above"].index
    assert rank(BAND.verdict(progress, None, top1 + better)) >= rank(BAND.verdict(progress, None, top1))


def test_a_band_holds_the_runs_it_was_made_of(tmp_path):
    runs = [make_run(tmp_path / str(seed), seed) for seed in range(3)]
    band = make_band(runs)
    assert (band.seeds, band.machine, band.data["name"]) == (3, "2 × CPU", "pets")
    assert band.loss_low[0] is None, "nothing is known before the first logging point"
    assert band.top1_low[23] is None
    assert band.top1_low[24] is not None
    for run in runs:
        smoothed = Smoothed()
        for line in read_metrics(run):
            progress = line["step"] / 100
            if line["kind"] == "train":
                assert band.verdict(progress, smoothed.add(progress, line["loss"]), None) == "within"
            else:
                assert band.verdict(progress, None, line["top1"]) == "within"
    assert band.verdict(0.5, 5.0, None) == "below"


def test_a_band_is_found_by_what_a_recipe_and_data_are(tmp_path, monkeypatch):
    monkeypatch.setattr(reference_curves, "FOLDER", tmp_path / "bands")
    band = make_band([make_run(tmp_path / str(seed), seed) for seed in range(2)])
    assert find_band(band.recipe, band.data) is None
    path = write_band(band, tmp_path / "bands" / default_path(band).name)
    assert path.name == "little-pets.json"
    assert read_band(path) == band
    run = describe(seed=17)
    assert find_band(run["recipe"] | {"name": "my own", "about": {"paper": "mine"}}, run["data"] | {"name": "elsewhere"}) == band
    assert find_band(run["recipe"] | {"batch_size": 16}, run["data"]) is None
    assert find_band(run["recipe"] | {"schedule": run["recipe"]["schedule"] | {"length": "5 epochs"}}, run["data"]) is None
    assert find_band(run["recipe"], run["data"] | {"fingerprint": "other"}) is None
    older = {name: value for name, value in run["recipe"].items() if name != "mixing"}
    assert find_band(older, run["data"]) == band, "a setting that a recipe does not have yet is at its default"
    assert find_band({"unknown": 1}, run["data"]) is None


def test_a_band_for_every_copy_of_the_data(tmp_path, monkeypatch):
    monkeypatch.setattr(reference_curves, "FOLDER", tmp_path / "bands")
    runs = [make_run(tmp_path / str(seed), seed) for seed in range(2)]
    main([*map(str, runs), "--copies", "--output", str(tmp_path / "bands" / "copies.json")])
    run = describe(seed=17)
    assert "fingerprint" in run["data"]
    assert find_band(run["recipe"], run["data"]) is not None
    assert find_band(run["recipe"], run["data"] | {"name": "elsewhere", "fingerprint": "another encoding"}) is not None
    assert find_band(run["recipe"], run["data"] | {"train": 5}) is None
    assert find_band(run["recipe"], run["data"] | {"classes": ["others"]}) is None


def test_data_without_a_fingerprint_is_told_by_counts_and_classes():
    data = {"name": "a", "counts": {"train": 3}, "classes": ["x", "y"]}
    assert reference_curves.identity(data) == reference_curves.identity(data | {"name": "b"})
    assert reference_curves.identity(data) != reference_curves.identity(data | {"classes": ["x", "z"]})
    assert reference_curves.identity({"train": 3, "classes": 2}) != reference_curves.identity({"train": 4, "classes": 2})


def test_runs_that_do_not_belong_together_are_refused(tmp_path):
    first = make_run(tmp_path / "first")
    for folder, changes, words in (
        ("recipe", {"recipe": describe(1)["recipe"] | {"batch_size": 16}}, "another recipe"),
        ("data", {"data": {"fingerprint": "other"}}, "other data"),
        ("seed", {}, "same seed"),
        ("steps", {"recipe": describe(1)["recipe"], "steps": 200}, "not a finished run"),
        ("seconds", {"recipe": describe(1)["recipe"], "seconds": 0}, "not a finished run"),
        ("nan", {"recipe": describe(1)["recipe"], "shift": math.nan}, "not finite"),
    ):
        with pytest.raises(UserError, match=words):
            make_band([first, make_run(tmp_path / folder, **changes)])
    with pytest.raises(UserError, match="at least two"):
        make_band([first])
    with pytest.raises(UserError, match=r"no run\.json"):
        make_band([first, tmp_path])


def test_runs_without_a_validation_make_a_band_of_losses(tmp_path):
    band = make_band([make_run(tmp_path / str(seed), seed, validations=()) for seed in range(2)])
    assert set(band.top1_low) == {None}
    assert band.verdict(1.0, sum(band.loss(1.0)) / 2, 0.9) == "within"


def test_the_command(tmp_path, capsys):
    runs = [str(make_run(tmp_path / str(seed), seed)) for seed in range(2)]
    main([*runs, "--output", str(tmp_path / "band.json")])
    assert "2 seeds" in capsys.readouterr().out
    assert read_band(tmp_path / "band.json").seeds == 2
    with pytest.raises(SystemExit, match="2"):
        main(runs[:1])
    assert capsys.readouterr().err == "A band needs at least two runs, with different seeds.\n"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"recipe": {}}'])
def test_a_file_that_is_no_band_is_refused(tmp_path, text):
    (tmp_path / "band.json").write_text(text)
    with pytest.raises(UserError, match="not a reference band"):
        read_band(tmp_path / "band.json")
    with pytest.raises(ValueError, match="same length"):
        Band(**SHAPE, progress=[], loss_low=[], loss_high=[], top1_low=[], top1_high=[])
    with pytest.raises(ValueError, match="must grow"):
        Band(**SHAPE, progress=[1, 0.5], loss_low=[1, 1], loss_high=[1, 1], top1_low=[1, 1], top1_high=[1, 1])


def test_every_band_of_the_package_can_be_read():
    for path in reference_curves.FOLDER.glob("*.json"):
        assert read_band(path).seeds > 1


def cifar(count):
    """As many images as CIFAR-10 has of its classes, all black and in one place of memory."""
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    black = np.broadcast_to(np.zeros((), np.uint8), (count, 32, 32, 3))
    return PixelSource("/data/cifar10", Labels(np.arange(count) % 10, names), lambda: black)


@pytest.mark.parametrize(
    ("name", "source", "recipe", "weights", "epochs"),
    [
        ("laptop-digits", "digits", "laptop", None, None),
        ("small-cifar10", "cifar10/", "small", None, 20),
        ("finetune-pets", "pets", "finetune", "vitrail_tiny", None),
    ],
)
def test_a_band_of_the_package_is_found_by_its_command(name, source, recipe, weights, epochs, monkeypatch):
    """What docs/default-recipes.md says to type still is the training that the band was made of, with any seed and in any precision."""
    if source == "cifar10/":
        monkeypatch.setattr(prepare, "open_splits", lambda *_, **__: Splits(cifar(50_000), cifar(10_000), None))
    leaves = leaves_of(["precision=fp32"], weights, epochs, 17, recipe)
    resolved = prepare.resolve(recipe, None, leaves, "cpu")
    splits, resolved, trained, _ = prepare.look_at(source, resolved)
    model = prepare.build(resolved, splits.train, trained)
    facts = describe_run(source, splits, resolved, model, Devices(torch.device("cpu")), Options(), "skip")
    assert find_band(facts["recipe"], facts["data"]) == read_band(reference_curves.FOLDER / f"{name}.json")
