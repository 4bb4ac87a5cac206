"""DINO: parity with the released code, an independent reference, schedules, the model families and bad inputs."""

import contextlib
import copy
import dataclasses
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.small import structures
from tests.trainers import CPU
from vitrail.checkpoints.formats import deit
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.loader import Batch
from vitrail.data.source import Subset
from vitrail.errors import UserError
from vitrail.models.registry import build, lookup
from vitrail.recipes.schema import OptimizerConfig, Recipe, ScheduleConfig
from vitrail.recipes.task_options import DinoOptions
from vitrail.tasks.dino import Dino, DinoTargets, ViewCrossEntropy, compare_view, pool
from vitrail.training.distributed import Devices
from vitrail.training.scope import apply_scope
from vitrail.training.task import Position
from vitrail.training.trainer import Options, Trainer

GOLDEN = Path(__file__).parents[1] / "golden" / "dino.npz"
TINY = DinoOptions(outputs=24, hidden=8, bottleneck=6, local_crops=2, local_size=4)
MODEL = lookup("deit_tiny_patch16")[1].replace(
    width=8, depth=1, heads=2, mlp_ratio=1.0, patch_size=2, image_size=(4, 4), classes=0, drop_path=0.0
)
# The names of the released head, and ours.
HEAD = {f"mlp.{2 * index}": f"layers.{index}" for index in range(3)} | {
    "last_layer.weight_v": "direction",
    "last_layer.weight_g": "gain",
}


def make_task(options=TINY, architecture=MODEL, images=8, **changes):
    source = Subset(open_splits("digits").train, np.arange(images))
    recipe = Recipe(task="dino", task_options=dataclasses.asdict(options), precision="fp32", batch_size=4)
    augmentation = dataclasses.replace(recipe.augmentation, image_size=architecture.image_size)
    recipe = dataclasses.replace(recipe, **{"augmentation": augmentation} | changes)
    task = Dino(recipe, source, CPU)
    torch.manual_seed(0)
    task.attach(build(architecture, "tiny"))
    return task


def make_trainer(task, micro_batches=1):
    devices = Devices(CPU, micro_batches=micro_batches)
    return Trainer(task.recipe, task.module.model, task, task.source, devices, Path(), Options())


def blank_batch(images):
    index = torch.arange(images)
    batch = SimpleNamespace(index=index, position=index, repeat=torch.zeros_like(index))
    batch.to = lambda device: batch
    return batch


def initial_values(names_and_shapes):
    """The weights with which the golden numbers start: as many random numbers as needed, by name."""
    rng = np.random.default_rng(0)
    values = {}
    for name, shape in sorted(names_and_shapes.items()):
        value = rng.standard_normal(shape) * 0.2
        if "weight_g" in name:
            value = np.ones(shape)
        elif "norm" in name and name.endswith("weight"):
            value = 1 + value
        values[name] = torch.from_numpy(value)
    return values


def with_our_names(values, architecture):
    """Weights of the released code under the names of `DinoModule.student`."""
    backbone = {name.removeprefix("backbone."): value for name, value in values.items() if name.startswith("backbone.")}
    own = {}
    for key in build(architecture, "tiny").state_dict():
        pair = deit.to_pair(key, architecture)
        own[f"model.{key}"] = pair.codec.read([backbone[name] for name in pair.theirs])
    for name, value in values.items():
        for theirs, ours in HEAD.items():
            if name.startswith(f"head.{theirs}"):
                own[name.replace(theirs, ours)] = value
    return own


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("fixed", {"clip_grad": 0.3}),
        ("trained", {"norm_last_layer": False, "freeze_last_layer": 0.0, "clip_grad": 3.0, "local_crops": 0}),
    ],
)
def test_four_steps_of_the_released_code(case, changes):
    """`tests/golden/dino.npz` has what main_dino.train_one_epoch left after two epochs of two steps, in float64."""
    golden = {name.removeprefix(f"{case}/"): value for name, value in np.load(GOLDEN).items() if name.startswith(case)}
    schedule = {"teacher_temperature": 0.0625, "teacher_temperature_start": 0.03125, "teacher_temperature_warmup": 2.0}
    options = dataclasses.replace(TINY, momentum=0.9, **schedule, **changes)
    task = make_task(
        options,
        optimizer=OptimizerConfig(lr=0.01, weight_decay=0.04, weight_decay_on="tensors"),
        schedule=ScheduleConfig(length="2 epochs", warmup="0 epochs", min_lr=1e-3),
    )
    shapes = {name.removeprefix("student/"): value.shape for name, value in golden.items() if name.startswith("student/")}
    start = with_our_names(initial_values(shapes), task.module.model.architecture)
    task.module.double()
    task.module.student.load_state_dict(start)
    task.module.teacher.load_state_dict(start)
    trainer = make_trainer(task)
    rng = np.random.default_rng(1)
    views = 2 + options.local_crops
    steps = [[torch.from_numpy(rng.standard_normal((4, 3, 4, 4))) for _ in range(views)] for _ in range(4)]
    losses = []

    def prepare(batch, position):
        crops = steps[position.step]
        temperature = torch.tensor(task.temperature_at(position.epoch), dtype=torch.float64)
        targets = DinoTargets(torch.cat(crops[2:]) if views > 2 else None, temperature)
        losses.append(float(copy.deepcopy(task.module)(torch.cat(crops[:2]), targets)[0].detach()))
        return torch.cat(crops[:2]), targets

    task.prepare_batch = prepare
    for _ in range(4):
        trainer.train_step(lambda: blank_batch(4))
    np.testing.assert_allclose(losses, golden["losses"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(task.module.center, golden["center"], rtol=0, atol=1e-12)
    for part, module in (("student", task.module.student), ("teacher", task.module.teacher)):
        theirs = {name.removeprefix(f"{part}/"): torch.from_numpy(v) for name, v in golden.items() if name.startswith(part)}
        expected = with_our_names(theirs, task.module.model.architecture)
        assert expected.keys() == module.state_dict().keys()
        for name, value in module.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-9, msg=f"{part} {name} differs")


def reference_loss(student, teacher, center, temperature, student_temperature, images):
    """The loss of the paper, pair by pair, from outputs [views * images, K]."""
    teacher_views = F.softmax((teacher - center) / temperature, -1).split(images)
    student_views = F.log_softmax(student / student_temperature, -1).split(images)
    pairs = [(t, s) for t in range(len(teacher_views)) for s in range(len(student_views)) if t != s]
    return sum(-(teacher_views[t] * student_views[s]).sum(-1).mean() for t, s in pairs) / len(pairs)


@pytest.mark.parametrize("local", [0, 3])
def test_loss_and_gradients_are_those_of_the_formula(local):
    task = make_task(dataclasses.replace(TINY, local_crops=local, local_size=2))
    module = task.module.double()
    torch.nn.init.normal_(module.center)
    torch.nn.init.normal_(module.teacher.head.direction)
    images, small = torch.randn(6, 3, 4, 4, dtype=torch.float64), torch.randn(3 * local, 3, 2, 2, dtype=torch.float64)
    values = module(images, DinoTargets(small if local else None, torch.tensor(0.05, dtype=torch.float64)))
    values[0].backward()
    found = {
        name: parameter.grad.clone()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and "gain" not in name
    }
    module.zero_grad()
    features = [module.model.features(part).pooled for part in (images, small) if len(part)]
    head, outputs = module.teacher.head, module.teacher.head(module.teacher.model(images))
    weight = head.direction / head.direction.norm(dim=1, keepdim=True)
    torch.testing.assert_close(outputs, head.project(module.teacher.model(images)) @ weight.T)
    loss = reference_loss(module.head(torch.cat(features)), outputs, module.center, 0.05, 0.1, 3)
    loss.backward()
    torch.testing.assert_close(values[0], loss, rtol=1e-10, atol=0)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, dict(module.named_parameters())[name].grad, rtol=1e-9, atol=1e-14)
    probabilities = F.softmax((outputs - module.center) / 0.05, -1)
    entropy = -(probabilities * probabilities.log()).sum(1).mean()
    torch.testing.assert_close(values[1:3], torch.stack([entropy, loss.detach() - entropy]))
    assert len(values) == 1 + len(task.logs) == (5 if local else 4)


@pytest.mark.parametrize("name", ["deit_tiny_patch16", "resmlp_s12"])
def test_ibots_loss_is_that_of_the_formula(name):
    """Loss, gradients and the center of the patches of a step, from the outputs for all patches, one view after the other."""
    architecture = lookup(name)[1].replace(width=8, depth=1, heads=2, patch_size=2, image_size=(8, 8), classes=0, drop_path=0.0)
    task = make_task(dataclasses.replace(TINY, local_crops=0, patch_weight=0.7, freeze_last_layer=0.0, masked=0.4), architecture)
    module, momentum = task.module.double(), task.options.center_momentum
    for tensor in (module.center, module.patch_center, module.mask_token, module.teacher.head.direction):
        torch.nn.init.normal_(tensor)
    batch = random_batch(8)
    images, targets = task.prepare_batch(batch, Position(0, 8, 0, 0))
    images, masks = images.double(), targets.patches.mask
    assert masks.any(1).sum() not in (0, 16)
    values = module(images, targets)
    values[0].backward()
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    losses, pooled, outputs, patch_outputs = [], [], [], []
    for image, mask in zip(images, masks, strict=True):
        patches, layout = module.model.embed(image[None])
        seen = patches.clone()
        seen[0, mask] = module.mask_token
        student = module.model.read(*module.model.encode(seen, layout))
        teacher = module.teacher.model.features(image[None])
        pooled.append(student.pooled)
        outputs.append(module.teacher.head(teacher.pooled))
        known, own = module.teacher.head(teacher.tokens[0, mask]), module.head(student.tokens[0, mask])
        p = F.softmax((known - module.patch_center) / 0.04, -1)
        losses.append(-(p * F.log_softmax(own / 0.1, -1)).sum(-1).mean() if mask.any() else own.sum())
        patch_outputs += [known.mean(0)] if mask.any() else []
    patch_loss = torch.stack(losses).mean()
    whole = reference_loss(module.head(torch.cat(pooled)), torch.cat(outputs), module.center, 0.04, 0.1, 8)
    (whole + 0.7 * patch_loss).backward()
    torch.testing.assert_close(values[[0, -1]], torch.stack([whole + 0.7 * patch_loss, patch_loss]), rtol=1e-6, atol=0)
    assert "mask_token" in found
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, dict(module.named_parameters())[name].grad, rtol=1e-5, atol=1e-7)
    expected = momentum * module.patch_center + (1 - momentum) * torch.stack(patch_outputs).mean(0)
    task.after_optimizer_step(Position(0, 8, 0, 0), torch.zeros(()))
    torch.testing.assert_close(module.patch_center, expected.detach(), rtol=1e-6, atol=1e-9)
    assert not module.patch_sum.any()


def random_batch(images=4, size=(9, 11)):
    index = torch.arange(images)
    pixels = torch.randint(0, 256, (images, 3, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return Batch(pixels, torch.tensor([size] * images), index, torch.zeros_like(index), index, None, {}, None)


@pytest.mark.parametrize("name", sorted(structures()))
def test_every_model_trains(name):
    architecture = structures()[name]
    if architecture.pooling == "per_class":
        with pytest.raises(UserError, match="per_class"):
            architecture.replace(classes=0)
        return
    task = make_task(dataclasses.replace(TINY, local_size=0, freeze_last_layer=0.0), architecture.replace(classes=0))
    trainer = make_trainer(task)
    before = {name: tensor.clone() for name, tensor in task.module.named_parameters()}
    without = []
    task.before_optimizer_step = lambda *_: without.extend(
        name for name, p in task.module.named_parameters() if p.requires_grad and p.grad is None
    )
    trainer.step = 1  # the learning rate of the first step is 0
    trainer.train_step(random_batch)
    assert not without  # DDP waits for the gradient of every parameter
    assert trainer.window[0].isfinite()
    assert trainer.window[2] == 1
    after = dict(task.module.named_parameters())
    assert not torch.equal(after["teacher.head.direction"], before["teacher.head.direction"])
    assert torch.equal(after["head.gain"], before["head.gain"])


RESMLP = lookup("resmlp_s12")[1].replace(width=8, depth=1, patch_size=2, image_size=(8, 8), classes=0, layerscale_init=1.0)


def states(task):
    return {name: tensor.clone() for name, tensor in task.module.state_dict().items()}


def test_micro_batches_do_not_matter():
    """Center, clipped gradients and BatchNorm are those of the whole step."""
    found = []
    for micro_batches in (1, 2):
        architecture = lookup("vitrail_mini")[1].replace(width=8, depth=1, image_size=(8, 8), patch_size=2, classes=0)
        task = make_task(
            dataclasses.replace(TINY, freeze_last_layer=0.0, clip_grad=0.1),
            architecture.replace(drop_path=0.3),
            group_size=2,
            optimizer=OptimizerConfig(lr=1e-3, eps=1e-4),
        )
        trainer = make_trainer(task, micro_batches)
        for step in (1, 2):
            trainer.step = step
            rows = torch.arange(4).chunk(micro_batches)
            parts = iter([random_batch()._map(lambda x, own=own: x[own]) for own in rows])
            trainer.train_step(partial(next, parts))
        found.append(states(task))
    assert found[0]["center"].abs().sum() > 0
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-4, atol=1e-6, msg=name)


def test_the_teacher_has_its_own_statistics_of_batch_norm():
    """Its weights become those of the student; its statistics stay those of the global views, which it has seen alone."""
    architecture = lookup("vitrail_mini")[1].replace(width=8, depth=1, image_size=(8, 8), patch_size=2, classes=0)
    task = make_task(dataclasses.replace(TINY, momentum=0.0), architecture)
    make_trainer(task).train_step(random_batch)
    student, teacher = (module.state_dict() for module in (task.module.student, task.module.teacher))
    equal = {name for name, value in student.items() if torch.equal(value, teacher[name])}
    assert {name for name, _ in task.module.student.named_parameters()} <= equal
    means = {name for name in student if name.endswith("running_mean")}
    assert means
    assert not means & equal
    assert all(teacher[name].any() for name in means)


def test_frozen_statistics_of_batch_norm_are_frozen_in_the_teacher_too():
    architecture = lookup("vitrail_mini")[1].replace(width=8, depth=1, image_size=(8, 8), patch_size=2, classes=0)
    task = make_task(dataclasses.replace(TINY, momentum=0.0), architecture)
    apply_scope(task.module.model, "last:1")
    trainer = make_trainer(task)
    before = states(task)
    trainer.train_step(random_batch)
    kept = {name for name in before if name.endswith(("running_mean", "running_var")) and "stem" in name}
    assert {name.split(".")[0] for name in kept} == {"model", "teacher"}
    assert all(torch.equal(before[name], value) for name, value in states(task).items() if name in kept)


def test_a_skipped_step_changes_nothing():
    task = make_task(dataclasses.replace(TINY, freeze_last_layer=0.0))
    trainer = make_trainer(task)
    trainer.options = Options(on_nan="skip")
    trainer.step = 1
    trainer.train_step(random_batch)
    before, prepare = states(task), task.prepare_batch
    task.prepare_batch = lambda *a: (prepare(*a)[0] * torch.nan, prepare(*a)[1])
    trainer.train_step(random_batch)
    schedule = ("temperature",)
    assert all(torch.equal(value, before[name]) for name, value in states(task).items() if name not in schedule)
    assert not task.module.output_sum.any()
    task.prepare_batch = prepare
    trainer.train_step(random_batch)
    assert not torch.equal(task.module.center, before["center"])


def test_the_alarm_judges_a_validation_with_the_temperature_of_its_epoch():
    """Also in the report, when the training has ended."""
    options = dataclasses.replace(TINY, teacher_temperature_warmup=5.0)
    task, judged = make_task(options, schedule=ScheduleConfig(length="9 epochs")), []
    task.alarm.check = lambda values, temperature, step, warmed_up: judged.append((temperature, step)) or ""
    for epoch in (0.0, 1.0, 1.5, 9.0):
        task.diagnose({"feature_std": 0.5, "effective_rank": 9.0, "information": 0.1}, epoch)
    assert judged == [(task.temperature_at(at), step) for at, step in ((0, 0), (0, 2), (1, 3), (8, 18))]


def test_the_last_layer_is_frozen_at_first():
    task = make_task(dataclasses.replace(TINY, freeze_last_layer=1.5, norm_last_layer=False))
    trainer = make_trainer(task)  # two steps in an epoch
    start = task.module.head.direction.clone()
    for step in range(4):
        trainer.train_step(random_batch)
        frozen = step < 3
        assert torch.equal(task.module.head.direction, start) == frozen
        assert (task.module.head.direction in trainer.optimizer.state) == (not frozen)
        assert (task.module.head.gain in trainer.optimizer.state) == (not frozen)


def test_schedules():
    options = dataclasses.replace(TINY, teacher_temperature_warmup=5.0, weight_decay_end=0.4)
    task = make_task(options, optimizer=OptimizerConfig(weight_decay=0.04), schedule=ScheduleConfig(length="2 epochs"))
    expected = np.concatenate([np.linspace(0.04, 0.07, 5), np.full(2, 0.07)])
    np.testing.assert_allclose([task.temperature_at(epoch) for epoch in range(7)], expected)
    task.options = dataclasses.replace(options, teacher_temperature_warmup=0.5)
    assert [task.temperature_at(epoch) for epoch in range(2)] == [0.04, 0.07]
    trainer = make_trainer(task)
    decays = []
    for step in range(4):
        trainer.train_step(random_batch)
        undecayed, *others = sorted({group["weight_decay"] for group in trainer.optimizer.param_groups})
        assert undecayed == 0
        decays += others
        assert task.ema.decay == pytest.approx(1 - 0.004 * (1 + np.cos(np.pi * step / 4)) / 2)
    np.testing.assert_allclose(decays, 0.4 - 0.36 * (1 + np.cos(np.pi * np.arange(4) / 4)) / 2)


def test_the_teacher_is_evaluated_and_the_student_restored():
    task = make_task(dataclasses.replace(TINY, momentum=0.5, freeze_last_layer=0.0))
    trainer = make_trainer(task)
    for _ in range(3):
        trainer.train_step(random_batch)
    model, teacher, before = task.module.model, task.module.teacher.model, states(task)
    images = torch.randn(2, 3, 4, 4)
    with torch.no_grad():
        student_output, teacher_output = model(images), teacher(images)
    assert not torch.allclose(student_output, teacher_output)
    assert task.measure(model, None, images) == {}  # weights that do not belong to the heads
    with torch.no_grad(), contextlib.suppress(ZeroDivisionError), task.evaluated_weights(model):
        assert torch.equal(model(images), teacher_output)
        found = task.summarize(task.measure(model, None, images))
        raise ZeroDivisionError
    assert all(torch.equal(value, before[name]) for name, value in task.module.state_dict().items())
    scaled = (task.module.teacher.head(teacher_output) - task.module.center) / task.module.temperature
    probabilities, entropy = scaled.softmax(1), torch.distributions.Categorical(logits=scaled).entropy().mean()
    mean = torch.distributions.Categorical(probs=probabilities.mean(0)).entropy()
    gap = F.kl_div(F.log_softmax(task.module.head(student_output).detach() / 0.1, 1), probabilities, reduction="batchmean")
    assert found["output_entropy"] == pytest.approx(float(entropy), rel=1e-5)
    assert found["mean_output_entropy"] == pytest.approx(float(mean), rel=1e-5)
    assert found["information"] == pytest.approx(float(mean - entropy), abs=1e-5)
    assert found["teacher_student_gap"] == pytest.approx(float(gap), abs=1e-5)


def test_local_crops_of_a_fixed_grid():
    options = dataclasses.replace(TINY, local_size=4)
    sizes = {}
    for choice in ("resize", "none", "interpolate"):
        task = make_task(dataclasses.replace(options, fixed_grid=choice), RESMLP)
        assert any("8 x 8" in message or "4 x 4 patches" in message for message in task.messages)
        trainer = make_trainer(task)
        _, targets = task.prepare_batch(random_batch(), trainer.position())
        sizes[choice] = None if targets.local is None else tuple(targets.local.shape)
        trainer.train_step(random_batch)
        assert trainer.window[2] == 1
    assert sizes == {"resize": (8, 3, 8, 8), "none": None, "interpolate": (8, 3, 4, 4)}


def test_interpolated_weights_are_those_of_resize():
    task = make_task(dataclasses.replace(TINY, fixed_grid="interpolate"), RESMLP)
    model = task.module.model.double()
    small = copy.deepcopy(model).resize(4, 4)
    images = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    found = pool(model, images)
    torch.testing.assert_close(found, small(images))
    found.square().sum().backward()
    assert model.blocks[0].mix.branches[0].body.map.weight.grad.abs().sum() > 0
    assert torch.equal(pool(task.module.teacher.model.double(), images.repeat(1, 1, 2, 2)), model(images.repeat(1, 1, 2, 2)))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
def test_gradients_of_half_precision_outputs(dtype, tolerance):
    """The gradient is computed in float32; float16 would round most of it to zero before the loss scale applies."""
    logits, targets = torch.randn(4, 3, 4096) / 10, torch.randn(2, 3, 4096).softmax(-1)
    wanted = logits.to(dtype).float().requires_grad_()
    reference = sum(
        -(t * F.log_softmax(wanted[s] / 0.1, -1)).sum(-1).mean() for i, t in enumerate(targets) for s in range(4) if s != i
    )
    scale = 2.0**10 if dtype == torch.float16 else 1.0
    (reference / 6 * scale).backward()
    half = logits.to(dtype).requires_grad_()
    loss = ViewCrossEntropy.apply(half * 1, targets, 0.1, compare_view)
    (loss * scale).backward()
    torch.testing.assert_close(loss, reference / 6)
    assert ((half.grad.float() - wanted.grad).norm() / wanted.grad.norm()) < tolerance


def test_cost_and_description():
    task = make_task(dataclasses.replace(TINY, local_size=2, local_crops=4))
    assert task.relative_cost == pytest.approx(2 * 4 / 3 + 4 / 4)
    assert "views of an image: 2 global of 4 pixels, 4 local of 2" in task.messages
    assert task.logs == ("teacher_entropy", "kl", "global_std", "local_std")


@pytest.mark.parametrize(
    ("changes", "architecture", "message"),
    [
        ({"local_size": 6}, {}, "local_size=6 is larger than the images of 4 pixels: give at most 4"),
        ({"local_size": 3}, {}, "local_size=3 is not a multiple of the patch size 2: give 2, or 0"),
        ({"patch_weight": 1.0, "masked": 0.1}, {}, "masked=0.1 of 2 x 2 patches is 0: choose another share"),
        ({"weight_decay_end": 0.4}, {"weight_decay": 0.0}, "weight_decay_end=0.4 needs an optimizer.weight_decay above 0"),
    ],
)
def test_views_that_do_not_fit(changes, architecture, message):
    optimizer = OptimizerConfig(weight_decay=architecture.get("weight_decay", 0.05))
    with pytest.raises(UserError, match=message):
        make_task(dataclasses.replace(TINY, **changes), optimizer=optimizer)


def test_interpolation_is_for_linear_mixers():
    for changes in ({"mixer": "mlp"}, {"pooling": "class_mlp", "pooling_depth": 1}):
        with pytest.raises(UserError, match="interpolate is for linear mixers alone: use resize or none"):
            make_task(dataclasses.replace(TINY, fixed_grid="interpolate"), RESMLP.replace(**changes))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"outputs": 0}, "outputs=0 is out of range: give at least 1"),
        ({"local_crops": -1}, "local_crops=-1 is out of range: give 0 or more"),
        ({"teacher_temperature": 0.0}, "teacher_temperature=0 is out of range: give a number above 0"),
        ({"momentum": 1.5}, "momentum=1.5 is out of range: give a number from 0 to 1"),
        ({"local_scale": (0.5, 0.2)}, r"local_scale=\[0.5, 0.2\] should be two shares"),
        ({"freeze_last_layer": -1.0}, "freeze_last_layer=-1 is out of range"),
        ({"knn_k": 0}, "at least 1"),
        ({"patch_weight": -1.0}, "patch_weight is 0 or more"),
        ({"masked": 1.0}, "masked a share of the patches: above 0, below 1"),
    ],
)
def test_options_out_of_range(option, message):
    with pytest.raises(UserError, match=message):
        DinoOptions(**option)
