"""Exported programs with dynamic and with fixed sizes, and hostile files."""

import io
import json
import pickle
import zipfile

import pytest
import torch

import vitrail
from tests.teachers.test_lookup import Exploit, plain
from tests.teachers.test_teacher import HALF
from vitrail.teachers import open_teacher
from vitrail.teachers.torch_export import is_arithmetic


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """A file that takes any size, and the module behind it."""
    module, path = plain(), tmp_path_factory.mktemp("exported") / "it.pt2"
    shapes = (dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC),)
    torch.export.save(torch.export.export(module, (torch.randn(2, 3, 16, 12),), dynamic_shapes=shapes), path)
    return path, module


def test_a_program_for_any_size(program):
    path, module = program
    teacher = open_teacher(path, preprocessing=HALF, classes=list("abcd"), device="cpu")
    assert teacher.size is None
    for shape in ((5, 3, 8, 8), (1, 3, 30, 20)):
        images = torch.randn(*shape)
        torch.testing.assert_close(teacher(images), module(images).detach())
    teacher.train()
    assert not any(parameter.requires_grad for parameter in teacher.parameters())


def test_a_program_for_one_size_and_number(tmp_path):
    module, path = plain(), tmp_path / "it.pt2"
    torch.export.save(torch.export.export(module, (torch.randn(2, 3, 8, 8),)), path)
    teacher = open_teacher(path, preprocessing=HALF)
    assert (teacher.size, teacher.classes) == ((8, 8), 4)
    images = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(teacher(images), module(images).detach())
    assert teacher(torch.randn(1, 3, 20, 20)).shape == (1, 4)
    with pytest.raises(vitrail.UserError, match="only images of 8 x 8"):
        open_teacher(path, preprocessing=HALF, size=16)


def rewrite(source, target, change):
    """The archive with other content: `change` gets {name: bytes}."""
    with zipfile.ZipFile(source) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    change(content)
    with zipfile.ZipFile(target, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)


def place(content, ending):
    return next(name for name in content if name.endswith(ending))


def edit(ending, change):
    def apply(content, marker):
        name = place(content, ending)
        value = json.loads(content[name])
        change(value, marker)
        content[name] = json.dumps(value).encode()

    return apply


def saved(marker):
    buffer = io.BytesIO()
    torch.save(Exploit(marker), buffer)
    return buffer.getvalue()


def pickled_weight(content, marker):
    name = place(content, "model_weights_config.json")
    config = json.loads(content[name])
    next(iter(config["config"].values()))["use_pickle"] = True
    content[name] = json.dumps(config).encode()
    content[place(content, "weights/weight_0")] = saved(marker)


def object_constant(content, marker):
    name = place(content, "model_constants_config.json")
    meta = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    content[name] = json.dumps({"config": {"it": meta}}).encode()
    content[name.replace("model_constants_config.json", "opaque_obj_0")] = pickle.dumps(Exploit(marker))


def sample_inputs(content, marker):
    content[place(content, "sample_inputs/model.pt")] = saved(marker)


def first_expression(value, marker):
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "expr_str":
                value[key] = f"__import__('os').mkdir('{marker}')"
            else:
                first_expression(inner, marker)
    elif isinstance(value, list):
        for inner in value:
            first_expression(inner, marker)


def nodes(value):
    return value["graph_module"]["graph"]["nodes"]


HOSTILE = {
    "a pickled weight": pickled_weight,
    "an object": object_constant,
    "sample inputs": sample_inputs,
    "an operation": edit("models/model.json", lambda value, marker: nodes(value)[0].update(target="torch.load")),
    "an expression": edit("models/model.json", first_expression),
    "a name": edit("models/model.json", lambda value, marker: nodes(value)[0].update(name="x; import os; os.abort()")),
    "a library": lambda content, marker: content.update({"it/data/aotinductor/model/it.so": b"\x7fELF"}),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_files_that_could_run_code_are_not_opened(what, program, tmp_path):
    marker = tmp_path / "ran"
    rewrite(program[0], tmp_path / "bad.pt2", lambda content: HOSTILE[what](content, marker))
    with pytest.raises(vitrail.UserError, match=r"could run code"):
        open_teacher(tmp_path / "bad.pt2", preprocessing=HALF)
    assert not marker.exists()


def test_the_attacks_work_without_the_check(program, tmp_path, monkeypatch):
    """torch itself runs the pickled one."""
    marker = tmp_path / "ran"
    rewrite(program[0], tmp_path / "bad.pt2", lambda content: pickled_weight(content, marker))
    monkeypatch.setattr("vitrail.teachers.torch_export.find_unsafe_content", lambda path: [])
    with pytest.raises(vitrail.UserError, match="cannot be opened"):
        open_teacher(tmp_path / "bad.pt2", preprocessing=HALF)
    assert marker.exists()


def test_files_that_are_not_programs(program, tmp_path):
    path = tmp_path / "it.pt2"
    for content in (b"", b"no archive", program[0].read_bytes()[:2000]):
        path.write_bytes(content)
        with pytest.raises(vitrail.UserError, match="exported program"):
            open_teacher(path, preprocessing=HALF)
    torch.save({"a": torch.zeros(2)}, path)
    with pytest.raises(vitrail.UserError, match=r"torch\.export\.save"):
        open_teacher(path, preprocessing=HALF)


def test_a_program_of_two_inputs(tmp_path):
    class Both(torch.nn.Module):
        def forward(self, images, more):
            return images.mean((2, 3)) + more

    torch.export.save(torch.export.export(Both(), (torch.randn(2, 3, 8, 8), torch.randn(2, 3))), tmp_path / "it.pt2")
    with pytest.raises(vitrail.UserError, match="2 inputs, not one"):
        open_teacher(tmp_path / "it.pt2", preprocessing=HALF)


@pytest.mark.parametrize(
    ("expression", "good"),
    [
        ("s31", True),
        ("Add(Mul(Integer(2), Symbol('s31', positive=True, integer=True)), Float('2.5', precision=53))", True),
        ("4*s16 + 3*(s2//2)", True),
        ("FloorDiv(s16 - 1, 2) + 1", True),
        ("Max(1, s0)*2.5", True),
        ("__import__('os')", False),
        ("exec(chr(97))", False),
        ("exec('s0')", False),
        ("Symbol('s0'.__class__)", False),
        ("(exec)(s0)", False),
        ("s0.real", False),
        ("[s0][0]", False),
    ],
)
def test_only_arithmetic_is_allowed(expression, good):
    assert is_arithmetic(expression) is good
