"""Float8 products: compared with float64 within the rounding of float8, alone and in a network."""

import copy

import pytest
import torch
from torch import nn

import vitrail
from vitrail.deploy.float8 import FP8, FP8_MAX, Float8Linear, quantize_rows, to_float8
from vitrail.deploy.fold import fold

HALF = 2.0**-4  # half the distance of neighbours that have three bits behind the first


def test_rows_in_eight_bits_are_as_near_as_they_can_be():
    torch.manual_seed(0)
    x = torch.randn(40, 64) * torch.logspace(-3, 3, 40)[:, None]
    x[7] = 0.0
    rows, scale = quantize_rows(x)
    assert rows.dtype == FP8
    assert rows.float().abs().amax(1)[x.abs().amax(1) > 0].eq(FP8_MAX).all()
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
    (rows, left), (weights, right) = quantize_rows(x.flatten(0, 1)), quantize_rows(layer.weight.detach())
    exact = (rows.double() * left) @ (weights.double() * right).t() + (layer.bias.double() if bias else 0.0)
    torch.testing.assert_close(found.flatten(0, 1).double(), exact, rtol=2**-7, atol=2**-8)
    wanted = layer(x.float()).flatten(0, 1)
    assert (found.flatten(0, 1).float() - wanted).norm() < 0.06 * wanted.norm()


def test_a_layer_is_moved_but_not_cast():
    layer = Float8Linear(nn.Linear(32, 16))
    before = layer.weight
    layer.to(torch.float64)
    layer.half()
    assert layer.weight.dtype == before.dtype == FP8
    assert layer.scale.dtype == torch.float32
    assert layer.bias.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["deit_tiny_patch16", "vit_tiny_patch16_6x2", "cait_xxs24"])
def test_a_network_keeps_its_answers(name):
    """Attention and MLPs of blocks are in float8; talking heads and the pooling are not."""
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
        to_float8(folded.backbone, notes)
        found = folded(images.bfloat16()).float()
    assert notes.done["products in float8"] >= 5
    assert (found - wanted).norm() < 0.15 * wanted.norm()
    assert (found.argmax(1) == wanted.argmax(1)).float().mean() >= 0.75


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may have such products")
def test_refused_where_there_are_no_such_products():
    with pytest.raises(vitrail.UserError, match="fp8 needs a Hopper GPU or later"):
        vitrail.optimize(vitrail.create("deit_tiny_patch16", 10, 32, depth=1), precision="fp8")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper GPU")
@pytest.mark.parametrize("goal", ["latency", "throughput"])
def test_a_network_on_a_gpu(goal):
    torch.manual_seed(3)
    model = vitrail.create("deit_small_patch16", 100, 224).cuda().eval()
    optimized = vitrail.optimize(model, goal, batch_size=8, precision="fp8")
    assert optimized.report.precision == "fp8"
    assert any("products in float8: 47" in message for message in optimized.report.applied), optimized.report.applied
    images = torch.randn(8, 3, 224, 224, device="cuda")
    with torch.no_grad():
        wanted, found = model(images), optimized(images)
    assert (found - wanted).norm() < 0.15 * wanted.norm()


def test_odd_widths_stay_as_they_are():
    model = vitrail.create("deit_tiny_patch16", 10, 32, width=40, heads=5, depth=2, mlp_ratio=2.0).eval()
    folded, notes = fold(model)
    to_float8(folded.backbone, notes)
    assert not notes.done["products in float8"]
    assert any("not multiples of 16" in message for message in notes.left)
