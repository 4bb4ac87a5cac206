"""From a batch to its targets: predictions of a teacher or of a label store, and how mixing changes them."""

import json
import math

import numpy as np
import pytest
import torch

import vitrail
from tests.tasks.test_token_labels import interpolated
from tests.teachers.predictions import make_source, make_store, make_teacher
from vitrail.data.loader import ImageReader, make_batch
from vitrail.data.rng import sample_key
from vitrail.data.transforms.mixup import Mix, mix_images
from vitrail.data.transforms.pipeline import augment
from vitrail.errors import UserError
from vitrail.models.vision_transformer import mix_tokens
from vitrail.recipes import lookup
from vitrail.tasks import teacher_labels
from vitrail.tasks.classification import Classification, ClassificationModule, resolve_teacher
from vitrail.tasks.token_labels import covered, draw_token_mix, token_loss, token_mask
from vitrail.training.task import Position

NAMES = ["cyan", "red", "blue", "grey", "green", "pink", "white"]  # the teacher's, of which the student has three
OWN = torch.tensor([2, 4, 1])  # blue, green, red
CPU = torch.device("cpu")
WHOLE = Mix(1.0, None)
CUT = Mix(1 - 8 * 8 / 192, (2, 10, 3, 11))  # CutMix across the edges of patches
BLENDED = Mix(0.7, None)
BASE = {"augmentation.image_size": [12, 16], "augmentation.policy": "rand", "architecture.patch_size": 4}
BASE |= {"architecture.width": 16, "architecture.depth": 1, "architecture.heads": 2, "model": "deit_tiny_patch16"}
BASE |= {"architecture.stem": "linear", "augmentation.image_size": [12, 16], "loss.label_smoothing": 0.1}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_source(tmp_path_factory.mktemp("data") / "images", 4)


@pytest.fixture(scope="module")
def teacher():
    return make_teacher(7, names=NAMES)


@pytest.fixture(scope="module")
def stores(tmp_path_factory, source, teacher):
    """All logits, and the three largest of seven."""
    folder = tmp_path_factory.mktemp("stores")
    for kept in (0, 3):
        make_store(folder / f"top{kept}", teacher, source, outputs=("logits", "tokens"), top_k=kept)
    return folder


def recipe_of(**changes):
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return resolve_teacher(lookup("laptop").set(BASE | named))


def targets_for(recipe, source, mix=WHOLE, step=5, indices=(0, 5, 9, 11)):
    """The batch, its augmented images, the mixed images and the targets."""
    parts = {key: value for key, value in recipe.architecture.items() if key != "drop_path"}
    model = vitrail.create(recipe.model, 3, recipe.augmentation.image_size, **parts)
    batch = make_batch(source, ImageReader(source, None, False).read_images(np.array(indices)))
    seen = augment(batch.pixels, batch.sizes, sample_key(0, 0, batch.index, batch.repeat), recipe.augmentation)
    images = mix_images(seen.images, [mix])
    task = Classification(recipe, source, CPU)
    task.attach(model)
    return batch, seen, images, task.make_targets(batch, seen, images, [mix], Position(step, 100, 2, step, (1,)))


def mixed_rows(rows, share):
    return share * rows + (1 - share) * rows.flip(0)


def labels_of(batch, smoothing=0.1):
    return torch.eye(3, dtype=torch.float64)[batch.labels] * (1 - smoothing) + smoothing / 3


@pytest.mark.parametrize("mix", [WHOLE, CUT, BLENDED])
def test_labels_only(source, mix):
    batch, _, _, targets = targets_for(recipe_of(), source, mix)
    assert targets[1:] == (None, None, None)
    torch.testing.assert_close(targets.classes.double(), mixed_rows(labels_of(batch), mix.lam), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mix", [WHOLE, CUT, BLENDED])
@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_an_online_teacher_sees_the_students_images(source, teacher, monkeypatch, kind, mix):
    """The augmented and mixed ones; its predictions are not mixed."""
    monkeypatch.setattr(teacher_labels, "open_teacher", lambda path, device: teacher)
    changes = {"augmentation__mean": [0.5, 0.4, 0.3], "augmentation__std": [0.5, 0.6, 0.7]}  # not the teacher's
    recipe = recipe_of(distillation__teacher="timm:other", distillation__kind=kind, distillation__temperature=2.0, **changes)
    _, _, images, targets = targets_for(recipe, source, mix)
    mean, std = (torch.tensor(each)[:, None, None] for each in (recipe.augmentation.mean, recipe.augmentation.std))
    own = (torch.tensor(each)[:, None, None] for each in (teacher.preprocessing.mean, teacher.preprocessing.std))
    logits = teacher(images.mul(std).add(mean).sub(next(own)).div(next(own)))[:, OWN].double()
    expected = (logits / 2).softmax(1) if kind == "soft" else torch.eye(3).double()[logits.argmax(1)]
    torch.testing.assert_close(targets.teacher.double(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kept", [0, 3])
@pytest.mark.parametrize("mix", [WHOLE, CUT, BLENDED])
@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_stored_predictions_are_mixed(source, stores, kind, mix, kept):
    """They do not depend on the augmentation, and are mixed as labels are."""
    path = stores / f"top{kept}"
    recipe = recipe_of(distillation__teacher=str(path), distillation__kind=kind, distillation__temperature=2.0)
    batch, _, _, targets = targets_for(recipe, source, mix)
    store = teacher_labels.LabelStore.open(path)
    logits = store.class_scores(store.rows(source)[batch.index], OWN).double()
    each = (logits / 2).softmax(1) if kind == "soft" else torch.eye(3).double()[logits.argmax(1)]
    torch.testing.assert_close(targets.teacher.double(), mixed_rows(each, mix.lam), rtol=1e-5, atol=1e-7)
    again = targets_for(recipe.set({"augmentation.policy": "none", "seed": 4}), source, mix)[-1]
    assert torch.equal(again.teacher, targets.teacher)


def maps_of(path, source, batch, seen, grid=(3, 4), patch=4, outside="spread"):
    """[B, N, 3] logits of the patches in double precision: dense maps, interpolated at two by two points."""
    store = teacher_labels.LabelStore.open(path)
    dense = store.dense_scores(store.rows(source)[batch.index], OWN, outside).double()
    return interpolated(dense, seen, grid, patch)


@pytest.mark.parametrize("outside", ["spread", "zero"])
@pytest.mark.parametrize("kept", [0, 3])
@pytest.mark.parametrize("crop_last", [False, True])
def test_token_labels_follow_the_augmentation(source, stores, crop_last, kept, outside):
    recipe = recipe_of(
        token_labels__store=str(stores / f"top{kept}"), augmentation__crop_last=crop_last, token_labels__outside=outside
    )
    assert (recipe.token_labels.weight, recipe.token_labels.target) == (0.5, "relabel")
    batch, seen, _, targets = targets_for(recipe, source)
    logits = maps_of(stores / f"top{kept}", source, batch, seen, outside=outside)
    tokens = logits.softmax(-1) * 0.9 + 0.1 / 3
    torch.testing.assert_close(targets.tokens.double(), tokens, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(targets.classes.double(), logits.mean(1).softmax(-1) * 0.9 + 0.1 / 3, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(targets.tokens.sum(-1), torch.ones(4, 12))


@pytest.mark.parametrize("target", ["labels", "relabel", "blend"])
def test_the_target_of_the_image(source, stores, target):
    """Blended: half of the map's where it agrees with the label, 0.9 where it does not, as in the released code."""
    recipe = recipe_of(token_labels__store=str(stores / "top0"), token_labels__target=target, token_labels__weight=0.5)
    batch, seen, _, targets = targets_for(recipe, source, indices=range(12))
    found = maps_of(stores / "top0", source, batch, seen).mean(1).softmax(-1) * 0.9 + 0.1 / 3
    expected_labels = labels_of(batch)
    weight = torch.where(found.argmax(1) == batch.labels, 0.5, 0.9)[:, None].double()
    assert len(weight.unique()) == 2
    expected = {"labels": expected_labels, "relabel": found, "blend": weight * found + (1 - weight) * expected_labels}[target]
    torch.testing.assert_close(targets.classes.double(), expected, rtol=1e-3, atol=1e-4)


def test_relabelling_alone_has_no_token_labels(source, stores):
    recipe = recipe_of(token_labels__store=str(stores / "top0"), token_labels__target="relabel")
    assert recipe.token_labels.weight == 0
    assert "dense_head" not in recipe.architecture
    targets = targets_for(recipe, source)[-1]
    assert targets.tokens is None


@pytest.mark.parametrize("mix", [CUT, BLENDED])
def test_mixed_pixels_mix_the_labels_of_their_patches(source, stores, mix):
    recipe = recipe_of(token_labels__store=str(stores / "top0"))
    plain, mixed = (targets_for(recipe, source, each)[-1] for each in (WHOLE, mix))
    part = covered(mix, (3, 4), 4, CPU).double()[None, :, None]
    if mix is CUT:
        assert len(part.unique()) > 3  # patches on the edge
        assert (part.mean() * 192).item() == pytest.approx(64, abs=1e-4)
    tokens = plain.tokens.double()
    torch.testing.assert_close(mixed.tokens.double(), (1 - part) * tokens + part * tokens.flip(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mixed.classes.double(), mixed_rows(plain.classes.double(), mix.lam), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mix", [WHOLE, CUT])
@pytest.mark.parametrize("what", ["predictions", "labels"])
def test_mixtoken_reaches_every_target(source, stores, what, mix):
    path = str(stores / "top0")
    taught = {"distillation__teacher": path, "token_labels__store": path, "distillation__kind": "soft"}
    plain = targets_for(recipe_of(**taught), source, mix)[-1]
    mixed = targets_for(recipe_of(**taught, token_labels__mixtoken=1.0, token_labels__mixtoken_on=what), source, mix)[-1]
    drawn = draw_token_mix(0, 2, 5, 1, (3, 4), 1.0)
    assert 0 < drawn.lam < 1
    assert torch.equal(mixed.mixed, token_mask([drawn], (3, 4), CPU))
    torch.testing.assert_close(mixed.classes.double(), mixed_rows(plain.classes.double(), drawn.lam), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mixed.teacher.double(), mixed_rows(plain.teacher.double(), drawn.lam), rtol=1e-5, atol=1e-6)
    expected = plain.tokens if what == "predictions" else mix_tokens(plain.tokens, mixed.mixed)
    assert torch.equal(mixed.tokens, expected)


def test_token_and_image_labels_are_mixed_alike(source, stores):
    """The share of an image's patches that carry its own labels is its own share of its label."""
    path, shares = str(stores / "top0"), set()
    plain = targets_for(recipe_of(token_labels__store=path), source)[-1]
    recipe = recipe_of(token_labels__store=path, token_labels__mixtoken=1.0, token_labels__mixtoken_on="labels")
    for step in range(12):
        targets = targets_for(recipe, source, step=step)[-1]
        own = (targets.tokens == plain.tokens).all(-1)
        assert torch.equal(~own, (targets.tokens == plain.tokens.flip(0)).all(-1))  # one source each
        share = own.double().mean(1)
        expected = share[:, None] * plain.classes + (1 - share[:, None]) * plain.classes.flip(0)
        torch.testing.assert_close(targets.classes.double(), expected, rtol=1e-5, atol=1e-6)
        shares.add(share[0].item())
    assert len(shares) > 3


def test_both_ways_of_mixing_tokens_are_one_training(source, stores):
    """Loss and gradients of a model with the targets of the task."""
    found = []
    for what in ("predictions", "labels"):
        recipe = recipe_of(token_labels__store=str(stores / "top0"), token_labels__mixtoken=1.0, token_labels__mixtoken_on=what)
        _, _, images, targets = targets_for(recipe, source, CUT)
        torch.manual_seed(2)
        parts = {key: value for key, value in recipe.architecture.items() if key != "drop_path"}
        model = vitrail.create(recipe.model, 3, (12, 16), **parts).double().train()
        loss = ClassificationModule(model, recipe)(images.double(), targets)
        loss.backward()
        found.append((loss.detach(), [parameter.grad for parameter in model.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-7, atol=1e-10)


def test_mixtoken_without_token_labels(source):
    targets = targets_for(recipe_of(token_labels__mixtoken=1.0), source)[-1]
    assert targets.tokens is None
    assert targets.mixed.any()


def test_targets_are_a_function_of_the_position(source, stores):
    recipe = recipe_of(
        token_labels__store=str(stores / "top3"), token_labels__mixtoken=1.0, distillation__teacher=str(stores / "top3")
    )
    one, two = (targets_for(recipe, source, CUT)[-1] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not torch.equal(targets_for(recipe, source, CUT, step=6)[-1].mixed, one.mixed)


def test_outputs_that_the_store_does_not_hold(source, teacher, stores, tmp_path):
    make_store(tmp_path / "logits", teacher, source)
    with pytest.raises(UserError, match="holds logits: annotate again with --outputs tokens"):
        targets_for(recipe_of(token_labels__store=str(tmp_path / "logits")), source)
    make_store(tmp_path / "tokens", teacher, source, outputs=("tokens",))
    with pytest.raises(UserError, match="holds tokens: annotate again with --outputs logits"):
        targets_for(recipe_of(distillation__teacher=str(tmp_path / "tokens")), source)


def test_a_store_of_other_images(source, teacher, stores, tmp_path):
    other = make_source(tmp_path / "other", 4, (20, 24))
    with pytest.raises(UserError, match="has no predictions for 12 of the 12 images"):
        targets_for(recipe_of(token_labels__store=str(stores / "top0")), other)


def test_a_teacher_of_other_classes(source, monkeypatch, tmp_path):
    """The first differences are named, of a network as of a store."""
    strange = make_teacher(7, names=["oak", "elm", "ash", "fir", "yew", "red", "fig"])
    monkeypatch.setattr(teacher_labels, "open_teacher", lambda path, device: strange)
    with pytest.raises(UserError, match=r"2 of 3.*blue.*green") as online:
        targets_for(recipe_of(distillation__teacher="timm:other"), source)
    make_store(tmp_path / "store", strange, source, outputs=("logits", "tokens"))
    with pytest.raises(UserError, match=r"2 of 3.*blue.*green"):
        targets_for(recipe_of(distillation__teacher=str(tmp_path / "store")), source)
    with pytest.raises(UserError, match=r"2 of 3.*blue.*green"):
        targets_for(recipe_of(token_labels__store=str(tmp_path / "store")), source)
    assert "--map" not in str(online.value)  # which a training does not have


def test_a_teacher_of_unnamed_classes(source, monkeypatch, tmp_path):
    monkeypatch.setattr(teacher_labels, "open_teacher", lambda path, device: make_teacher(7))
    with pytest.raises(UserError, match=r"7 classes without names.*: name the teacher's with vitrail annotate --classes\.$"):
        targets_for(recipe_of(distillation__teacher="timm:other"), source)
    (tmp_path / "net.pth").touch()
    with pytest.raises(UserError, match=r"7 classes without names.*: name the teacher's in .*net\.pth\.teacher\.json\.$"):
        targets_for(recipe_of(distillation__teacher=str(tmp_path / "net.pth")), source)
    make_store(tmp_path / "store", make_teacher(7), source)
    with pytest.raises(UserError, match=r"7 classes without names.*: name the teacher's with vitrail annotate --classes\.$"):
        targets_for(recipe_of(distillation__teacher=str(tmp_path / "store")), source)


def test_wordnet_ids_next_to_the_data_match_the_classes(tmp_path):
    """A teacher of ImageNet's classes without names, online and as a store."""
    images, teacher = make_source(tmp_path / "images", 2), make_teacher(1000)
    make_store(tmp_path / "store", teacher, images, outputs=("logits", "tokens"), top_k=5)
    recipe = recipe_of(distillation__teacher=str(tmp_path / "store"), token_labels__store=str(tmp_path / "store"))
    with pytest.raises(UserError, match=r"3 of 3 are unknown .*or their WordNet ids in wordnet_ids\.json next to the data\.$"):
        targets_for(recipe, images, indices=(0, 1))
    ids = {"blue": "n03126707", "green": "n02012849", "red": "n01440764"}
    (tmp_path / "images" / "wordnet_ids.json").write_text(json.dumps(ids))
    assert targets_for(recipe, images, indices=(0, 1))[-1].teacher.shape == (2, 3)
    store = teacher_labels.LabelStore.open(tmp_path / "store")
    assert teacher_labels.match_classes(store, images, "store").tolist() == [517, 134, 0]
    assert teacher_labels.match_classes(teacher, images, "net").tolist() == [517, 134, 0]


def test_the_size_of_a_teacher_is_chosen(source, teacher, monkeypatch):
    """Its own if the student's images are smaller or more than twice as large; no sidecar file is needed."""
    monkeypatch.setattr(teacher_labels, "open_teacher", lambda path, device: teacher)

    def opened(size, **changes):
        monkeypatch.setattr(teacher, "size", None)
        recipe = recipe_of(distillation__teacher="timm:other", **changes).set({"augmentation.image_size": size})
        return teacher_labels.open_online_teacher(recipe, source, CPU).messages

    (message,) = opened([12, 16])
    assert message == "images are resized for the teacher, from 12x16 to 16 pixels, its own size"
    assert teacher.size == (16, 16)
    assert opened([48, 48])
    assert teacher.size == (16, 16)
    for size in ([16, 16], [16, 20], [32, 32]):
        assert opened(size) == []
        assert teacher.size is None
    assert opened([12, 16], distillation__teacher_size="student") == []
    assert teacher.size is None


def test_an_exported_program_needs_preprocessing(source, tmp_path):
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 3)).eval()
    torch.export.save(torch.export.export(module, (torch.zeros(2, 3, 16, 16),)), tmp_path / "net.pt2")
    with pytest.raises(UserError, match=r"has no preprocessing: write it to .*net\.pt2\.teacher\.json"):
        recipe_of(distillation__teacher=str(tmp_path / "net.pt2"))
    sidecar = {"preprocessing": {"image_size": 16}, "classes": ["red", "blue", "green"]}
    (tmp_path / "net.pt2.teacher.json").write_text(json.dumps(sidecar))
    recipe = recipe_of(distillation__teacher=str(tmp_path / "net.pt2"))
    assert teacher_labels.open_online_teacher(recipe, source, CPU).index.tolist() == [1, 2, 0]


def test_the_sidecar_is_part_of_the_digests(tmp_path):
    (tmp_path / "net.pth").write_bytes(b"weights")
    recipe = recipe_of(distillation__teacher=str(tmp_path / "net.pth"))
    before = teacher_labels.digests(recipe)
    (tmp_path / "net.pth.teacher.json").write_text('{"kind": "resnet_keras"}')
    after = teacher_labels.digests(recipe)
    assert before.items() < after.items()
    (tmp_path / "net.pth.teacher.json").write_text("{}")
    assert teacher_labels.digests(recipe) != after


def test_the_lowest_token_loss_is_the_entropy_of_the_targets(source, stores):
    """A model that predicts the targets themselves has it."""
    recipe = recipe_of(token_labels__store=str(stores / "top0"))
    targets = targets_for(recipe, source)[-1]
    tokens = targets.tokens.double()
    least = -(tokens * tokens.log()).sum(-1).mean()
    assert token_loss(tokens.log(), targets.tokens).item() == pytest.approx(least.item(), rel=1e-6)
    assert token_loss(tokens.log() + torch.randn(4, 12, 3), targets.tokens).item() > least.item()
    assert least.item() < math.log(3)
