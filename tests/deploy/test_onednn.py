"""Networks packed for a processor: every precision answers as the original does, within what that precision can say."""

import copy

import pytest
import torch

import vitrail
from tests.models.test_every_model import randomize
from tests.small import structures
from vitrail.deploy import cpu_kernels as kernels
from vitrail.deploy import onednn, optimize
from vitrail.deploy.onednn_layers import Int8Linear, Int8Norm, PackedAttention, PackedConv, PackedLinear, PackedPatches
from vitrail.deploy.parity import difference
from vitrail.models.config import Architecture
from vitrail.models.registry import build

SMALL = Architecture(width=64, depth=3, heads=2, classes=5, image_size=(16, 24), patch_size=4, residual="layerscale")
LIMITS = {"fp32": 1e-5, "bf16": 0.05, "int8": 0.1}
pytestmark = pytest.mark.skipif(not onednn.can_quantize(), reason="this torch has no oneDNN")


def small(**changes):
    return randomize(build(SMALL.replace(**changes))).eval()


def images(model, count=6):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, model.architecture.channels, *model.architecture.image_size, generator=generator)


def of_kind(network, kind):
    return [module for module in network.modules() if isinstance(module, kind)]


@pytest.mark.parametrize("name", structures())
@pytest.mark.parametrize("precision", LIMITS)
def test_every_structure(name, precision):
    model = randomize(build(structures()[name])).eval()
    image = images(model, 4)
    optimized = vitrail.optimize(model, precision=precision, example=image)
    with torch.no_grad():
        assert difference(optimized(image), model(image)) < LIMITS[precision]
        assert difference(optimized(image[:1]), model(image[:1])) < 2 * LIMITS[precision]


@pytest.mark.parametrize(
    "changes",
    [
        {"pos_embed": "relative_bias", "pos_embed_place": "shared"},
        {"pos_embed": "relative", "pos_embed_place": "layers"},
        {"branches": 3},
        {"activation": "gelu_tanh"},
        {"activation": "relu"},
        {"activation": "silu"},
        {"heads": 4},
        {"qkv_bias": False},
        {"norm_place": "post"},
        {"channels": 1},
        {"classes": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("precision", LIMITS)
def test_parts(changes, precision):
    model = small(**changes)
    image = images(model)
    optimized = vitrail.optimize(model, precision=precision, example=image)
    with torch.no_grad():
        assert difference(optimized(image), model(image)) < LIMITS[precision]


def test_what_runs():
    model = small()
    packed = vitrail.optimize(model, precision="fp32")
    assert (
        len(of_kind(packed, PackedLinear)) == 1 + 3 * 4 + 1
    )  # the stem; the last block computes its queries apart; a head of 5 is too small
    assert not of_kind(packed, torch.nn.Conv2d)
    quantized = vitrail.optimize(model, precision="int8")
    assert len(of_kind(quantized, Int8Linear)) == 3 * 4 + 1
    assert len(of_kind(quantized, PackedPatches)) == 1
    if kernels.load_cpu_kernels() is not None:
        assert len(of_kind(quantized, Int8Norm)) == 6
    assert quantized.report.precision == "int8"
    assert "products in int8: 13" in quantized.report.applied
    assert "same top-1 prediction for 4 of 4" in str(quantized.report)
    assert any("no example was given" in message for message in quantized.report.skipped)


@pytest.mark.parametrize("name", ["resnet50_cifar", "vit_small_r26_s32", "vitrail_tiny"])
def test_convolutions_are_packed_for_each_size(name):
    model = randomize(build(structures()[name])).eval()
    optimized = vitrail.optimize(model, precision="fp32")
    packed = of_kind(optimized, PackedConv)
    assert packed
    assert len(packed) == len(of_kind(optimized.folded.backbone.stem, torch.nn.Conv2d))
    for extra in range(PackedConv.MAX_SIZES + 2):
        image = torch.randn(2, 3, *(side + 32 * extra for side in model.architecture.image_size))
        with torch.no_grad():
            assert difference(optimized(image), model(image)) < LIMITS["fp32"]
        assert all(0 < len(conv.packed) <= PackedConv.MAX_SIZES for conv in packed)


def test_eight_bits_do_not_depend_on_the_company():
    model = small()
    image = images(model)
    optimized = vitrail.optimize(model, precision="int8", example=image)
    loud = torch.cat([image[:1], 50 * image[1:]])
    assert torch.allclose(optimized(loud)[0], optimized(image[:1])[0], atol=1e-5)
    assert not any("calibration on" in message for message in optimized.report.skipped)
    assert optimized.report.same_top1[1] == len(image)


@pytest.mark.parametrize("count", [1, 4])
def test_an_example_of_one_image_is_told(count):
    model = small()
    same = images(model, 1).repeat(count, 1, 1, 1)
    left = vitrail.optimize(model, precision="int8", example=same).report.skipped
    assert any("the example has one distinct image only" in message for message in left)
    assert not any("one distinct image only" in message for message in vitrail.optimize(model, example=same).report.skipped)


def test_a_large_int8_error_is_rejected(monkeypatch):
    monkeypatch.setattr(optimize, "QUANTIZED_TOLERANCE", 1e-4)
    with pytest.raises(vitrail.UserError, match=r"in int8 .* pass more of your own images as the example, or use bf16"):
        vitrail.optimize(small(), precision="int8")


def test_other_sizes_and_no_images():
    model = small()
    for precision, limit in LIMITS.items():
        optimized = vitrail.optimize(model, precision=precision)
        image = torch.randn(2, 3, 18, 31)  # not whole patches: the rest is not looked at
        with torch.no_grad():
            assert difference(optimized(image), model(image)) < 3 * limit
        assert optimized(image[:0]).shape == (0, 5)


@pytest.mark.parametrize("precision", LIMITS)
def test_images_that_are_no_numbers(precision):
    model = small()
    image = images(model, 2)
    optimized = vitrail.optimize(model, precision=precision, example=image)
    image[0, 0, 0, 0] = torch.nan
    found = optimized(image)
    assert found[0].isnan().all()
    assert found[1].isfinite().all()


def test_it_stays_as_and_where_it_is():
    optimized = vitrail.optimize(small(), precision="bf16")
    assert optimized.to("cpu") is optimized
    assert optimized.bfloat16() is optimized
    for change in (lambda: optimized.float(), lambda: optimized.to("meta"), lambda: optimized.half()):
        with pytest.raises(vitrail.UserError, match="cannot be moved or cast"):
            change()
    image = torch.randn(2, 3, 16, 24)
    assert torch.equal(copy.deepcopy(optimized)(image), optimized(image))
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert torch.equal(optimized(image), optimized(image))


def test_a_caller_may_compile():
    optimized = vitrail.optimize(small())
    image = torch.randn(2, 3, 16, 24)
    compiled = torch.compile(lambda x: optimized(x) + 1, backend="eager")
    assert torch.allclose(compiled(image), optimized(image) + 1)
    torch.compiler.reset()


def test_images_in_other_layouts():
    model = small()
    optimized = vitrail.optimize(model)
    image = torch.randn(3, 3, 16, 24)
    for same in (image.contiguous(memory_format=torch.channels_last), image.repeat_interleave(2, 0)[::2]):
        assert torch.equal(optimized(same), optimized(image))


@pytest.mark.parametrize("precision", LIMITS)
def test_without_a_compiler(precision, monkeypatch):
    monkeypatch.setattr(onednn, "load_cpu_kernels", lambda: None)
    monkeypatch.setattr(onednn, "unavailable_reason", lambda: "there is no C++ compiler (g++)")
    model = small()
    image = images(model)
    optimized = vitrail.optimize(model, precision=precision, example=image)
    assert "AVX-512 attention kernel: there is no C++ compiler (g++)" in optimized.report.skipped
    assert all(part.kernels is None for part in of_kind(optimized, PackedAttention))
    with torch.no_grad():
        assert difference(optimized(image), model(image)) < LIMITS[precision]


def test_without_onednn(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = small()
    optimized = vitrail.optimize(model)
    assert not of_kind(optimized, PackedLinear)
    assert optimized.float().to(torch.float64)(torch.randn(1, 3, 16, 24)).dtype == torch.float64
    with pytest.raises(vitrail.UserError, match="no int8 products"):
        vitrail.optimize(model, precision="int8")


def test_float64_is_left_to_torch():
    model = small().double()
    assert not of_kind(vitrail.optimize(model), PackedLinear)
    assert vitrail.optimize(model, precision="int8").report.total_error < 0.1
