"""Attention maps are what the fast path uses, and asking for them changes nothing."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.test_every_model import randomize
from tests.small import structures
from vitrail.errors import UserError
from vitrail.layers.attention import Attention, TalkingHeads
from vitrail.layers.block import Branch
from vitrail.models.config import Architecture
from vitrail.models.registry import build

TINY = Architecture(width=32, depth=3, heads=4, classes=5, image_size=(32, 48))
WITH_MAPS = {
    "plain": {},
    "two branches": {"branches": 2, "residual": "layerscale"},
    "talking heads": {"mixer": "talking_heads"},
    "relative": {"pos_embed": "relative", "pos_embed_place": "layers"},
    "relative bias": {"pos_embed": "relative_bias", "pos_embed_place": "shared"},
    "axial": {"mixer": "axial", "pooling": "mean"},
    "late token": {"class_token_at": 2},
}


class Operations(TorchDispatchMode):
    """Records every operation that reaches the kernels."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.seen.append(str(operation))
        return operation(*args, **(kwargs or {}))


def attention_by_hand(body, x, layout, relative):
    """softmax(q k / sqrt(d) + bias) v, written out."""
    batch, tokens, width = x.shape
    q, k, v = (part.reshape(batch, tokens, body.heads, -1).transpose(1, 2) for part in body.qkv(x).chunk(3, -1))
    scores = q @ k.mT * (width // body.heads) ** -0.5
    if relative is not None:
        scores = scores + relative(q, layout)
    if isinstance(body, TalkingHeads):
        scores = torch.einsum("oh,bhqk->boqk", body.before.weight, scores) + body.before.bias[:, None, None]
    if getattr(body, "axis", None):
        index = torch.arange(tokens)
        line = index // layout.width if body.axis == "row" else index % layout.width
        scores = scores.masked_fill(line[:, None] != line, -torch.inf)
    maps = weights = scores.softmax(-1)
    if isinstance(body, TalkingHeads):
        weights = torch.einsum("oh,bhqk->boqk", body.after.weight, maps) + body.after.bias[:, None, None]
    return maps, body.proj((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", WITH_MAPS)
def test_maps_equal_the_explicit_softmax(kind):
    model = randomize(build(TINY.replace(**WITH_MAPS[kind]))).eval()
    image = torch.randn(2, 3, 32, 48)
    trace = model.trace(image)
    assert list(trace.layers) == [0, 1, 2]
    x, layout = model._add_pos_embed(*model.embed(image))
    for index in range(3):
        x, layout = model._prepare_block_input(index, x, layout)
        relative = model._relative_pos_embed(index)
        expected = []
        for branch in model.block(index).mix.branches:
            assert isinstance(branch, Branch)
            assert isinstance(branch.body, Attention)
            maps, output = attention_by_hand(branch.body, branch.norm(x), layout, relative)
            expected.append(maps)
            torch.testing.assert_close(branch.body(branch.norm(x), layout, relative), output, rtol=1e-4, atol=1e-4)
        found = trace.layers[index].attention
        torch.testing.assert_close(found, torch.cat(expected, 1), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.sum(-1), torch.ones(found.shape[:-1]), rtol=1e-5, atol=1e-5)
        x = model.block(index)(x, layout, relative)
    assert trace.prefix == model.architecture.num_prefix_tokens
    assert trace.grid == (2, 3)


@pytest.mark.parametrize("keys", ["all", "patches"])
def test_the_readout_is_traced_after_the_trunk(keys):
    options = {"pooling": "class_attention", "pooling_keys": keys, "distillation": True}
    model = randomize(build(TINY.replace(mixer="talking_heads", **options))).eval()
    image = torch.randn(2, 3, 32, 48)
    trace = model.trace(image, layers=[-1, 3])
    assert sorted(trace.layers) == [3, 4]
    for layer in trace.layers.values():
        assert layer.attention.shape == (2, 4, 2, 6 + 2 * (keys == "all"))
        torch.testing.assert_close(layer.attention.sum(-1), torch.ones(2, 4, 2))


def test_ratios_are_those_of_the_branches():
    model = randomize(build(TINY.replace(branches=2, residual="layerscale"))).eval()
    image = torch.randn(2, 3, 32, 48)
    x, layout = model._prepare_block_input(0, *model._add_pos_embed(*model.embed(image)))
    ratios = model.trace(image, [0]).layers[0].ratios
    middle = model.block(0).mix(x, layout)
    after = model.block(0).ffn(middle, layout)
    norm = lambda tensor: tensor.flatten(1).norm(dim=1)  # noqa: E731
    torch.testing.assert_close(ratios["mix"], norm(middle - x) / norm(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ratios["ffn"], norm(after - middle) / norm(middle), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", structures())
def test_tracing_leaves_the_fast_path_alone(name):
    """The same kernels before and after, no hooks, the same numbers; models without attention have ratios only."""
    model = randomize(build(structures()[name])).eval()
    image = torch.randn(2, 3, *model.architecture.image_size)
    with torch.no_grad():
        with Operations() as before:
            first = model(image)
        trace = model.trace(image)
        with Operations() as after:
            second = model(image)
    assert before.seen == after.seen
    assert torch.equal(first, second)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    if model.architecture.mixer == "attention" and model.architecture.depth:
        assert any("flash_attention" in operation for operation in after.seen)
        assert all(layer.attention is not None for index, layer in trace.layers.items() if index < model.architecture.depth)


def test_unknown_layers():
    with pytest.raises(UserError, match="3 layers"):
        build(TINY).trace(torch.randn(1, 3, 32, 48), layers=[3])
