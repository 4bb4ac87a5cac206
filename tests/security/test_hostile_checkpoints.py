"""Checkpoints from strangers: nothing in them is run, and reading them needs memory of about their size and little time."""

import contextlib
import io
import json
import os
import pickle
import shutil
import struct
import zipfile

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

import vitrail
from tests.security.checkpoints import change_listing, tiny_model, write_sharded_run, write_sums
from vitrail.checkpoints.delta import read_delta
from vitrail.checkpoints.training_checkpoints import COMPLETE, SHARD_INDEX, read_checkpoint
from vitrail.errors import UserError
from vitrail.recipes import lookup
from vitrail.runs.initial_model import locate_weights, open_pretrained, states_architecture

HEAD = "model:head.bias"
PART = "__0_0.distcp"


class Exploit:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.fixture(scope="module")
def sharded_run(tmp_path_factory):
    return write_sharded_run(tmp_path_factory.mktemp("sharded") / "run")


@pytest.fixture
def sharded(sharded_run, tmp_path):
    return shutil.copytree(sharded_run.parents[1], tmp_path / "run") / "checkpoints" / sharded_run.name


def forge_bytes(path, marker):
    """List one tensor as bytes, which torch would unpickle, with the size and dtype that a tensor has."""

    def forge(listing):
        entry = listing.state_dict_metadata[HEAD]
        forged = BytesStorageMetadata()
        forged.size, forged.properties, forged.chunks = entry.size, entry.properties, entry.chunks
        listing.state_dict_metadata[HEAD] = forged
        (path / "__9_0.distcp").write_bytes(pickle.dumps(Exploit(marker)))
        size = (path / "__9_0.distcp").stat().st_size
        listing.storage_data[MetadataIndex(HEAD)] = _StorageInfo("__9_0.distcp", 0, size)

    change_listing(path, forge)


ROUTES = {
    "load": lambda path, out, cli: vitrail.load(path),
    "convert": lambda path, out, cli: cli("convert", path, out / "out.safetensors"),
    "info": lambda path, out, cli: cli("info", path),
    "predict": lambda path, out, cli: cli("predict", path, out / "image.png"),
    "delta make": lambda path, out, cli: cli("delta", "make", path, path, "--out", out / "out.safetensors"),
    "train --from": lambda path, out, cli: open_pretrained(lookup("finetune").set({"init.weights": locate_weights(str(path))})),
    "resume": lambda path, out, cli: vitrail.resume(path.parents[1]),
}


@pytest.mark.parametrize("route", ROUTES)
def test_forged_listing_of_a_sharded_checkpoint_runs_nothing(route, sharded, run_cli, tmp_path):
    marker = tmp_path / "ran"
    Image.new("RGB", (32, 32)).save(tmp_path / "image.png")
    forge_bytes(sharded, marker)
    try:
        result = ROUTES[route](sharded, tmp_path, run_cli)
    except UserError as error:
        message = str(error)
    else:
        assert result.returncode == 2, result
        message = result.stderr
    assert not marker.exists()
    assert "BytesStorageMetadata, which could run code" in message


def place(listing):
    return next(place for index, place in listing.storage_data.items() if index.fqn == HEAD)


def set_place(**values):
    return lambda listing: vars(place(listing)).update(values)


def set_size(size):
    def change(listing):
        entry = listing.state_dict_metadata[HEAD]
        entry.size = torch.Size(size)
        entry.chunks[0].sizes = torch.Size(size)

    return change


def repeat_tensor(listing):
    """A thousand tensors in the place of the largest."""
    largest = max(listing.storage_data, key=lambda index: listing.storage_data[index].length)
    for number in range(1000):
        listing.state_dict_metadata[f"model:{number}"] = listing.state_dict_metadata[largest.fqn]
        listing.storage_data[MetadataIndex(f"model:{number}", largest.offset)] = listing.storage_data[largest]


@pytest.mark.parametrize(
    "change",
    [
        set_place(relative_path="../../run.json"),
        set_place(relative_path="/etc/passwd"),
        set_place(relative_path=COMPLETE),
        set_place(relative_path=["a"]),
        set_place(offset=-5),
        set_place(offset=1 << 60),
        set_place(length=1 << 60),
        set_place(length="long"),
        set_place(transform_descriptors=["gzip"]),
        set_size((1 << 34,)),
        set_size((10, 1)),
        set_size((-1,)),
        set_size((0, 1 << 39, 1 << 39)),
        repeat_tensor,
        lambda listing: listing.storage_data.clear(),
        lambda listing: listing.state_dict_metadata.update({HEAD: 3}),
        lambda listing: listing.state_dict_metadata[HEAD].chunks.clear(),
        lambda listing: setattr(listing.state_dict_metadata[HEAD].properties, "dtype", torch.int64),
        lambda listing: setattr(listing, "state_dict_metadata", [1]),
    ],
)
def test_forged_places_and_sizes(change, sharded):
    change_listing(sharded, change)
    with pytest.raises(UserError, match=r"is not a complete training checkpoint: .*(listing|another tensor)"):
        vitrail.load(sharded)


def test_listing_that_reserves_memory_or_calls_torch(sharded, tmp_path):
    """LONG_BINPUT makes room for 2^31 objects; BUILD would set attributes of torch's classes."""
    reserving = b"\x80\x04Nr\xff\xff\xff\x7f."
    build = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n}\x8c\x05state\x8c\x01xsb."
    for data in (reserving, build, pickle.dumps(Exploit(tmp_path / "ran")), b"", b"\x80\x04", pickle.dumps({"a": 1})):
        (sharded / SHARD_INDEX).write_bytes(data)
        write_sums(sharded)
        with pytest.raises(UserError):
            vitrail.load(sharded)
    assert not (tmp_path / "ran").exists()


def test_parts_that_are_not_what_they_should_be(sharded, tmp_path):
    content = (sharded / PART).read_bytes()
    (sharded / PART).unlink()
    (tmp_path / "elsewhere").write_bytes(content)
    (sharded / PART).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a link"):
        vitrail.load(sharded)
    (sharded / PART).unlink()
    os.mkfifo(sharded / PART)
    with pytest.raises(UserError, match="not a regular file"):
        vitrail.load(sharded)
    (sharded / PART).unlink()
    (sharded / PART).write_bytes(pickle.dumps(Exploit(tmp_path / "ran")) + content)
    write_sums(sharded)
    with pytest.raises(UserError):
        vitrail.load(sharded)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "values",
    [{"layout": "1"}, {"step": "4"}, {"facts": []}, {"sums": [1]}, {"sums": {}}, {"sums": {"../a": [1, 2]}}, {"facts": {}}],
)
def test_wrong_types_in_the_last_file_of_a_sharded_checkpoint(values, sharded):
    complete = json.loads((sharded / COMPLETE).read_text())
    (sharded / COMPLETE).write_text(json.dumps(complete | values))
    with pytest.raises(UserError, match="is not a complete training checkpoint"):
        vitrail.load(sharded)


def compress(path, padding=0):
    """Repack a file of torch.save with compressed members, and zeros after its pickle."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data + bytes(padding if name.endswith("data.pkl") else 0))


def test_compressed_torch_file_is_not_unpacked(tmp_path):
    path = vitrail.save(tiny_model(), tmp_path / "weights.pth", "deit")
    compress(path, padding=1 << 24)
    assert path.stat().st_size < 1 << 19
    with pytest.raises(UserError, match="it is compressed"):
        vitrail.load(path)


def test_archive_with_two_directories(tmp_path):
    """zipfile looks for the ZIP64 record before its locator, torch where the locator points to."""
    path = vitrail.save(tiny_model(), tmp_path / "weights.pth", "deit")
    vitrail.load(path)
    plain = path.read_bytes()
    compress(path, padding=1 << 20)
    hidden = path.read_bytes()
    (size, offset), count = struct.unpack("<2L", hidden[-10:-2]), struct.unpack("<H", hidden[-14:-12])[0]
    record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, offset)
    body = hidden[:-22] + record + bytes(4)  # then the members and the directory of the archive that the check sees
    moved = io.BytesIO()
    moved.write(body)
    with zipfile.ZipFile(io.BytesIO(plain)) as source, zipfile.ZipFile(moved, "a") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    data = moved.getvalue()
    size, offset = struct.unpack("<2L", data[-10:-2])
    count = struct.unpack("<H", data[-14:-12])[0]
    shown = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, offset)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, len(hidden) - 22, 1)
    path.write_bytes(data[:-22] + shown + locator + data[-22:])
    with zipfile.ZipFile(path) as archive:
        assert {member.compress_type for member in archive.infolist()} == {zipfile.ZIP_STORED}
    with pytest.raises(UserError, match="zip directory is damaged"):
        vitrail.load(path)


def test_archive_with_a_member_twice_or_a_comment(tmp_path):
    path = vitrail.save(tiny_model(), tmp_path / "weights.pth", "deit")
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr(archive.namelist()[0], b"other")
    with pytest.raises(UserError, match="members overlap"):
        vitrail.load(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = b"a comment"
    with pytest.raises(UserError, match="zip directory"):
        vitrail.load(path)


def test_pipes_sockets_and_devices_are_not_opened(tmp_path):
    pipe, folder = tmp_path / "weights.safetensors", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    os.mkfifo(folder / "config.json")
    vitrail.save(tiny_model(), folder / "model.safetensors", "timm")
    for path in (pipe, "/dev/zero", folder):
        with pytest.raises(UserError, match="is not a regular file: give a"):
            vitrail.load(path)
    assert not states_architecture(str(pipe))
    for read in (read_delta, read_checkpoint):
        with pytest.raises(UserError, match="is not a regular file"):
            read(pipe)
    base = vitrail.save(tiny_model(), tmp_path / "base.safetensors")
    with pytest.raises(UserError, match="is not a regular file"):
        vitrail.load(base, delta=pipe)


@pytest.mark.parametrize(
    "index",
    [
        {"weight_map": ["model-1.safetensors"]},
        {"weight_map": "model-1.safetensors"},
        {"weight_map": {}},
        {},
        {"weight_map": {"a": 3}},
        {"weight_map": {"a": ["model-1.safetensors"]}},
        {"weight_map": {"a": "../weights.safetensors"}},
        {"weight_map": {"a": "/etc/passwd"}},
        {"weight_map": {"a": ".."}},
        {"weight_map": {"a": "."}},
        {"weight_map": {"a": "sub"}},
        {"weight_map": {"a": ""}},
        {"weight_map": {"a": "missing.safetensors"}},
        {"weight_map": {"a": "nul\0l"}},
        [],
    ],
)
def test_index_of_shards(index, tmp_path):
    vitrail.save(tiny_model(), tmp_path / "weights.safetensors")
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "model.safetensors").write_bytes((tmp_path / "weights.safetensors").read_bytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"does not list files of that folder|There is no file|is not a JSON object"):
        vitrail.load(folder)


def rewrite_header(path, change):
    tensors = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["vitrail"])
    change(header)
    header.pop("header_sha256", None)  # as in files of older versions
    safetensors.torch.save_file(tensors, path, {"vitrail": json.dumps(header)})


WRONG = (1, "text", None, [1, 2], 1e300)


@pytest.mark.parametrize("part", ["architecture", "preprocessing", ""])
def test_wrong_types_in_the_header_of_an_artifact(part, tmp_path):
    """Every field with every wrong type is loaded or rejected in one sentence; an integer is a valid number."""
    path = vitrail.save(tiny_model(), tmp_path / "model.safetensors")
    whole = path.read_bytes()
    with safetensors.safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["vitrail"])
    fields = header[part] if part else header
    messages = []
    for field in fields:
        for value in WRONG:
            path.write_bytes(whole)
            rewrite_header(path, lambda new, field=field, value=value: (new[part] if part else new).update({field: value}))
            try:
                vitrail.load(path).preprocessing.check()
            except UserError as error:
                messages.append(str(error))
    assert len(messages) > 2 * len(fields)
    assert all(str(path) in message and "\n" not in message for message in messages)


@pytest.mark.parametrize(
    "fields",
    [
        {"depth": 2000},
        {"pooling": "class_attention", "pooling_depth": 1 << 31},
        {"stem": "resnet", "stem_layers": [1 << 20]},
        {"mixer": "linear", "pooling": "mean", "image_size": [65535, 65535], "patch_size": 1},
        {"width": 1 << 20},
        {"classes": 1 << 31},
    ],
)
def test_enormous_architectures_are_not_built(fields, tmp_path):
    path = vitrail.save(tiny_model(), tmp_path / "model.safetensors")
    rewrite_header(path, lambda header: header["architecture"].update(fields))
    with pytest.raises(UserError, match=r"too few|cannot be built|does not match|is missing"):
        vitrail.load(path)


def test_integer_as_the_value_of_a_number(tmp_path):
    model = vitrail.create("deit3_small_patch16", 3, 32, depth=1, layerscale_init=1)
    assert type(model.architecture.layerscale_init) is float
    path = vitrail.save(model, tmp_path / "model.safetensors")
    rewrite_header(path, lambda header: header["architecture"].update(layerscale_init=1))
    assert vitrail.load(path).architecture == model.architecture


def test_every_flipped_bit_of_the_weights_is_noticed(tmp_path):
    path = vitrail.save(tiny_model(), tmp_path / "model.safetensors")
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    generator = np.random.default_rng(0)
    for position in generator.integers(start, len(whole), 50):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << int(generator.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="do not match their checksum"):
            vitrail.load(path)


def test_every_flipped_bit_of_the_header_is_noticed(tmp_path):
    """A model that is loaded has the architecture, preprocessing and class names that were saved."""
    model = tiny_model()
    model.class_names = ["cat", "dog", "owl"]
    path = vitrail.save(model, tmp_path / "model.safetensors")
    whole = path.read_bytes()
    generator = np.random.default_rng(0)
    for position in generator.integers(8, 8 + int.from_bytes(whole[:8], "little"), 300):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << int(generator.integers(8))
        path.write_bytes(damaged)
        with contextlib.suppress(UserError):
            loaded = vitrail.load(path)
            assert loaded.architecture == model.architecture
            assert (loaded.preprocessing, loaded.class_names) == (model.preprocessing, model.class_names)
    for name in (b"sha256", b"header_sha256", b"class_names", b"crop_ratio"):
        path.write_bytes(whole.replace(b'"%s\\"' % name, b'"%s\\"' % (name[:-1] + b"_"), 1))
        with pytest.raises(UserError, match=r"is unknown|does not match its checksum"):
            vitrail.load(path)


def test_checksum_does_not_depend_on_notes_and_order(tmp_path):
    model = tiny_model()
    path = vitrail.save(model, tmp_path / "model.safetensors")
    tensors = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["vitrail"]) | {"notes": {"source": "a note added with other tools"}, "name": "other"}
    safetensors.torch.save_file(tensors, path, {"vitrail": json.dumps(dict(reversed(header.items())))})
    assert vitrail.load(path).notes["source"]
    rewrite_header(path, lambda header: header.pop("sha256"))
    assert torch.equal(vitrail.load(path).head.weight, model.head.weight)  # as files of older versions
