"""The command as a person types it: real processes, real files."""

import json
import os
import subprocess
import sys

import pytest
import torch

import vitrail
from tests.weights.test_formats import SUFFIX, little


def run(*words, **options):
    command = [sys.executable, "-m", "vitrail.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def refused(*words):
    """Exit code 2, one sentence on standard error, no traceback."""
    result = run(*words)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr.strip()


@pytest.fixture(scope="module")
def deit_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "deit.pth"
    return vitrail.save(little("deit_base_patch16"), path, "deit")


def test_help_has_examples():
    assert "vitrail models" in run("models", "--help").stdout
    assert "vitrail info" in run("info", "--help").stdout
    assert "vitrail convert" in run("convert", "--help").stdout
    assert run("--version").stdout.strip() == vitrail.__version__


def test_models_as_a_table_and_as_json():
    table = run("models", "cait").stdout
    assert all(text in table for text in ("cait_xxs24", "12.0 M", "2.52 G", "cait_m48"))
    rows = json.loads(run("models", "cait", "--json").stdout)
    assert rows[0]["name"] == "cait_xxs24"
    assert (rows[0]["parameters"], rows[0]["tokens"], rows[0]["image_size"]) == (11_956_264, 196, [224, 224])
    assert rows[0]["macs"] == 2_523_475_200
    assert "CaiT" in rows[0]["paper"]


def test_info_of_a_name_at_another_size():
    text = run("info", "cait_s24", "--image-size", "384").stdout
    assert all(part in text for part in ("47.1 M", "32.1 G", "talking_heads", "class_attention", "crop_ratio"))
    content = json.loads(run("info", "deit_tiny_patch16", "--image-size", "192x256", "--json").stdout)
    assert content["cost"]["tokens"] == 12 * 16 + 1
    assert content["architecture"]["image_size"] == [192, 256]


def test_info_of_a_file(deit_file):
    text = run("info", deit_file).stdout
    assert "assumed" in text
    assert json.loads(run("info", deit_file, "--json").stdout)["format"] == "deit"


@pytest.mark.parametrize("format", ["vitrail", "deit", "timm", "hf"])
def test_convert_and_check(format, deit_file, tmp_path):
    out = tmp_path / f"out{SUFFIX[format]}"
    result = run("convert", deit_file, out, "--format", format, "--check")
    assert result.returncode == 0, result.stderr
    assert "largest logit difference 0 " in result.stdout
    image = torch.randn(1, 3, 32, 32)
    assert torch.equal(vitrail.load(out)(image), vitrail.load(deit_file)(image))


def test_convert_says_what_does_not_fit(deit_file, tmp_path):
    assert "activation=gelu" in refused("convert", deit_file, tmp_path / "out.npz", "--format", "npz")
    assert not list(tmp_path.iterdir())
    assert run("convert", deit_file, tmp_path / "out.npz", "--format", "npz", "--approximate", "--check").returncode == 0
    assert "choose from vitrail, deit" in refused("convert", deit_file, tmp_path / "x.onnx", "--format", "onnx")


def test_bad_input_gets_one_sentence(deit_file, tmp_path):
    assert "no file" in refused("convert", tmp_path / "none.pth", tmp_path / "out.safetensors")
    assert "nearest are" in refused("info", "deit_smal")
    assert "No model matches" in refused("models", "zzz")
    assert "not an image size" in refused("info", "deit_tiny_patch16", "--image-size", "big")
    assert "smaller than one patch" in refused("info", "deit_tiny_patch16", "--image-size", "8")
    (tmp_path / "text.pth").write_text("hello, this is not a checkpoint")
    assert "not a safetensors" in refused("info", tmp_path / "text.pth")
    assert "EMA" in refused("convert", deit_file, tmp_path / "out.safetensors", "--ema")
    (tmp_path / "folder.safetensors").mkdir()
    assert "is a folder" in refused("convert", deit_file, tmp_path / "folder.safetensors")
    assert "ends in .npz" in refused("convert", deit_file, tmp_path / "out.pth", "--format", "npz")
    assert "no file" in refused("info", "deit_small_patch16_224.pth")
    assert "no model" in refused("info", "x" * 300)
    assert "cannot be written" in refused("convert", deit_file, "/etc/passwd/x.safetensors")
    assert "more than 2000" in refused("info", "vit_small_patch16_99999x9")
    assert "not an image size" in refused("info", "deit_tiny_patch16", "--image-size", "²")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_loses_nothing(deit_file, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no small disk can be mounted here")
    try:
        (disk / "out.safetensors").write_text("the old file")
        message = refused("convert", deit_file, disk / "out.safetensors")
        assert "could not be written" in message
        assert [entry.name for entry in disk.iterdir()] == ["out.safetensors"]
        assert (disk / "out.safetensors").read_text() == "the old file"
    finally:
        subprocess.run(["umount", str(disk)], check=True)
