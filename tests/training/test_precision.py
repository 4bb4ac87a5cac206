import pytest
import torch

from vitrail.devices import has_bfloat16
from vitrail.recipes import lookup
from vitrail.training import precision
from vitrail.training.precision import choose_precision

CPU = torch.device("cpu")


@pytest.fixture
def without(monkeypatch):
    monkeypatch.setattr(precision, "has_bfloat16", lambda device: False)


def test_bf16_is_replaced_without_hardware_support(without):
    recipe, messages = choose_precision(lookup("finetune"), CPU)
    assert recipe.precision == "fp32"
    assert messages == ["this CPU has no bfloat16 instructions: using float32"]
    recipe, messages = choose_precision(lookup("finetune"), torch.device("cuda", 0))
    assert recipe.precision == "fp16"
    assert len(messages) == 1


def test_precision_set_by_the_user_is_kept(without):
    recipe = lookup("finetune").set({"precision": "bf16"})
    assert choose_precision(recipe, CPU, {"precision": "bf16"}) == (recipe, [])
    fp32 = lookup("resmlp_s12")  # float32 in the paper
    assert fp32.precision == "fp32"
    assert choose_precision(fp32, CPU) == (fp32, [])


@pytest.mark.parametrize(("wide", "tiles"), [(True, False), (False, True), (False, False)])
def test_cpus_with_bfloat16(monkeypatch, wide, tiles):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: wide)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert has_bfloat16(CPU) is (wide or tiles)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not has_bfloat16(CPU)


def test_gpus_with_bfloat16(monkeypatch):
    for capability, found in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert has_bfloat16(torch.device("cuda", 0)) is found
