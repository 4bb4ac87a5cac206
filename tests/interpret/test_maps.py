"""Relevance maps: every architecture has some, and each equals its definition."""

import copy

import pytest
import torch
from torch.nn import functional as F

from tests.interpret.test_recording import recorded
from tests.models.test_every_model import randomize
from tests.models.test_trace import TINY, WITH_MAPS
from tests.small import structures
from vitrail.errors import UserError
from vitrail.interpret import attention
from vitrail.interpret.attention import covered_size, record
from vitrail.interpret.branch_norms import branch_norms
from vitrail.interpret.maps import (
    METHODS,
    attention_map,
    available_methods,
    class_attention,
    compute_map,
    relevance_map,
    threshold_mass,
)
from vitrail.interpret.scores import probability_curve
from vitrail.interpret.token_similarity import token_cosines
from vitrail.models.registry import build


@pytest.mark.parametrize("name", structures())
def test_every_architecture_has_maps(name):
    recording, model, images = recorded(structures()[name], gradients=True)
    methods = available_methods(model)
    assert len(methods) >= 2
    for method in methods:
        found = compute_map(recording, method, torch.tensor([1, 2]))
        assert found.shape == (2, *recording.grid)
        assert found.isfinite().all()
        assert (found >= 0).all()
    for method in set(METHODS) - set(methods):
        with pytest.raises(UserError, match=f"The method {method} is not available: .*Available: "):
            relevance_map(model, images, method)


def test_attention_of_blocks_before_a_pooling_without_attention_is_not_followed():
    """Nothing leads back from the pooling to the blocks: gradient-weighted attention would be zero."""
    _, model, images = recorded(TINY.replace(pooling="class_mlp", pooling_depth=1))
    assert available_methods(model) == ["input_gradient", "occlusion"]
    for method in ("gradient_attention", "attention", "rollout"):
        with pytest.raises(UserError, match="the last layer of this model has no attention"):
            relevance_map(model, images, method)


HEADS = {  # what the logits are computed from, and the part of each prefix token
    "both tokens": ({"distillation": True}, [0.5, 0.5]),
    "distillation token": ({"distillation": True, "fusion": "distillation"}, [0.0, 1.0]),
    "class token of two": ({"distillation": True, "fusion": "class"}, [1.0, 0.0]),
    "sum of probabilities": ({"distillation": True, "fusion": "softmax_sum"}, [0.5, 0.5]),
    "no second head": ({"distillation": True, "distillation_head": False}, [1.0, 0.0]),
    "dense head": ({"dense_head": True, "dense_weight": 0.5}, [1.0]),
}


@pytest.mark.parametrize("kind", [*WITH_MAPS, *HEADS])
def test_gradient_attention_is_the_product_of_whole_matrices(kind, monkeypatch):
    """Against matrices [T, T] with gradients by autograd through the explicit softmax of one block at a time."""
    changes, parts = HEADS.get(kind) or (WITH_MAPS[kind], [1.0])
    recording, model, images = recorded(TINY.replace(**changes), gradients=True)
    classes = torch.tensor([3, 1])
    monkeypatch.setattr(attention, "CHUNK", 200)
    gradients = recording.gradients(classes)
    relevance = None
    for layer in range(3):
        steps = []
        for part in recording.heads(layer):
            outer = gradients.outputs[part.proj].unflatten(-1, (part.query.shape[1], -1)).transpose(1, 2)
            steps.append((part.weights() * part.weight_gradient(outer, part.value)).clamp(min=0))
        step = torch.cat(steps, 1).mean(1).double()
        size = step.shape[-1]
        before = torch.eye(size).double() if relevance is None else relevance
        if len(before[0]) < size:  # the class token comes with this block
            before = torch.eye(size).double()[None].repeat(2, 1, 1)
            before[:, 1:, 1:] = relevance
        relevance = before + step @ before
    start, prefix = torch.zeros(2, size).double(), recording.prefix
    start[:, :prefix] = torch.tensor(parts)[:prefix]
    if not prefix:
        start += 1 / size
    if kind == "dense head":
        best = model.outputs(images).dense[[0, 1], :, classes].argmax(1)
        start[[0, 1], prefix + best] = 0.5
    row = torch.einsum("bq,bqk->bk", start, relevance - torch.eye(size))[:, prefix:]
    found = compute_map(recording, "gradient_attention", classes).flatten(1).double()
    assert found.max() > 0
    torch.testing.assert_close(found, row, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("pooling", ["class", "class_attention"])
@pytest.mark.parametrize("kind", [kind for kind, (_, parts) in HEADS.items() if len(parts) == 2])
def test_attention_is_that_of_the_tokens_of_the_logits(kind, pooling):
    """Of the class token, the distillation token or both, also where they are queries of a pooling."""
    changes, (first, second) = HEADS[kind]
    recording, _, _ = recorded(TINY.replace(pooling=pooling, **changes))
    rows = recording.attention_rows(-1, [0, 1])[..., 2:]
    expected = (first * rows[:, :, 0] + second * rows[:, :, 1]).mean(1).unflatten(1, recording.grid)
    torch.testing.assert_close(compute_map(recording, "attention"), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("stem", ["linear", "hmlp", "local_transformer"])
def test_pixels_without_a_patch_change_nothing(stem):
    """Images of 44 x 60 pixels have 2 x 3 patches of 16: maps are those of the upper left 32 x 48."""
    model = randomize(build(TINY.replace(stem=stem, image_size=(44, 60), pooling="mean"))).eval()
    images, classes = torch.randn(2, 3, 44, 60), torch.tensor([3, 1])
    whole, part = (record(model, each, gradients=True) for each in (images, images[..., :32, :48]))
    assert whole.covered == part.covered == (32, 48)
    assert available_methods(model) == [
        "gradient_attention",
        *("attention", "rollout", "thresholded_heads", "evidence"),
        "input_gradient",
        "occlusion",
    ]
    for method in available_methods(model):
        torch.testing.assert_close(compute_map(whole, method, classes), compute_map(part, method, classes), rtol=1e-4, atol=1e-6)
    maps = torch.rand(2, 2, 3)
    for insertion in (False, True):
        curves = (probability_curve(each, maps, classes, insertion) for each in (whole, part))
        torch.testing.assert_close(*curves, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", structures())
def test_patches_cover_whole_images_of_whole_patches(name):
    model = build(structures()[name])
    assert covered_size(model, *model.architecture.image_size) == model.architecture.image_size


@pytest.mark.parametrize(
    "name", ["deit_tiny_distilled_patch16", "cait_xxs24", "vitrail_tiny", "patchconvnet_s20_multi", "lvvit_t"]
)
def test_maps_of_bfloat16_weights_are_float32(name):
    """Sums and products over the blocks are not rounded to bfloat16; only the attention weights themselves are."""
    model = randomize(build(structures()[name])).eval()
    images = torch.randn(2, 3, *model.architecture.image_size, generator=torch.Generator().manual_seed(0))
    low, classes = copy.deepcopy(model).bfloat16(), torch.tensor([1, 2])
    for method in available_methods(model):
        found = relevance_map(low, images.bfloat16(), method, classes)
        assert found.dtype == torch.float32
        assert found.max() > 0 or method != "gradient_attention"
        if method == "rollout":
            torch.testing.assert_close(found.sum((1, 2)), torch.ones(2), rtol=0, atol=1e-6)
            torch.testing.assert_close(found, relevance_map(model, images, method, classes), rtol=0.03, atol=0)
    recording = record(low, images.bfloat16())
    for layer in range(recording.layers):
        if recording.has_attention(layer):
            assert recording.attention_rows(layer, [0]).dtype == torch.float32


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16", "cait_xxs24", "patchconvnet_s20_multi", "lvvit_t", "resmlp_s12"])
def test_autocast_changes_nothing(name):
    """Reports are written under the autocast of the training: maps and figures are computed in the precision of the weights."""
    recording, model, images = recorded(structures()[name], gradients=True)
    classes = torch.tensor([1, 2])
    methods = available_methods(model)
    expected = {method: compute_map(recording, method, classes) for method in methods}
    layers = [layer for layer in range(recording.layers) if recording.has_attention(layer)]
    rows = {layer: recording.attention_rows(layer, [0]) for layer in layers}
    figures, cosines = branch_norms(recording), token_cosines(recording)
    with torch.autocast("cpu", torch.bfloat16):
        again = record(model, images, gradients=True)
        assert torch.equal(again.logits, recording.logits)
        for method in methods:
            torch.testing.assert_close(compute_map(again, method, classes), expected[method], rtol=0, atol=0, msg=method)
        for layer in layers:
            assert torch.equal(again.attention_rows(layer, [0]), rows[layer])
        torch.testing.assert_close(
            [branch_norms(again), token_cosines(again)], [figures, cosines], rtol=0, atol=0, equal_nan=True
        )


def test_class_attention_is_the_mean_of_the_heads_of_the_first_class_attention_block():
    """CaiT's saliency: layer CA1, the mean of the heads, without the key of the class token."""
    recording, model, images = recorded(structures()["cait_xxs24"])
    patches, layout = model.encode(*model.embed(images))
    block = model.pooling.blocks[0]
    query = model.pooling.queries.expand(2, -1, -1)
    u, z = block.norm1(query), block.norm1(torch.cat([query, patches], 1))
    heads = model.architecture.pooling_heads
    q, k = (
        linear(x).unflatten(-1, (heads, -1)).transpose(1, 2) for linear, x in ((block.attention.q, u), (block.attention.k, z))
    )
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    expected = weights[:, :, 0, 1:].mean(1).unflatten(1, layout.grid)
    torch.testing.assert_close(class_attention(recording, torch.tensor([0, 1])), expected, rtol=1e-4, atol=1e-6)


def test_per_class_maps_are_those_of_the_queries():
    recording, _, _ = recorded(structures()["patchconvnet_s20_multi"])
    rows = recording.attention_rows(-1).mean(1)  # [B, C, N]
    found = class_attention(recording, torch.tensor([4, 2]))
    torch.testing.assert_close(found.flatten(1), rows[torch.arange(2), torch.tensor([4, 2])])


def test_attention_of_a_layer_and_head():
    recording, model, images = recorded(TINY)
    every = model.trace(images).layers[1].attention[:, :, 0, 1:].unflatten(-1, (2, 3))
    torch.testing.assert_close(attention_map(recording, 1, 2), every[:, 2], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(relevance_map(model, images, "attention:1"), every.mean(1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(relevance_map(model, images, "attention:1:-1"), every[:, -1], rtol=1e-4, atol=1e-6)


def test_thresholded_mass():
    maps = torch.tensor([[[0.1, 0.5], [0.15, 0.25]]])
    assert threshold_mass(maps, 0.6).tolist() == [[[False, True], [False, True]]]
    assert threshold_mass(maps, 0.5).tolist() == [[[False, True], [False, False]]]
    assert threshold_mass(maps, 1.0).all()


def test_occlusion_hides_every_part_once():
    recording, model, images = recorded(TINY)
    found = compute_map(recording, "occlusion", torch.tensor([3, 1]))
    hidden = images.clone()
    hidden[..., 16:32, 32:48] = 0  # the last patch
    with torch.no_grad():
        before, after = (model(x).log_softmax(1)[torch.arange(2), torch.tensor([3, 1])] for x in (images, hidden))
    torch.testing.assert_close(found[:, 1, 2], (before - after).clamp(min=0), rtol=1e-4, atol=1e-5)
    large = build(TINY.replace(image_size=(16 * 9, 16 * 20))).eval()
    found = relevance_map(large, torch.randn(1, 3, 16 * 9, 16 * 20), "occlusion")
    assert found.shape == (1, 9, 20)
    assert torch.equal(found[:, 0], found[:, 1])  # parts of two rows and three columns


def test_input_gradient_is_the_mean_over_the_pixels_of_a_patch():
    recording, model, images = recorded(TINY, gradients=True)
    changed = images.clone().requires_grad_()
    model(changed).max(1).values.sum().backward()
    expected = F.avg_pool2d((images * changed.grad).sum(1).abs(), 16)
    torch.testing.assert_close(compute_map(recording, "input_gradient"), expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("saliency", "The method 'saliency' is not known: choose from class_attention"),
        ("attention:x", "The method 'attention:x' is not known"),
        ("rollout:3", "The method rollout uses all its layers"),
        ("attention:3", "Layer 3 does not exist: this model has 3 layers"),
        ("attention:0:4", "Head 4 does not exist: layer 0 has 4 heads"),
        ("class_attention", "not available: this model has the pooling 'class'"),
    ],
)
def test_methods_that_do_not_exist(method, message):
    with pytest.raises(UserError, match=message):
        relevance_map(build(TINY), torch.zeros(1, 3, 32, 48), method)


def test_large_images_need_bounded_memory():
    """No tensor of one recording is larger than a chunk of rows and the tokens themselves."""
    model = build(TINY.replace(depth=2, image_size=(640, 640))).eval()
    images = torch.randn(1, 3, 640, 640)
    recording = record(model, images)  # 1,601 tokens: all weights of a layer are 4 * 1601^2 = 10 million values
    sizes = []
    attention.CHUNK, kept = 1 << 20, attention.CHUNK
    try:
        for _, weights in recording.row_chunks(0):
            sizes.append(weights.numel())
        found = compute_map(recording, "rollout")
    finally:
        attention.CHUNK = kept
    assert max(sizes) <= 1 << 20 < sum(sizes)
    torch.testing.assert_close(found, compute_map(recording, "rollout"), rtol=1e-4, atol=1e-8)
