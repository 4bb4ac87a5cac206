"""`vitrail.train` and `vitrail train` have the same arguments, under the same names, with the same effect."""

import dataclasses
import inspect
import re
from typing import get_args, get_type_hints

import pytest
import torch

import vitrail
from vitrail.aliases import upgrade_key
from vitrail.cli.train import TrainOptions
from vitrail.errors import UserError
from vitrail.formatting import format_time_span, pluralize
from vitrail.recipes import Recipe, lookup
from vitrail.recipes.arguments import RECIPE_KEYS, recipe_changes
from vitrail.runs import prepare as preparation
from vitrail.runs import train
from vitrail.runs.request import TrainRequest, resolve_recipe
from vitrail.runs.step_timing import Pace
from vitrail.training.distributed import Devices
from vitrail.training.trainer import Options

PARAMETERS = inspect.signature(vitrail.train).parameters
# One value for each argument, as text where the command line parses it itself.
VALUES = {
    "source": "photos",
    "recipe": "deit_small",
    "from_": "weights.pth",
    "model": "deit_tiny_patch16",
    "epochs": 2.5,
    "minutes": 3.0,
    "scope": "head",
    "seed": 7,
    "teacher": "teacher.pth",
    "labels": "store",
    "label": "coarse_label",
    "map": "breeds.csv",
    "tokenizer": "tok.safetensors",
    "lr": 0.1,
    "batch_size": 24,
    "image_size": (96, 128),
    "weight_decay": 0.3,
    "patience": 4,
    "changes": {"mixing.mixup": "0.5"},
    "out": "runs/here",
    "device": "cpu",
    "micro_batch_size": 8,
    "workers": 0,
    "unreadable": "fatal",
}
AS_TEXT = {"image_size": "96x128", "changes": ["mixing.mixup=0.5"]}


@pytest.fixture
def requests(monkeypatch):
    """The requests that `vitrail.train` would run."""
    made = []
    monkeypatch.setattr(train, "run_request", made.append)
    return made


def test_names_are_those_of_the_command_line():
    assert VALUES.keys() | {"options"} == PARAMETERS.keys()
    assert PARAMETERS.keys() - {"options"} <= set(TrainOptions._fields)
    others = set(TrainOptions._fields) - PARAMETERS.keys()
    settings = {field.name for field in dataclasses.fields(Options)} | {"shard", "save_every"}
    assert others - settings == {"seeds", "folds"}
    for name, hint in get_type_hints(TrainOptions, include_extras=True).items():
        declared = [option for part in get_args(hint)[1:] for option in part.param_decls or ()]
        if name in RECIPE_KEYS and declared:
            assert declared == [f"--{name.rstrip('_').replace('_', '-')}"]


def test_each_argument_is_documented():
    documented = re.findall(r"^ {4}(\w+): ", inspect.cleandoc(vitrail.train.__doc__), re.MULTILINE)
    assert documented == list(PARAMETERS)


@pytest.mark.parametrize("name", VALUES)
def test_arguments_have_the_effect_of_options(name, requests):
    other_length = {"epochs": "minutes"}.get(name, "epochs")  # only one of them sets the length
    for names in {(name,), tuple(VALUES.keys() - {other_length})}:
        vitrail.train(**{each: VALUES[each] for each in names})
        given = TrainOptions(**{each: AS_TEXT.get(each, VALUES[each]) for each in names}).request()
        assert dataclasses.replace(given, options=None) == requests.pop()


def test_every_everyday_argument_reaches_its_key():
    recipe = lookup("deit_small")
    changed = recipe.set(recipe_changes(recipe, {}, {name: VALUES[name] for name in RECIPE_KEYS})).leaves()
    expected = {RECIPE_KEYS[name]: VALUES[name] for name in RECIPE_KEYS} | {"schedule.length": "2.5 epochs"}
    assert {key: changed[key] for key in expected} == expected
    assert all(changed[key] != recipe.leaves().get(key) for key in expected)


def test_set_accepts_the_names_of_the_arguments():
    assert {name: upgrade_key(name.rstrip("_")) for name in RECIPE_KEYS} == RECIPE_KEYS


def test_arguments_take_precedence_over_changes():
    for changes in ({"lr": 1}, {"optimizer.lr": 1, "learning_rate": 2}, {"optimiser.rate": 1}):
        assert recipe_changes(None, changes, {"lr": 0.1, "seed": None}) == {"optimizer.lr": 0.1}


def test_python_accepts_the_recipe_of_a_run(requests, tmp_path):
    recipe = lookup("laptop")
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    vitrail.train("photos", str(tmp_path / "recipe.yaml"), teacher=tmp_path)
    assert requests[0].recipe == recipe
    assert requests[0].changes == {"distillation.teacher": str(tmp_path)}


def test_invalid_arguments():
    for arguments in ({"epochs": 0}, {"minutes": 0}, {"minutes": -1.0}, {"workers": -1}):
        with pytest.raises(vitrail.UserError, match=next(iter(arguments))):
            vitrail.train("digits", **arguments)
    with pytest.raises(vitrail.UserError, match=r"validation.patience must not be negative"):
        Recipe().set({"patience": -1})


def test_help_of_train(run_cli):
    _, text, _ = run_cli("train", "--help")
    panel = text[text.index("─ Everyday ─") : text.index("─ Recipe ─")]
    for name in ("from", "epochs", "minutes", "lr", "batch-size", "image-size", "weight-decay", "patience", "seed", "scope"):
        assert f"--{name} " in panel
    for command in ((), ("train",), ("data", "pack"), ("predict",), ("recipes",)):
        _, text, _ = run_cli(*command, "--help")
        assert not re.search(r"<bool>|<int range>|<list", text)


def test_recipes_lists_a_few_first(run_cli):
    _, table, _ = run_cli("recipes")
    names = re.findall(r"^  (\w+) +\d", table, re.MULTILINE)
    assert names[:3] == ["laptop", "small", "finetune"]
    assert sorted(names[3:8]) == ["beit_small", "detect", "dino_small", "grafit_small", "segment"]
    papers = [lookup(name).about.paper for name in names[8:]]
    assert len(papers) == len(set(papers)) == 9
    assert "`vitrail recipes --all` lists all" in table


def test_recipes_show_prints_any_letter(run_cli):
    _, text, _ = run_cli("recipes", "show", "laptop")
    assert "99.4 ± 0.6 %" in text
    assert vitrail.Recipe.from_dict(lookup("laptop").to_dict()) == lookup("laptop")
    assert "lr: 0.1\n" in run_cli("recipes", "show", "laptop", "--set", "lr=0.1")[1]


def test_durations_and_plurals():
    texts = {41: "41 s", 89.9: "90 s", 600: "10 min", 7200: "2 h", 11_100: "3 h 5 min", 86_390: "1 day", 90_000: "1 day 1 hour"}
    texts |= {497_781: "5 days 18 hours"}
    assert {seconds: format_time_span(seconds) for seconds in texts} == texts
    assert [pluralize(count, "step") for count in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": "3"}, "epochs='3' is not a valid length"),
        ({"minutes": "5"}, "minutes is a time budget"),
        ({"workers": "2"}, "workers is the number of processes"),
        ({"micro_batch_size": "a"}, "micro_batch_size is the number of images"),
        ({"epochs": 3, "minutes": 5}, "epochs and minutes both set the length"),
    ],
)
def test_lengths_and_numbers_that_cannot_be_used(arguments, message):
    with pytest.raises(UserError, match=message):
        vitrail.train("digits", **arguments)


@pytest.mark.parametrize(("options", "compiled"), [(None, False), (Options(keep=5), False), (Options(compile=True), True)])
def test_trainings_are_compiled_on_a_gpu_unless_chosen_otherwise(options, compiled, monkeypatch):
    monkeypatch.setattr(preparation, "measure_pace", lambda *_: Pace(0.01))
    monkeypatch.setattr("vitrail.training.trainer.compile_blocks", lambda network: None)
    request = TrainRequest("digits", "laptop", options=options)
    prepared = preparation.prepare(request, resolve_recipe(request, "cpu"), Devices(torch.device("cpu")), lambda _: None)
    assert prepared.run["options"]["compile"] is prepared.trainer.options.compile is compiled
