"""gelu(x + bias) and its gradients against float64: on a GPU, or with TRITON_INTERPRET=1."""

import os
from importlib.util import find_spec

import pytest
import torch
from torch.nn import functional as F

from vitrail.layers import fused, kernels
from vitrail.layers.fused import fuse_bias_gelu
from vitrail.layers.kernels import select_bias_gelu
from vitrail.layers.mlp import FeedForward

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
RUNS = find_spec("triton") is not None and (GPU or os.environ.get("TRITON_INTERPRET") == "1")
without_kernels = pytest.mark.skipif(not RUNS, reason="needs a GPU, or Triton and TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def enabled(monkeypatch):
    monkeypatch.setattr(kernels, "ENABLED", frozenset(("bias_gelu",)))


@pytest.mark.gpu
@without_kernels
@pytest.mark.parametrize("shape", [(2, 5, 24), (3, 700, 130), (1, 1, 1), (1100, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernels(shape, dtype):
    from vitrail.layers.kernels.bias_gelu import bias_gelu

    x = (3 * torch.randn(shape, device=DEVICE)).to(dtype).requires_grad_()
    bias = torch.randn(shape[-1], device=DEVICE, requires_grad=True)
    gradient = torch.randn(shape, device=DEVICE).to(dtype)
    out = bias_gelu(x, bias)
    assert out.dtype == dtype
    found = (out, *torch.autograd.grad(out, (x, bias), gradient))
    x64, bias64 = x.detach().double().requires_grad_(), bias.detach().double().requires_grad_()
    wanted = F.gelu(x64 + bias64)
    expected = (wanted, *torch.autograd.grad(wanted, (x64, bias64), gradient.double()))
    for ours, theirs in zip(found, expected, strict=True):
        apart = (ours.double() - theirs).abs().max() / theirs.abs().max()
        assert apart < (1e-5 if dtype == torch.float32 else 2e-3)


def test_no_kernel_on_cpu():
    assert select_bias_gelu(torch.zeros(3, 4, dtype=torch.bfloat16)) is None


@pytest.mark.parametrize(("act", "requested"), [("gelu", True), ("gelu_tanh", False), ("relu", False)])
def test_activations_that_use_the_kernel(monkeypatch, act, requested):
    calls = []

    def pretend(x):
        return lambda product, bias: calls.append(1) or F.gelu(product + bias)

    monkeypatch.setattr(fused, "select_bias_gelu", pretend)
    layer, x = FeedForward(6, 12, act), torch.randn(2, 3, 6)
    expected = layer(x)
    assert not calls
    out = fuse_bias_gelu(layer)(x)
    assert bool(calls) == requested
    torch.testing.assert_close(out, expected)


def test_linear_gelu():
    from vitrail.layers.kernels.linear_gelu import linear_gelu

    x, weight, bias = torch.randn(2, 3, 16), torch.randn(8, 16), torch.randn(8)
    torch.testing.assert_close(linear_gelu(x, weight, bias), F.gelu(F.linear(x, weight, bias)), rtol=1e-3, atol=1e-3)
    torch.library.opcheck(linear_gelu, (x, weight, bias))
    assert kernels.select_linear_gelu(x, weight.bfloat16()) is None
