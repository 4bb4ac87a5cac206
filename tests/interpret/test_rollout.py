"""Where a prediction comes from: attention followed through the blocks, and the contribution of each patch."""

import pytest
import torch

import vitrail
from tests.models.test_every_model import randomize
from tests.models.test_trace import TINY, WITH_MAPS
from vitrail.errors import UserError
from vitrail.interpret.evidence import patch_evidence
from vitrail.interpret.rollout import attention_rollout
from vitrail.models.registry import build

SMALL = {"width": 32, "depth": 3, "heads": 2, "patch_size": 4, "image_size": (16, 24), "classes": 7}
IMAGES = torch.randn(2, 3, 16, 24, generator=torch.Generator().manual_seed(0))
KINDS = WITH_MAPS | {
    "mean": {"pooling": "mean"},
    "mean with a class token": {"pooling": "mean", "keep_class_token": True},
    "distilled": {"distillation": True},
    "distillation token": {"distillation": True, "fusion": "distillation"},
    "class attention": {"pooling": "class_attention", "mixer": "talking_heads"},
    "class attention to patches": {"pooling": "class_attention", "pooling_keys": "patches", "distillation": True},
    "queries per class": {"pooling": "per_class"},
}


def small(name="deit3_small_patch16", **parts):
    model = vitrail.create(name, **SMALL | parts).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_rollout_is_the_published_product(kind, residual):
    """(A + I) / 2 of every block multiplied as whole matrices in float64; one matrix [S + N, S + N] per block of the pooling."""
    model = randomize(build(TINY.replace(**KINDS[kind]))).double().eval()
    images = torch.randn(2, 3, 32, 48, dtype=torch.float64)
    trace = model.trace(images)
    rollout = torch.eye(6, dtype=torch.float64).expand(2, -1, -1)
    for index in range(3):
        weights = trace.layers[index].attention.mean(1)
        size = weights.shape[-1]
        before = torch.eye(size, dtype=torch.float64).repeat(2, 1, 1)  # prefix tokens begin as themselves
        before[:, -rollout.shape[1] :, -rollout.shape[1] :] = rollout
        rollout = ((weights + torch.eye(size)) / 2 if residual else weights) @ before
    if len(trace.layers) > 3:
        queries = trace.layers[3].attention.shape[2]
        whole = torch.eye(queries + 6, dtype=torch.float64).repeat(2, 1, 1)
        whole[:, queries:, queries:] = rollout
        for index in sorted(trace.layers)[3:]:
            weights = trace.layers[index].attention.mean(1)
            step = torch.eye(queries + 6, dtype=torch.float64).repeat(2, 1, 1)
            step[:, :queries] *= 0.5 if residual else 0.0
            step[:, :queries, -weights.shape[-1] :] += weights * (0.5 if residual else 1.0)
            whole = step @ whole
        if kind == "queries per class":
            row = whole[torch.arange(2), model(images).argmax(1), queries:]
        else:
            row = whole[:, : 2 if model.architecture.distillation else 1, queries:].mean(1)
    else:
        tokens = {"distilled": slice(0, 2), "distillation token": slice(1, 2)}.get(kind, slice(0, 1))
        row = rollout[:, tokens if model.architecture.pooling == "class" else slice(trace.prefix, None)].mean(1)
        row = row[:, trace.prefix :]
    found = attention_rollout(model, images, residual)
    assert found.dtype == torch.float64
    assert found.shape == (2, 2, 3)
    torch.testing.assert_close(found.flatten(1), row / row.sum(1, keepdim=True), rtol=1e-10, atol=1e-12)


def test_rollout_of_uniform_attention_is_uniform():
    model = small(pooling="mean")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "qkv" in name:
                parameter.zero_()
    assert torch.allclose(attention_rollout(model, IMAGES), torch.full((2, 4, 6), 1 / 24), atol=1e-6)


@pytest.mark.parametrize("name", ["deit3_small_patch16", "resmlp_s12", "resnet18_cifar"])
def test_patch_evidence_sums_to_the_logit(name):
    changes = {"pooling": "mean"} if name.startswith("deit") else {}
    size = (
        {"image_size": (16, 24), "classes": 7} if name.startswith("resnet") else SMALL | ({"heads": 1} if changes == {} else {})
    )
    model = randomize(vitrail.create(name, **size | changes)).eval()
    with torch.inference_mode():
        logits = model(IMAGES)
    classes = torch.tensor([3, 5])
    parts = patch_evidence(model, IMAGES, classes)
    assert parts.shape == (2, *model.stem.grid(16, 24))
    assert torch.allclose(parts.mean((1, 2)), logits[torch.arange(2), classes] - logits.mean(1), atol=1e-4)


def test_patch_evidence_of_a_dense_head_are_its_logits():
    model = small("lvvit_t", stem_width=8, patch_size=16, image_size=(32, 48))
    images = torch.randn(2, 3, 32, 48)
    with torch.no_grad():
        dense = model.outputs(images).dense
    expected = (dense[..., 3] - dense.mean(-1)).unflatten(1, (2, 3))
    assert torch.allclose(patch_evidence(model, images, torch.tensor([3, 3])), expected, atol=1e-5)


def test_unsupported_models_are_rejected():
    with pytest.raises(UserError, match="Layer 0 of this model has no attention"):
        attention_rollout(small("vitrail_mini"), IMAGES)
    with pytest.raises(UserError, match="Patch evidence needs mean pooling"):
        patch_evidence(small(pooling="class"), IMAGES, torch.tensor([0, 1]))
