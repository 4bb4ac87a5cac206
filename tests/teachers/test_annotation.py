"""Writing: the teacher's own answers, each image once."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.images import make_folder, make_image, spoil
from tests.teachers.predictions import contents, in_a_process, make_source, make_store, make_teacher, network
from vitrail.data.datasets.concat import join
from vitrail.data.datasets.lookup import open_parts, open_source
from vitrail.data.feed import Feed
from vitrail.data.source import Subset
from vitrail.data.transforms.pipeline import augment
from vitrail.errors import UserError
from vitrail.evaluation.accuracy import test_view as tested
from vitrail.teachers import annotation, label_store_writer, open_teacher
from vitrail.teachers.annotation import Wanted, annotate, identity
from vitrail.teachers.class_index import match_data
from vitrail.teachers.label_store import Store

ALL = ("logits", "tokens", "features")


def test_the_store_says_what_the_teacher_says(tmp_path):
    teacher, source = make_teacher(), make_source(tmp_path / "p", size=(24, 20))
    store = make_store(tmp_path / "s", teacher, source, what=ALL, views=2)
    rows = torch.arange(36)
    (batch,) = Feed(source, workers=0).sweep(36)
    view = tested(teacher.preprocessing)
    images = augment(batch.pixels, batch.sizes, torch.zeros_like(batch.index), view).images
    direct = teacher(images)
    torch.testing.assert_close(store.class_scores(rows), direct, atol=2e-2, rtol=1e-3)
    torch.testing.assert_close(store.features(rows), teacher.features(images), atol=1e-2, rtol=1e-3)
    torch.testing.assert_close(store.class_scores(rows, view=1), teacher(images.flip(3)), atol=2e-2, rtol=1e-3)
    assert store.logits(rows)[0].argmax(1).tolist() == direct.argmax(1).tolist()
    # Maps are of the whole image, which is wider than it is high, not of the centre square that is tested.
    squashed = augment(
        batch.pixels, batch.sizes, torch.zeros_like(batch.index), tested(teacher.preprocessing._replace(resize="square"))
    ).images
    torch.testing.assert_close(store.dense_scores(rows), teacher.dense(squashed), atol=2e-2, rtol=1e-3)
    torch.testing.assert_close(store.dense_scores(rows, view=1), teacher.dense(squashed.flip(3)), atol=2e-2, rtol=1e-3)


def test_a_teachers_accuracy_is_that_of_its_store(tmp_path):
    source = open_source("digits", "test")
    teacher = make_teacher(10)
    store = make_store(tmp_path / "s", teacher, source, shard=128, batch=64, top_k=5)
    labels = torch.from_numpy(source.label.values)
    said = store.logits(store.rows(source))[1]
    hits = torch.zeros(2)
    for batch in Feed(source, workers=0).sweep(64):
        images = augment(batch.pixels, batch.sizes, torch.zeros_like(batch.index), tested(teacher.preprocessing)).images
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
def test_one_pass_where_the_crop_makes_no_difference(prepared, size, passes, tmp_path, monkeypatch):
    source, teacher = make_source(tmp_path / "p", 4, size), make_teacher()
    teacher.preprocessing = teacher.preprocessing._replace(**prepared)
    maps, asked = type(teacher.network).maps, []
    teacher.network.maps = lambda images: asked.append(len(images)) or maps(teacher.network, images)
    make_store(tmp_path / "s", teacher, source, 12, what=ALL, top_k=3, views=2)
    assert asked == [1] + [4] * 3 * 2 * passes  # one to learn the shapes; three batches in two views
    monkeypatch.setattr(annotation.Annotator, "is_same", lambda self, sizes: False)
    make_store(tmp_path / "twice", teacher, source, 12, what=ALL, top_k=3, views=2)
    assert contents(tmp_path / "s") == contents(tmp_path / "twice")


NAMED = ["cyan", "red", "blue", "grey", "green", "pink", "white"]


def test_the_largest_of_the_chosen_classes(tmp_path):
    """In the data's order and by its names, as if the teacher knew no others."""
    source, teacher = make_source(tmp_path / "p"), make_teacher(names=NAMED)
    chosen = match_data(teacher, source, "")
    assert chosen.numbers.tolist() == [2, 4, 1]
    for kept in (0, 2):
        wanted = Wanted(("logits", "tokens"), kept, batch=4)
        annotate(teacher, source, tmp_path / f"few{kept}", wanted, workers=0, chosen=chosen)
    whole = make_store(tmp_path / "whole", teacher, source, what=("logits", "tokens"))
    rows, index = torch.arange(36), chosen.numbers
    all_three, two = (Store.open(tmp_path / f"few{kept}") for kept in (0, 2))
    for store in (all_three, two):
        assert (store.classes, store.class_names) == (3, ["blue", "green", "red"])
        assert store.manifest["chosen"] == {"of": 7, "classes": [2, 4, 1]}
        assert store.match(source.classes).tolist() == [0, 1, 2]
    assert torch.equal(all_three.class_scores(rows), whole.class_scores(rows)[:, index])
    assert torch.equal(all_three.dense_scores(rows), whole.dense_scores(rows)[:, index])
    values, classes = two.tokens(rows)
    expected = whole.dense_scores(rows)[:, index].topk(2, 1)
    assert torch.equal(values, expected.values)
    assert torch.equal(classes, expected.indices)
    # What is left out is one class here, so that nothing is spread.
    torch.testing.assert_close(two.class_targets(rows), whole.class_scores(rows)[:, index].softmax(1), atol=2e-3, rtol=1e-2)
    assert (two.manifest["top_k"], all_three.manifest["top_k"]) == (2, 0)


def test_a_store_goes_on_about_the_same_classes_alone(tmp_path):
    source, teacher = make_source(tmp_path / "p", 4), make_teacher(names=NAMED)
    chosen = match_data(teacher, source, "")

    def run(folder, chosen):
        return annotate(teacher, source, tmp_path / folder, Wanted(batch=4), workers=0, shard=5, chosen=chosen)

    run("few", chosen)
    before = contents(tmp_path / "few")
    (tmp_path / "few" / "shard-00001.safetensors").unlink()
    assert run("few", chosen).kept == 2
    assert contents(tmp_path / "few") == before
    others = chosen._replace(names=["b", "g", "r"])
    numbers = chosen._replace(numbers=torch.tensor([2, 4, 6]))
    for other, words in (
        (None, r"begun about 3 \(blue, green, …\) classes, not 7 \(cyan, red, …\): .*--all-classes"),
        (others, r"begun about 3 \(blue, green, …\) classes, not 3 \(b, g, …\)"),
        (numbers, "begun with others of the teacher's classes"),
    ):
        with pytest.raises(UserError, match=words):
            run("few", other)
    assert contents(tmp_path / "few") == before
    run("all", None)
    with pytest.raises(UserError, match=r"begun about 7 .*, not 3"):
        run("all", chosen)
    # Manifests of before there was a choice are of all classes.
    manifest = json.loads((tmp_path / "all" / "manifest.json").read_text())
    del manifest["chosen"]
    (tmp_path / "all" / "manifest.json").write_text(json.dumps(manifest))
    assert run("all", None).kept == 3


def test_equal_images_are_asked_about_once(tmp_path):
    make_folder(tmp_path / "p", count=5)
    for number in range(5):  # the same bytes under another class and name
        (tmp_path / "p" / "red" / f"again {number}.png").write_bytes((tmp_path / "p" / "blue" / f"{number:03}.png").read_bytes())
    source = open_source(str(tmp_path / "p"))
    result = annotate(make_teacher(), source, tmp_path / "s", Wanted(batch=4), workers=0)
    assert (result.given, result.images) == (20, 15)
    rows = Store.open(tmp_path / "s").rows(source)
    assert len(rows) == 20
    assert len(set(rows.tolist())) == 15


def test_unreadable_images_are_noted_and_have_no_row(tmp_path):
    make_folder(tmp_path / "p", count=5)
    spoil(tmp_path / "p" / "green" / "002.png")
    source = open_source(str(tmp_path / "p"))
    (tmp_path / "p" / "red" / "000.png").unlink()  # since it was listed
    result = annotate(make_teacher(), source, tmp_path / "s", Wanted(batch=4), workers=0)
    assert sorted(Path(problem.where).parts[-2:] for problem in result.skipped) == [("green", "002.png"), ("red", "000.png")]
    store = Store.open(tmp_path / "s")
    rows = store.rows(source)
    lost = [Path(source.where(index)).parts[-2:] for index in torch.nonzero(rows < 0).flatten().tolist()]
    assert lost == [("green", "002.png"), ("red", "000.png")]
    # Those beside an unreadable one in its batch have their own answers.
    whole = open_source(str(make_folder(tmp_path / "q", count=5)))
    clean = make_store(tmp_path / "clean", make_teacher(), whole)
    good = torch.nonzero(rows >= 0).flatten()
    torch.testing.assert_close(store.logits(rows[good])[0], clean.logits(clean.rows(whole)[good])[0], atol=1e-2, rtol=1e-3)


def test_workers_and_none_give_the_same_bytes(tmp_path):
    source, teacher = make_source(tmp_path / "p", 20), make_teacher()
    for workers in (0, 2):
        annotate(teacher, source, tmp_path / str(workers), Wanted(ALL, 3, batch=8), workers=workers, shard=16)
    assert contents(tmp_path / "0") == contents(tmp_path / "2")


def test_what_is_finished_is_not_done_again(tmp_path):
    source, teacher = make_source(tmp_path / "p"), make_teacher()
    make_store(tmp_path / "s", teacher, source)
    before = contents(tmp_path / "s")
    asked = []
    teacher.network.maps = lambda images: asked.append(len(images)) or type(teacher.network).maps(teacher.network, images)
    result = annotate(teacher, source, tmp_path / "s", Wanted(batch=4), workers=0, shard=10)
    assert asked == [1]  # to learn the shapes
    assert (result.kept, result.shards) == (4, 4)
    assert contents(tmp_path / "s") == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_k": 2}, "top k 0, not 2"),
        ({"what": ("features",)}, "what logits, not features"),
        ({"batch_size": 5}, "batch 4, not 5"),
        ({"views": 2}, "views plain, not plain, mirrored"),
    ],
)
def test_other_options_are_refused(change, words, tmp_path):
    source, teacher = make_source(tmp_path / "p", 3), make_teacher()
    make_store(tmp_path / "s", teacher, source)
    with pytest.raises(UserError, match=words):
        make_store(tmp_path / "s", teacher, source, **change)


def test_another_teacher_or_other_data_are_refused(tmp_path):
    source, teacher = make_source(tmp_path / "p", 3), make_teacher()
    make_store(tmp_path / "s", teacher, source)
    with pytest.raises(UserError, match="another teacher"):
        make_store(tmp_path / "s", make_teacher(seed=1), source)
    make_image(tmp_path / "p" / "red" / "new.png", 1)
    with pytest.raises(UserError, match="other data"):
        make_store(tmp_path / "s", teacher, open_source(str(tmp_path / "p")))


def test_a_teacher_is_known_by_its_weights():
    assert identity(make_teacher())["weights"] == identity(make_teacher())["weights"]
    assert identity(make_teacher())["weights"] != identity(make_teacher(seed=1))["weights"]


def test_a_place_that_is_taken_is_refused(tmp_path):
    source, teacher = make_source(tmp_path / "p", 2), make_teacher()
    (tmp_path / "letter").write_text("dear")
    with pytest.raises(UserError, match="is a file"):
        make_store(tmp_path / "letter", teacher, source)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="no store"):
        make_store(tmp_path / "folder", teacher, source)
    with pytest.raises(UserError, match="lies inside"):
        make_store(tmp_path / "p" / "answers", teacher, source)

    def second():
        with pytest.raises(UserError, match="Another process is writing"):
            make_store(tmp_path / "s", teacher, source)

    (tmp_path / "s").mkdir()
    with label_store_writer.alone(tmp_path / "s"):
        assert in_a_process(second) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e6])
def test_answers_that_are_no_numbers_are_refused(value, tmp_path):
    source, teacher = make_source(tmp_path / "p", 3), make_teacher()
    teacher.network.fc.bias.data[2] = value
    with pytest.raises(UserError, match=r"not finite, or above .*blue/000\.png"):
        make_store(tmp_path / "s", teacher, source)


def test_what_cannot_be_asked(tmp_path):
    for bad in ({"what": ("color",)}, {"what": ()}, {"views": 3}, {"top_k": -1}, {"batch_size": 0}):
        with pytest.raises(UserError):
            Wanted(**bad)
    source = make_source(tmp_path / "p", 2)
    silent = open_teacher(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 3)), preprocessing={"image_size": 16})
    with pytest.raises(UserError, match="one answer per image"):
        make_store(tmp_path / "s", silent, source, what=("tokens",))
    with pytest.raises(UserError, match="holds no images"):
        make_store(tmp_path / "s", make_teacher(), Subset(source, np.arange(0)))
    bad = [spoil(tmp_path / "bad" / name / f"{number}.png") for name in "ab" for number in range(2)]
    bad[1].write_bytes(b"")
    with pytest.raises(UserError, match=r"None of 2 images .*bad/a/0\.png: not a JPEG"):
        make_store(tmp_path / "s", make_teacher(), open_source(str(tmp_path / "bad")))
    lost = open_source(str(make_folder(tmp_path / "q", count=2)))
    for index in range(len(lost)):
        Path(lost.where(index)).unlink()
    with pytest.raises(UserError, match="None of the 6 images"):
        make_store(tmp_path / "s", make_teacher(), lost)


def test_all_splits_together(tmp_path):
    parts = list(open_parts("digits").values())
    both = join(parts)
    assert len(both) == sum(map(len, parts))
    first = len(parts[0])
    assert np.array_equal(both.encoded(first), parts[1].encoded(0))
    assert both.where(first) == parts[1].where(0)


def test_more_kept_than_there_are_is_all(tmp_path):
    store = make_store(tmp_path / "s", make_teacher(3), make_source(tmp_path / "p", 2), top_k=5)
    assert store.manifest["top_k"] == 0
    assert store.logits(torch.arange(2))[1].tolist() == [[0, 1, 2]] * 2


def test_a_checkpoint_file_of_a_convnet(tmp_path):
    torch.save(network(5).state_dict(), tmp_path / "net.pth")
    teacher = open_teacher(tmp_path / "net.pth", size=32)
    store = make_store(tmp_path / "s", teacher, make_source(tmp_path / "p", 2), what=("tokens",), top_k=2)
    assert store.manifest["size"] == [32, 32]
    assert store.manifest["teacher"]["name"] == "net.pth"


def test_a_batch_of_several_chunks_is_one_batch(tmp_path, monkeypatch):
    """Decoded by parts, asked about whole, with unreadable images in the middle of either."""
    source = make_source(tmp_path / "p", 8)
    for name in ("blue/005.png", "green/000.png"):
        (tmp_path / "p" / name).write_text(f"{name} is no image")
    teacher, sizes = make_teacher(), []
    maps = type(teacher.network).maps
    teacher.network.maps = lambda images: sizes.append(len(images)) or maps(teacher.network, images)
    one = make_store(tmp_path / "one", teacher, source, shard=20, batch=12)
    assert sizes == [1, 10, 8, 4]  # one to learn the shapes; 20 images and 4 in batches of 12, without the unreadable
    monkeypatch.setattr(annotation, "CHUNK", 5)
    for workers in (0, 2):
        annotate(teacher, source, tmp_path / str(workers), Wanted(batch=12), workers=workers, shard=20)
        assert contents(tmp_path / str(workers)) == contents(tmp_path / "one")
    assert one.skipped.tolist() == [5, 8]


def test_a_network_that_fails_is_told_before_images_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(annotation, "shelve", lambda *_: pytest.fail("read images"))
    strange = open_teacher(make_teacher().network, preprocessing={"image_size": 16})
    strange.network.maps = lambda images: images @ images.new_zeros(5, 5)
    with pytest.raises(UserError, match=r"fails on an image of 16 x 16 \(.*\): give another --size") as raised:
        annotate(strange, make_source(tmp_path / "p", 1), tmp_path / "s")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "s").exists()
