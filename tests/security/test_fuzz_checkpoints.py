"""Damaged checkpoints with fixed seeds: each is loaded or rejected with a UserError, in little time and memory."""

import json
import pickle
import resource
import shutil
import time

import numpy as np
import pytest
import safetensors.torch
import torch

import vitrail
from tests.security.checkpoints import RUN, tiny_model, write_sharded_run, write_sums
from vitrail.checkpoints.delta import make_delta, save_delta
from vitrail.checkpoints.training_checkpoints import COMPLETE, SHARD_INDEX
from vitrail.errors import UserError

VALUES = [None, True, 0, -1, 7, 1 << 40, 1.5, -1e300, float("nan"), "", "text", "../..", [], [1], [[]], {}, {"a": [1]}]


def damage(data, generator):
    """Bytes with a few flipped bits, cut off, with a run of one value, or with a part copied to another place."""
    changed, kind = bytearray(data), generator.integers(4)
    # Every second change is near the start or the end, where the headers and directories are.
    length = len(data)
    near = int(generator.choice([0, max(length - 2000, 0)]))
    first, last = (near, min(near + 2000, length)) if generator.random() < 0.5 else (0, length)
    position, count = int(generator.integers(first, last)), int(generator.integers(1, 64))
    if kind == 0:
        for where in generator.integers(first, last, generator.integers(1, 9)):
            changed[where] ^= 1 << int(generator.integers(8))
    elif kind == 1:
        del changed[position:]
    elif kind == 2:
        changed[position : position + count] = bytes([int(generator.choice([0, 255, 0x5B, 0x7B]))]) * count
    else:
        source = int(generator.integers(0, length))
        changed[position : position + count] = data[source : source + count]
    return bytes(changed)


def mutate(value, generator):
    """A JSON value with one part of it replaced, removed or repeated."""
    if not isinstance(value, dict | list) or not value or generator.random() < 0.15:
        return VALUES[generator.integers(len(VALUES))]
    changed = value.copy()
    key = list(value)[generator.integers(len(value))] if isinstance(value, dict) else int(generator.integers(len(value)))
    if generator.random() < 0.1:
        del changed[key]
    else:
        changed[key] = mutate(value[key], generator)
    return changed


@pytest.fixture(autouse=True)
def limits():
    start, memory = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 200 << 10  # KiB
    assert time.perf_counter() - start < 60


def try_load(path, **options):
    """The model, or None if the file was rejected; other exceptions are failures of the test."""
    try:
        return vitrail.load(path, **options)
    except UserError as error:
        assert str(error).strip(), "an error without a message"  # noqa: PT017
        return None


def same_tensors(model, other):
    return all(torch.equal(tensor, other.state_dict()[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "format", "suffix"),
    [
        ("deit_tiny_patch16", "vitrail", ".safetensors"),
        ("deit_tiny_patch16", "timm", ".safetensors"),
        ("deit_tiny_patch16", "deit", ".pth"),
        ("vit_base_patch16", "npz", ".npz"),
    ],
)
def test_damaged_files(name, format, suffix, tmp_path):
    model = tiny_model(name)
    path = vitrail.save(model, tmp_path / f"model{suffix}", format)
    whole, generator = path.read_bytes(), np.random.default_rng(1)
    for _ in range(40):
        path.write_bytes(damage(whole, generator))
        loaded = try_load(path)
        assert loaded is None or format != "vitrail" or same_tensors(loaded, model)


def test_damaged_files_of_the_old_torch_format(tmp_path):
    source = vitrail.save(tiny_model(), tmp_path / "new.pth", "deit")
    path = tmp_path / "old.pth"
    torch.save(torch.load(source), path, _use_new_zipfile_serialization=False)
    assert vitrail.load(path)
    whole, generator = path.read_bytes(), np.random.default_rng(2)
    for _ in range(40):
        path.write_bytes(damage(whole, generator))
        try_load(path)


def test_damaged_deltas(tmp_path):
    base = tiny_model()
    tuned = vitrail.build(base.architecture, base.name)
    tuned.load_state_dict(base.state_dict() | {"head.bias": torch.ones(3)})
    vitrail.save(base, tmp_path / "base.safetensors")
    path = save_delta(make_delta(base, tuned), tmp_path / "delta.safetensors")
    whole, generator = path.read_bytes(), np.random.default_rng(3)
    for _ in range(40):
        path.write_bytes(damage(whole, generator))
        loaded = try_load(tmp_path / "base.safetensors", delta=path)
        assert loaded is None or same_tensors(loaded, tuned)


@pytest.mark.parametrize("kind", ["file", "sharded"])
def test_damaged_training_checkpoints(kind, tmp_path):
    if kind == "file":
        path = shutil.copytree(RUN, tmp_path / "run") / "checkpoints" / "step-000000004.safetensors"
        names = [path]
    else:
        path = write_sharded_run(tmp_path / "run")
        names = [path / name for name in (SHARD_INDEX, SHARD_INDEX, "__0_0.distcp", COMPLETE)]
    model = vitrail.load(path)
    generator = np.random.default_rng(4)
    for number in range(20):
        changed = names[number % len(names)]
        whole = changed.read_bytes()
        changed.write_bytes(damage(whole, generator))
        rehashed = kind == "sharded" and changed.name != COMPLETE
        if rehashed:
            write_sums(path)
        loaded = try_load(path)
        assert loaded is None or rehashed or same_tensors(loaded, model)
        changed.write_bytes(whole)
        if rehashed:
            write_sums(path)


def test_wrong_json_in_metadata(tmp_path):
    """The header of an artifact, of a delta and of a training checkpoint."""
    artifact = vitrail.save(tiny_model(), tmp_path / "model.safetensors")
    checkpoint = shutil.copytree(RUN, tmp_path / "run") / "checkpoints" / "step-000000004.safetensors"
    generator = np.random.default_rng(5)
    for path, entry, rounds in ((artifact, "vitrail", 60), (checkpoint, "vitrail_checkpoint", 10)):
        tensors = safetensors.torch.load_file(path)
        with safetensors.safe_open(path, "pt") as file:
            header = json.loads(file.metadata()[entry])
        for _ in range(rounds):
            safetensors.torch.save_file(tensors, path, {entry: json.dumps(mutate(header, generator))})
            try_load(path)


def test_wrong_json_in_a_run_directory(tmp_path):
    folder = shutil.copytree(RUN, tmp_path / "run")
    run, generator = json.loads((folder / "run.json").read_text()), np.random.default_rng(6)
    for _ in range(20):
        (folder / "run.json").write_text(json.dumps(mutate(run, generator)))
        try_load(folder / "checkpoints" / "step-000000004.safetensors")


def test_wrong_json_in_a_folder_of_hugging_face(tmp_path):
    folder = vitrail.save(tiny_model("vit_base_patch16"), tmp_path / "folder", "hf")
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    index = {"weight_map": {"a": "part.safetensors", "b": "part.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    generator = np.random.default_rng(7)
    for name in ("config.json", "preprocessor_config.json", "model.safetensors.index.json"):
        path = folder / name
        content = json.loads(path.read_text())
        for number in range(12):
            text = json.dumps(mutate(content, generator)).encode()
            path.write_bytes(text if number % 4 else damage(text, generator))
            try_load(folder)
        path.write_text(json.dumps(content))


def test_pickles_of_other_objects(tmp_path):
    """Files of torch.save that contain other values than tensors by name."""
    path = tmp_path / "model.pth"
    tensor = torch.zeros(2, 3)
    for content in (
        *([1], {1: tensor}, {"model": [tensor]}, {"a": tensor.to_sparse()}, {"a": tensor.to(torch.complex64)}, {"": tensor}),
        *(
            {"patch_embed.proj.weight": torch.tensor(1)},
            {"model": {"model": {"model": {"model": 1}}}},
            {"embedding/kernel": tensor},
        ),
        *(tensor, None, "text", {"blocks.²": tensor, "patch_embed.": tensor}, {"a": torch.empty(3, device="meta")}),
        {f"blocks.{10**9}.attn": tensor, "patch_embed.proj.weight": torch.zeros(8, 3, 4, 4)},
    ):
        torch.save(content, path)
        assert try_load(path) is None
    for data in (pickle.dumps({"a": 1}), b"\x80\x02" + b"(" * 100_000, b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."):
        path.write_bytes(data + bytes(20))
        assert try_load(path) is None
