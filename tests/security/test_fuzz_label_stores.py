"""Label stores from strangers: a changed manifest or shard gives one error message, or a store with valid predictions."""

import hashlib
import json
import math
import os
import random
import shutil

import pytest
import torch

from tests.teachers.predictions import make_source, make_store, make_teacher
from vitrail.cli.annotate import summarize
from vitrail.errors import UserError
from vitrail.teachers.label_store import LabelStore, check_shards, read_manifest

VALUES = [
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**400, 0.5, math.nan, math.inf, "", "x", "../x", "/etc/passwd", "\udcff"),
    *([], [[]], [None], [-1], [2**40, 2**40], ["logits", "logits"], {}, {"a": 1}, {"shape": [1], "dtype": "object"}),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    source = make_source(folder / "images", count=4)
    make_store(
        folder / "store", make_teacher(names=list("abcdefg")), source, outputs=("logits", "tokens", "features"), top_k=3, views=2
    )
    return folder / "store"


@pytest.fixture
def copy(store, tmp_path):
    return shutil.copytree(store, tmp_path / "store")


def read(path, digests=True):
    """Everything that commands read from a store: the outcome is predictions, or an error message."""
    try:
        opened = LabelStore.open(path, digests)
        summarize(opened.manifest)
        rows = torch.arange(len(opened))
        for each in (opened, opened.to("cpu")):
            if digests:  # only then were all predictions read
                for scores in (each.class_scores(rows), each.dense_scores(rows, view=opened.views - 1), each.features(rows)):
                    assert len(scores) == len(rows)
        assert opened.classes >= 1
        assert opened.grid is None or min(opened.grid) > 0
        return opened
    except UserError:
        return None


def places(value, path=()):
    """The paths of all entries of a JSON value."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(inner, (*path, key))


def change(manifest, path, action, value):
    for key in path[:-1]:
        manifest = manifest[key]
    if action == "remove":
        del manifest[path[-1]]
    elif action == "repeat" and isinstance(manifest, list):
        manifest.append(manifest[path[-1]])
    else:
        manifest[path[-1]] = value


def test_changed_manifests(copy):
    file, generator = copy / "manifest.json", random.Random(20)
    original = file.read_text()
    paths = list(places(json.loads(original)))
    changes = [(path, "set", generator.choice(VALUES)) for path in paths] + [(path, "remove", None) for path in paths[::3]]
    changes += [(generator.choice(paths), "set", value) for value in VALUES for _ in range(4)]
    changes += [(path, "repeat", None) for path in paths[::5]]
    assert len(changes) >= 250
    for path, action, value in changes:
        manifest = json.loads(original)
        change(manifest, path, action, value)
        file.write_text(json.dumps(manifest))
        read(copy, digests=False)
    file.write_text(original)
    assert read(copy) is not None


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("teacher", []),
        ("teacher", {"name": "x", "weights": None, "classes": -7, "class_names": None}),
        ("outputs", "logits"),
        ("outputs", [["logits"]]),
        ("outputs", []),
        ("views", 2),
        ("views", ["plain", "plain"]),
        ("covers", 7),
        ("arrays", []),
        ("arrays", {}),
        ("arrays", {"logits.values": {"dtype": "float16", "shape": [2, -3]}}),
        ("arrays", {"logits.values": {"dtype": "float16", "shape": []}}),
        ("images", "36"),
        ("images", math.nan),
        ("images", 2**40),
        ("shard_size", 0),
        ("shard_size", -10),
        ("shard_size", 10.0),
        ("shards", {}),
        ("shards", [7]),
        ("shards", []),
        ("complete", "yes"),
        ("vitrail", None),
        ("class_subset", [1]),
        ("top_k", None),
    ],
)
def test_invalid_entries(entry, value, copy):
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {entry: value}))
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        read_manifest(copy)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "shard-00001.safetensors", "", "shard-0.safetensors", 3]
)
def test_names_of_shards(name, copy):
    """Only the shards of the folder are opened, each once."""
    manifest = json.loads((copy / "manifest.json").read_text())
    shutil.copy(copy / "shard-00000.safetensors", copy.parent / "outside.safetensors")
    manifest["shards"][0]["name"] = name
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        LabelStore.open(copy)


@pytest.mark.parametrize("text", ["", "[" * 100_000, '{"a":' * 100_000, "NaN", "3", '"x"', "\x00", "1" * 5000])
def test_manifests_that_are_not_objects(text, copy):
    (copy / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        read_manifest(copy)


def test_changed_shards(copy):
    """With the digest of the changed shard in the manifest, as whoever changes it would write it."""
    shard, generator = copy / "shard-00000.safetensors", random.Random(20)
    original, manifest = shard.read_bytes(), json.loads((copy / "manifest.json").read_text())
    header = 8 + int.from_bytes(original[:8], "little")
    for number in range(80):
        content = bytearray(original)
        if number % 4 == 3:
            content = content[: generator.randrange(len(content))]
        else:
            for _ in range(generator.choice([1, 4, 64])):
                content[generator.randrange(header if number % 2 else len(content))] = generator.randrange(256)
        shard.write_bytes(content)
        manifest["shards"][0] |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (copy / "manifest.json").write_text(json.dumps(manifest))
        read(copy)


def test_classes_that_the_teacher_does_not_have(copy):
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["teacher"] |= {"classes": 3, "class_names": list("abc")}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="classes that the teacher does not have"):
        LabelStore.open(copy)


@pytest.mark.parametrize("name", ["manifest.json", "shard-00000.safetensors"])
def test_pipes_are_not_read(name, copy):
    manifest = read_manifest(copy)
    (copy / name).unlink()
    os.mkfifo(copy / name)
    with pytest.raises(UserError):
        LabelStore.open(copy)
    with pytest.raises(UserError):
        check_shards(copy, manifest | {"shards": [shard | {"name": name} for shard in manifest["shards"]]}, True)
