"""Products in eight bits: against float64 by what their codes can hold, and in a network."""

import copy

import pytest
import torch
from torch import nn

import vitrail
from vitrail.deploy.float8 import CODE, TOP, Float8Linear, coded, to_float8
from vitrail.deploy.fold import fold

HALF = 2.0**-4  # half the distance of neighbours that have three bits behind the first


def test_rows_in_eight_bits_are_as_near_as_they_can_be():
    torch.manual_seed(0)
    x = torch.randn(40, 64) * torch.logspace(-3, 3, 40)[:, None]
    x[7] = 0.0
    rows, scale = coded(x)
    assert rows.dtype == CODE
    assert rows.float().abs().amax(1)[x.abs().amax(1) > 0].eq(TOP).all()
    found = rows.float() * scale
    least = scale * 2.0**-10  # half the smallest step near zero
    assert ((found - x).abs() <= HALF * x.abs() + least).all()


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_is_near_what_its_codes_multiply_to(bias):
    torch.manual_seed(1)
    layer, x = nn.Linear(64, 48, bias=bias), torch.randn(2, 5, 64).bfloat16()
    found = Float8Linear(layer)(x)
    assert found.dtype == torch.bfloat16
    assert found.shape == (2, 5, 48)
    (rows, left), (weights, right) = coded(x.flatten(0, 1)), coded(layer.weight.detach())
    exact = (rows.double() * left) @ (weights.double() * right).t() + (layer.bias.double() if bias else 0.0)
    torch.testing.assert_close(found.flatten(0, 1).double(), exact, rtol=2**-7, atol=2**-8)
    wanted = layer(x.float()).flatten(0, 1)
    assert (found.flatten(0, 1).float() - wanted).norm() < 0.06 * wanted.norm()


def test_a_layer_is_moved_but_not_cast():
    layer = Float8Linear(nn.Linear(32, 16))
    before = layer.weight
    layer.to(torch.float64)
    layer.half()
    assert layer.weight.dtype == before.dtype == CODE
    assert layer.scale.dtype == torch.float32
    assert layer.bias.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["deit_tiny_patch16", "vit_tiny_patch16_6x2", "cait_xxs24"])
def test_a_network_keeps_its_answers(name):
    """Attention and MLPs of blocks are in eight bits; what talks between heads, and the pooling, is not."""
    torch.manual_seed(2)
    model = vitrail.create(name, 10, 64, depth=3).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "scale" in key or "head" in key:
                parameter.normal_(0.0, 0.3)
        images = torch.randn(8, 3, 64, 64)
        wanted = model(images)
        folded, notes = fold(copy.deepcopy(model))
        folded.to(torch.bfloat16)
        to_float8(folded.trunk, notes)
        found = folded(images.bfloat16()).float()
    assert notes.done["products in eight bits"] >= 5
    assert (found - wanted).norm() < 0.15 * wanted.norm()
    assert (found.argmax(1) == wanted.argmax(1)).float().mean() >= 0.75


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may have such products")
def test_refused_where_there_are_no_such_products():
    with pytest.raises(vitrail.UserError, match="fp8 needs a GPU of Hopper's kind"):
        vitrail.optimize(vitrail.create("deit_tiny_patch16", 10, 32, depth=1), precision="fp8")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper GPU")
@pytest.mark.parametrize("aim", ["latency", "throughput"])
def test_a_network_on_a_gpu(aim):
    torch.manual_seed(3)
    model = vitrail.create("deit_small_patch16", 100, 224).cuda().eval()
    optimized = vitrail.optimize(model, aim, batch=8, precision="fp8")
    assert optimized.report.precision == "fp8"
    assert any("products in eight bits: 47" in sentence for sentence in optimized.report.done), optimized.report.done
    images = torch.randn(8, 3, 224, 224, device="cuda")
    with torch.no_grad():
        wanted, found = model(images), optimized(images)
    assert (found - wanted).norm() < 0.15 * wanted.norm()


def test_odd_widths_stay_as_they_are():
    model = vitrail.create("deit_tiny_patch16", 10, 32, width=40, heads=5, depth=2, mlp_ratio=2.0).eval()
    folded, notes = fold(model)
    to_float8(folded.trunk, notes)
    assert not notes.done["products in eight bits"]
    assert any("no multiples of 16" in sentence for sentence in notes.left)
