"""Sidecar files, lists of classes and published label maps from strangers: one error message each, without waiting."""

import json
import math
import os
import zipfile

import pytest
import torch

from tests.convnets import timm_state
from tests.teachers.test_lookup import SMALL, Exploit
from vitrail.errors import UserError
from vitrail.teachers import open_teacher
from vitrail.teachers.sidecar import read_classes
from vitrail.teachers.tokenlabeling import read_label_map

VALUES = [
    *(None, True, 0, -1, 3, 2**31, 10**400, 0.5, math.nan, math.inf, "", "x", "..", "/etc/passwd", "../x", "it.pth", "\x00"),
    *([], [[]], [None], [-1, -1], [2**40, 2**40], {}, {"a": 1}, [math.nan] * 3, [0.0] * 3, "n" * 5000, "\udcff"),
]


def test_changed_sidecars(tmp_path):
    torch.save(timm_state(SMALL), tmp_path / "it.pth")
    settings = [{key: value} for key in ("kind", "classes", "size", "preprocessing") for value in VALUES]
    keys = ("image_size", "crop_ratio", "resize", "interpolation", "mean", "std", "order", "range")
    settings += [{"preprocessing": {key: value}} for key in keys for value in VALUES]
    assert len(settings) > 300
    rejected = 0
    for content in settings:
        (tmp_path / "it.pth.teacher.json").write_text(json.dumps(content))
        try:
            open_teacher(tmp_path / "it.pth").preprocessing.check()
        except UserError:
            rejected += 1
    assert rejected > 200


def test_pipes_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for read in (read_classes, lambda path: read_label_map(tmp_path / path, 5), lambda path: open_teacher(path)):
        with pytest.raises(UserError):
            read(str(tmp_path / "pipe"))


def write_map(path, content):
    torch.save(content, path)
    return path


def test_label_maps(tmp_path):
    path, good = tmp_path / "it.pt", torch.zeros(2, 3, 4, 4, dtype=torch.float16)
    assert read_label_map(write_map(path, good), 5).shape == (2, 3, 4, 4)
    for content in (
        Exploit(tmp_path / "ran"),
        torch.zeros(1, dtype=torch.float16).expand(2, 2**20, 2**10, 2**10),
        torch.zeros(2, 3, 4, 4, dtype=torch.float16).to_sparse(),
        torch.zeros(2, 3, 4, 4, dtype=torch.float16, device="meta"),
        {"a": good},
    ):
        with pytest.raises(UserError):
            read_label_map(write_map(path, content), 5)
    assert not (tmp_path / "ran").exists()


def test_compressed_label_maps(tmp_path):
    write_map(tmp_path / "it.pt", torch.zeros(2, 3, 512, 512, dtype=torch.float16))
    with zipfile.ZipFile(tmp_path / "it.pt") as archive, zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as changed:
        for name in archive.namelist():
            changed.writestr(name, archive.read(name))
    with pytest.raises(UserError, match="was not opened"):
        read_label_map(tmp_path / "b.pt", 5)
