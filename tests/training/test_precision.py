import pytest
import torch

from vitrail.recipes import lookup
from vitrail.training import precision
from vitrail.training.precision import has_bfloat16, suited

CPU = torch.device("cpu")


@pytest.fixture
def without(monkeypatch):
    monkeypatch.setattr(precision, "has_bfloat16", lambda device: False)


def test_machines_without_bfloat16_take_what_they_have(without):
    recipe, said = suited(lookup("finetune"), CPU)
    assert recipe.precision == "fp32"
    assert said == ["this processor does not multiply in bfloat16: computing in float32"]
    recipe, said = suited(lookup("finetune"), torch.device("cuda", 0))
    assert recipe.precision == "fp16"
    assert len(said) == 1


def test_what_is_said_or_no_trouble_stays(without):
    asked = lookup("finetune").set({"precision": "bf16"})
    assert suited(asked, CPU, {"precision": "bf16"}) == (asked, [])
    whole = lookup("resmlp_s12")  # float32 in the paper
    assert whole.precision == "fp32"
    assert suited(whole, CPU) == (whole, [])


@pytest.mark.parametrize(("wide", "tiles"), [(True, False), (False, True), (False, False)])
def test_processors_that_have_it(monkeypatch, wide, tiles):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: wide)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert has_bfloat16(CPU) is (wide or tiles)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not has_bfloat16(CPU)


def test_graphics_cards_that_have_it(monkeypatch):
    for capability, found in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert has_bfloat16(torch.device("cuda", 0)) is found
