"""Damaged, foreign and hostile files: one sentence each, nothing run, nothing lost."""

import json
import os
import pickle

import numpy as np
import pytest
import safetensors.torch
import torch

import vitrail
from tests.checkpoints.test_formats import SUFFIX, little


class Exploit:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_wants_to_run_code_is_not_run(zipped, protocol, tmp_path):
    marker, path = tmp_path / "ran", tmp_path / "weights.pth"
    if zipped:
        torch.save({"model": Exploit(marker)}, path, pickle_protocol=protocol)
    else:
        path.write_bytes(pickle.dumps({"model": Exploit(marker), "padding": "x" * 100}, protocol=protocol))
    with pytest.raises(vitrail.UserError, match=r"run code|damaged"):
        vitrail.load(path)
    assert not marker.exists()


def test_an_archive_with_pickled_arrays_is_not_run(tmp_path):
    marker, path = tmp_path / "ran", tmp_path / "weights.npz"
    np.savez(path, **{"embedding/kernel": np.array([Exploit(marker)], dtype=object)})
    with pytest.raises(vitrail.UserError, match="unsafe"):
        vitrail.load(path)
    assert not marker.exists()


@pytest.mark.parametrize("format", ["vitrail", "deit", "timm", "npz"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999])
def test_cut_off_files(format, share, tmp_path):
    path = tmp_path / f"weights{SUFFIX[format]}"
    vitrail.save(little("vit_base_patch16" if format == "npz" else "deit_base_patch16"), path, format)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(vitrail.UserError) as caught:
        vitrail.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"GIF89a" + bytes(100), "not a safetensors"),
        (b"", "too short"),
        (b"PK\x03\x04" + bytes(50), "damaged"),
        (b"\x80\x02" + bytes(50), "damaged"),
        ((8).to_bytes(8, "little") + b"{broken}", "damaged"),
        ((2**60).to_bytes(8, "little") + b"{" + bytes(50), "damaged"),
    ],
)
def test_foreign_files(content, says, tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(content)
    with pytest.raises(vitrail.UserError, match=says):
        vitrail.load(path)


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(vitrail.UserError, match="no file"):
        vitrail.load(tmp_path / "nothing.pth")
    with pytest.raises(vitrail.UserError, match=r"model\.safetensors"):
        vitrail.load(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (
            {"conv1.weight": (64, 3, 7, 7)},
            r"other\.safetensors is not a checkpoint of a supported vision transformer: .*the first is",
        ),
        ({"patch_embed.proj.weight": (64, 3, 16, 16)}, "is missing"),
        ({"embeddings.patch_embeddings.projection.weight": (64, 3, 16, 16)}, "is missing"),
        ({"patch_embed.proj.weight": (64,), "norm.weight": (64,)}, "is missing|shapes"),
    ],
)
def test_tensors_of_something_else(tensors, says, tmp_path):
    path = tmp_path / "other.safetensors"
    safetensors.torch.save_file({key: torch.zeros(shape) for key, shape in tensors.items()}, path)
    with pytest.raises(vitrail.UserError, match=says):
        vitrail.load(path)


def deit_state(tmp_path):
    path = tmp_path / "state.pth"
    vitrail.save(little("deit_base_patch16"), path, "deit")
    return torch.load(path)["model"], path


def test_one_tensor_missing_surplus_or_misshapen(tmp_path):
    state, path = deit_state(tmp_path)
    for key in list(state)[::5]:
        torch.save({name: value for name, value in state.items() if name != key}, path)
        with pytest.raises(vitrail.UserError):
            vitrail.load(path)
    torch.save(state | {"blocks.0.attn.extra": torch.zeros(3)}, path)
    with pytest.raises(vitrail.UserError, match=r"do not belong to .*blocks\.0\.attn\.extra"):
        vitrail.load(path)
    torch.save(state | {"blocks.1.mlp.fc2.weight": torch.zeros(3, 3)}, path)
    with pytest.raises(vitrail.UserError, match=r"blocks\.1\.mlp\.fc2\.weight.*\(3, 3\)"):
        vitrail.load(path)
    torch.save({"model": 3}, path)
    with pytest.raises(vitrail.UserError, match="no tensors"):
        vitrail.load(path)
    torch.save([1, 2], path)
    with pytest.raises(vitrail.UserError, match="not a dictionary"):
        vitrail.load(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda header: "{",
        lambda header: json.dumps({"layout": 1}),
        lambda header: json.dumps(header | {"layout": 99}),
        lambda header: json.dumps(header | {"architecture": header["architecture"] | {"mixer": "magic"}}),
        lambda header: json.dumps(header | {"architecture": header["architecture"] | {"depth": 3}}),
        lambda header: json.dumps(header | {"architecture": header["architecture"] | {"surprise": 1}}),
        lambda header: json.dumps(header | {"architecture": header["architecture"] | {"width": "wide"}}),
    ],
)
def test_a_damaged_artifact_header(change, tmp_path):
    path = tmp_path / "model.safetensors"
    model = little("deit_base_patch16")
    vitrail.save(model, path)
    with safetensors.safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["vitrail"])
    safetensors.torch.save_file(model.state_dict(), path, {"vitrail": change(header)})
    with pytest.raises(vitrail.UserError):
        vitrail.load(path)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    model = little("deit_base_patch16")
    vitrail.save(model, path)
    before = path.read_bytes()

    def full(*args, **kwargs):
        args[1].write_bytes(b"half a file")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(vitrail.UserError, match="No space left"):
        vitrail.save(model, path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


def test_unknown_format_and_override(tmp_path):
    model = little("deit_base_patch16")
    with pytest.raises(vitrail.UserError, match="vitrail, deit"):
        vitrail.save(model, tmp_path / "x", format="onnx")
    path = vitrail.save(model, tmp_path / "x.pth", format="deit")
    with pytest.raises(vitrail.UserError, match="did you mean heads"):
        vitrail.load(path, head=3)
