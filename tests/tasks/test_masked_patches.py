"""Masked patch prediction: corruption, targets, one step against a reference in float64, models, data, artifacts."""

import json
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import vitrail
from tests.small import structures
from tests.tasks.trainings import MASKED, trained
from tests.trainers import make_trainer
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.image_loader import ImageLoader
from vitrail.data.rng import sample_key
from vitrail.data.source import Subset
from vitrail.errors import UserError
from vitrail.evaluation.features import compute_features
from vitrail.models.registry import build
from vitrail.recipes import lookup
from vitrail.recipes.task_options import MaskedPatchOptions
from vitrail.runs.request import TrainRequest, open_data, resolve_recipe
from vitrail.tasks.masked_patches import SEPARATE_STEMS, MaskedPatches, count_patches, quantize_colors
from vitrail.training.distributed import Devices
from vitrail.training.trainer import Options

CPU = torch.device("cpu")
TARGETS = ("mean_color", "downsized", "pixels")


def recipe_with(**options):
    return lookup("masked_small").set(MASKED | {f"task_options.{name}": value for name, value in options.items()})


def digits(images=32):
    return Subset(open_splits("digits").train, np.arange(images))


def task_for(recipe, architecture=None):
    """A task and its model; `architecture` replaces the recipe's."""
    task = MaskedPatches(recipe, digits(), CPU)
    torch.manual_seed(0)
    model = build(architecture) if architecture else vitrail.create(recipe.model, 0, 16, **recipe.architecture)
    task.attach(model)
    return task, model


# Corruption


@pytest.mark.parametrize(
    ("corrupted", "grid", "expected"),
    [(0.5, (14, 14), (98, 78, 10)), (0.15, (14, 14), (29, 23, 3)), (0.5, (4, 4), (8, 6, 1)), (0.5, (1, 2), (1, 1, 0))],
)
def test_the_shares_are_exact(corrupted, grid, expected):
    """Of every image exactly so many patches are corrupted, masked and replaced; the masked ones come first."""
    recipe = recipe_with(corrupted=corrupted)
    size = (grid[0] * 4, grid[1] * 4)
    task, _ = task_for(
        recipe, vitrail.create("vit_small_patch16", 0, size, width=16, depth=1, heads=2, patch_size=4).architecture
    )
    keys = sample_key(0, 0, torch.arange(40), torch.zeros(40, dtype=torch.long))
    targets = task.make_targets(torch.zeros(40, 3, *size), keys)
    patches, (count, masked, replaced) = math.prod(grid), expected
    assert targets.positions.shape == (40, count)
    assert (targets.masked.sum(1) == masked).all()
    changed = targets.source != torch.arange(patches)
    assert (changed.sum(1) == replaced).all()
    assert not (changed & targets.masked).any()
    for row in range(40):
        assert len(set(targets.positions[row].tolist())) == count
        assert set(targets.positions[row, :masked].tolist()) == set(targets.masked[row].nonzero()[:, 0].tolist())
        assert set(changed[row].nonzero()[:, 0].tolist()) <= set(targets.positions[row, masked:].tolist())
        sources = targets.source[row][changed[row]].tolist()
        assert len(set(sources)) == len(sources)


def test_no_number_of_patches_is_negative():
    assert count_patches(2, MaskedPatchOptions(corrupted=0.5, masked=0.3, replaced=0.1)) == (1, 1, 0)


def test_patches_are_drawn_uniformly():
    """Over many images every patch is corrupted, masked and replaced equally often, by every other patch."""
    task, _ = task_for(recipe_with(replaced=0.2))  # 8 of 16: 6 masked, 2 replaced
    count = 20_000
    keys = sample_key(0, 0, torch.arange(count), torch.zeros(count, dtype=torch.long))
    targets = task.make_targets(torch.zeros(count, 3, 16, 16), keys)
    torch.testing.assert_close(targets.masked.double().mean(0), torch.full((16,), 6 / 16).double(), rtol=0, atol=0.015)
    pairs = torch.zeros(16, 16)
    own = torch.arange(16).expand(count, -1)
    pairs.index_put_((own.flatten(), targets.source.flatten()), torch.ones(count * 16), accumulate=True)
    pairs.fill_diagonal_(0)
    expected = count * 2 / 16 / 15  # of each ordered pair
    assert pairs.sum() == count * 2
    others = ~torch.eye(16, dtype=torch.bool)
    assert ((pairs[others] - expected).abs() < 5 * math.sqrt(expected)).all()


def test_corruption_depends_on_the_image_alone():
    task, _ = task_for(recipe_with())
    index, repeat = torch.tensor([7, 3, 11]), torch.tensor([0, 1, 0])
    together = task.make_targets(torch.rand(3, 3, 16, 16), sample_key(5, 2, index, repeat))
    alone = task.make_targets(torch.rand(1, 3, 16, 16), sample_key(5, 2, index[1:2], repeat[1:2]))
    other = task.make_targets(torch.rand(1, 3, 16, 16), sample_key(5, 3, index[1:2], repeat[1:2]))
    for name in ("positions", "masked", "source"):
        assert torch.equal(getattr(together, name)[1:2], getattr(alone, name))
    assert not torch.equal(other.masked, alone.masked)


# Targets


def test_colors_have_three_bits_per_channel():
    values = [(0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (0.126, 0.124, 0.5), (0.99, 0.3, 0.0)]
    pixels = torch.tensor(values).T.reshape(1, 3, 2, 2)
    assert quantize_colors(pixels).flatten().tolist() == [0, 511, 1 * 64 + 0 * 8 + 4, 7 * 64 + 2 * 8 + 0]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("patch", [4, 6])
def test_targets_are_those_of_the_pixels(target, patch):
    """Computed patch by patch from the pixels before normalization; images with a rest that no patch covers."""
    recipe = recipe_with(target=target)
    size = (2 * patch + 1, 3 * patch)
    a = vitrail.create("vit_small_patch16", 0, size, width=16, depth=1, heads=2, patch_size=patch).architecture
    task, _ = task_for(recipe, a)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(2, 3, *size, generator=generator, dtype=torch.float64)
    mean, std = (torch.tensor(v, dtype=torch.float64).view(3, 1, 1) for v in (recipe.augmentation.mean, recipe.augmentation.std))
    found = task.describe_patches((pixels - mean) / std)
    for image in range(2):
        for row in range(2):
            for column in range(3):
                own = pixels[image, :, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
                if target == "pixels":
                    expected = own.reshape(-1)
                    torch.testing.assert_close(found[image, 3 * row + column], expected, rtol=0, atol=1e-6)
                    continue
                cells = 1 if target == "mean_color" else 4
                edges = [(math.floor(i * patch / cells), math.ceil((i + 1) * patch / cells)) for i in range(cells)]
                parts = [own[:, top:bottom, left:right].mean((1, 2)) for top, bottom in edges for left, right in edges]
                expected = [int(64 * (8 * r // 1) + 8 * (8 * g // 1) + 8 * b // 1) for r, g, b in torch.stack(parts).tolist()]
                assert found[image, 3 * row + column].tolist() == expected


# One step against formulas in float64


def reference_forward(p, images, targets, target):
    """Loss of a ViT with one block, mean pooling and learned positions, from its parameters by name; loops over patches."""
    batch, size, width, heads = len(images), 4, 16, 2
    tokens = []
    for image, masked, source in zip(images, targets.masked, targets.source, strict=True):
        corners = [(row, column) for row in range(0, 16, size) for column in range(0, 16, size)]
        kernel = p["model.stem.proj.weight"].reshape(width, -1)
        own = [kernel @ image[:, y : y + size, x : x + size].reshape(-1) + p["model.stem.proj.bias"] for y, x in corners]
        tokens.append(torch.stack([p["mask_token"] if masked[i] else own[int(source[i])] for i in range(16)]))
    x = torch.stack(tokens) + p["model.pos_embed.0.table"]

    def norm(x, name):
        centered = x - x.mean(-1, keepdim=True)
        return centered / (centered.square().mean(-1, keepdim=True) + 1e-6).sqrt() * p[f"{name}.weight"] + p[f"{name}.bias"]

    def linear(x, name):
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    block = "model.blocks.0.{}.branches.0.{}"
    inner = norm(x, block.format("mix", "norm"))
    q, k, v = (
        part.view(batch, 16, heads, width // heads).transpose(1, 2)
        for part in linear(inner, block.format("mix", "body.qkv")).chunk(3, -1)
    )
    weights = (q @ k.transpose(-2, -1) / math.sqrt(width // heads)).softmax(-1)
    x = x + linear((weights @ v).transpose(1, 2).reshape(batch, 16, width), block.format("mix", "body.proj"))
    inner = linear(norm(x, block.format("ffn", "norm")), block.format("ffn", "body.fc1"))
    inner = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
    x = norm(x + linear(inner, block.format("ffn", "body.fc2")), "model.norm")
    losses = []
    for image in range(batch):
        for number, position in enumerate(targets.positions[image].tolist()):
            prediction, content = linear(x[image, position], "head.linear"), targets.content[image, number]
            if target == "pixels":
                losses.append((prediction - content).square().mean())
                continue
            for cell, color in enumerate(content.tolist()):
                logits = prediction[512 * cell : 512 * (cell + 1)]
                losses.append(logits.logsumexp(0) - logits[color])
    return torch.stack(losses).mean()


@pytest.mark.parametrize("target", TARGETS)
def test_a_step_equals_the_formulas(target):
    recipe = recipe_with(target=target).set({"batch_size": 4, "schedule.warmup": "0 steps", "optimizer.clip_grad_norm": 0.0})
    trainer = make_trainer(recipe, digits(), options=Options(log_steps=100))
    trainer.task.module.double()
    prepare, seen = trainer.task.prepare_batch, []

    def prepare_double(batch, position):
        images, targets = prepare(batch, position)
        seen.append(
            (images.double(), targets._replace(content=targets.content.double() if target == "pixels" else targets.content))
        )
        return seen[-1]

    trainer.task.prepare_batch = prepare_double
    before = {name: p.detach().clone().requires_grad_() for name, p in trainer.task.module.named_parameters()}
    loss = reference_forward(before, *next_batch(trainer, prepare_double), target)
    gradients = dict(zip(before, torch.autograd.grad(loss, list(before.values())), strict=True))
    loss = loss.detach()
    stream = ImageLoader(trainer.source, CPU, 0).train_loader(trainer.sampler, (0,), 1).iterate_steps(0, 1)
    trainer.train_step(lambda: next(stream))
    assert torch.equal(seen[0][1].positions, seen[1][1].positions)
    decayed = {name for name in before if before[name].ndim > 1 and "pos_embed" not in name}
    config = recipe.optimizer
    for name, parameter in trainer.task.module.named_parameters():
        # The first step of Adam: the bias-corrected moments are the gradient and its square.
        step = gradients[name] / (gradients[name].abs() + config.eps)
        start = before[name] * (1 - config.lr * config.weight_decay * (name in decayed))
        torch.testing.assert_close(parameter, start - config.lr * step, rtol=0, atol=1e-12)
    assert float(trainer.window[0]) == pytest.approx(float(loss), rel=1e-6)  # the log is in float32


def next_batch(trainer, prepare):
    stream = ImageLoader(trainer.source, CPU, 0).train_loader(trainer.sampler, (0,), 1).iterate_steps(0, 1)
    return prepare(next(stream), trainer.position(0, trainer.recipe.batch_size))


def test_a_skipped_step_changes_nothing():
    trainer = make_trainer(recipe_with(), digits(), options=Options(on_nan="skip"))
    prepare = trainer.task.prepare_batch
    trainer.task.prepare_batch = lambda batch, position: (prepare(batch, position)[0] * torch.nan, prepare(batch, position)[1])
    before = {name: value.clone() for name, value in trainer.task.module.state_dict().items()}
    stream = ImageLoader(trainer.source, CPU, 0).train_loader(trainer.sampler, (0,), 1).iterate_steps(0, 1)
    trainer.train_step(lambda: next(stream))
    assert all(torch.equal(value, before[name]) for name, value in trainer.task.module.state_dict().items())


# Models


@pytest.mark.parametrize("name", structures())
def test_every_model_trains_or_is_refused(name):
    """All trainable parameters get a gradient: processes wait for each of them."""
    architecture = structures()[name]
    if architecture.pooling != "per_class":
        architecture = architecture.replace(classes=0)
    if architecture.stem not in SEPARATE_STEMS:
        with pytest.raises(UserError, match=f"a {architecture.stem} stem, whose tokens overlap: those next to a masked patch"):
            task_for(recipe_with(), architecture)
        return
    if architecture.mixer == "none":
        with pytest.raises(UserError, match="does not mix patches, so that nothing is known about a masked one"):
            task_for(recipe_with(), architecture)
        return
    task, model = task_for(recipe_with(), architecture.replace(drop_path=0.0, dropout=0.0))
    images = torch.randn(4, 3, *architecture.image_size)
    keys = sample_key(0, 0, torch.arange(4), torch.zeros(4, dtype=torch.long))
    loss, accuracy = task.module.train()(images, task.make_targets(images, keys))
    assert 0 <= accuracy <= 1
    loss.backward()
    unused = {n for n, p in task.module.named_parameters() if p.requires_grad and p.grad is None} - {"model.head.weight"}
    assert not unused
    assert {part.split(".")[1] for part, p in task.module.named_parameters() if not p.requires_grad} <= {
        "pooling",
        "norm",
        "blocks",
    }
    assert compute_features(model.eval(), images, task.features).shape == (4, architecture.width)


def test_refused_settings():
    for options, message in (
        ({"corrupted": 0.0}, "corrupted=0 is a share of the patches: above 0 and below 1"),
        ({"corrupted": 1.0}, "corrupted=1 is a share"),
        ({"corrupted": 0.01}, "corrupted=0.01 of 16 patches is 0: use larger images or smaller patches"),
        ({"corrupted": 0.99}, "corrupted=0.99 of 16 patches is 16"),
        ({"masked": 0.0}, "masked=0 and replaced=0.1 are shares of the corrupted patches"),
        ({"masked": 0.8, "replaced": 0.3}, "both together at most 1"),
        ({"target": "colour"}, "task_options.target='colour' is not known; choose from mean_color, downsized, pixels"),
        ({"mask": 0.5}, "A recipe has no 'task_options.mask'; the nearest are masked"),
    ):
        with pytest.raises(UserError, match=message):
            task_for(recipe_with(**options))
    with pytest.raises(UserError, match=r"Patches of 2 pixels cannot be downsized to 4 x 4: set task_options.target=mean_color"):
        task_for(recipe_with(target="downsized").set({"architecture.patch_size": 2}))
    for changes in ({"mixing.mixup": 0.8}, {"augmentation.random_erasing": 0.25}):
        with pytest.raises(UserError, match="masked_patches predicts the pixels of single, complete images: set mixing"):
            resolve_recipe(TrainRequest("digits", recipe_with().set(changes)), "cpu")


# Validation


@pytest.mark.parametrize("target", TARGETS)
def test_validation_metrics(target):
    """Loss over corrupted patches; accuracy or error at masked ones, beside the best constant; independent of the batch size."""
    task, model = task_for(recipe_with(target=target))
    model.preprocessing = model.preprocessing._replace(mean=task.recipe.augmentation.mean, std=task.recipe.augmentation.std)
    loader = ImageLoader(digits(20), CPU, 0)
    task.module.eval()
    values = task.evaluate(model, loader, 20, Devices(CPU))
    assert task.evaluate(model, loader, 8, Devices(CPU)) == pytest.approx(values, rel=1e-5)
    (batch,) = loader.iterate(20)
    images = model.preprocessing.apply(batch.pixels, batch.sizes)
    targets = task.make_targets(images, sample_key(0, 0, batch.index, batch.repeat))
    with torch.no_grad():
        prediction = task.module.predict(images, targets)
    masked, content = prediction[:, :6], targets.content[:, :6]
    if target == "pixels":
        assert values["loss"] == pytest.approx(float(F.mse_loss(prediction, targets.content)), rel=1e-5)
        assert values["error"] == pytest.approx(float(F.mse_loss(masked, content).sqrt()), rel=1e-5)
        colors = content.unflatten(-1, (3, 16))
        spread = (colors - colors.mean((0, 1, 3), keepdim=True)).square().mean().sqrt()
        assert values["constant_error"] == pytest.approx(float(spread), rel=1e-5)
        assert not task.logs
        return
    assert values["loss"] == pytest.approx(float(F.cross_entropy(prediction.flatten(0, 2), targets.content.flatten())), rel=1e-5)
    assert values["accuracy"] == pytest.approx(float((masked.argmax(-1) == content).double().mean()))
    assert values["majority_accuracy"] == pytest.approx(content.flatten().bincount().max() / content.numel())
    assert task.logs == ("accuracy",)


def test_predictions_no_better_than_a_constant_give_a_warning():
    healthy = {"feature_std": 0.5, "effective_rank": 9.0}
    task, _ = task_for(recipe_with())
    poor = healthy | {"accuracy": 0.2, "majority_accuracy": 0.25}
    assert task.diagnose(poor, 2.0) == ""
    assert task.diagnose(poor | {"accuracy": 0.3}, 9.0) == ""
    assert "not better than a constant (20.0% right, the most frequent color 25.0%): change optimizer.lr" in task.diagnose(
        poor, 9.0
    )
    assert "nearly equal" in task.diagnose(poor | {"feature_std": 0.0}, 9.0)
    task, _ = task_for(recipe_with(target="pixels", on_collapse="stop"))
    assert task.diagnose(healthy | {"error": 0.2, "constant_error": 0.25}, 9.0) == ""
    with pytest.raises(UserError, match=r"Stopped at epoch 9: .*\(error 0.250, the mean color 0.250\): change optimizer.lr"):
        task.diagnose(healthy | {"error": 0.25, "constant_error": 0.25}, 9.0)


# Runs


def test_the_artifact_is_a_backbone_for_other_trainings(tmp_path):
    """Other classes, another size; nothing stays frozen."""
    trained("masked", tmp_path, tmp_path)
    model = vitrail.load(tmp_path / "best.safetensors")
    assert (model.architecture.classes, model.class_names) == (0, None)
    assert model.architecture.pooling == "mean"
    recipe = lookup("finetune").set({"init.weights": str(tmp_path), "augmentation.image_size": [24, 24]})
    request = TrainRequest("digits", recipe)
    data = open_data(request, resolve_recipe(request, "cpu"))
    trainer = make_trainer(data.recipe, data.splits.train)
    assert trainer.model.architecture.image_size == (24, 24)
    assert len(trainer.model.class_names) == 10
    assert torch.equal(trainer.model.stem.proj.weight, model.stem.proj.weight)
    assert all(parameter.requires_grad for parameter in trainer.model.parameters())


def test_it_starts_from_weights_of_other_trainings(tmp_path):
    """They keep their pooling; their classifier is not part of the new artifact."""
    weights = tmp_path / "weights.safetensors"
    before = vitrail.create("deit3_small_patch16", 7, 16, width=16, depth=1, heads=2, patch_size=4)
    vitrail.save(before, weights)
    request = TrainRequest("digits", lookup("masked_small"), changes={"init.weights": str(weights), "batch_size": 16})
    data = open_data(request, resolve_recipe(request, "cpu"))
    trainer = make_trainer(data.recipe, data.splits.train)
    a = trainer.model.architecture
    assert (a.pooling, a.classes, a.residual) == ("class", 0, "layerscale")
    assert torch.equal(trainer.model.stem.proj.weight, before.stem.proj.weight)


def test_the_best_weights_are_tested_without_the_head_of_the_last_step(tmp_path):
    run = vitrail.train("digits", "masked_small", out=tmp_path / "run", changes=MASKED, workers=0, device="cpu")
    assert {"loss", "accuracy", "knn"} <= run.best.keys()
    test = json.loads((run.folder / "run.json").read_text())["test"]
    assert "knn" in test
    assert not {"loss", "accuracy"} & test.keys()


def test_the_best_weights_have_the_lowest_loss():
    task, _ = task_for(recipe_with())
    best = {"loss": 1.0, "knn": 0.9}
    assert task.is_better({"loss": 0.9, "knn": 0.1}, best)
    assert not task.is_better({"loss": 1.0, "knn": 0.95}, best)
