"""A training without options: its weights, and the image size and the length that fit into a time budget."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import vitrail
from tests.images import make_folder
from vitrail.data.datasets.lookup import open_splits
from vitrail.errors import UserError
from vitrail.models.flops import cost
from vitrail.recipes import lookup
from vitrail.recipes.arguments import recipe_changes
from vitrail.runs import budget, request
from vitrail.runs import prepare as preparation
from vitrail.runs.budget import MAX_EPOCHS, MIN_EPOCHS, choose_image_size, choose_length, choose_validation_size, image_seconds
from vitrail.runs.initial_model import configure
from vitrail.runs.request import TrainRequest, open_data, resolve_recipe
from vitrail.runs.step_timing import Pace
from vitrail.training import precision
from vitrail.training.distributed import Devices
from vitrail.training.schedules import lr_at

CPU = torch.device("cpu")


@pytest.fixture
def photos(tmp_path):
    make_folder(tmp_path / "photos", count=10, size=(200, 170))
    return tmp_path / "photos"


@pytest.mark.parametrize(
    ("size", "mode", "device", "recipe"),
    [((80, 60), "RGB", "cpu", "finetune"), ((80, 60), "L", "cpu", "laptop"), ((28, 28), "RGB", "cuda", "small")],
)
def test_photographs_start_from_the_bundled_weights(size, mode, device, recipe, tmp_path):
    make_folder(tmp_path / "images", size=size, mode=mode)
    resolved = resolve_recipe(TrainRequest(str(tmp_path / "images")), device)
    assert (resolved.name, resolved.init.weights) == (recipe, "vitrail_tiny" if recipe == "finetune" else "")


def test_fine_tuning_by_name_starts_from_the_bundled_weights(photos, tmp_path):
    def start(source, **more):
        resolved = resolve_recipe(TrainRequest(str(source), "finetune", **more), "cpu")
        return resolved.name, resolved.init.weights

    assert start(photos) == ("finetune", "vitrail_tiny")
    assert start(photos, model="vitrail_mini") == ("finetune", "")
    make_folder(tmp_path / "letters", mode="L")
    assert start(tmp_path / "letters") == ("finetune", "")


def test_very_many_photographs_are_trained_from_scratch_on_a_gpu(photos, monkeypatch):
    monkeypatch.setattr(request, "MAX_FINETUNED", 20)
    assert resolve_recipe(TrainRequest(str(photos)), "cuda").name == "small"
    assert resolve_recipe(TrainRequest(str(photos)), "cpu").name == "finetune"


def test_a_training_from_scratch_says_what_it_is_for(photos, tmp_path):
    def messages(source, recipe="laptop", **changes):
        requested = TrainRequest(str(source), recipe, changes=changes)
        return " ".join(open_data(requested, resolve_recipe(requested, "cpu")).messages)

    make_folder(tmp_path / "letters", mode="L")
    hint = "training from scratch is for images unlike photographs"
    assert hint in messages(photos)
    assert hint not in messages(tmp_path / "letters")
    assert hint not in messages(photos, "finetune")
    assert hint in messages(photos, "finetune", model="vitrail_mini")
    make_folder(tmp_path / "rays", size=(80, 60), mode="L")
    expected = "training from scratch, since the images are gray: --from vitrail_tiny starts from weights of color photographs"
    assert expected in messages(tmp_path / "rays", None)
    assert "from scratch" not in messages(tmp_path / "rays", "laptop") + messages(tmp_path / "letters", None)


def minutes_for(model, source, size, seconds):
    """Minutes in which MIN_EPOCHS of images of `size` take place, if one of the model's own size takes `seconds`."""
    macs = cost(model.architecture.replace(image_size=(size, size))).macs / cost(model.architecture).macs
    return seconds * macs * len(source) * MIN_EPOCHS / 60


def test_the_largest_size_that_fits_is_chosen_up_to_that_of_the_images(photos, monkeypatch):
    model, source = vitrail.load("vitrail_tiny"), open_splits(str(photos)).train
    monkeypatch.setattr(budget, "image_seconds", lambda *_: 0.02)
    enough = {size: 1.001 * minutes_for(model, source, size, 0.02) for size in (128, 160, 192)}
    assert [choose_image_size(model, source, CPU, minutes) for minutes in enough.values()] == [
        (128, 128),
        (160, 160),
        (160, 160),
    ]
    assert choose_image_size(model, source, CPU, 0.999 * minutes_for(model, source, 160, 0.02)) == (128, 128)
    model.resize(128, 96)
    assert choose_image_size(model, source, CPU, enough[192]) == (128, 96)
    assert choose_validation_size(model, (128, 96)) == (160, 112)


@pytest.mark.parametrize(
    ("has_bfloat16", "changes", "size"), [(True, {}, 160), (False, {}, 128), (True, {"precision": "fp32"}, 128)]
)
def test_the_size_is_chosen_with_the_precision_of_the_training(has_bfloat16, changes, size, photos, monkeypatch):
    """bfloat16 takes half of the time: a size that float32 has no time for fits."""
    model, source = vitrail.load("vitrail_tiny"), open_splits(str(photos)).train
    monkeypatch.setattr(precision, "has_bfloat16", lambda _: has_bfloat16)
    monkeypatch.setattr(budget, "image_seconds", lambda _, __, dtype: 0.01 if dtype == torch.bfloat16 else 0.02)
    monkeypatch.setattr(request, "has_colors", lambda _: True)
    requested = TrainRequest(str(photos), changes=changes, minutes=1.5 * minutes_for(model, source, 160, 0.01))
    data = open_data(requested, resolve_recipe(requested, "cpu"))
    assert data.recipe.augmentation.image_size == (size, size)


def test_images_are_larger_in_validations_and_predictions(photos, tmp_path, monkeypatch):
    """FixRes. The weights keep the size of their training for a further one."""
    monkeypatch.setattr(budget, "image_seconds", lambda *_: 1e-6)

    def open_recipe(**more):
        requested = TrainRequest(str(photos), **more)
        return open_data(requested, resolve_recipe(requested, "cpu"))

    opened = open_recipe()
    assert (opened.recipe.augmentation.image_size, opened.recipe.validation.image_size) == ((160, 160), (192, 192))
    assert "validation and predictions at 192 pixels: random crops" in " ".join(opened.messages)
    assert opened.recipe.min_decode_side == 288
    assert open_recipe(changes={"validation.image_size": [160, 160]}).recipe.validation_size == (160, 160)
    assert open_recipe(changes={"augmentation.image_size": 96}).recipe.validation_size == (96, 96)
    fixed = vitrail.create("resmlp_s12", 3, device="meta")
    with pytest.raises(UserError, match=r"resmlp_s12 has weights for each patch .*: remove validation.image_size"):
        configure(fixed, lookup("finetune").set({"augmentation.image_size": 224, "validation.image_size": 256}), None)
    assert choose_validation_size(fixed, (224, 224)) == (0, 0)

    small = vitrail.create("vitrail_mini", 3, (32, 32), width=8, depth=1)
    vitrail.save(small, tmp_path / "small.safetensors")
    sizes = {"augmentation.image_size": [32, 32], "validation.image_size": [40, 40]}
    short = sizes | {"init.weights": str(tmp_path / "small.safetensors"), "schedule.length": "2 steps", "batch_size": 8}
    run = vitrail.train(photos, "finetune", changes=short, out=tmp_path / "run", device="cpu", workers=0)
    model = vitrail.load(run.artifact)
    assert (model.architecture.image_size, model.preprocessing.image_size) == ((32, 32), (40, 40))
    assert model.preprocess(next(photos.rglob("*.png"))).shape == (1, 3, 40, 40)
    (step,) = (run.folder / "checkpoints").glob("step-*.safetensors")
    assert vitrail.load(step).preprocessing == model.preprocessing
    again = open_recipe(recipe="finetune", changes={"init.weights": str(run.artifact)})
    assert again.recipe.augmentation.image_size == (32, 32)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_passes_are_timed_in_that_precision_and_leave_the_model_unchanged(dtype):
    model = vitrail.create("vitrail_mini", classes=3, image_size=(32, 32))
    before, types = {name: value.clone() for name, value in model.state_dict().items()}, set()
    model.blocks[0].register_forward_hook(lambda _, __, output: types.add(output.dtype))
    model.head.register_forward_hook(lambda _, __, output: types.add(output.dtype))
    assert image_seconds(model, CPU, dtype) > 0
    assert (torch.bfloat16 in types) == (dtype is not None)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("recipe", "minutes", "length"),
    [
        ("finetune", 1, "5 epochs"),
        ("finetune", 0.2, "8 steps"),
        ("finetune", 0.001, "1 steps"),
        ("finetune", 100, f"{MAX_EPOCHS} epochs"),
        ("laptop", 100, "521 epochs"),
        ("dino_small", 100, "521 epochs"),
    ],
)
def test_the_length_fits_with_its_validations(recipe, minutes, length):
    """An epoch has 10 steps of a second and a validation of 1.5 s; 2 s are spent before and after."""
    recipe = lookup(recipe)
    if recipe.name == "finetune":
        recipe = recipe.set({"init.weights": "vitrail_tiny"})
    trainer = SimpleNamespace(recipe=recipe, sampler=SimpleNamespace(steps=10), validate_every=10)
    assert choose_length(trainer, Pace(step=1.0, validation=1.5, fixed=2.0), minutes) == length


def prepare(source, recipe, monkeypatch, pace=1.0, **more):
    """The trainer and the messages of a tiny model; a step takes `pace` seconds, a validation twice as long."""
    messages = []
    changes = {"model": "vitrail_mini", "augmentation.image_size": [32, 32], "batch_size": 3, "precision": "fp32"}
    requested = TrainRequest(str(source), recipe, changes=changes | more.pop("changes", {}), device="cpu", workers=0, **more)
    monkeypatch.setattr(preparation, "measure_pace", lambda *_: Pace(step=pace, validation=2 * pace))
    prepared = preparation.prepare(requested, resolve_recipe(requested, "cpu"), Devices(CPU), messages.append)
    return prepared.trainer, " ".join(messages)


@pytest.mark.parametrize(("recipe", "epochs"), [("cait_s24", 3), ("deit_small", 3), ("deit_small", 12)])
@pytest.mark.parametrize("by", ["epochs", "minutes"])
def test_warmup_and_cooldown_fit_into_the_length(recipe, epochs, by, photos, monkeypatch):
    changes = {"schedule.cooldown": "10 epochs"}
    if by == "epochs":
        changes |= recipe_changes(recipe, changes, {"epochs": epochs})
    minutes = epochs * 11 / 60 * 1.01 if by == "minutes" else None  # nine steps and a validation
    trainer, said = prepare(photos, recipe, monkeypatch, changes=changes, minutes=minutes)
    steps, schedule = trainer.sampler.steps, trainer.recipe.schedule
    assert trainer.total == epochs * steps
    assert ("schedule.warmup set to 10%: 5 epochs are more than half of the training" in said) == (epochs == 3)
    rates = [lr_at(dataclasses.replace(schedule, by_epoch=False), 1.0, step, steps) for step in range(trainer.total)]
    assert max(rates) > 0.8
    assert rates[-1] < 0.3


def test_a_warmup_of_the_user_is_kept(photos, monkeypatch):
    trainer, said = prepare(photos, "deit_small", monkeypatch, changes={"epochs": 3, "warmup_epochs": 5})
    assert (trainer.recipe.schedule.warmup, "schedule.warmup" in said) == ("5 epochs", False)


def test_lengths_that_do_not_fit(photos, monkeypatch):
    with pytest.raises(UserError, match="epochs and minutes both set the length of the training: give one of them"):
        TrainRequest(str(photos), changes={"epochs": 3}, minutes=5.0)
    trainer, said = prepare(photos, "laptop", monkeypatch, pace=10.0, minutes=0.1)
    assert trainer.total == 1
    assert "0.1 minutes are too few for 1 step and 1 validation" in said
    assert "too few" not in prepare(photos, "laptop", monkeypatch, minutes=1)[1]
