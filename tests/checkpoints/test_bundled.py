"""The bundled weights, which all commands accept by name."""

import json
import runpy
import tomllib
from pathlib import Path

import pytest
import torch
from PIL import Image

import vitrail
from tests.training.runs import make_run
from vitrail.aliases import upgrade_name, upgrade_tensor
from vitrail.checkpoints import bundled
from vitrail.checkpoints.bundled import NAMES, find_bundled
from vitrail.checkpoints.readers import read_safetensors
from vitrail.errors import UserError
from vitrail.runs.initial_model import states_architecture
from vitrail.runs.request import TrainRequest, open_data, resolve_recipe
from vitrail.teachers.lookup import open_teacher

PACKAGE = Path(vitrail.__file__).parent


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def image(tmp_path):
    Image.new("RGB", (80, 70), (90, 60, 30)).save(tmp_path / "cat.jpg")
    return "cat.jpg"


@pytest.mark.parametrize("name", NAMES)
def test_file_size_dtype_and_header(name):
    file = find_bundled(name)
    assert file.stat().st_size <= 12_000_000
    tensors, metadata = read_safetensors(file)
    header = json.loads(metadata["vitrail"])
    assert upgrade_name(header["name"]) == name  # the file was written before the rename
    assert len(header["class_names"]) == header["architecture"]["classes"] == 200
    matrices = [tensor for tensor in tensors.values() if tensor.dim() > 1]
    assert {tensor.dtype for tensor in matrices} == {torch.float16}
    assert all(tensor.isfinite().all() for tensor in tensors.values())


@pytest.mark.parametrize("name", NAMES)
def test_float16_tensors_are_loaded_as_float32(name):
    model = vitrail.load(name)
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    stored = {upgrade_tensor(key): tensor for key, tensor in read_safetensors(find_bundled(name))[0].items()}
    assert stored.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, stored[key].to(tensor.dtype)) for key, tensor in model.state_dict().items())
    assert model.architecture.differences(vitrail.create(name, classes=200).architecture) == []


def test_old_name_is_accepted():
    model, old = vitrail.load("vitrail_tiny"), vitrail.load("house_tiny")
    assert old.name == model.name == "vitrail_tiny"
    assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in old.state_dict().items())
    assert open_teacher("house_tiny").name == "vitrail_tiny"
    assert resolve_recipe(TrainRequest(changes={"init.weights": "house_tiny"}), "cpu").init.weights == "vitrail_tiny"
    assert json.loads(model.notes["made"])["steps"] > 0


def test_package_data():
    declared = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["vitrail"]
    shipped = {path for pattern in declared for path in PACKAGE.glob(pattern)}
    assert {find_bundled(name) for name in NAMES} <= shipped
    assert {PACKAGE / "data" / "datasets" / name for name in ("pets.parquet", "pets.md")} <= shipped


def test_current_folder_takes_precedence(tmp_path):
    (tmp_path / "vitrail_tiny").mkdir()
    vitrail.save(vitrail.create("vitrail_mini", classes=3, depth=1), tmp_path / "vitrail_tiny" / "best.safetensors")
    assert find_bundled("vitrail_tiny") is None
    assert vitrail.load("vitrail_tiny").architecture.classes == 3
    assert vitrail.load("./vitrail_tiny").architecture.classes == 3
    recipe = resolve_recipe(TrainRequest(changes={"init.weights": "vitrail_tiny"}), "cpu")
    assert recipe.init.weights == str(tmp_path / "vitrail_tiny" / "best.safetensors")


@pytest.mark.parametrize(("changes", "decay"), [({}, 0.9), ({"optimizer.layer_decay": 0.75}, 0.75)])
def test_a_small_network_is_fine_tuned_with_less_layer_decay(changes, decay):
    request = TrainRequest("pets", changes={"init.weights": "vitrail_tiny", "schedule.length": "1 steps"} | changes)
    data = open_data(request, resolve_recipe(request, "cpu"))
    assert data.recipe.optimizer.layer_decay == decay
    assert any("optimizer.layer_decay set to 0.9" in message for message in data.messages) == (not changes)


def test_recipe_contains_the_name_and_not_the_path():
    recipe = resolve_recipe(TrainRequest(changes={"init.weights": "vitrail_tiny", "init.scope": "attention"}), "cpu")
    assert (recipe.name, recipe.init.weights) == ("finetune", "vitrail_tiny")
    assert states_architecture("vitrail_tiny")


def test_commands_accept_the_name(run_cli, image, tmp_path):
    shown = run_cli("info", "vitrail_tiny", "--json")
    assert shown.returncode == 0, shown.stderr
    facts = json.loads(shown.stdout)
    assert (facts["format"], len(facts["class_names"])) == ("vitrail", 200)
    answered = run_cli("predict", "vitrail_tiny", image, "--json")
    assert answered.returncode == 0, answered.stderr
    assert json.loads(answered.stdout)["classes"][0]["name"] in facts["class_names"]
    assert run_cli("embed", "vitrail_tiny", tmp_path, "--out", "features.npy").returncode == 0
    assert run_cli("convert", "vitrail_tiny", "copy.safetensors", "--check").returncode == 0
    assert vitrail.load("copy.safetensors").class_names == facts["class_names"]


def test_base_of_a_delta(run_cli):
    tuned = vitrail.load("vitrail_tiny")
    with torch.no_grad():
        tuned.head.bias += 1
    vitrail.save(tuned, "tuned.safetensors")
    assert run_cli("delta", "make", "vitrail_tiny", "tuned.safetensors", "--out", "delta.safetensors").returncode == 0
    again = vitrail.load("vitrail_tiny+delta.safetensors")
    assert torch.equal(again.head.bias, tuned.head.bias)


def test_teacher():
    assert open_teacher("vitrail_tiny").classes == 200
    request = TrainRequest(recipe="laptop", changes={"distillation.teacher": "vitrail_tiny"})
    assert resolve_recipe(request, "cpu").distillation.teacher == "vitrail_tiny"


def test_other_names_are_files():
    assert find_bundled("vitrail_mini") is None
    assert find_bundled("./vitrail_tiny") is None
    with pytest.raises(vitrail.UserError, match="There is no file vitrail_mini"):
        vitrail.load("vitrail_mini")


def test_damaged_file_is_rejected(tmp_path, monkeypatch):
    data = bytearray(find_bundled("vitrail_tiny").read_bytes())
    data[6_000_000] ^= 1
    (tmp_path / "vitrail_tiny.safetensors").write_bytes(data)
    monkeypatch.setattr(bundled, "__file__", str(tmp_path / "__init__.py"))
    bundled.verified_file.cache_clear()
    try:
        with pytest.raises(UserError, match="are damaged: install Vitrail again"):
            vitrail.load("vitrail_tiny")
        (tmp_path / "vitrail_tiny.safetensors").unlink()
        with pytest.raises(UserError, match="are missing"):
            vitrail.load("vitrail_tiny")
    finally:
        bundled.verified_file.cache_clear()


def test_misspelled_name():
    with pytest.raises(UserError, match=r"no file vitrail_tinny\. Weights with similar names: vitrail_tiny,"):
        vitrail.load("vitrail_tinny")


def test_what_is_bundled_from_now_on_keeps_the_commit_that_trained_it(tmp_path):
    make_run(tmp_path / "run", code="0123abc with changes")
    history = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "bundle_weights.py"))["history"]
    assert history(tmp_path / "run", "some images")["made"]["code"] == "0123abc with changes"
