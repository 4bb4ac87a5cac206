"""Optimized models in files: the same logits in another process, only on the machine and version they were made for."""

import json

import pytest
import safetensors.torch
import torch

import vitrail
from tests.deploy.exports import make_model
from tests.small import structures
from vitrail.checkpoints.artifact import OPTIMIZED
from vitrail.deploy.onednn import can_pack, can_quantize
from vitrail.deploy.optimize import Report
from vitrail.deploy.saved_optimized import checksum
from vitrail.errors import UserError

NAMES = ("deit_tiny_patch16", "deit_tiny_distilled_patch16", "cait_xxs24", "resmlp_s12", "patchconvnet_s20", "vit_tiny_r_s16_p8")


def check_round_trip(fast, path):
    assert fast.save(path) == path
    loaded = vitrail.load_optimized(path)
    images = torch.randn(3, 3, *fast.architecture.image_size)
    torch.testing.assert_close(loaded(images), fast(images), rtol=0, atol=0)
    assert loaded.report == fast.report
    assert loaded.class_names == fast.class_names
    assert loaded.preprocessing == fast.preprocessing
    assert loaded.architecture == fast.architecture


@pytest.mark.parametrize("name", NAMES)
def test_the_same_logits(name, tmp_path):
    check_round_trip(vitrail.optimize(make_model(name)), tmp_path / "m.safetensors")


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_lower_precision(precision, tmp_path):
    if not (can_quantize() if precision == "int8" else can_pack(torch.bfloat16)):
        pytest.skip(f"this CPU has no oneDNN products in {precision}")
    model = vitrail.load("vitrail_tiny")
    fast = vitrail.optimize(model, precision=precision, example=torch.randn(4, 3, 128, 128) if precision == "int8" else None)
    check_round_trip(fast, tmp_path / "m.safetensors")
    if precision == "int8":
        assert (tmp_path / "m.safetensors").stat().st_size < 12e6  # 23 MB in float32


def test_an_unpacked_model(tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.deploy.optimize.can_pack", lambda dtype: False)
    check_round_trip(vitrail.optimize(make_model("cait_xxs24")), tmp_path / "m.safetensors")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return vitrail.optimize(make_model("deit_tiny_patch16")).save(tmp_path_factory.mktemp("saved") / "m.safetensors")


def change(path, target, tensors=None, **fields):
    """The file with another header or other tensors, and a checksum of them."""
    with safetensors.safe_open(path, "pt") as file:
        header = json.loads(file.metadata()[OPTIMIZED]) | fields
    content = safetensors.torch.load_file(path) | (tensors or {})
    header |= {"sha256": fields.get("sha256", checksum(header, content))}
    safetensors.torch.save_file(content, target, {OPTIMIZED: json.dumps(header)})
    return target


REPORT = Report("latency", "float32", ("folded",), (), 0.0, 0.0, 0.0, (2, 1), (4, 4)).to_dict()
MISMATCHES = {
    "torch": ({"machine": {"vitrail": vitrail.__version__, "torch": "1.0", "hardware": "x"}}, "for torch 1.0, and this is torch"),
    "layout": ({"layout": 1}, "another version of Vitrail"),
    "GPU": ({"device": "cuda"}, "there is none"),
    "batch": ({"graph_batch": "many"}, "damaged header"),
    "classes": ({"class_names": ["a"]}, "damaged header"),
    "one text": ({"class_names": "x" * structures()["deit_tiny_patch16"].classes}, "damaged header"),
    "report": ({"report": {}}, "damaged header"),
    "goal": ({"report": REPORT | {"goal": {"a": 1}}}, "damaged header"),
    "precision": ({"report": REPORT | {"precision": ["int8"]}}, "damaged header"),
    "applied": ({"report": REPORT | {"applied": "folded"}}, "damaged header"),
    "error": ({"report": REPORT | {"total_error": "0"}}, "damaged header"),
    "counts": ({"report": REPORT | {"same_top1": [4]}}, "damaged header"),
    "checksum": ({"sha256": "0"}, "does not match its checksum"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_other_machines_and_damaged_files(case, saved, tmp_path):
    fields, message = MISMATCHES[case]
    if case == "GPU" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match=message) as caught:
        vitrail.load_optimized(change(saved, tmp_path / "m.safetensors", **fields))
    assert "\n" not in str(caught.value)


def test_other_hardware(saved, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "RISC")
    with pytest.raises(UserError, match=r"was optimized for a CPU with .*, and this is a CPU with RISC: optimize the original"):
        vitrail.load_optimized(saved)


def test_other_logits(saved, tmp_path):
    """A network that computes something else than where it was written is not used."""
    tensors = safetensors.torch.load_file(saved)
    tensors["check.logits"] = tensors["check.logits"] + 1.0
    with pytest.raises(UserError, match="computes other logits here"):
        vitrail.load_optimized(change(saved, tmp_path / "m.safetensors", tensors))


def test_a_large_architecture_is_not_allocated(saved, tmp_path):
    with safetensors.safe_open(saved, "pt") as file:
        architecture = json.loads(file.metadata()[OPTIMIZED])["architecture"]
    with pytest.raises(UserError, match="weights in the architecture"):
        vitrail.load_optimized(change(saved, tmp_path / "m.safetensors", architecture=architecture | {"width": 1 << 16}))


def test_the_checksum_covers_the_header(saved, tmp_path):
    with safetensors.safe_open(saved, "pt") as file:
        digest = json.loads(file.metadata()[OPTIMIZED])["sha256"]
    with pytest.raises(UserError, match="does not match its checksum"):
        vitrail.load_optimized(change(saved, tmp_path / "m.safetensors", name="another", sha256=digest))


@pytest.mark.parametrize(("side", "patch"), [(8192, 16), (512, 4)])
def test_large_images_are_not_computed(side, patch, saved, tmp_path, monkeypatch):
    """A file of a few MB could otherwise need any amount of memory to compute its logits."""
    monkeypatch.setattr("vitrail.deploy.saved_optimized.rebuild", lambda *parts: pytest.fail("the network was built"))
    with safetensors.safe_open(saved, "pt") as file:
        architecture = json.loads(file.metadata()[OPTIMIZED])["architecture"]
    architecture |= {"image_size": [side, side], "patch_size": patch, "pos_embed": "none"}
    with pytest.raises(UserError, match=f"inputs of {side} x {side} pixels"):
        vitrail.load_optimized(change(saved, tmp_path / "m.safetensors", architecture=architecture))


def test_kinds_of_files_are_not_confused(saved, tmp_path):
    with pytest.raises(UserError, match=r"open it with vitrail\.load_optimized"):
        vitrail.load(saved)
    with pytest.raises(UserError, match="is not an optimized model"):
        vitrail.load_optimized("vitrail_tiny")
    with pytest.raises(UserError, match=r"must end in \.safetensors"):
        vitrail.optimize(make_model("deit_tiny_patch16")).save(tmp_path / "m.pt")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_on_a_gpu(precision, tmp_path):
    fast = vitrail.optimize(vitrail.load("vitrail_tiny", device="cuda"), precision=precision)
    fast.save(tmp_path / "m.safetensors")
    loaded = vitrail.load_optimized(tmp_path / "m.safetensors")
    images = torch.randn(3, 3, 128, 128, device="cuda")
    torch.testing.assert_close(loaded(images), fast(images), rtol=2e-2, atol=2e-2)
