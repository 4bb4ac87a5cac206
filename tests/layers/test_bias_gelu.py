"""gelu(x + bias) and its gradients against float64: on a GPU, or with TRITON_INTERPRET=1."""

import os
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from vitrail.layers import attention, kernels
from vitrail.layers.attention import FeedForward
from vitrail.layers.kernels import bias_gelu_for

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
@pytest.mark.parametrize("compiled", [False, True])
def test_the_kernels(shape, dtype, compiled):
    from vitrail.layers.kernels import bias_gelu as module

    bias_gelu = module.bias_gelu if compiled else module.BiasGelu.apply

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


@pytest.mark.gpu
@without_kernels
@pytest.mark.parametrize("graph", [False, True])
def test_gradients_of_gradients_are_refused(graph):
    from vitrail.layers.kernels.bias_gelu import BiasGelu

    x, bias = torch.randn(2, 3, 8, device=DEVICE, requires_grad=True), torch.randn(8, device=DEVICE, requires_grad=True)
    found = torch.autograd.grad(BiasGelu.apply(x, bias).square().sum(), (x, bias), create_graph=graph)
    wanted = torch.autograd.grad(F.gelu(x + bias).square().sum(), (x, bias))
    torch.testing.assert_close([each.detach() for each in found], list(wanted), rtol=1e-4, atol=1e-4)
    assert all(each.requires_grad == graph for each in found)
    if graph:
        with pytest.raises(RuntimeError, match="differentiate twice"):
            found[0].sum().backward()


def test_no_kernel_for_a_processor():
    assert bias_gelu_for(torch.zeros(3, 4, dtype=torch.bfloat16)) is None


@pytest.mark.parametrize(("act", "asked"), [("gelu", True), ("gelu_tanh", False), ("relu", False)])
def test_what_asks_for_it(monkeypatch, act, asked):
    calls = []

    def pretend(x):
        return lambda product, bias: calls.append(1) or F.gelu(product + bias)

    monkeypatch.setattr(attention, "bias_gelu_for", pretend)
    layer, x = FeedForward(6, 12, act), torch.randn(2, 3, 6)
    found = layer(x)
    assert bool(calls) == asked
    torch.testing.assert_close(found, layer.fc2(layer.activation(layer.fc1(x))))


def test_an_operator_only_where_somebody_compiles(monkeypatch):
    """It costs the host more than calling the kernels does; fake tensors and compilers need it."""
    monkeypatch.setattr(kernels, "may_run", lambda name, x: True)
    parts = ModuleType("bias_gelu")
    parts.bias_gelu, parts.BiasGelu = (lambda x, bias: x + 1), SimpleNamespace(apply=lambda x, bias: x + 2)
    monkeypatch.setitem(sys.modules, "vitrail.layers.kernels.bias_gelu", parts)

    def call(x):
        return bias_gelu_for(x)(x, x)

    assert call(torch.zeros(1)) == 2
    assert torch.compile(call, backend="eager", fullgraph=True)(torch.zeros(1)) == 1
    with FakeTensorMode():
        assert bias_gelu_for(torch.zeros(1)) is parts.bias_gelu


def test_gelu_inside_a_product():
    from vitrail.layers.kernels.linear_gelu import linear_gelu

    x, weight, bias = torch.randn(2, 3, 16), torch.randn(8, 16), torch.randn(8)
    torch.testing.assert_close(linear_gelu(x, weight, bias), F.gelu(F.linear(x, weight, bias)), rtol=1e-3, atol=1e-3)
    torch.library.opcheck(linear_gelu, (x, weight, bias))
    assert kernels.linear_gelu_for(x, weight.bfloat16()) is None, "for a processor there is none"
