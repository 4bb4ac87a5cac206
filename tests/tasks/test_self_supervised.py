"""What the tasks without labels have in common: graphs of the views, the choice of the best weights, refused settings."""

import numpy as np
import pytest
import torch

from tests.tasks.trainings import STEPS, make, write_tokenizer
from tests.training.processes import run
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.source import Subset
from vitrail.errors import UserError
from vitrail.evaluation.feature_health import measure_health
from vitrail.recipes import lookup
from vitrail.runs import step_timing
from vitrail.runs.step_timing import measure_pace
from vitrail.tasks.registry import find_task


def test_timed_steps_do_not_use_up_the_graphs(tmp_path, monkeypatch):
    """Their batches have many sizes, and only a few graphs are captured."""
    trainer, captured = make("masked", tmp_path, tmp_path / "run"), []
    task, splits = trainer.task, open_splits("digits")

    def record(pixels, sizes, keys):
        captured.append(len(pixels))
        return task.make_views(pixels, sizes, keys)

    monkeypatch.setattr(task, "_captured_views", record)
    monkeypatch.setattr(step_timing, "BUDGET", 0.05)
    measure_pace(trainer, splits._replace(validation=Subset(splits.validation, np.arange(16))), 0)
    assert not captured
    run(trainer)
    micro_batches = trainer.devices.micro_batches
    assert captured == [trainer.recipe.batch_size // micro_batches] * micro_batches * (STEPS - 1)


def test_the_latest_weights_are_kept_without_labels_to_validate_on(tmp_path):
    """Training images have labels, validation images do not: every k-NN accuracy is 0."""
    trainer = make("dino", tmp_path, tmp_path / "run")
    trainer.validation.source.label = None
    run(trainer)
    assert (trainer.best["knn"], trainer.best["step"]) == (0.0, STEPS)
    assert trainer.task.is_better({"knn": 0.5}, {"knn": 0.4})
    assert not trainer.task.is_better({"knn": 0.4}, {"knn": 0.5})


SETTINGS = {"mixing.mixup": 0.8, "mixing.cutmix": 1.0, "distillation.teacher": "vitrail_tiny", "token_labels.store": "maps"}


@pytest.mark.parametrize("name", ["dino_small", "tokenizer_small", "beit_small", "grafit_small"])
def test_settings_without_effect_are_refused(name, tmp_path):
    recipe = lookup(name)
    if name == "beit_small":
        recipe = recipe.set({"task_options.tokenizer": str(write_tokenizer(tmp_path / "tok.safetensors"))})
    task = find_task(recipe.task)
    assert task.resolve_recipe(recipe, frozenset()).task_options["knn_k"]
    for key, value in SETTINGS.items():
        expected = "has no effect on (training without labels|Grafit): remove it|Grafit .* does not mix them: set"
        with pytest.raises(UserError, match=expected):
            task.resolve_recipe(recipe.set({key: value}), frozenset())
    with pytest.raises(UserError, match="needs one vector per image, and pooling=per_class has one per class: choose another"):
        task.resolve_recipe(recipe.set({"architecture.pooling": "per_class"}), frozenset())


def test_a_few_images_do_not_all_have_the_same_neighbors():
    noise = torch.Generator().manual_seed(0)
    for count in (5, 11, 40):
        features, views = torch.randn(2, count, 16, generator=noise)
        assert measure_health(features, features).agreement == 1.0
        assert measure_health(features, views).agreement < 0.7


def test_one_image_has_no_neighbors():
    assert measure_health(torch.ones(1, 4), torch.ones(1, 4)).agreement == 1.0
