"""From a batch to its targets: who is asked about what, and how mixing reaches everything that was said."""

import json
import math

import numpy as np
import pytest
import torch

import vitrail
from tests.tasks.test_token_labels import looked_up
from tests.teachers.predictions import make_source, make_store, make_teacher
from vitrail.data.loader import Reader, make_batch
from vitrail.data.rng import sample_key
from vitrail.data.transforms.mixup import Mix, mix_images
from vitrail.data.transforms.pipeline import augment
from vitrail.errors import UserError
from vitrail.models.vision_transformer import mix_tokens
from vitrail.recipes import lookup
from vitrail.runs.prepare import with_teacher
from vitrail.tasks import supervision as guides
from vitrail.tasks.classification import Supervised
from vitrail.tasks.supervision import Guide
from vitrail.tasks.token_labels import covered, draw_token_mix, token_loss, token_mask

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
    """All logits, and the three best of seven."""
    folder = tmp_path_factory.mktemp("stores")
    for kept in (0, 3):
        make_store(folder / f"top{kept}", teacher, source, what=("logits", "tokens"), top_k=kept)
    return folder


def recipe_of(**changes):
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return with_teacher(lookup("laptop").set(BASE | named))


def asked(recipe, source, mix=WHOLE, step=5, indices=(0, 5, 9, 11)):
    """The batch, what is seen of it and what the guide says it is."""
    parts = {key: value for key, value in recipe.architecture.items() if key != "drop_path"}
    model = vitrail.create(recipe.model, 3, recipe.augmentation.image_size, **parts)
    batch = make_batch(source, Reader(source, None, False).images(np.array(indices)))
    seen = augment(batch.pixels, batch.sizes, sample_key(0, 0, batch.index, batch.repeat), recipe.augmentation)
    images = mix_images(seen.images, mix)
    guide = Guide(recipe, model, source, CPU)
    return batch, seen, images, guide.targets(batch, seen, images, mix, 2, step, 1)


def mixed_rows(rows, share):
    return share * rows + (1 - share) * rows.flip(0)


def labels_of(batch, smoothing=0.1):
    return torch.eye(3, dtype=torch.float64)[batch.labels] * (1 - smoothing) + smoothing / 3


@pytest.mark.parametrize("mix", [WHOLE, CUT, BLENDED])
def test_nobody_teaches(source, mix):
    batch, _, _, targets = asked(recipe_of(), source, mix)
    assert targets[1:] == (None, None, None)
    torch.testing.assert_close(targets.classes.double(), mixed_rows(labels_of(batch), mix.share), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mix", [WHOLE, CUT, BLENDED])
@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_a_network_is_asked_about_what_the_student_sees(source, teacher, monkeypatch, kind, mix):
    """Of the augmented and mixed images; no label of the teacher's is mixed."""
    monkeypatch.setattr(guides, "open_teacher", lambda path, device: teacher)
    changes = {"augmentation__mean": [0.5, 0.4, 0.3], "augmentation__std": [0.5, 0.6, 0.7]}  # not the teacher's
    recipe = recipe_of(distillation__teacher="timm:somebody", distillation__kind=kind, distillation__temperature=2.0, **changes)
    _, _, images, targets = asked(recipe, source, mix)
    mean, std = (torch.tensor(each)[:, None, None] for each in (recipe.augmentation.mean, recipe.augmentation.std))
    own = (torch.tensor(each)[:, None, None] for each in (teacher.preprocessing.mean, teacher.preprocessing.std))
    logits = teacher(images.mul(std).add(mean).sub(next(own)).div(next(own)))[:, OWN].double()
    expected = (logits / 2).softmax(1) if kind == "soft" else torch.eye(3).double()[logits.argmax(1)]
    torch.testing.assert_close(targets.teacher.double(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kept", [0, 3])
@pytest.mark.parametrize("mix", [WHOLE, CUT, BLENDED])
@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_a_store_is_asked_about_each_image_and_its_answers_are_mixed(source, stores, kind, mix, kept):
    """What it says about an image does not depend on how that is cut and colored; it is mixed as labels are."""
    path = stores / f"top{kept}"
    recipe = recipe_of(distillation__teacher=str(path), distillation__kind=kind, distillation__temperature=2.0)
    batch, _, _, targets = asked(recipe, source, mix)
    store = guides.Store.open(path)
    logits = store.class_scores(store.rows(source)[batch.index], OWN).double()
    each = (logits / 2).softmax(1) if kind == "soft" else torch.eye(3).double()[logits.argmax(1)]
    torch.testing.assert_close(targets.teacher.double(), mixed_rows(each, mix.share), rtol=1e-5, atol=1e-7)
    again = asked(recipe.set({"augmentation.policy": "none", "seed": 4}), source, mix)[-1]
    assert torch.equal(again.teacher, targets.teacher)


def maps_of(path, source, batch, seen, grid=(3, 4), patch=4, outside="spread"):
    """[B, N, 3] logits of the patches in double precision: dense maps, looked up at two by two places."""
    store = guides.Store.open(path)
    dense = store.dense_scores(store.rows(source)[batch.index], OWN, outside).double()
    return looked_up(dense, seen, grid, patch)


@pytest.mark.parametrize("outside", ["spread", "zero"])
@pytest.mark.parametrize("kept", [0, 3])
@pytest.mark.parametrize("crop_last", [False, True])
def test_patches_get_the_labels_of_what_they_show(source, stores, crop_last, kept, outside):
    recipe = recipe_of(tokens__labels=str(stores / f"top{kept}"), augmentation__crop_last=crop_last, tokens__outside=outside)
    assert (recipe.token_labels.weight, recipe.token_labels.target) == (0.5, "relabel")
    batch, seen, _, targets = asked(recipe, source)
    logits = maps_of(stores / f"top{kept}", source, batch, seen, outside=outside)
    tokens = logits.softmax(-1) * 0.9 + 0.1 / 3
    torch.testing.assert_close(targets.tokens.double(), tokens, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(targets.classes.double(), logits.mean(1).softmax(-1) * 0.9 + 0.1 / 3, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(targets.tokens.sum(-1), torch.ones(4, 12))


@pytest.mark.parametrize("target", ["labels", "relabel", "blend"])
def test_the_label_of_the_image(source, stores, target):
    """Blended: half the map's where it agrees with the data, 0.9 where it does not, as the released code has it."""
    recipe = recipe_of(tokens__labels=str(stores / "top0"), tokens__target=target, tokens__weight=0.5)
    batch, seen, _, targets = asked(recipe, source, indices=range(12))
    found = maps_of(stores / "top0", source, batch, seen).mean(1).softmax(-1) * 0.9 + 0.1 / 3
    truth = labels_of(batch)
    weight = torch.where(found.argmax(1) == batch.labels, 0.5, 0.9)[:, None].double()
    assert len(weight.unique()) == 2
    expected = {"labels": truth, "relabel": found, "blend": weight * found + (1 - weight) * truth}[target]
    torch.testing.assert_close(targets.classes.double(), expected, rtol=1e-3, atol=1e-4)


def test_relabelling_alone_leaves_the_patches_out(source, stores):
    recipe = recipe_of(tokens__labels=str(stores / "top0"), tokens__target="relabel")
    assert recipe.token_labels.weight == 0
    assert "dense_head" not in recipe.architecture
    targets = asked(recipe, source)[-1]
    assert targets.tokens is None


@pytest.mark.parametrize("mix", [CUT, BLENDED])
def test_pixels_that_are_mixed_mix_the_labels_of_their_patches(source, stores, mix):
    recipe = recipe_of(tokens__labels=str(stores / "top0"))
    plain, mixed = (asked(recipe, source, each)[-1] for each in (WHOLE, mix))
    part = covered(mix, (3, 4), 4, CPU).double()[None, :, None]
    if mix is CUT:
        assert len(part.unique()) > 3  # patches on the edge
        assert (part.mean() * 192).item() == pytest.approx(64, abs=1e-4)
    tokens = plain.tokens.double()
    torch.testing.assert_close(mixed.tokens.double(), (1 - part) * tokens + part * tokens.flip(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mixed.classes.double(), mixed_rows(plain.classes.double(), mix.share), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mix", [WHOLE, CUT])
@pytest.mark.parametrize("what", ["predictions", "labels"])
def test_mixtoken_reaches_every_target(source, stores, what, mix):
    path = str(stores / "top0")
    taught = {"distillation__teacher": path, "tokens__labels": path, "distillation__kind": "soft"}
    plain = asked(recipe_of(**taught), source, mix)[-1]
    mixed = asked(recipe_of(**taught, tokens__mix=1.0, tokens__mix_what=what), source, mix)[-1]
    drawn = draw_token_mix(0, 2, 5, 1, (3, 4), 1.0)
    assert 0 < drawn.share < 1
    assert torch.equal(mixed.mixed, token_mask(drawn, (3, 4), CPU))
    torch.testing.assert_close(mixed.classes.double(), mixed_rows(plain.classes.double(), drawn.share), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mixed.teacher.double(), mixed_rows(plain.teacher.double(), drawn.share), rtol=1e-5, atol=1e-6)
    expected = plain.tokens if what == "predictions" else mix_tokens(plain.tokens, mixed.mixed)
    assert torch.equal(mixed.tokens, expected)


def test_patches_and_image_agree_on_whose_they_are(source, stores):
    """The share of an image's patches that carry its own labels is its own share of its label."""
    path, shares = str(stores / "top0"), set()
    plain = asked(recipe_of(tokens__labels=path), source)[-1]
    recipe = recipe_of(tokens__labels=path, tokens__mix=1.0, tokens__mix_what="labels")
    for step in range(12):
        targets = asked(recipe, source, step=step)[-1]
        own = (targets.tokens == plain.tokens).all(-1)
        assert torch.equal(~own, (targets.tokens == plain.tokens.flip(0)).all(-1))  # one source each
        share = own.double().mean(1)
        expected = share[:, None] * plain.classes + (1 - share[:, None]) * plain.classes.flip(0)
        torch.testing.assert_close(targets.classes.double(), expected, rtol=1e-5, atol=1e-6)
        shares.add(share[0].item())
    assert len(shares) > 3


def test_both_ways_of_mixing_tokens_are_one_training(source, stores):
    """Loss and gradients of a network, with what the guide itself has said."""
    found = []
    for what in ("predictions", "labels"):
        recipe = recipe_of(tokens__labels=str(stores / "top0"), tokens__mix=1.0, tokens__mix_what=what)
        _, _, images, targets = asked(recipe, source, CUT)
        torch.manual_seed(2)
        parts = {key: value for key, value in recipe.architecture.items() if key != "drop_path"}
        model = vitrail.create(recipe.model, 3, (12, 16), **parts).double().train()
        loss = Supervised(model, recipe)(images.double(), targets)
        loss.backward()
        found.append((loss.detach(), [parameter.grad for parameter in model.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-7, atol=1e-10)


def test_mixtoken_needs_no_labels_of_patches(source):
    targets = asked(recipe_of(tokens__mix=1.0), source)[-1]
    assert targets.tokens is None
    assert targets.mixed.any()


def test_the_same_place_gives_the_same_targets(source, stores):
    recipe = recipe_of(tokens__labels=str(stores / "top3"), tokens__mix=1.0, distillation__teacher=str(stores / "top3"))
    one, two = (asked(recipe, source, CUT)[-1] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not torch.equal(asked(recipe, source, CUT, step=6)[-1].mixed, one.mixed)


def test_what_the_store_does_not_keep(source, teacher, stores, tmp_path):
    make_store(tmp_path / "logits", teacher, source)
    with pytest.raises(UserError, match="keeps logits: annotate again with --what tokens"):
        asked(recipe_of(tokens__labels=str(tmp_path / "logits")), source)
    make_store(tmp_path / "tokens", teacher, source, what=("tokens",))
    with pytest.raises(UserError, match="keeps tokens: annotate again with --what logits"):
        asked(recipe_of(distillation__teacher=str(tmp_path / "tokens")), source)


def test_a_store_of_other_images(source, teacher, stores, tmp_path):
    other = make_source(tmp_path / "other", 4, (20, 24))
    with pytest.raises(UserError, match="knows nothing of 12 of the 12 images"):
        asked(recipe_of(tokens__labels=str(stores / "top0")), other)


def test_a_teacher_of_other_classes(source, monkeypatch, tmp_path):
    """The first differences are named, of a network as of a store."""
    strange = make_teacher(7, names=["oak", "elm", "ash", "fir", "yew", "red", "fig"])
    monkeypatch.setattr(guides, "open_teacher", lambda path, device: strange)
    with pytest.raises(UserError, match=r"2 of 3.*blue.*green") as online:
        asked(recipe_of(distillation__teacher="timm:somebody"), source)
    make_store(tmp_path / "store", strange, source, what=("logits", "tokens"))
    with pytest.raises(UserError, match=r"2 of 3.*blue.*green"):
        asked(recipe_of(distillation__teacher=str(tmp_path / "store")), source)
    with pytest.raises(UserError, match=r"2 of 3.*blue.*green"):
        asked(recipe_of(tokens__labels=str(tmp_path / "store")), source)
    assert "--map" not in str(online.value)  # which a training does not have


def test_a_teacher_of_unnamed_classes(source, monkeypatch, tmp_path):
    monkeypatch.setattr(guides, "open_teacher", lambda path, device: make_teacher(7))
    with pytest.raises(UserError, match=r"7 classes without names.*: name the teacher's with vitrail annotate --classes\.$"):
        asked(recipe_of(distillation__teacher="timm:somebody"), source)
    (tmp_path / "net.pth").touch()
    with pytest.raises(UserError, match=r"7 classes without names.*: name the teacher's in .*net\.pth\.teacher\.json\.$"):
        asked(recipe_of(distillation__teacher=str(tmp_path / "net.pth")), source)
    make_store(tmp_path / "store", make_teacher(7), source)
    with pytest.raises(UserError, match=r"7 classes without names.*: name the teacher's with vitrail annotate --classes\.$"):
        asked(recipe_of(distillation__teacher=str(tmp_path / "store")), source)


def test_the_ids_beside_the_data_tell_which_class_is_which(tmp_path):
    """A teacher of ImageNet's classes without names, live and as a store."""
    images, teacher = make_source(tmp_path / "images", 2), make_teacher(1000)
    make_store(tmp_path / "store", teacher, images, what=("logits", "tokens"), top_k=5)
    recipe = recipe_of(distillation__teacher=str(tmp_path / "store"), tokens__labels=str(tmp_path / "store"))
    with pytest.raises(UserError, match=r"unknown .* 3 of 3.*or their WordNet ids in wordnet_ids\.json beside the data\.$"):
        asked(recipe, images, indices=(0, 1))
    ids = {"blue": "n03126707", "green": "n02012849", "red": "n01440764"}
    (tmp_path / "images" / "wordnet_ids.json").write_text(json.dumps(ids))
    assert asked(recipe, images, indices=(0, 1))[-1].teacher.shape == (2, 3)
    store = guides.Store.open(tmp_path / "store")
    assert guides.matched(store, images, "store").tolist() == [517, 134, 0]
    assert guides.matched(teacher, images, "net").tolist() == [517, 134, 0]


def test_a_teacher_of_other_images_is_told(source, teacher, monkeypatch, tmp_path):
    monkeypatch.setattr(guides, "open_teacher", lambda path, device: teacher)
    recipe = recipe_of(distillation__teacher="timm:somebody")  # 12 x 16, the teacher's 16 x 16
    (said,) = guides.open_asked(recipe, source, CPU).said
    assert "made for images of 16 pixels and sees the student's of 12x16, of which it may know less: ask it once" in said
    assert guides.open_asked(recipe.set({"augmentation.image_size": [16, 16]}), source, CPU).said == []
    (said,) = guides.open_asked(recipe.set({"augmentation.image_size": [16, 20]}), source, CPU).said
    assert "student's of 16x20, of which it may know less and which take longer: ask it once" in said
    (tmp_path / "net.pt").touch()
    local = recipe.set({"augmentation.image_size": [16, 20], "distillation.teacher": str(tmp_path / "net.pt")})
    (said,) = guides.open_asked(local, source, CPU).said
    assert said.endswith(f'take longer: write {{"size": 16}} into {tmp_path}/net.pt.teacher.json')
    monkeypatch.setattr(teacher, "size", (16, 16))  # it is shown every image at its own
    assert guides.open_asked(recipe, source, CPU).said == []


def test_a_program_can_be_asked_if_its_preprocessing_is_said_beside_it(source, tmp_path):
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 3)).eval()
    torch.export.save(torch.export.export(module, (torch.zeros(2, 3, 16, 16),)), tmp_path / "net.pt2")
    with pytest.raises(UserError, match=r"how its images are prepared: say it in .*net\.pt2\.teacher\.json"):
        recipe_of(distillation__teacher=str(tmp_path / "net.pt2"))
    said = {"preprocessing": {"image_size": 16}, "classes": ["red", "blue", "green"]}
    (tmp_path / "net.pt2.teacher.json").write_text(json.dumps(said))
    recipe = recipe_of(distillation__teacher=str(tmp_path / "net.pt2"))
    assert guides.open_asked(recipe, source, CPU).index.tolist() == [1, 2, 0]


def test_what_is_said_beside_a_teacher_is_part_of_it(tmp_path):
    (tmp_path / "net.pth").write_bytes(b"weights")
    recipe = recipe_of(distillation__teacher=str(tmp_path / "net.pth"))
    before = guides.identities(recipe)
    (tmp_path / "net.pth.teacher.json").write_text('{"kind": "resnet_keras"}')
    after = guides.identities(recipe)
    assert before.items() < after.items()
    (tmp_path / "net.pth.teacher.json").write_text("{}")
    assert guides.identities(recipe) != after


def test_a_student_that_knows_what_the_teacher_says(source, stores):
    """A network whose answer is the target itself has the least loss there is: the entropy of the targets."""
    recipe = recipe_of(tokens__labels=str(stores / "top0"))
    targets = asked(recipe, source)[-1]
    tokens = targets.tokens.double()
    least = -(tokens * tokens.log()).sum(-1).mean()
    assert guides_loss(tokens.log(), targets) == pytest.approx(least.item(), rel=1e-6)
    assert guides_loss(tokens.log() + torch.randn(4, 12, 3), targets) > least.item()
    assert least.item() < math.log(3)


def guides_loss(logits, targets):
    return token_loss(logits, targets.tokens).item()
