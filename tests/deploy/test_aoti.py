"""AOTInductor packages: compiled, run in Python, and run by the C++ program of the docs."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from PIL import Image

import vitrail
from tests.deploy.exports import make_model, photographs
from vitrail.deploy.exported_outputs import ImageProgram, make_network
from vitrail.deploy.image_input import ImagePreprocessing
from vitrail.deploy.program_export import trace
from vitrail.errors import UserError
from vitrail.models.preprocessing import pad_images

EXAMPLE = Path(__file__).parents[2] / "docs" / "how-to" / "aoti.cpp"


@pytest.mark.large  # two compilers for a minute or more
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_a_package_in_python_and_in_cpp(tmp_path):
    model = make_model("deit_tiny_patch16")
    result = vitrail.export(model, tmp_path / "m.pt2", to="aoti")
    assert result.certificate.agreement == 1.0
    package, torch_folder = torch._inductor.aoti_load_package(str(tmp_path / "m.pt2")), Path(torch.__file__).parent
    for photo in photographs():
        expected = model(model.preprocessing.apply(*pad_images([photo])))
        torch.testing.assert_close(package(torch.from_numpy(photo)[None]), expected, rtol=1e-4, atol=1e-4)
    include = [f"-I{torch_folder / 'include'}", f"-I{torch_folder / 'include/torch/csrc/api/include'}"]
    link = [f"-L{torch_folder / 'lib'}", f"-Wl,-rpath,{torch_folder / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    flags = ["-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    subprocess.run(["g++", *flags, *include, str(EXAMPLE), *link, "-o", str(tmp_path / "aoti")], check=True)
    Image.fromarray(photographs()[1]).save(tmp_path / "cat.ppm")
    done = subprocess.run(
        [tmp_path / "aoti", tmp_path / "m.pt2", tmp_path / "cat.ppm"], capture_output=True, text=True, check=True
    )
    index, probability = done.stdout.split("\n")[0].split()
    (best,) = model.predict(photographs()[1])
    assert int(index) == best.classes[0].index
    assert float(probability) == pytest.approx(best.probability, abs=1e-4)
    assert len(EXAMPLE.read_text().splitlines()) <= 40


@pytest.mark.gpu
@pytest.mark.parametrize("to", ["torch-export", "aoti"])
def test_on_a_gpu(to, tmp_path):
    model = make_model("deit_tiny_patch16")
    vitrail.export(model, tmp_path / "m.pt2", to=to, device="cuda")
    path = str(tmp_path / "m.pt2")
    program = torch._inductor.aoti_load_package(path) if to == "aoti" else torch.export.load(path).module()
    for photo in photographs():
        expected = model(model.preprocessing.apply(*pad_images([photo])))
        torch.testing.assert_close(program(torch.from_numpy(photo)[None].cuda()).cpu(), expected, rtol=1e-2, atol=1e-2)


def test_all_tensors_of_a_program_are_on_its_device():
    model = make_model("deit_tiny_patch16")
    network = make_network(model, "classification", "image")
    module = ImageProgram(ImagePreprocessing(model.preprocessing), network).eval()
    program = trace(module, True, model.preprocessing.image_size, None, torch.device("meta"))
    assert program.constants  # mean, standard deviation
    assert {each.device.type for each in (*program.state_dict.values(), *program.constants.values())} == {"meta"}


def test_without_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UserError, match="needs a C\\+\\+ compiler: install g\\+\\+, or choose --to torch-export"):
        vitrail.export(make_model("deit_tiny_patch16"), tmp_path / "m.pt2", to="aoti")


def test_a_model_that_torch_cannot_export(tmp_path, monkeypatch):
    def export(*arguments, **options):
        raise RuntimeError("Constraints violated (batch)!\n  - Not all values")

    monkeypatch.setattr(torch.export, "export", export)
    with pytest.raises(UserError, match=r"torch cannot export this model \(Constraints violated \(batch\)!\): choose --to onnx"):
        vitrail.export(make_model("deit_tiny_patch16"), tmp_path / "m.pt2", to="torch-export")
