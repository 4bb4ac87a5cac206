"""Training from pre-trained weights: every architecture, other classes and sizes, both heads of a distilled model, deltas."""

import numpy as np
import pytest
import torch

import vitrail
from tests.models.test_every_model import randomize
from tests.small import structures
from tests.trainers import initial_model
from vitrail.checkpoints.delta import make_delta, save_delta
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.source import Subset
from vitrail.errors import UserError
from vitrail.heads.task_heads import SegmentationConfig
from vitrail.recipes import lookup
from vitrail.recipes.schema import Recipe
from vitrail.runs.initial_model import adapt, build_initial, configure
from vitrail.runs.request import TrainRequest, describe_pretrained, open_data, resolve_recipe
from vitrail.tasks.classification import ClassificationModule
from vitrail.tasks.registry import BUILT_IN
from vitrail.tasks.targets import ClassificationTargets
from vitrail.training.optimizers import parameter_groups

CLASSES = ["one", "two", "three"]


def recipe_for(size, **changes):
    return lookup("finetune").set({"augmentation.image_size": list(size)} | changes)


def resolved(changes, model=None):
    return resolve_recipe(TrainRequest(recipe="finetune", model=model, changes=changes), "cpu")


def opened(recipe, model=None):
    return open_data(TrainRequest("digits", model=model), recipe)


def described(data):
    """What is logged about the pre-trained weights."""
    return describe_pretrained(data.pretrained, data.recipe, list(data.splits.train.classes))


def sized(model, rows, columns):
    """The model's size with so many patches more."""
    height, width = model.architecture.image_size
    return height + rows * model.architecture.patch_size, width + columns * model.architecture.patch_size


@pytest.mark.parametrize("name", structures())
def test_every_architecture_adapts_to_other_classes_and_another_size(name):
    """The backbone is the resampled one, every head is new and, here, zero; every head that is trained gets a gradient."""
    trained = randomize(vitrail.build(structures()[name]))
    expected = vitrail.build(trained.architecture)
    expected.load_state_dict(trained.state_dict())
    size = sized(trained, 2, -1)
    expected.resize(*size)
    model, new_head = adapt(trained, recipe_for(size), CLASSES)
    assert new_head
    assert model.architecture.image_size == size
    assert model.architecture.classes == 3
    for key, value in model.state_dict().items():
        if key.startswith("head"):
            assert not value.any()
        elif not (key == "pooling.queries" and model.architecture.pooling == "per_class"):
            assert torch.equal(value, expected.state_dict()[key]), key
    loss = ClassificationModule(model.train(), lookup("finetune"))(
        torch.randn(2, 3, *size), ClassificationTargets(torch.eye(3)[:2])
    )
    loss.backward()
    assert loss.isfinite()
    trained_heads = {key for key, parameter in model.named_parameters() if key.startswith("head") and parameter.grad is not None}
    assert trained_heads == {key for key in model.state_dict() if key.startswith("head") and not key.startswith("head_dense")}


def test_a_dense_head_without_token_labels_has_no_effect():
    """LV-ViT's adds its maximum in evaluation; image labels do not train it."""
    trained = randomize(vitrail.build(structures()["lvvit_s"]))
    model, _ = adapt(trained, recipe_for(trained.architecture.image_size, **{"init.zero_head": False}), CLASSES)
    assert model.head.weight.any()
    outputs = model.eval().outputs(torch.randn(2, 3, *model.architecture.image_size))
    assert torch.equal(outputs.logits, outputs.main)


@pytest.mark.parametrize("pos_embed", ["relative", "relative_bias", "learned2d"])
def test_tables_of_every_kind_follow_the_size(pos_embed):
    place = "stem" if pos_embed == "learned2d" else "layers"
    parts = {"width": 32, "depth": 2, "heads": 2, "patch_size": 8, "pos_embed": pos_embed, "pos_embed_place": place}
    trained = randomize(vitrail.create("deit_tiny_patch16", 5, (32, 48), **parts))
    on_the_fly = vitrail.build(trained.architecture).eval()
    on_the_fly.load_state_dict(trained.state_dict())
    trained.class_names = [*CLASSES, "four", "five"]
    model, new_head = adapt(trained, recipe_for((48, 32), **{"init.zero_head": False}), trained.class_names)
    assert not new_head
    image = torch.randn(2, 3, 48, 32)
    torch.testing.assert_close(model.eval()(image), on_the_fly(image))


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16", "cait_xxs24"])
def test_a_distilled_network_keeps_both_its_heads(name, zero):
    """Other classes and another size: two new heads on the two trained tokens, and both learn."""
    parts = {"width": 32, "depth": 2, "heads": 2, "patch_size": 8, "distillation": True, "distillation_head": True}
    trained = randomize(vitrail.create(name, 7, 32, **parts))
    tokens = (trained.pooling.queries if trained.prefix is None else trained.prefix).clone()
    assert len(tokens) == 2
    model, new_head = adapt(trained, recipe_for((48, 32), **{"init.zero_head": zero}), CLASSES)
    assert new_head
    for head in (model.head, model.head_distillation):
        assert head.weight.shape == (3, 32)
        assert bool(head.weight.any()) != zero
    assert torch.equal(model.pooling.queries if model.prefix is None else model.prefix, tokens)
    outputs = model.train().outputs(torch.randn(2, 3, 48, 32))
    torch.testing.assert_close(outputs.logits, (outputs.main + outputs.distillation) / 2)
    outputs.logits.square().mean().add(outputs.logits.mean()).backward()
    assert model.head.weight.grad.any()
    assert model.head_distillation.weight.grad.any()


def test_the_same_classes_at_another_size_keep_both_heads():
    parts = {"width": 32, "depth": 1, "heads": 2, "patch_size": 8}
    trained = randomize(vitrail.create("deit_tiny_distilled_patch16", 3, 32, **parts))
    heads = [trained.head.weight.clone(), trained.head_distillation.weight.clone()]
    trained.class_names = CLASSES
    model, new_head = adapt(trained, recipe_for((48, 48), **{"init.zero_head": False}), CLASSES)
    assert not new_head
    assert torch.equal(model.head.weight, heads[0])
    assert torch.equal(model.head_distillation.weight, heads[1])


TAUGHT = {"architecture.distillation": True}


@pytest.mark.parametrize("name", [name for name, a in structures().items() if a.pooling in ("class", "class_attention")])
def test_a_distillation_token_is_added(name):
    """Everything else is the pre-trained model's, row by row; at another size, with the same classes."""
    a = structures()[name]
    if a.distillation:
        a = a.replace(distillation=False)
    trained = randomize(vitrail.build(a))
    trained.class_names = [f"class {number}" for number in range(5)]
    expected = vitrail.build(a)
    expected.load_state_dict(trained.state_dict())
    size = sized(trained, 1, 1)
    expected.resize(*size)
    recipe = recipe_for(size, **TAUGHT, **{"init.zero_head": False})
    model, new_head = adapt(trained, recipe, trained.class_names)
    assert not new_head
    assert model.architecture.distillation
    added = []
    for key, value in expected.state_dict().items():
        ours = model.state_dict()[key]
        if ours.shape != value.shape:
            added.append(key)
            ours = torch.cat([ours[:1], ours[2:]])
        assert torch.equal(ours, value), key
    assert added
    assert model.state_dict().keys() - expected.state_dict().keys() == {"head_distillation.weight", "head_distillation.bias"}
    assert model.head_distillation.weight.any()
    loss = ClassificationModule(model.train(), recipe)(
        torch.randn(2, 3, *size), ClassificationTargets(torch.eye(5)[:2], torch.eye(5)[1:3])
    )
    loss.backward()
    tokens = model.pooling.queries if model.prefix is None else model.prefix
    assert (tokens.grad.abs().sum(-1) > 0).all()
    assert model.head_distillation.weight.grad.any()


@pytest.mark.parametrize("ending", ["safetensors", "pth"])
@pytest.mark.parametrize("way", ["recipe", "model"])
def test_a_distillation_token_for_weights_in_a_file(way, ending, tmp_path):
    """Requested by a recipe key or by the model's name: it is logged, the recipe keeps it, and a restarted run has it too."""
    parts = {"width": 64, "depth": 2, "heads": 1, "patch_size": 4}
    base = randomize(vitrail.create("deit_tiny_patch16", 10, 32, **parts))
    vitrail.save(base, tmp_path / f"base.{ending}", "deit" if ending == "pth" else "vitrail")
    changes = {"init.weights": str(tmp_path / f"base.{ending}"), "init.zero_head": False, "augmentation.image_size": 32}
    changes |= TAUGHT if way == "recipe" else {f"architecture.{field}": value for field, value in parts.items()}
    model = None if way == "recipe" else "deit_tiny_distilled_patch16"
    data = opened(resolved(changes, model), model)
    assert "no distillation token: the token, its position and its classifier are newly initialized" in described(data)[-1]
    recipe, source = data.recipe, data.splits.train
    assert recipe.architecture["distillation"] is True
    first = build_initial(recipe, list(source.classes), data.pretrained)
    assert first.head_distillation is not None
    assert torch.equal(first.head.weight, base.head.weight)
    assert torch.equal(first.prefix[:1], base.prefix)
    again = initial_model(recipe, source)  # as a run that has no checkpoint yet
    assert all(torch.equal(value, first.state_dict()[name]) for name, value in again.state_dict().items())
    head = opened(recipe.set({"init.scope": "head"}), model)
    assert described(head)[-1].endswith("init.scope=head does not train the token")


def test_a_distillation_token_that_is_not_read_or_exists_already(tmp_path):
    parts = {"width": 64, "depth": 1, "heads": 1, "patch_size": 8}
    vitrail.save(vitrail.create("deit_tiny_patch16", 10, 32, pooling="mean", **parts), tmp_path / "mean.safetensors")
    vitrail.save(vitrail.create("deit_tiny_distilled_patch16", 10, 32, **parts), tmp_path / "both.safetensors")
    changes = {"init.weights": str(tmp_path / "mean.safetensors"), "augmentation.image_size": 32}
    with pytest.raises(UserError, match="a distillation token needs pooling=class or class_attention"):
        opened(resolved(changes | TAUGHT))
    changes["init.weights"] = str(tmp_path / "both.safetensors")
    data = opened(resolved(changes | TAUGHT))
    assert not any("distillation token" in message for message in (*data.messages, *described(data)))
    with pytest.raises(UserError, match="has distillation=True, but distillation=False was requested"):
        opened(resolved(changes | {"architecture.distillation": False}))


def test_layer_decay_of_the_trained_layers():
    trained = vitrail.create("deit_tiny_patch16", 3, 32, width=32, depth=3, heads=2, patch_size=8)
    recipe = recipe_for((32, 32), **{"init.scope": "last:2", "optimizer.layer_decay": 0.5})
    model = configure(trained, recipe, CLASSES)
    names = {parameter: name for name, parameter in model.named_parameters()}
    factors = {names[p]: group["lr_scale"] for group in parameter_groups(model, recipe.optimizer) for p in group["params"]}
    assert factors["head.weight"] == 1.0
    assert factors["blocks.2.mix.branches.0.body.qkv.weight"] == 0.5
    assert factors["blocks.1.ffn.branches.0.body.fc2.bias"] == 0.25
    assert not any(name.startswith(("blocks.0", "stem", "pos_embed", "prefix")) for name in factors)


def test_base_and_delta_are_weights_to_start_from(tmp_path, monkeypatch):
    parts = {"width": 64, "depth": 2, "heads": 1, "patch_size": 8}
    base = randomize(vitrail.create("deit_tiny_patch16", 10, 32, **parts))
    tuned = vitrail.build(base.architecture)
    tuned.load_state_dict(base.state_dict())
    tuned.head.weight.data += 1
    vitrail.save(base, tmp_path / "base.pth", "deit")
    save_delta(make_delta(base, tuned), tmp_path / "delta.safetensors")
    monkeypatch.chdir(tmp_path)
    changes = {"init.weights": "base.pth+delta.safetensors", "init.zero_head": False, "augmentation.image_size": [32, 32]}
    recipe = resolved(changes)
    assert recipe.init.weights == f"{tmp_path / 'base.pth'}+{tmp_path / 'delta.safetensors'}"
    monkeypatch.chdir("/")  # as a run that is resumed from elsewhere
    model = initial_model(recipe, open_splits("digits").train)
    assert torch.equal(model.head.weight, tuned.head.weight)
    assert model.architecture.drop_path == recipe.architecture["drop_path"]


def with_splits(source, path):
    """Splits by name, as `open_sources` returns them."""
    return {"train": Subset(source, np.arange(200)), "validation": Subset(source, np.arange(200, 240))} | path


@pytest.mark.parametrize("has_test", [False, True])
def test_a_validation_fraction_of_a_source(monkeypatch, has_test):
    from vitrail.data.datasets import lookup

    digits = open_splits("digits").train
    other = Subset(digits, np.arange(240, 300))
    monkeypatch.setattr(lookup, "open_sources", lambda path, column: with_splits(digits, {"test": other} if has_test else {}))
    plain, held = open_splits("anything"), open_splits("anything", validation_fraction=0.25)
    assert (len(plain.train), len(plain.validation)) == (200, 40)
    assert len(held.train) + len(held.validation) == 200
    assert len(held.validation) == pytest.approx(50, abs=5)
    assert not set(held.train.indices) & set(held.validation.indices)
    assert len(held.test) == (60 if has_test else 40)  # the validation images, if there are no others
    again = open_splits("anything", validation_fraction=0.25)
    assert np.array_equal(again.validation.indices, held.validation.indices)


def test_a_validation_fraction_of_a_recipe():
    recipe = lookup("laptop").set({"data.validation_fraction": 0.3, "batch_size": 16})
    splits, usual = (opened(each).splits for each in (recipe, lookup("laptop").set({"batch_size": 16})))
    total = len(usual.train) + len(usual.validation)
    assert len(splits.validation) == pytest.approx(0.3 * total, rel=0.02)
    assert len(splits.train) + len(splits.validation) == total
    with pytest.raises(UserError, match=r"data\.validation_fraction must lie in \[0, 1\)"):
        lookup("laptop").set({"data.validation_fraction": 1})


def test_learning_rates_that_a_paper_tried():
    recipe = lookup("vit_base_patch16_to_pets")
    assert recipe.about.lr_grid == (0.001, 0.003, 0.01, 0.03)
    assert recipe.about.validation_fraction == 0.1
    assert recipe.lr in recipe.about.lr_grid
    assert lookup("deit_base").about.lr_grid == ()


BEIT = {"pooling": "mean", "pool_norm": True, "keep_class_token": True, "pos_embed_place": "layers"}
PRETRAINED = {"width": 32, "heads": 2, "depth": 2, "patch_size": 4, "pos_embed": "relative_bias", "pos_embed_place": "shared"}


def test_weights_of_beit_are_fine_tuned_with_mean_pooling(tmp_path):
    """Blocks, stem and class token are kept, each block has a copy of the relative bias, and the norm after pooling is new."""
    base = randomize(vitrail.create("vit_tiny_patch16_12x1_ls", 0, 16, **PRETRAINED))
    vitrail.save(base, tmp_path / "beit.safetensors")
    changes = {"init.weights": str(tmp_path / "beit.safetensors"), "augmentation.image_size": 16, "init.zero_head": False}
    data = opened(resolved(changes | {f"architecture.{field}": value for field, value in BEIT.items()}))
    assert "pooling, final norm and position tables are those of the recipe" in described(data)[-1]
    model = build_initial(data.recipe, CLASSES, data.pretrained).eval()
    assert {field: getattr(model.architecture, field) for field in BEIT} == BEIT
    image = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        patches = base.encode(*base.embed(image))[0][:, 1:]
        features = model.features(image)
        torch.testing.assert_close(features.tokens, patches)
        pooled = torch.nn.functional.layer_norm(patches.mean(1), (32,), eps=1e-6)
        torch.testing.assert_close(features.pooled, pooled)
        torch.testing.assert_close(model(image), model.head(pooled))
    larger = build_initial(data.recipe.set({"augmentation.image_size": 24}), CLASSES, vitrail.load(tmp_path / "beit.safetensors"))
    assert torch.equal(larger.pos_embed[0].table, larger.pos_embed[1].table)
    assert larger.pos_embed[0].table.shape == (11 * 11 + 3, 2)


@pytest.mark.parametrize(
    ("parts", "requested", "field"),
    [
        ({}, {"pooling": "mean"}, "pooling"),  # the class token would be lost
        ({"pos_embed": "learned"}, {"pos_embed_place": "layers"}, "pos_embed_place"),
        ({"pooling": "mean", "pool_norm": True}, {"pool_norm": False}, "pool_norm"),
    ],
)
def test_other_changes_of_pooling_and_positions_are_refused(parts, requested, field, tmp_path):
    base = vitrail.create("vit_tiny_patch16_12x1_ls", 0, 16, **PRETRAINED | parts)
    vitrail.save(base, tmp_path / "base.safetensors")
    changes = {"init.weights": str(tmp_path / "base.safetensors"), "augmentation.image_size": 16}
    recipe = resolved(changes | {f"architecture.{name}": value for name, value in requested.items()})
    with pytest.raises(UserError, match=f"has {field}=.* was requested"):
        opened(recipe)


@pytest.mark.parametrize("task", BUILT_IN)
def test_a_head_of_another_task_is_removed(task):
    """Its parameters would get no gradient, and a resumed run, which is built without it, would not fit its checkpoint."""
    pretrained = vitrail.create("vitrail_mini", 0, 16, width=16, depth=1, patch_size=4)
    pretrained.set_task_head(SegmentationConfig(("sky", "road"), (0, 1), 16, kind="linear"))
    recipe = Recipe(name="tiny", task=task).set({"augmentation.image_size": [16, 16]})
    model, _ = adapt(pretrained, recipe, CLASSES if task == "classification" else None)
    assert (model.task_head is not None) == (task in ("segmentation", "detection", "grafit"))  # which replace it
