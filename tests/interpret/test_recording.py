"""One plain forward pass, and the attention rows computed afterwards from what it left."""

import numpy as np
import pytest
import torch

from tests.models.test_every_model import randomize
from tests.models.test_trace import TINY, WITH_MAPS
from tests.small import structures
from vitrail.errors import UserError
from vitrail.interpret import attention
from vitrail.interpret.attention import batch_size_for, record
from vitrail.layers import attention as layers
from vitrail.layers import pooling
from vitrail.models.registry import build

WITH_ATTENTION = [name for name, a in structures().items() if a.uses_heads or a.pooling in ("class_attention", "per_class")]


def recorded(architecture, **options):
    model = randomize(build(architecture)).eval()
    images = torch.randn(2, 3, *architecture.image_size, generator=torch.Generator().manual_seed(1))
    return record(model, images, **options), model, images


@pytest.mark.parametrize("name", WITH_ATTENTION)
def test_rows_are_those_of_the_explicit_softmax(name):
    recording, model, images = recorded(structures()[name])
    with torch.no_grad():
        assert torch.equal(recording.logits, model(images))
    trace = model.trace(images)
    assert (recording.grid, recording.prefix, recording.layers) == (trace.grid, trace.prefix, len(trace.layers))
    for layer, expected in trace.layers.items():
        assert recording.has_attention(layer) == (expected.attention is not None)
        if expected.attention is not None:
            every = recording.attention_rows(layer)
            torch.testing.assert_close(every, expected.attention, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(every.sum(-1), torch.ones(every.shape[:-1]), rtol=1e-5, atol=1e-5)
            last = every.shape[2] - 1
            torch.testing.assert_close(recording.attention_rows(layer, [last, 0]), every[:, :, [last, 0]], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", WITH_ATTENTION)
def test_rows_are_those_of_the_queries_and_keys_of_the_forward_pass(name, monkeypatch):
    """Against the softmax of what reached the fused kernel, in numpy; test_trace.py has the other mixers."""
    calls = []

    def attend(query, key, value, bias=None, *more):
        scores = query.double().numpy() @ key.double().numpy().swapaxes(-1, -2) / query.shape[-1] ** 0.5
        scores = scores + (0 if bias is None else bias.double().numpy())
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        calls.append(weights / weights.sum(-1, keepdims=True))
        return fused(query, key, value, bias, *more)

    recording, model, images = recorded(structures()[name])
    fused = layers.scaled_dot_product_attention
    for module in (layers, pooling):
        monkeypatch.setattr(module, "scaled_dot_product_attention", attend)
    with torch.no_grad():
        model(images)
    own = [layer for layer in range(recording.layers) if recording.has_attention(layer)]
    calls = [each for each in calls if len(each) == 2]  # stems attend within parts of the images, axial attention within lines
    if model.architecture.mixer in ("talking_heads", "axial"):
        own = [layer for layer in own if recording.is_pooling(layer)]
    for layer in own:
        expected = np.concatenate([calls.pop(0) for _ in recording.heads(layer)], 1)
        np.testing.assert_allclose(recording.attention_rows(layer).numpy(), expected, rtol=1e-4, atol=1e-6)
        last = expected.shape[2] - 1
        np.testing.assert_allclose(recording.attention_rows(layer, [last]).numpy(), expected[:, :, [last]], rtol=1e-4, atol=1e-6)
    assert own or model.architecture.mixer in ("talking_heads", "axial")
    assert not calls


def test_passes_that_keep_the_graph_have_fewer_large_images():
    sizes = {224: 8, 384: 3, 1024: 1}
    for side, expected in sizes.items():
        assert batch_size_for(build(TINY.replace(image_size=(side, side))), 8) == expected
    convnet = structures()["resnet18"].replace(image_size=(1024, 1024))
    assert batch_size_for(build(convnet), 8) == 1


@pytest.mark.parametrize("kind", WITH_MAPS)
def test_chunks_of_rows_together_are_all_rows(kind, monkeypatch):
    recording, model, images = recorded(TINY.replace(**WITH_MAPS[kind]))
    expected = model.trace(images, [1]).layers[1].attention
    monkeypatch.setattr(attention, "CHUNK", expected[:, :, :2].numel())  # two queries at a time
    chunks = list(recording.row_chunks(1))
    assert [len(rows) for rows, _ in chunks[:2]] == [2, 2]
    torch.testing.assert_close(torch.cat([weights for _, weights in chunks], 2), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", WITH_MAPS)
def test_gradients_of_the_weights_are_those_of_autograd(kind):
    """The gradient of the attention weights, from that of the outputs of the heads, against autograd."""
    recording, model, images = recorded(TINY.replace(**WITH_MAPS[kind]), gradients=True)
    classes = torch.tensor([3, 1])
    found = recording.gradients(classes)
    x, layout, relative = recording.blocks[-1]
    branch = model.block(2).mix.branches[-1]
    body = branch.body
    query, key, value = body.split_heads(body.qkv(branch.norm(x.detach())))
    weights = body.weights(query, key, layout, relative).detach().requires_grad_()
    mixed = body.mix_heads(body.after, weights) if hasattr(body, "after") else weights
    outputs = (mixed @ value.detach()).transpose(1, 2).flatten(2)
    (expected,) = torch.autograd.grad((outputs * found.outputs[body.proj]).sum(), weights)
    outer = found.outputs[body.proj].unflatten(-1, (body.heads, -1)).transpose(1, 2)
    torch.testing.assert_close(body.weight_gradient(outer, value), expected, rtol=1e-4, atol=1e-6)

    changed = images.clone().requires_grad_()
    model(changed).gather(1, classes[:, None]).sum().backward()
    torch.testing.assert_close(found.images, changed.grad, rtol=1e-4, atol=1e-6)


def test_recording_changes_nothing():
    model = build(TINY).train()
    with torch.inference_mode():
        images = torch.randn(1, 3, 32, 48)
        record(model, images, gradients=True).gradients(torch.tensor([0]))
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_does_not_exist():
    recording, _, _ = recorded(TINY)
    with pytest.raises(UserError, match="Layer 3 does not exist: this model has 3 layers"):
        recording.attention_rows(3)
    with pytest.raises(UserError, match="Token 7 does not exist: layer 0 has 7 query tokens"):
        recording.attention_rows(0, [7])
    recording, _, _ = recorded(structures()["resmlp_s12"])
    with pytest.raises(UserError, match="Layer 0 of this model has no attention"):
        recording.attention_rows(0)
