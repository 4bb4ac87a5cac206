"""Whole trainings with a teacher: each signal, online or stored; resumed, divided, fine-tuned; errors."""

import json
import os
import re
import shutil
import signal

import pytest
import torch

import vitrail
from tests.images import make_folder
from tests.trainers import make_trainer
from tests.training.small import FAST_PATCHES
from vitrail.checkpoints.readers import read_weights
from vitrail.checkpoints.training_checkpoints import read_checkpoint
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.image_loader import ImageLoader
from vitrail.errors import UserError
from vitrail.runs import prepare
from vitrail.runs import train as runs
from vitrail.runs.initial_model import build_initial
from vitrail.runs.plan import plan
from vitrail.runs.request import TrainRequest, open_data, resolve_recipe
from vitrail.runs.run_directory import write_json
from vitrail.runs.seeds import plan_seeds, read_seeds, to_dict
from vitrail.runs.train import resume
from vitrail.tasks.classification import describe_targets
from vitrail.tasks.teacher_labels import class_order_message
from vitrail.teachers import open_teacher
from vitrail.teachers.annotation import AnnotationRequest, annotate
from vitrail.training.checkpointing import CheckpointManager
from vitrail.training.distributed import Devices
from vitrail.training.metrics import read_metrics
from vitrail.training.trainer import Options, Trainer

NAMES = ["blue", "green", "red"]
SMALL = {"architecture.width": 16, "architecture.depth": 1, "architecture.heads": 2, "architecture.patch_size": 4}
VIT = SMALL | {"model": "deit_tiny_patch16"}
TINY = {"precision": "fp32", "batch_size": 8, "schedule.length": "4 steps", "augmentation.image_size": 16}
TINY |= {"optimizer.lr": 0.01, "augmentation.policy": "rand"}
TOWER = {"architecture.width": 16, "architecture.depth": 1, "architecture.heads": 2, "augmentation.image_size": 32}
DISTILLED = VIT | {"architecture.distillation": True}
SOFT = {"distillation.kind": "soft", "distillation.temperature": 3.0, "distillation.weight": 0.1}
KINDS = {"soft": VIT | SOFT, "hard": VIT, "token": DISTILLED, "soft token": DISTILLED | SOFT}
DENSE = {
    "deit": VIT,
    "lvvit": TOWER | {"model": "lvvit_t", "architecture.stem_width": 8},
    "resmlp": {"model": "resmlp_s12", "architecture.width": 16, "architecture.depth": 1, "architecture.patch_size": 4},
    "patchconvnet": {
        "model": "patchconvnet_s60",
        "architecture.width": 16,
        "architecture.depth": 1,
        "augmentation.image_size": 32,
    },
    "distilled": DISTILLED,
    "cait": {"model": "cait_xxs24", "architecture.distillation": True} | SMALL,
}


@pytest.fixture(autouse=True)
def easy(monkeypatch):
    """What takes longer than these trainings and has tests of its own."""
    for owner, name, value in FAST_PATCHES:
        monkeypatch.setattr(owner, name, value)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    root = tmp_path_factory.mktemp("data") / "colors"
    make_folder(root / "train", count=8)
    make_folder(root / "val", count=3)
    return root


def make_teacher(path, names=NAMES, seed=0, size=16, **parts):
    torch.manual_seed(seed)
    small = {"width": 16, "depth": 1, "heads": 2, "patch_size": 4}
    model = vitrail.create("deit_tiny_patch16", len(names), size, **small | parts)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.class_names = list(names)
    vitrail.save(model, path)
    return path


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return make_teacher(tmp_path_factory.mktemp("teachers") / "teacher.safetensors", ["red", "black", "green", "blue"])


@pytest.fixture(scope="module")
def store(tmp_path_factory, images, teacher):
    path = tmp_path_factory.mktemp("stores") / "store"
    annotate(open_teacher(teacher), open_splits(str(images)).train, path, AnnotationRequest(("logits", "tokens"), 2), workers=0)
    return path


def train(images, out, changes, recipe="laptop", **more):
    more = {"options": Options(log_steps=1), "device": "cpu", "workers": 0} | more
    return vitrail.train(str(images), recipe, out=out, changes=TINY | changes, **more)


def request(images, changes, recipe="laptop"):
    return TrainRequest(str(images), recipe, changes=TINY | changes, device="cpu", workers=0)


def resolve(images, changes, recipe="laptop"):
    """The data, and the recipe that is fitted to it."""
    requested = request(images, changes, recipe)
    return open_data(requested, resolve_recipe(requested, "cpu"))


def losses(run):
    return [line["loss"] for line in read_metrics(run.folder) if line["kind"] == "train"]


@pytest.fixture(scope="module")
def plain(images, tmp_path_factory):
    """Without a teacher."""
    with pytest.MonkeyPatch.context() as patched:
        for owner, name, value in FAST_PATCHES:
            patched.setattr(owner, name, value)
        return train(images, tmp_path_factory.mktemp("runs") / "plain", VIT)


def metadata(run):
    return json.loads((run.folder / "run.json").read_text())


@pytest.mark.parametrize(
    ("kind", "where"), [*((kind, "online") for kind in KINDS), ("soft", "stored"), ("hard", "stored"), ("token", "stored")]
)
def test_every_signal_trains(images, teacher, store, plain, tmp_path, kind, where):
    path = teacher if where == "online" else store
    run = train(images, tmp_path / "run", KINDS[kind] | {"distillation.teacher": str(path)})
    assert run.finished
    assert len(losses(run)) == 4
    assert all(loss > 0 for loss in losses(run))
    assert losses(run)[0] != losses(plain)[0]  # 1.1 with labels only
    assert metadata(run)["recipe"]["distillation"]["kind"] == ("soft" if "soft" in kind else "hard")
    model = vitrail.load(run.artifact)
    assert (model.head_distillation is not None) == ("token" in kind)
    assert model(torch.randn(2, 3, 16, 16)).isfinite().all()


def test_online_and_stored_predictions_agree_on_the_same_images(images, teacher, tmp_path):
    """Without augmentation a store of all logits is the teacher, up to its half precision."""
    path = tmp_path / "all"
    annotate(open_teacher(teacher), open_splits(str(images)).train, path, workers=0)
    still = VIT | SOFT | {"augmentation.crop": "squash", "augmentation.policy": "none", "augmentation.interpolation": "bicubic"}
    still |= {"mixing.mixup": 0, "mixing.cutmix": 0, "augmentation.random_erasing": 0, "distillation.weight": 0.5}
    online, stored = (
        train(images, tmp_path / name, still | {"distillation.teacher": str(path)})
        for name, path in (("online", teacher), ("stored", path))
    )
    assert losses(stored) == pytest.approx(losses(online), rel=2e-2)
    assert losses(stored)[0] == pytest.approx(losses(online)[0], rel=2e-3)


@pytest.mark.parametrize("name", DENSE)
def test_token_labels_train_every_kind_of_architecture(images, store, tmp_path, name):
    changes = DENSE[name] | {"token_labels.store": str(store), "token_labels.mixtoken": 1.0}
    run = train(images, tmp_path / "run", changes | {"schedule.length": "2 steps"})
    assert run.finished
    model = vitrail.load(run.artifact)
    assert model.architecture.dense_head
    assert model.head_dense is not None
    assert model.head_dense.weight.any()


def test_both_ways_of_mixing_tokens_are_one_training(images, store, tmp_path):
    quick = VIT | {"token_labels.store": str(store), "optimizer.lr": 0.1}
    runs = [
        train(images, tmp_path / what, quick | {"token_labels.mixtoken": 1.0, "token_labels.mixtoken_on": what})
        for what in ("predictions", "labels")
    ]
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=1e-4)
    plain = train(images, tmp_path / "unmixed", quick)
    assert losses(plain) != pytest.approx(losses(runs[0]), rel=1e-3)


def test_per_class_queries_have_no_dense_head(images, store, tmp_path):
    multi = {"model": "patchconvnet_s60_multi", "architecture.width": 16, "architecture.depth": 1}
    with pytest.raises(UserError, match="pooling=per_class has no dense head"):
        train(images, tmp_path / "run", multi | {"token_labels.store": str(store)})
    assert not (tmp_path / "run").exists()


def test_per_class_queries_can_be_relabelled(images, store, tmp_path):
    multi = {"model": "patchconvnet_s60_multi", "architecture.width": 16, "architecture.depth": 1, "augmentation.image_size": 32}
    assert train(images, tmp_path / "run", multi | {"token_labels.store": str(store), "token_labels.target": "relabel"}).finished


def stop_at(monkeypatch, step):
    original = Trainer.train_step

    def train_step(self, next_batch):
        original(self, next_batch)
        if self.step == step:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Trainer, "train_step", train_step)


EVERYTHING = DISTILLED | {"token_labels.mixtoken": 1.0, "mixing.mixup": 0.8, "mixing.cutmix": 1.0, "schedule.length": "5 steps"}


@pytest.mark.parametrize("where", ["online", "stored"])
def test_stopped_and_resumed_bit_for_bit(images, teacher, store, tmp_path, monkeypatch, where):
    """With a teacher, token labels and every kind of mixing."""
    path = teacher if where == "online" else store
    changes = EVERYTHING | {"distillation.teacher": str(path), "token_labels.store": str(store)}
    whole = train(images, tmp_path / "whole", changes)
    with monkeypatch.context() as patched:
        stop_at(patched, 3)
        halted = train(images, tmp_path / "halted", changes)
    assert not halted.finished
    again = resume(halted.folder, device="cpu")
    assert again.finished
    assert losses(again) == losses(whole)
    for name in ("best.safetensors", "last.safetensors"):
        assert (again.folder / name).read_bytes() == (whole.folder / name).read_bytes()


def test_a_missing_teacher_is_named(images, teacher, tmp_path, monkeypatch):
    path = tmp_path / "teacher.safetensors"
    shutil.copy(teacher, path)
    with monkeypatch.context() as patched:
        stop_at(patched, 2)
        halted = train(images, tmp_path / "run", VIT | {"distillation.teacher": str(path)})
    path.unlink()
    with pytest.raises(UserError, match=rf"{path}, which .* was trained with, is missing") as raised:
        resume(halted.folder, device="cpu")
    assert str(raised.value).count("\n") == 0
    other = vitrail.load(teacher)
    other.head.weight.data.neg_()
    vitrail.save(other, path)
    with pytest.raises(UserError, match=r"is not what .* was trained with"):
        resume(halted.folder, device="cpu")
    shutil.copy(teacher, path)
    assert resume(halted.folder, device="cpu").finished


def test_a_missing_store_is_named(images, store, tmp_path, monkeypatch):
    path = tmp_path / "answers"
    shutil.copytree(store, path)
    with monkeypatch.context() as patched:
        stop_at(patched, 2)
        halted = train(images, tmp_path / "run", VIT | {"token_labels.store": str(path), "distillation.teacher": str(path)})
    shutil.rmtree(path)
    with pytest.raises(UserError, match=str(path)):
        resume(halted.folder, device="cpu")


def test_explicit_keys_keep_their_values(teacher, store):
    """A teacher and a label store without further keys are used in the usual way."""

    def resolved(changes):
        return resolve_recipe(TrainRequest(recipe="laptop", changes=changes), "cpu")

    def seen(**keys):
        recipe = resolved({key.replace("__", "."): value for key, value in keys.items()})
        return recipe.distillation.kind, recipe.token_labels.weight, recipe.token_labels.target

    paths = {"distillation__teacher": str(teacher), "token_labels__store": str(store)}
    assert seen(**paths) == ("hard", 0.5, "relabel")
    assert seen(**paths, distillation__kind="none", token_labels__target="labels") == ("none", 0.5, "labels")
    assert seen(**paths, distillation__kind="soft", token_labels__weight=0) == ("soft", 0.0, "relabel")
    with pytest.raises(UserError, match="weight=0 gives the teacher no effect"):
        seen(**paths, distillation__weight=0)
    ignored = resolved({"distillation.teacher": str(teacher), "distillation.kind": "none"})
    assert describe_targets(ignored) == [f"the teacher {teacher} is not used: distillation.kind is none"]
    assert resolved({"teacher": str(teacher)}).distillation.kind == "hard"  # the name of another library
    old = {"teacher": str(teacher), "tokens.labels": str(store), "tokens.target": "labels"}  # an old key is explicit too
    assert resolved(old).token_labels.target == "labels"


def test_explicit_keys_keep_their_values_with_every_seed(teacher, tmp_path):
    """The recipe of several seeds is resolved first, and once more by each training."""
    changes = {"teacher": str(teacher), "distillation.kind": "none", "precision": "bf16"}
    planned = plan_seeds(TrainRequest("digits", "laptop", changes=changes), 2)
    write_json(tmp_path / "seeds.json", to_dict(planned))
    saved = read_seeds(tmp_path)
    assert saved == planned
    assert resolve_recipe(saved.request, "cpu") == planned.recipe
    assert planned.recipe.distillation.kind == "none"
    assert "precision" in saved.request.explicit_keys


def test_a_teacher_without_class_names(images, store):
    source = open_splits(str(images)).train
    assert class_order_message(None, 3, source) == [
        "the teacher has no class names: its 3 classes are taken in the order of the data's, blue, green, red …"
    ]
    assert class_order_message(NAMES, 3, source) == class_order_message(None, 1000, source) == []


def test_micro_batches_add_up_to_the_batch(images, teacher, store, tmp_path):
    """Without mixing and batch norm, eight images at once are four and four, up to rounding."""
    changes = DISTILLED | {"distillation.teacher": str(teacher), "token_labels.store": str(store), "architecture.drop_path": 0}
    changes |= {"mixing.mixup": 0, "mixing.cutmix": 0, "precision": "fp32"}
    one, two = (train(images, tmp_path / str(size), changes, micro_batch_size=size) for size in (8, 4))
    assert (metadata(one)["micro_batches"], metadata(two)["micro_batches"]) == (1, 2)
    assert losses(one)[0] == pytest.approx(losses(two)[0], rel=1e-5)
    assert losses(one) == pytest.approx(losses(two), rel=1e-2)


def test_a_micro_batch_does_not_depend_on_its_process(images, teacher, store, tmp_path):
    """Two micro-batches on one process are one on each of two: images, targets of every kind, and the loss."""
    data = resolve(images, EVERYTHING | {"distillation.teacher": str(teacher), "token_labels.store": str(store)})
    found = []
    for rank, world in ((0, 1), (0, 2), (1, 2)):
        devices = Devices(torch.device("cpu"), rank, world, micro_batches=2)
        trainer = make_trainer(data.recipe, data.splits.train, tmp_path)
        loader = ImageLoader(data.splits.train, devices.device, 0)
        batches = loader.train_loader(trainer.sampler, devices.own_micro_batches, 2).iterate_steps(0, 3)
        for step in range(3):
            trainer.step = step
            for micro_batch in devices.own_micro_batches:
                inputs, targets = trainer.task.prepare_batch(next(batches), trainer.position(micro_batch))
                torch.manual_seed(step)
                found.append((step, micro_batch, inputs, targets, trainer.module(inputs, targets).detach()))
    one_process, together = found[:6], sorted(found[6:], key=lambda part: part[:2])
    for one, two in zip(one_process, together, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)
    masks = [part[3].mixed for part in one_process]
    assert not all(torch.equal(mask, masks[0]) for mask in masks)
    assert all(target is not None for part in one_process for target in part[3])


@pytest.mark.parametrize("names", [NAMES, ["blue", "green", "red", "yellow"]])
def test_finetuning_keeps_both_heads_and_the_teacher(images, teacher, tmp_path, names):
    """At a higher resolution, and for other classes: the teacher sees the student's size."""
    base = train(images, tmp_path / "base", DISTILLED | {"distillation.teacher": str(teacher)})
    other, data = teacher, images
    if names != NAMES:
        data = make_folder(tmp_path / "more", names, count=8)
        other = make_teacher(tmp_path / "other.safetensors", names)
    changes = {"init.weights": str(base.artifact), "augmentation.image_size": 24, "init.zero_head": False}
    run = train(data, tmp_path / "tuned", changes | {"distillation.teacher": str(other)}, recipe="finetune")
    before, after = vitrail.load(base.artifact), vitrail.load(run.folder / "last.safetensors")
    assert after.architecture.image_size == (24, 24)
    assert after.class_names == names
    assert after.head_distillation.weight.shape == (len(names), 16)
    assert after.prefix.shape == before.prefix.shape
    moved = {name for name, value in after.state_dict().items() if not torch.equal(value, before.state_dict().get(name, value))}
    assert "prefix" in moved
    if names == NAMES:
        assert {"head.weight", "head_distillation.weight"} <= moved


def test_finetuning_adds_a_distillation_token(images, teacher, plain, tmp_path, monkeypatch, capsys):
    """To weights that were trained without one; a resumed run gives the same weights."""
    changes = {"init.weights": str(plain.artifact), "architecture.distillation": True, "init.zero_head": False}
    changes |= {"distillation.teacher": str(teacher)}
    run = train(images, tmp_path / "tuned", changes, recipe="finetune")
    assert "these weights have no distillation token" in capsys.readouterr().err
    before, after = vitrail.load(plain.artifact), vitrail.load(run.folder / "last.safetensors")
    assert len(after.prefix) == len(before.prefix) + 1 == 2
    assert after.head_distillation.weight.any()
    with monkeypatch.context() as patched:
        stop_at(patched, 2)
        halted = train(images, tmp_path / "halted", changes, recipe="finetune")
    again = resume(halted.folder, device="cpu")
    assert (again.folder / "last.safetensors").read_bytes() == (run.folder / "last.safetensors").read_bytes()


def test_finetuning_adds_a_dense_head(images, store, plain, tmp_path):
    """It starts at zero, so that it has no effect before it is trained."""
    changes = {"init.weights": str(plain.artifact), "token_labels.store": str(store), "init.zero_head": False}
    data = resolve(images, changes, "finetune")
    begun = build_initial(data.recipe, NAMES, data.pretrained)
    assert not begun.head_dense.weight.any()
    assert torch.equal(begun.head.weight, vitrail.load(plain.artifact).head.weight)
    run = train(images, tmp_path / "tuned", changes, recipe="finetune")
    assert vitrail.load(run.folder / "last.safetensors").head_dense.weight.any()


def test_the_teacher_is_neither_trained_nor_saved(images, teacher, plain, tmp_path):
    before, content = read_weights(teacher).tensors, teacher.read_bytes()
    seen = []
    original = Trainer.__post_init__

    def recording(self):
        original(self)
        seen.append(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Trainer, "__post_init__", recording)
        run = train(images, tmp_path / "run", VIT | {"distillation.teacher": str(teacher)}, options=Options(save_steps=1))
    assert teacher.read_bytes() == content
    (trainer,) = seen
    kept = trainer.task.teacher
    assert not any(module.training for module in kept.network.modules())
    for name, value in kept.network.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in kept.parameters())
    assert read_weights(run.artifact).tensors.keys() == read_weights(plain.artifact).tensors.keys()
    states = [read_checkpoint(CheckpointManager(each.folder / "checkpoints").all()[-1])[1] for each in (run, plain)]
    assert [sorted(group) for group in states[0].values()] == [sorted(group) for group in states[1].values()]
    assert not any("teacher" in name for group in states[0].values() for name in group)


def test_a_recipe_that_needs_a_teacher_or_labels(images, tmp_path):
    for changes, message in (
        (VIT | {"distillation.kind": "soft"}, "needs a teacher: give --teacher"),
        (VIT | {"token_labels.weight": 0.5}, "needs token labels: give --labels"),
        (VIT | {"token_labels.target": "blend"}, "needs token labels: give --labels"),
    ):
        with pytest.raises(UserError, match=message):
            train(images, tmp_path / "run", changes)
    assert not (tmp_path / "run").exists()


def test_unusable_teachers(images, teacher, store, tmp_path):
    """One line each, and no run directory."""
    strange = make_teacher(tmp_path / "strange.safetensors", ["oak", "elm", "ash"])
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pth").write_text("no weights")
    cases = {
        str(tmp_path / "nowhere.pth"): "There is no teacher at",
        str(tmp_path / "empty"): "empty",
        str(tmp_path / "text.pth"): "text.pth",
        str(strange): r"3 of 3 are unknown to the model \('blue', 'green', 'red'\); the model has 'oak', 'elm', 'ash'",
        str(images): "colors",
    }
    for path, message in cases.items():
        with pytest.raises(UserError, match=message) as raised:
            train(images, tmp_path / "run", VIT | {"distillation.teacher": path})
        assert "\n" not in str(raised.value)
        assert "--map" not in str(raised.value)
    for path in (str(teacher), str(tmp_path / "nowhere"), str(images)):
        with pytest.raises(UserError, match="no label store at"):
            train(images, tmp_path / "run", VIT | {"token_labels.store": path})
    with pytest.raises(UserError, match="no predictions for"):
        train(make_folder(tmp_path / "other", count=6, size=(20, 18)), tmp_path / "run", VIT | {"token_labels.store": str(store)})
    assert not (tmp_path / "run").exists()


def test_unusable_teachers_are_rejected_first(images, teacher, store, tmp_path, monkeypatch):
    """Before anything is decoded, measured or built, by a training and by its plan."""
    for owner, name in ((runs, "ImageLoader"), (prepare, "plan_memory"), (prepare, "build_initial")):
        monkeypatch.setattr(owner, name, lambda *_, name=name, **__: pytest.fail(f"{name} came first"))
    strange = make_teacher(tmp_path / "strange.safetensors", ["oak", "elm", "ash"])
    coarse = make_teacher(
        tmp_path / "coarse.safetensors", size=64, patch_size=32
    )  # one patch is larger than the student's images
    damaged = vitrail.load(make_teacher(tmp_path / "damaged.safetensors"))
    damaged.head.bias.data[0] = torch.nan
    vitrail.save(damaged, tmp_path / "damaged.safetensors")
    other = tmp_path / "other"
    annotate(open_teacher(strange), open_splits(str(images)).train, other, workers=0)
    logits = tmp_path / "logits"
    annotate(open_teacher(teacher), open_splits(str(images)).train, logits, workers=0)
    at_student_size = {"distillation.teacher_size": "student"}
    cases = [
        ({"distillation.teacher": str(strange)}, "3 of 3 are unknown to the model"),
        (at_student_size | {"distillation.teacher": str(coarse)}, r"coarse.safetensors fails on the student's images of 16 x 16"),
        ({"distillation.teacher": str(tmp_path / "damaged.safetensors")}, "predicts NaN or Inf"),
        ({"distillation.teacher": str(other)}, "3 of 3 are unknown to the model"),
        ({"token_labels.store": str(logits)}, "holds logits: annotate again with --outputs tokens"),
    ]
    for changes, message in cases:
        with pytest.raises(UserError, match=message):
            train(images, tmp_path / "run", VIT | changes)
        with pytest.raises(UserError, match=message):
            plan(request(images, VIT | changes))
    assert not (tmp_path / "run").exists()


def test_a_plan_counts_the_teacher(images, teacher, store, tmp_path, capsys):
    online = plan(request(images, VIT | {"distillation.teacher": str(teacher)}))
    assert any(re.search(r" GB memory; the teacher takes \d+ % of a step and \d+ kB$", message) for message in online)
    stored = plan(request(images, VIT | {"distillation.teacher": str(store)}))
    assert any(message.endswith(" GB memory") for message in stored)
    train(images, tmp_path / "run", VIT | {"distillation.teacher": str(teacher)})
    assert re.search(r"the teacher takes \d+ % of a step and \d+ kB\n", capsys.readouterr().err)


def test_a_teacher_that_predicts_nan_is_rejected(images, tmp_path):
    path = make_teacher(tmp_path / "damaged.safetensors")
    damaged = vitrail.load(path)
    damaged.head.weight.data[0, 0] = torch.nan
    vitrail.save(damaged, path)
    with pytest.raises(UserError, match="predicts NaN or Inf"):
        train(images, tmp_path / "run", VIT | {"distillation.teacher": str(path)})


def test_messages_on_the_targets(images, teacher, store, tmp_path, capsys):
    train(
        images,
        tmp_path / "run",
        VIT | {"distillation.teacher": str(teacher), "token_labels.store": str(store), "token_labels.mixtoken": 1.0},
    )
    output = capsys.readouterr().err
    assert f"0.5 of the loss is hard distillation from {teacher}\n" in output
    assert f"token labels from {store} with weight 0.5, image target: relabel, MixToken\n" in output
