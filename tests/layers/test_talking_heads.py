"""Talking heads against a reference in float64: the plain path anywhere, the kernels on a GPU or with TRITON_INTERPRET=1."""

import os
from importlib.util import find_spec

import pytest
import torch

from vitrail.layers import attention, kernels
from vitrail.layers.attention import TalkingHeads
from vitrail.layers.kernels import select_talking_heads
from vitrail.layers.layout import Layout
from vitrail.layers.pos_embed import RelativePosBias

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
RUNS = find_spec("triton") is not None and (GPU or os.environ.get("TRITON_INTERPRET") == "1")
without_kernels = pytest.mark.skipif(not RUNS, reason="needs a GPU, or Triton and TRITON_INTERPRET=1")
without_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
NAMES = ("qkv", "before", "shift", "after", "bias")


@pytest.fixture(autouse=True)
def enabled(monkeypatch):
    monkeypatch.setattr(kernels, "ENABLED", frozenset(("talking_heads",)))


def reference(qkv, before, shift, after, bias):
    """Image by image and head by head, as the paper writes it: [B, N, 3, H, D] to [B, N, H, D]."""
    heads, width = qkv.shape[3:]
    images = []
    for image in qkv:
        query, key, value = image.unbind(1)
        scores = [query[:, h] @ key[:, h].T / width**0.5 for h in range(heads)]
        mixed = [sum(before[g, h] * scores[h] for h in range(heads)) + shift[g] for g in range(heads)]
        shares = [tile.softmax(1) for tile in mixed]
        weights = [sum(after[g, h] * shares[h] for h in range(heads)) + bias[g] for g in range(heads)]
        images.append(torch.stack([weights[g] @ value[:, g] for g in range(heads)], 1))
    return torch.stack(images)


def arguments(batch, tokens, heads, width, dtype=torch.float32):
    """Random numbers on the kernels' device, and the gradient that comes back."""
    qkv, gradient = torch.randn(batch, tokens, 3, heads, width), torch.randn(batch, tokens, heads, width)
    mixing = [torch.randn(shape) for shape in ((heads, heads), (heads,), (heads, heads), (heads,))]
    return [each.to(DEVICE) for each in (qkv.to(dtype), *mixing)], gradient.to(DEVICE, dtype)


def differentiated(run, inputs, gradient):
    """The output of `run` and the gradients of its inputs, by name."""
    inputs = [each.detach().clone().requires_grad_() for each in inputs]
    out = run(*inputs)
    grads = torch.autograd.grad(out, inputs, gradient)
    return {"out": out.detach()} | dict(zip(NAMES, grads, strict=True))


def check(run, inputs, gradient, tolerance):
    """Each result is right to a share of the largest value of it; the bias before the softmax has no gradient but rounding."""
    found = differentiated(run, inputs, gradient)
    expected = differentiated(reference, [each.double() for each in inputs], gradient.double())
    assert expected.pop("shift").abs().max() < 1e-9
    assert found.pop("shift").abs().max() < 100 * tolerance
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        apart = (found[name].double() - value).abs().max() / value.abs().max()
        assert apart < tolerance, f"{name} is off by {apart:.1e}"


def fused(*inputs):
    from vitrail.layers.kernels.talking_heads import talking_heads

    return talking_heads(*inputs)


def bare(heads, width, **options):
    """A layer whose `qkv` and `proj` hand tensors through."""
    layer = TalkingHeads(heads * width, heads, **options)
    layer.qkv, layer.proj = torch.nn.Identity(), torch.nn.Identity()
    return layer


def through_layer(qkv, *mixing):
    """The layer as a function of the same tensors as the kernel."""
    names = ("before.weight", "before.bias", "after.weight", "after.bias")
    tensors, layout = dict(zip(names, mixing, strict=True)), Layout(1, qkv.shape[1])
    out = torch.func.functional_call(bare(*qkv.shape[3:]), tensors, (qkv.flatten(2), layout))
    return out.unflatten(2, qkv.shape[3:])


@pytest.mark.parametrize(("tokens", "heads", "width"), [(3, 1, 8), (35, 4, 16), (20, 6, 48)])
def test_the_plain_path(tokens, heads, width):
    inputs, gradient = arguments(2, tokens, heads, width)
    check(through_layer, [each.cpu() for each in inputs], gradient.cpu(), 1e-5)


def test_no_kernel_for_a_processor():
    assert select_talking_heads(torch.zeros(1, 4, 3, 2, 16, dtype=torch.bfloat16)) is None


@pytest.mark.parametrize(("tokens", "heads", "width"), [(2049, 8, 48), (4, 17, 16), (4, 2, 65)])
def test_no_kernel_for_what_no_tile_holds(monkeypatch, tokens, heads, width):
    for name in ("kernel_available", "is_ampere"):
        monkeypatch.setattr(kernels, name, lambda *_: True)
    assert select_talking_heads(torch.empty(1, tokens, 3, heads, width, dtype=torch.bfloat16, device="meta")) is None


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("biased", [False, True])
def test_when_the_kernel_is_asked_for(monkeypatch, training, dropout, biased):
    """Not with a bias on the scores, and not where weights are dropped."""
    requested = []
    monkeypatch.setattr(attention, "select_talking_heads", lambda qkv: requested.append(qkv.shape))
    relative = RelativePosBias((2, 3), 16, 2) if biased else None
    layer = bare(2, 16, attention_dropout=dropout).train(training)
    layer(torch.randn(1, 6, 96), Layout(2, 3), relative)
    assert requested == ([] if biased or (training and dropout) else [(1, 6, 3, 2, 16)])


@pytest.mark.gpu
@without_kernels
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "width"),
    [(2, 37, 4, 16), (1, 35, 8, 48), (1, 17, 6, 48), (3, 5, 1, 16), (1, 41, 16, 24), (2, 33, 5, 20)],
)
def test_the_kernels(batch, tokens, heads, width):
    """Half precision on a GPU, where they are made for it; single precision when interpreted."""
    inputs, gradient = arguments(batch, tokens, heads, width, torch.float16 if GPU else torch.float32)
    check(fused, inputs, gradient, 5e-3 if GPU else 1e-5)


@pytest.mark.gpu
@without_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=without_gpu)])
def test_precision(dtype):
    """Triton's interpreter does not multiply matrices of bfloat16."""
    inputs, gradient = arguments(1, 35, 2, 16, dtype)
    check(fused, inputs, gradient, {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype])


@pytest.mark.gpu
@without_kernels
@pytest.mark.parametrize(("room", "forward", "backward"), [(0, 1, 1), (2, 2, 1), (4, 3, 2)])
def test_parts_of_a_batch(monkeypatch, room, forward, backward):
    """Three images in one, two or three parts have the same outputs to the bit, and sums that differ by their order."""
    from vitrail.layers.kernels import talking_heads as module

    inputs, gradient = arguments(3, 9, 5, 16, torch.float16)
    whole = differentiated(fused, inputs, gradient)
    assert module.Plan(inputs[0], 2).images == 3
    monkeypatch.setattr(module, "TILING", module.TILING._replace(part_bytes=room * 5 * 9 * 16 * 2))
    assert [module.Plan(inputs[0], matrices).images for matrices in (1, 2)] == [forward, backward]
    parts, again = (differentiated(fused, inputs, gradient) for _ in range(2))
    for name, value in whole.items():
        assert torch.equal(parts[name], again[name]), f"{name} differs from run to run"
        torch.testing.assert_close(parts[name], value, rtol=0, atol=0 if name in ("out", "qkv") else 1e-4)


@pytest.mark.gpu
@without_kernels
def test_no_images():
    inputs, gradient = arguments(0, 5, 2, 16)
    found = differentiated(fused, inputs, gradient)
    assert found["out"].shape == (0, 5, 2, 16)
    assert not any(found[name].any() for name in NAMES)


@pytest.mark.gpu
@without_kernels
def test_large_scores_do_not_overflow():
    inputs, gradient = arguments(1, 35, 2, 16)
    inputs[0] *= 8
    query, key, _ = inputs[0].unbind(2)
    assert (query[0, :, 0] @ key[0, :, 0].T).max() / 4 > 88, "or a float32 would hold its exponential"
    check(fused, inputs, gradient, 5e-3)


@pytest.mark.gpu
@without_kernels
def test_a_nan_is_seen_and_stays_in_its_image():
    inputs, _ = arguments(2, 20, 2, 16)
    clean = fused(*inputs)
    inputs[0][0, 18] = torch.nan
    found = fused(*inputs)
    assert found[0].isnan().all()
    assert torch.equal(found[1], clean[1])


@pytest.mark.gpu
@without_kernels
def test_the_layer_with_the_kernel(monkeypatch):
    """The same numbers as without, for tensors in any order in memory, and one node of a compiled graph."""
    inputs, gradient = arguments(2, 18, 4, 16)
    expected = differentiated(through_layer, inputs, gradient)
    from vitrail.layers.kernels.talking_heads import talking_heads

    monkeypatch.setattr(attention, "select_talking_heads", lambda qkv: talking_heads)
    gradient = gradient.transpose(0, 1).contiguous().transpose(0, 1)
    found = differentiated(through_layer, inputs, gradient)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4)
    graphs = []

    def catch(graph, _):
        graphs.append(graph)
        return graph.forward

    layer = bare(4, 16).to(DEVICE)
    found = torch.compile(layer, backend=catch, fullgraph=True)(inputs[0].flatten(2), Layout(3, 6))
    torch.testing.assert_close(found, layer(inputs[0].flatten(2), Layout(3, 6)))
    (graph,) = graphs
    assert sum("talking_heads" in str(node.target) for node in graph.graph.nodes) == 1


@pytest.mark.gpu
@without_kernels
def test_the_operators_are_registered_rightly():
    from vitrail.layers.kernels.talking_heads import talking_heads, talking_heads_backward

    inputs, gradient = arguments(1, 5, 2, 16)
    torch.library.opcheck(talking_heads, [each.requires_grad_() for each in inputs], rtol=1e-4, atol=1e-4)
    qkv, before, _, after, bias = (each.detach() for each in inputs)
    torch.library.opcheck(talking_heads_backward, (gradient, qkv, before, after, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@without_gpu
@pytest.mark.parametrize("heads", [4, 6, 8, 16])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_under_autocast(heads, compiled):
    """On a GPU the kernel is chosen, and is nearer to float64 than twice what the plain path is."""
    layer, layout = TalkingHeads(heads * 48, heads).cuda(), Layout(14, 14)
    x, gradient = torch.randn(2, 2, 196, heads * 48, device="cuda")
    assert select_talking_heads(torch.empty(2, 196, 3, heads, 48, device="cuda", dtype=torch.bfloat16)) is not None

    def run(body, half):
        body.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            out = body(x if half else x.double(), layout)
        out.backward(gradient.to(out.dtype))
        return [out.detach().double(), *(parameter.grad.double() for parameter in layer.parameters())]

    found = run(torch.compile(layer, fullgraph=True) if compiled else layer, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "select_talking_heads", lambda qkv: None)
        torch.compiler.reset()
        plain = run(layer, True)
        exact = run(layer.double(), False)
    names = ["out", *(name for name, _ in layer.named_parameters())]
    for name, ours, theirs, right in zip(names, found, plain, exact, strict=True):
        apart, allowed = (ours - right).norm(), (theirs - right).norm()
        assert apart <= 2 * allowed + 1e-3 * right.norm(), f"{name}: {apart:.2e}, plain {allowed:.2e}"


@pytest.mark.gpu
@without_gpu
def test_no_matrix_of_all_pairs_is_kept(monkeypatch):
    from vitrail.layers.kernels import talking_heads as module

    inputs, gradient = arguments(8, 1024, 8, 48, torch.bfloat16)
    monkeypatch.setattr(module, "TILING", module.TILING._replace(part_bytes=64 << 20))  # of 268 MB that both would have
    differentiated(fused, inputs, gradient)
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    differentiated(fused, inputs, gradient)
    assert torch.cuda.max_memory_allocated() - start < 8 * 8 * 1024 * 1024 * 2
