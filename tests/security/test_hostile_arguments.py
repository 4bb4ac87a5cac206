"""Arguments of commands and of the Python interface that are out of range, recursive or of the wrong type: one sentence each."""

import os
import time

import pytest
import torch

import vitrail
from vitrail.data.workers import Workers, default_workers, max_workers
from vitrail.errors import UserError
from vitrail.recipes import Recipe
from vitrail.recipes.schema import parse_value

LAUGHS = "a: &a [x, x]\nb: &b [*a, *a]\ntask_options: {x: *b}\n"
RECIPES = {
    "recursive": ("&a [*a]", "aliases, tags"),
    "recursive value": ("task_options: &a {x: *a}", "aliases, tags"),
    "exponential": (LAUGHS, "aliases, tags"),
    "nested": ("[" * 500, "nested too deeply"),
    "nested value": ("task_options: {x: " + "[" * 100 + "]" * 100 + "}", "nested more than 16 levels deep"),
    "tag": ("name: !!python/object/apply:os.system [id]", "aliases, tags"),
    "date": ("name: 2001-99-99", "month must be in 1..12"),
    "long integer": ("seed: " + "9" * 5000, "is not YAML"),
    "large number": ("optimizer: {lr: " + "9" * 400 + "}", "not a finite number"),
    "key": ("task_options: {x: {1: 2}}", "has the key 1, which is not text"),
    "bytes": ("task_options: {x: !!binary aGk=}", "aliases, tags"),
    "list": ("- 1", "The recipe is a group of settings"),
}
VALUES = [
    ("seed", "&a [*a]"),
    ("augmentation.scale", "&a [*a, *a]"),
    ("optimizer.lr", "!!timestamp 2001-99-99"),
    ("seed", "9" * 5000),
    ("optimizer.lr", "9" * 400),
    ("augmentation.image_size", "1" * 5000 + "x1"),
    ("init.scope", "last:" + "1" * 5000),
    ("task_options.x", "{1: 2}"),
    ("task_options.x", "2001-01-01"),
    ("task_options.x", "[" * 100 + "]" * 100),
]


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_files(name, tmp_path, cli_error):
    text, message = RECIPES[name]
    (tmp_path / "recipe.yaml").write_text(text)
    assert message in cli_error("train", "digits", "--recipe", tmp_path / "recipe.yaml", "--out", tmp_path / "run")


def test_a_recipe_that_is_a_named_pipe(tmp_path, cli_error):
    os.mkfifo(tmp_path / "recipe.yaml")
    assert "it is not a file" in cli_error("train", "digits", "--recipe", tmp_path / "recipe.yaml", "--out", tmp_path / "run")


@pytest.mark.parametrize(("key", "value"), VALUES)
def test_changes(key, value):
    with pytest.raises(UserError) as caught:
        Recipe().set({key: value})
    assert key in str(caught.value)


@pytest.mark.parametrize(("key", "value"), [("schedule.length", "1e999 epochs"), ("schedule.warmup", "1" * 400 + " steps")])
def test_durations_without_end(key, value):
    with pytest.raises(UserError, match="is too long for a training"):
        Recipe().set({key: value})


@pytest.mark.parametrize(
    "command",
    [
        ("info", "vitrail_tiny", "--image-size", "1" * 5000),
        ("bench", "vitrail_tiny", "--batch-size", "1" * 5000),
        ("train", "x" * 300, "--out", "run"),
        ("train", "digits", "--recipe", "x" * 300 + ".yaml"),
        ("resume", "x" * 300),
        ("replay", "x" * 300),
        ("compare", "x" * 300),
        ("convert", "vitrail_tiny", "x" * 300 + ".pth"),
    ],
    ids=lambda command: command[0],
)
def test_long_numbers_and_names(command, tmp_path, monkeypatch, cli_error):
    monkeypatch.chdir(tmp_path)
    assert cli_error(*command)


def test_aliases_in_changes_are_text():
    assert parse_value("&a [*a]") == "&a [*a]"
    assert parse_value("[" * 500) == "[" * 500
    assert parse_value("[1, {a: b}]") == [1, {"a": "b"}]


@pytest.mark.parametrize(
    "command", [("data", "inspect", "digits"), ("data", "pack", "digits", "packed"), ("train", "digits", "--out", "run")]
)
def test_thousands_of_workers(command, run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("multiprocessing.Process.start", lambda process: pytest.fail("a process was started"))
    options = ["--set", "architecture.depth=1", "--epochs", "0.1"] if command[0] == "train" else []
    done = run_cli(*command, "--workers", 5000, *options)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"5000 is not a valid number of workers: give a number from 0 to {max_workers()}."


@pytest.mark.parametrize("count", [-1, 5000, 2.5, "4", None])
def test_numbers_of_workers(count):
    with pytest.raises(UserError, match="is not a valid number of workers"):
        Workers(str, count)
    assert default_workers() <= max_workers()


def test_thousands_of_seeds(run_cli, tmp_path):
    done = run_cli("train", "digits", "--seeds", 10**9, "--out", tmp_path / "run")
    assert done.returncode == 2
    assert "--seeds" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", [None, 5, b"deit_tiny_patch16", ["deit_tiny_patch16"]])
def test_names_of_models(name):
    with pytest.raises(UserError, match="A model is given by its name, such as 'deit_small_patch16', not by"):
        vitrail.create(name)


@pytest.mark.parametrize("device", ["nowhere", "hpu", "cuda:99", 99, [], "cpu:x"])
def test_devices(device):
    with pytest.raises(UserError, match=r"Device '.*' is not available: give cpu, or cuda on a machine with a GPU\.$"):
        vitrail.create("deit_tiny_patch16", device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu():
    with pytest.raises(UserError, match="Device 'cuda' is not available"):
        vitrail.create("deit_tiny_patch16", device="cuda")


def test_precision_of_images():
    model = vitrail.create("deit_tiny_patch16", 3, 32, depth=1).eval()
    images = torch.randn(1, 3, 32, 32)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        with pytest.raises(UserError, match=rf"images are {dtype} and the weights torch.float32; convert the images with .to\("):
            model(images.to(dtype))
    with pytest.raises(UserError, match="the images are on meta and the model is on cpu; move one of them"):
        model(images.to("meta"))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(images.bfloat16()).shape == (1, 3)
        with pytest.raises(UserError, match=r"torch\.float64"):
            model(images.double())
    assert model.double()(images.double()).dtype == torch.float64


@pytest.mark.parametrize("given", [True, False])
def test_a_device_is_initialized_directly(given):
    """Of 632 million parameters nothing is allocated on "meta"; on another device they are not initialized on the CPU first."""
    started = time.process_time()
    with torch.device("meta"):
        model = vitrail.create("deit3_huge_patch14", device="meta" if given else None)
    assert time.process_time() - started < 5
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    with torch.device("meta"):
        on_cpu = vitrail.create("deit_tiny_patch16", depth=1, device="cpu")
    assert {parameter.device.type for parameter in on_cpu.parameters()} == {"cpu"}


def test_the_device_does_not_change_the_weights():
    weights = []
    for device in (None, "cpu"):
        torch.manual_seed(0)
        weights.append(vitrail.create("deit_tiny_patch16", 3, depth=1, device=device).state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
