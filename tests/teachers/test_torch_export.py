"""Exported programs with dynamic and with fixed sizes."""

import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import vitrail
from tests.small import structures
from tests.teachers.test_lookup import plain
from tests.teachers.test_teacher import HALF
from vitrail.models.registry import build
from vitrail.teachers import open_teacher
from vitrail.teachers.export_operators import ATEN, find_operator

PROGRAM = Path(__file__).with_name("program.pt2")  # saved by torch 2.13; without stack traces


def export(module, path, *images, **options):
    torch.export.save(torch.export.export(module, images, **options), path)
    return path


def test_a_program_for_any_size():
    teacher = open_teacher(PROGRAM, preprocessing=HALF, classes=list("abcd"), device="cpu")
    assert teacher.size is None
    module = plain()
    module.load_state_dict(
        {name: teacher.network.weights[index] for index, name in enumerate(("0.weight", "0.bias", "4.weight", "4.bias"))}
    )
    for shape in ((5, 3, 8, 8), (1, 3, 30, 20)):
        images = torch.randn(*shape)
        torch.testing.assert_close(teacher(images), module(images).detach())
    images = torch.linspace(-1, 1, 3 * 8 * 6).view(1, 3, 8, 6)
    assert teacher(images).tolist() == [pytest.approx([-0.28282, 0.10838, -0.28112, -0.31392], abs=1e-4)]
    teacher.train()
    assert not any(parameter.requires_grad for parameter in teacher.parameters())


def test_a_program_for_one_size_and_number(tmp_path):
    module = plain()
    path = export(module, tmp_path / "it.pt2", torch.randn(2, 3, 8, 8))
    teacher = open_teacher(path, preprocessing=HALF)
    assert (teacher.size, teacher.classes) == ((8, 8), 4)
    images = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(teacher(images), module(images).detach())
    assert teacher(torch.randn(1, 3, 20, 20)).shape == (1, 4)
    with pytest.raises(vitrail.UserError, match="only images of 8 x 8"):
        open_teacher(path, preprocessing=HALF, size=16)


class Mixed(nn.Module):
    """Sizes that are computed, lists of tensors, constants, operators in place, arguments of many kinds."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 6, 1, bias=False), nn.BatchNorm2d(6), nn.Linear(2, 4)
        self.register_buffer("shift", torch.arange(2.0), persistent=False)

    def forward(self, images):
        batch, _, height, width = images.shape
        images = nn.functional.relu(self.norm(self.conv(images)), inplace=True)
        images = nn.functional.pad(images, (1, 1, 1, 1), mode="reflect")
        first, second, third = images.reshape(batch, 6, (height + 2) * (width + 2)).chunk(3, 1)
        images = torch.where(first > second, first, torch.full_like(third, -torch.inf)).clamp(min=torch.tensor(-1.0))
        images = images.unflatten(2, (height + 2, width + 2))[:, :, 1:, ::2] + torch.ones(width // 2 + 1)
        images = nn.functional.interpolate(images, (height // 2, 4), mode="bicubic", antialias=True)
        return self.head(images.mean((2, 3)) + self.shift.to(images.dtype))


def test_a_program_of_many_operators(tmp_path):
    module = Mixed().eval()
    shapes = (dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC),)
    teacher = open_teacher(
        export(module, tmp_path / "it.pt2", torch.randn(2, 3, 8, 10), dynamic_shapes=shapes), preprocessing=HALF
    )
    for shape in ((3, 3, 8, 10), (2, 3, 12, 16)):
        images = torch.randn(*shape)
        torch.testing.assert_close(teacher(images), module(images).detach())
        torch.testing.assert_close(teacher(images), module(images).detach())  # the first call has changed no weights


def test_images_are_not_changed(tmp_path):
    module = nn.Sequential(nn.ReLU(inplace=True), plain())
    teacher, images = (
        open_teacher(export(module, tmp_path / "it.pt2", torch.randn(2, 3, 8, 8)), preprocessing=HALF),
        -torch.ones(2, 3, 8, 8),
    )
    torch.testing.assert_close(teacher(images), module(images.clone()).detach())
    assert images.max() == -1


def test_a_model_of_ours(tmp_path):
    model = build(structures()["deit_tiny_distilled_patch16"]).eval()
    images = torch.randn(2, 3, *model.architecture.image_size)
    teacher = open_teacher(export(model, tmp_path / "it.pt2", images), preprocessing=HALF)
    torch.testing.assert_close(teacher(images), model(images).detach())


def test_all_operators_exist():
    assert all(find_operator(f"torch.ops.aten.{name}") for name in ATEN)


def test_files_that_are_not_programs(tmp_path):
    path = tmp_path / "it.pt2"
    for content in (b"", b"no archive", PROGRAM.read_bytes()[:2000]):
        path.write_bytes(content)
        with pytest.raises(vitrail.UserError, match="exported program"):
            open_teacher(path, preprocessing=HALF)
    torch.save({"a": torch.zeros(2)}, path)
    with pytest.raises(vitrail.UserError, match=r"torch\.export\.save"):
        open_teacher(path, preprocessing=HALF)


def test_programs_of_other_versions(tmp_path):
    with zipfile.ZipFile(PROGRAM) as archive, zipfile.ZipFile(tmp_path / "it.pt2", "w") as changed:
        for name in archive.namelist():
            changed.writestr(name, archive.read(name).replace(b'"major": 8', b'"major": 9'))
    with pytest.raises(vitrail.UserError, match="written by another version of torch"):
        open_teacher(tmp_path / "it.pt2", preprocessing=HALF)


def test_a_program_of_two_inputs(tmp_path):
    class Both(nn.Module):
        def forward(self, images, more):
            return images.mean((2, 3)) + more

    path = export(Both(), tmp_path / "it.pt2", torch.randn(2, 3, 8, 8), torch.randn(2, 3))
    with pytest.raises(vitrail.UserError, match="2 inputs, not one"):
        open_teacher(path, preprocessing=HALF)
