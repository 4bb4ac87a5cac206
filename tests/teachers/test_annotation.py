"""Annotation: the stored predictions are the teacher's own, for each unique image once."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.convnets import timm_state
from tests.images import make_folder, make_image, write_invalid_image
from tests.teachers.predictions import contents, in_a_process, make_source, make_store, make_teacher, network
from vitrail.data.datasets.concat import join
from vitrail.data.datasets.lookup import open_source, open_sources
from vitrail.data.image_loader import ImageLoader
from vitrail.data.source import Subset
from vitrail.errors import UserError
from vitrail.teachers import annotation, label_store_writer, open_teacher
from vitrail.teachers.annotation import AnnotationRequest, annotate, describe_teacher
from vitrail.teachers.class_index import match_source
from vitrail.teachers.label_store import LabelStore

ALL = ("logits", "tokens", "features")


def test_store_contains_the_predictions_of_the_teacher(tmp_path):
    teacher, source = make_teacher(), make_source(tmp_path / "p", size=(24, 20))
    store = make_store(tmp_path / "s", teacher, source, outputs=ALL, views=2)
    rows = torch.arange(36)
    (batch,) = ImageLoader(source, workers=0).iterate(36)
    images = teacher.preprocessing.apply(batch.pixels, batch.sizes)
    direct = teacher(images)
    torch.testing.assert_close(store.class_scores(rows), direct, atol=2e-2, rtol=1e-3)
    torch.testing.assert_close(store.features(rows), teacher.features(images), atol=1e-2, rtol=1e-3)
    torch.testing.assert_close(store.class_scores(rows, view=1), teacher(images.flip(3)), atol=2e-2, rtol=1e-3)
    assert store.logits(rows)[0].argmax(1).tolist() == direct.argmax(1).tolist()
    # Maps are of the full image, which is wider than it is high, not of the center crop.
    squashed = teacher.preprocessing._replace(resize="square").apply(batch.pixels, batch.sizes)
    torch.testing.assert_close(store.dense_scores(rows), teacher.dense(squashed), atol=2e-2, rtol=1e-3)
    torch.testing.assert_close(store.dense_scores(rows, view=1), teacher.dense(squashed.flip(3)), atol=2e-2, rtol=1e-3)


def test_accuracy_of_a_store_is_that_of_its_teacher(tmp_path):
    source = open_source("digits", "test")
    teacher = make_teacher(10)
    store = make_store(tmp_path / "s", teacher, source, shard_size=128, batch_size=64, top_k=5)
    labels = torch.from_numpy(source.label.values)
    said = store.logits(store.rows(source))[1]
    hits = torch.zeros(2)
    for batch in ImageLoader(source, workers=0).iterate(64):
        images = teacher.preprocessing.apply(batch.pixels, batch.sizes)
        best = teacher(images).topk(5, 1).indices == batch.labels[:, None]
        hits += torch.stack([best[:, 0].sum(), best.any(1).sum()])
    assert (said[:, 0] == labels).sum() == hits[0]
    assert (said == labels[:, None]).any(1).sum() == hits[1]


@pytest.mark.parametrize(
    ("prepared", "size", "passes"),
    [
        ({"crop_ratio": 1.0}, (20, 20), 1),  # nothing is cut from a square
        ({"crop_ratio": 1.0}, (24, 20), 2),
        ({"crop_ratio": 0.8}, (20, 20), 2),
        ({"crop_ratio": 0.8, "resize": "square"}, (24, 20), 1),
    ],
)
def test_one_forward_pass_if_the_crop_is_the_full_image(prepared, size, passes, tmp_path, monkeypatch):
    source, teacher = make_source(tmp_path / "p", 4, size), make_teacher()
    teacher.preprocessing = teacher.preprocessing._replace(**prepared)
    maps, requested = type(teacher.network.model).embed, []
    teacher.network.model.embed = lambda images: requested.append(len(images)) or maps(teacher.network.model, images)
    make_store(tmp_path / "s", teacher, source, 12, outputs=ALL, top_k=3, views=2)
    assert requested == [1] + [4] * 3 * 2 * passes  # one to get the shapes; three batches in two views
    monkeypatch.setattr(annotation.Annotator, "is_uncropped", lambda self, sizes: False)
    make_store(tmp_path / "twice", teacher, source, 12, outputs=ALL, top_k=3, views=2)
    assert contents(tmp_path / "s") == contents(tmp_path / "twice")


NAMED = ["cyan", "red", "blue", "grey", "green", "pink", "white"]


def test_top_k_of_a_class_subset(tmp_path):
    """In the order and with the names of the data, as if the teacher had no other classes."""
    source, teacher = make_source(tmp_path / "p"), make_teacher(names=NAMED)
    chosen = match_source(teacher, source, "")
    assert chosen.indices.tolist() == [2, 4, 1]
    for kept in (0, 2):
        wanted = AnnotationRequest(("logits", "tokens"), kept, batch_size=4)
        annotate(teacher, source, tmp_path / f"few{kept}", wanted, workers=0, class_subset=chosen)
    whole = make_store(tmp_path / "whole", teacher, source, outputs=("logits", "tokens"))
    rows, index = torch.arange(36), chosen.indices
    all_three, two = (LabelStore.open(tmp_path / f"few{kept}") for kept in (0, 2))
    for store in (all_three, two):
        assert (store.classes, store.class_names) == (3, ["blue", "green", "red"])
        assert store.manifest["class_subset"] == {"of": 7, "classes": [2, 4, 1]}
        assert store.match(source.classes).tolist() == [0, 1, 2]
    assert torch.equal(all_three.class_scores(rows), whole.class_scores(rows)[:, index])
    assert torch.equal(all_three.dense_scores(rows), whole.dense_scores(rows)[:, index])
    values, classes = two.tokens(rows)
    expected = whole.dense_scores(rows)[:, index].topk(2, 1)
    assert torch.equal(values, expected.values)
    assert torch.equal(classes, expected.indices)
    # The rest is one class here.
    torch.testing.assert_close(two.class_targets(rows), whole.class_scores(rows)[:, index].softmax(1), atol=2e-3, rtol=1e-2)
    assert (two.manifest["top_k"], all_three.manifest["top_k"]) == (2, 0)


def test_store_is_continued_only_with_the_same_classes(tmp_path):
    source, teacher = make_source(tmp_path / "p", 4), make_teacher(names=NAMED)
    chosen = match_source(teacher, source, "")

    def run(folder, chosen):
        return annotate(
            teacher, source, tmp_path / folder, AnnotationRequest(batch_size=4), workers=0, shard_size=5, class_subset=chosen
        )

    run("few", chosen)
    before = contents(tmp_path / "few")
    (tmp_path / "few" / "shard-00001.safetensors").unlink()
    assert run("few", chosen).reused_shards == 2
    assert contents(tmp_path / "few") == before
    others = chosen._replace(names=["b", "g", "r"])
    numbers = chosen._replace(indices=torch.tensor([2, 4, 6]))
    for other, words in (
        (None, r"written for 3 \(blue, green, …\) classes, not 7 \(cyan, red, …\): .*--all-classes"),
        (others, r"written for 3 \(blue, green, …\) classes, not 3 \(b, g, …\)"),
        (numbers, "written for other classes of the teacher"),
    ):
        with pytest.raises(UserError, match=words):
            run("few", other)
    assert contents(tmp_path / "few") == before
    run("all", None)
    with pytest.raises(UserError, match=r"written for 7 .*, not 3"):
        run("all", chosen)
    # Old manifests without this entry are of all classes.
    manifest = json.loads((tmp_path / "all" / "manifest.json").read_text())
    del manifest["class_subset"]
    (tmp_path / "all" / "manifest.json").write_text(json.dumps(manifest))
    assert run("all", None).reused_shards == 3


def test_duplicates_are_annotated_once(tmp_path):
    make_folder(tmp_path / "p", count=5)
    for number in range(5):  # the same bytes under another class and name
        (tmp_path / "p" / "red" / f"again {number}.png").write_bytes((tmp_path / "p" / "blue" / f"{number:03}.png").read_bytes())
    source = open_source(str(tmp_path / "p"))
    result = annotate(make_teacher(), source, tmp_path / "s", AnnotationRequest(batch_size=4), workers=0)
    assert (result.source_images, result.images) == (20, 15)
    rows = LabelStore.open(tmp_path / "s").rows(source)
    assert len(rows) == 20
    assert len(set(rows.tolist())) == 15


def test_unreadable_images_are_listed_and_have_no_row(tmp_path):
    make_folder(tmp_path / "p", count=5)
    write_invalid_image(tmp_path / "p" / "green" / "002.png")
    source = open_source(str(tmp_path / "p"))
    (tmp_path / "p" / "red" / "000.png").unlink()  # since it was listed
    result = annotate(make_teacher(), source, tmp_path / "s", AnnotationRequest(batch_size=4), workers=0)
    assert sorted(Path(problem.location).parts[-2:] for problem in result.skipped) == [("green", "002.png"), ("red", "000.png")]
    store = LabelStore.open(tmp_path / "s")
    rows = store.rows(source)
    lost = [Path(source.location(index)).parts[-2:] for index in torch.nonzero(rows < 0).flatten().tolist()]
    assert lost == [("green", "002.png"), ("red", "000.png")]
    # Images in the same batch as an unreadable one have their own predictions.
    whole = open_source(str(make_folder(tmp_path / "q", count=5)))
    clean = make_store(tmp_path / "clean", make_teacher(), whole)
    good = torch.nonzero(rows >= 0).flatten()
    torch.testing.assert_close(store.logits(rows[good])[0], clean.logits(clean.rows(whole)[good])[0], atol=1e-2, rtol=1e-3)


def test_same_bytes_with_and_without_workers(tmp_path):
    source, teacher = make_source(tmp_path / "p", 20), make_teacher()
    for workers in (0, 2):
        annotate(
            teacher, source, tmp_path / str(workers), AnnotationRequest(ALL, 3, batch_size=8), workers=workers, shard_size=16
        )
    assert contents(tmp_path / "0") == contents(tmp_path / "2")


def test_finished_shards_are_not_computed_again(tmp_path):
    source, teacher = make_source(tmp_path / "p"), make_teacher()
    make_store(tmp_path / "s", teacher, source)
    before = contents(tmp_path / "s")
    requested = []
    teacher.network.model.embed = lambda images: (
        requested.append(len(images)) or type(teacher.network.model).embed(teacher.network.model, images)
    )
    result = annotate(teacher, source, tmp_path / "s", AnnotationRequest(batch_size=4), workers=0, shard_size=10)
    assert requested == [1]  # to get the shapes
    assert (result.reused_shards, result.shards) == (4, 4)
    assert contents(tmp_path / "s") == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_k": 2}, "top k 0, not 2"),
        ({"outputs": ("features",)}, "outputs logits, not features"),
        ({"batch_size": 5}, "batch size 4, not 5"),
        ({"views": 2}, "views plain, not plain, mirrored"),
    ],
)
def test_other_options_are_rejected(change, words, tmp_path):
    source, teacher = make_source(tmp_path / "p", 3), make_teacher()
    make_store(tmp_path / "s", teacher, source)
    with pytest.raises(UserError, match=words):
        make_store(tmp_path / "s", teacher, source, **change)


def test_another_teacher_or_other_data_is_rejected(tmp_path):
    source, teacher = make_source(tmp_path / "p", 3), make_teacher()
    make_store(tmp_path / "s", teacher, source)
    with pytest.raises(UserError, match="another teacher"):
        make_store(tmp_path / "s", make_teacher(seed=1), source)
    make_image(tmp_path / "p" / "red" / "new.png", 1)
    with pytest.raises(UserError, match="other images"):
        make_store(tmp_path / "s", teacher, open_source(str(tmp_path / "p")))


def test_digest_of_a_teacher_depends_on_its_weights():
    assert describe_teacher(make_teacher())["weights"] == describe_teacher(make_teacher())["weights"]
    assert describe_teacher(make_teacher())["weights"] != describe_teacher(make_teacher(seed=1))["weights"]


def test_unsuitable_output_folders_are_rejected(tmp_path):
    source, teacher = make_source(tmp_path / "p", 2), make_teacher()
    (tmp_path / "letter").write_text("dear")
    with pytest.raises(UserError, match="is a file"):
        make_store(tmp_path / "letter", teacher, source)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="not a label store"):
        make_store(tmp_path / "folder", teacher, source)
    with pytest.raises(UserError, match="is inside the data"):
        make_store(tmp_path / "p" / "answers", teacher, source)

    def second():
        with pytest.raises(UserError, match="Another process is writing"):
            make_store(tmp_path / "s", teacher, source)

    (tmp_path / "s").mkdir()
    with label_store_writer.exclusive_lock(tmp_path / "s"):
        assert in_a_process(second) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e6])
def test_nan_and_inf_are_rejected(value, tmp_path):
    source, teacher = make_source(tmp_path / "p", 3), make_teacher()
    teacher.network.model.head.bias.data[2] = value
    with pytest.raises(UserError, match=r"NaN or Inf, or exceed float16, for .*blue/000\.png"):
        make_store(tmp_path / "s", teacher, source)


def test_invalid_requests(tmp_path):
    for bad in ({"outputs": ("color",)}, {"outputs": ()}, {"views": 3}, {"top_k": -1}, {"batch_size": 0}):
        with pytest.raises(UserError):
            AnnotationRequest(**bad)
    source = make_source(tmp_path / "p", 2)
    silent = open_teacher(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 3)), preprocessing={"image_size": 16})
    with pytest.raises(UserError, match="one label per image"):
        make_store(tmp_path / "s", silent, source, outputs=("tokens",))
    with pytest.raises(UserError, match="contains no images"):
        make_store(tmp_path / "s", make_teacher(), Subset(source, np.arange(0)))
    bad = [write_invalid_image(tmp_path / "bad" / name / f"{number}.png") for name in "ab" for number in range(2)]
    bad[1].write_bytes(b"")
    with pytest.raises(UserError, match=r"None of 2 consecutive images .*bad/a/0\.png: not a JPEG"):
        make_store(tmp_path / "s", make_teacher(), open_source(str(tmp_path / "bad")))
    lost = open_source(str(make_folder(tmp_path / "q", count=2)))
    for index in range(len(lost)):
        Path(lost.location(index)).unlink()
    with pytest.raises(UserError, match="None of the 6 images"):
        make_store(tmp_path / "s", make_teacher(), lost)


def test_all_splits_together(tmp_path):
    parts = list(open_sources("digits").values())
    both = join(parts)
    assert len(both) == sum(map(len, parts))
    first = len(parts[0])
    assert np.array_equal(both.encoded(first), parts[1].encoded(0))
    assert both.location(first) == parts[1].location(0)


def test_top_k_above_the_number_of_classes_is_all(tmp_path):
    store = make_store(tmp_path / "s", make_teacher(3), make_source(tmp_path / "p", 2), top_k=5)
    assert store.manifest["top_k"] == 0
    assert store.logits(torch.arange(2))[1].tolist() == [[0, 1, 2]] * 2


def test_a_checkpoint_file_of_a_convnet(tmp_path):
    torch.save(timm_state(network(5)), tmp_path / "net.pth")
    teacher = open_teacher(tmp_path / "net.pth", size=32)
    store = make_store(tmp_path / "s", teacher, make_source(tmp_path / "p", 2), outputs=("tokens",), top_k=2)
    assert store.manifest["size"] == [32, 32]
    assert store.manifest["teacher"]["name"] == "net.pth"


def test_a_batch_of_several_chunks_is_one_batch(tmp_path, monkeypatch):
    """Decoded in chunks, computed in one batch, with unreadable images in the middle of both."""
    source = make_source(tmp_path / "p", 8)
    for name in ("blue/005.png", "green/000.png"):
        (tmp_path / "p" / name).write_text(f"{name} is no image")
    teacher, sizes = make_teacher(), []
    maps = type(teacher.network.model).embed
    teacher.network.model.embed = lambda images: sizes.append(len(images)) or maps(teacher.network.model, images)
    one = make_store(tmp_path / "one", teacher, source, shard_size=20, batch_size=12)
    assert sizes == [1, 10, 8, 4]  # one to get the shapes; 20 images and 4 in batches of 12, without the unreadable
    monkeypatch.setattr(annotation, "CHUNK", 5)
    for workers in (0, 2):
        annotate(teacher, source, tmp_path / str(workers), AnnotationRequest(batch_size=12), workers=workers, shard_size=20)
        assert contents(tmp_path / str(workers)) == contents(tmp_path / "one")
    assert one.skipped.tolist() == [5, 8]


def test_failing_network_is_reported_before_images_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(annotation, "find_unique_images", lambda *_: pytest.fail("read images"))
    strange = open_teacher(make_teacher().network.model, preprocessing={"image_size": 16})
    strange.network.model.embed = lambda images: images @ images.new_zeros(5, 5)
    with pytest.raises(UserError, match=r"fails on an image of 16 x 16 \(.*\): give another --size") as raised:
        annotate(strange, make_source(tmp_path / "p", 1), tmp_path / "s")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "s").exists()
