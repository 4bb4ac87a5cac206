"""Label stores: rows by content, values and classes from files or on a device, damaged files."""

import json

import numpy as np
import pytest
import torch

from tests.images import make_folder, make_image
from tests.teachers.predictions import make_source, make_store, make_teacher
from vitrail.data.datasets.lookup import open_source
from vitrail.data.source import Subset
from vitrail.errors import UserError
from vitrail.teachers.label_store import LabelStore
from vitrail.teachers.topk_logits import class_probabilities, expand_top_k

NAMES = ["red", "green", "blue", "cyan", "pink", "grey", "black"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    source = make_source(folder / "images")
    teacher = make_teacher(names=NAMES)
    return folder, source, make_store(folder / "few", teacher, source, outputs=("logits", "tokens", "features"), top_k=3, views=2)


def test_rows_are_found_by_content(place, tmp_path):
    _, source, store = place
    assert store.rows(source).tolist() == list(range(36))
    shuffled = Subset(source, np.random.default_rng(0).permutation(36))
    assert store.rows(shuffled).tolist() == shuffled.indices.tolist()
    for index in range(3):
        (tmp_path / "elsewhere" / "one").mkdir(parents=True, exist_ok=True)
        (tmp_path / "elsewhere" / "one" / f"renamed {index}.png").write_bytes(source.encoded(35 - index))
    assert store.rows(open_source(str(tmp_path / "elsewhere"))).tolist() == [35, 34, 33]


def test_missing_images_are_counted_and_the_first_is_named(place, tmp_path):
    _, source, store = place
    make_image(tmp_path / "new" / "a" / "known.png").write_bytes(source.encoded(0))
    for name in "xyz":
        make_image(tmp_path / "new" / "a" / f"{name}.png", 3)
    with pytest.raises(UserError, match=r"3 of the 4 images of .*x\.png"):
        store.rows(open_source(str(tmp_path / "new")))


def test_one_changed_bit_is_another_image(place, tmp_path):
    _, source, store = place
    make_folder(tmp_path / "p", count=1)
    content = bytearray(source.encoded(5))
    content[-20] ^= 1
    (tmp_path / "p" / "red" / "000.png").write_bytes(content)
    with pytest.raises(UserError, match="no predictions for 3 of the 3"):
        store.rows(open_source(str(tmp_path / "p")))


@pytest.mark.parametrize("what", ["logits", "tokens"])
def test_resident_store_equals_files(place, what):
    _, _, store = place
    resident = store.to("cpu")
    assert resident.resident is not None
    assert store.to("cpu", max_fraction=0.0).resident is None
    rows, views = torch.tensor([35, 0, 9, 10, 11, 9]), torch.tensor([0, 1, 1, 0, 1, 0])
    for one, other in zip(getattr(store, what)(rows, views), getattr(resident, what)(rows, views), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(store.features(rows, views), resident.features(rows, views))
    alone = getattr(store, what)(rows[1:2], 1)
    assert torch.equal(alone[0], getattr(store, what)(rows, views)[0][1:2])


def test_shapes_and_types(place):
    _, _, store = place
    values, classes = store.logits(torch.arange(5))
    assert (values.shape, values.dtype, classes.shape, classes.dtype) == ((5, 3), torch.float32, (5, 3), torch.int64)
    assert bool((values[:, :-1] >= values[:, 1:]).all())
    values, classes = store.tokens(torch.arange(5))
    assert values.shape == classes.shape == (5, 3, *store.grid)
    assert store.features(torch.arange(5)).shape == (5, 16)
    assert store.logits(torch.empty(0, dtype=torch.int64))[0].shape == (0, 3)
    assert (store.classes, store.class_names, store.views, store.covers, len(store)) == (7, NAMES, 2, "whole", 36)


def test_classes_above_half_precision_and_above_sixteen_bits(place, tmp_path):
    _, source, _ = place
    few = Subset(source, np.arange(3))
    for classes, kind in ((40_000, "uint16"), (70_000, "uint32")):
        teacher = make_teacher(classes)
        teacher.network.model.head.bias.data[classes - 1] = 1e4  # the last class is predicted
        store = make_store(tmp_path / kind, teacher, few, top_k=2)
        assert store.manifest["arrays"]["logits.classes"]["dtype"] == kind
        for each in (store, store.to("cpu")):
            assert each.logits(torch.arange(3))[1][:, 0].tolist() == [classes - 1] * 3


def test_targets_of_the_kept_classes_are_the_teachers_own(place, tmp_path):
    _, source, few = place
    whole = make_store(tmp_path / "all", make_teacher(), source, outputs=("logits", "tokens"))
    rows = torch.arange(36)
    truth = whole.class_targets(rows)
    assert whole.manifest["top_k"] == 0
    assert truth.sum(1).allclose(torch.ones(36))
    spread = few.class_targets(rows)
    kept = few.logits(rows)[1]
    torch.testing.assert_close(spread.gather(1, kept), truth.gather(1, kept), atol=0.01, rtol=0.02)
    assert spread.sum(1).allclose(torch.ones(36))
    others = spread.scatter(1, kept, -1)
    assert all(len(row[row >= 0].unique()) == 1 for row in others)
    dropped = few.class_targets(rows, outside="drop")
    assert bool((dropped.scatter(1, kept, 0) == 0).all())
    dense = few.dense_targets(rows)  # zero: as the released code has it
    scores = torch.zeros(36, 7, *few.grid).scatter_(1, few.tokens(rows)[1], few.tokens(rows)[0])
    torch.testing.assert_close(dense, scores.softmax(1))
    torch.testing.assert_close(whole.dense_scores(rows), whole.tokens(rows)[0])
    exact = few.dense_targets(rows, outside="spread")
    numbers = few.tokens(rows)[1]
    torch.testing.assert_close(exact.gather(1, numbers), whole.dense_targets(rows).gather(1, numbers), atol=0.01, rtol=0.02)


def test_targets_in_the_students_order(place):
    _, _, store = place
    student = ["blue", "red", "pink"]
    index = store.match(student)
    assert index.tolist() == [2, 0, 4]
    rows = torch.arange(4)
    assert torch.equal(store.class_scores(rows, index), store.class_scores(rows)[:, index])
    assert store.dense_targets(rows, index).shape == (4, 3, *store.grid)
    assert store.dense_targets(rows, index, "drop").isfinite().all()
    with pytest.raises(UserError, match=r"'teal'.*'red'"):
        store.match(["teal", "green"])
    with pytest.raises(UserError, match="has 7 classes, not 5"):
        store.dense_targets(rows, 5)


def test_uniform_if_none_of_the_stored_classes_is_the_students():
    scores = expand_top_k(torch.tensor([[3.0]]), torch.tensor([[0]]), 4, "drop", None)[:, 1:]
    assert class_probabilities(scores, "drop").tolist() == [[pytest.approx(1 / 3)] * 3]
    with pytest.raises(UserError, match="probability outside the stored classes"):
        expand_top_k(torch.tensor([[3.0]]), torch.tensor([[0]]), 4, "spread", None)
    with pytest.raises(UserError, match="choose from zero, drop, spread"):
        expand_top_k(torch.tensor([[3.0]]), torch.tensor([[0]]), 4, "equal", None)


def test_outputs_views_and_rows_that_do_not_exist(place, tmp_path):
    _, source, store = place
    plain = make_store(tmp_path / "plain", make_teacher(), source)
    with pytest.raises(UserError, match="contains logits, not tokens"):
        plain.tokens(torch.arange(2))
    with pytest.raises(UserError, match="not view 1"):
        plain.logits(torch.arange(2), 1)
    for bad in (-1, 36):
        for each in (store, store.to("cpu")):
            with pytest.raises(UserError, match="rows 0 to 35"):
                each.logits(torch.tensor([0, bad]))


@pytest.mark.parametrize("damage", ["bit", "cut", "gone"])
def test_damage_is_detected_and_repaired(damage, tmp_path):
    source, teacher = make_source(tmp_path / "p", 6), make_teacher()
    make_store(tmp_path / "s", teacher, source)
    shard = tmp_path / "s" / "shard-00001.safetensors"
    before = {file.name: file.read_bytes() for file in (tmp_path / "s").iterdir()}
    content = bytearray(shard.read_bytes())
    content[-3] ^= 4
    if damage == "gone":
        shard.unlink()
    else:
        shard.write_bytes(content if damage == "bit" else content[:-1])
    with pytest.raises(UserError, match=r"shard-00001\.safetensors is damaged or missing"):
        LabelStore.open(tmp_path / "s")
    if damage == "bit":
        LabelStore.open(tmp_path / "s", check=False)
    make_store(tmp_path / "s", teacher, source)
    assert {file.name: file.read_bytes() for file in (tmp_path / "s").iterdir()} == before


def test_folders_that_are_not_stores(tmp_path):
    with pytest.raises(UserError, match="There is no label store at"):
        LabelStore.open(tmp_path)
    for content in ("", "[]", "{}", '{"format": 1}'):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(UserError, match="is damaged"):
            LabelStore.open(tmp_path)


def test_a_manifest_that_does_not_fit_its_shards(tmp_path):
    make_store(tmp_path / "s", make_teacher(), make_source(tmp_path / "p", 4))
    file = tmp_path / "s" / "manifest.json"
    manifest = json.loads(file.read_text())
    for change, words in (
        ({"complete": False}, "is incomplete"),
        ({"layout": 99}, "another version"),
        ({"arrays": {"logits.values": {"dtype": "float16", "shape": [1, 8]}}}, "arrays is missing or invalid"),
        ({"outputs": ["features"], "arrays": {"features": {"dtype": "float16", "shape": [1, 7]}}}, "does not match its manifest"),
    ):
        file.write_text(json.dumps(manifest | change))
        with pytest.raises(UserError, match=words):
            LabelStore.open(tmp_path / "s")
