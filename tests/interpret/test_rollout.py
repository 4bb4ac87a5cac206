"""Where an answer comes from: attention followed through the blocks, and what each patch says."""

import pytest
import torch

import vitrail
from vitrail.errors import UserError
from vitrail.interpret.rollout import attention_rollout, patch_evidence

SMALL = {"width": 32, "depth": 3, "heads": 2, "patch_size": 4, "image_size": (16, 24), "classes": 7}
IMAGES = torch.randn(2, 3, 16, 24, generator=torch.Generator().manual_seed(0))


def small(name="deit3_small_patch16", **parts):
    model = vitrail.create(name, **SMALL | parts).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


@pytest.mark.parametrize("pooling", ["mean", "class"])
def test_rollout_is_the_product_of_attentions(pooling):
    model = small(pooling=pooling)
    found = attention_rollout(model, IMAGES)
    assert found.shape == (2, 4, 6)
    assert torch.allclose(found.sum((1, 2)), torch.ones(2))
    trace = model.trace(IMAGES)
    steps = [(trace.layers[index].attention.mean(1) + torch.eye(24 + trace.prefix)) / 2 for index in range(3)]
    whole = steps[2] @ steps[1] @ steps[0]
    row = whole.mean(1) if pooling == "mean" else whole[:, 0, 1:]
    assert torch.allclose(found.flatten(1), row / row.sum(1, keepdim=True), atol=1e-6)


def test_rollout_of_uniform_attention_is_uniform():
    model = small(pooling="mean")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "qkv" in name:
                parameter.zero_()
    assert torch.allclose(attention_rollout(model, IMAGES), torch.full((2, 4, 6), 1 / 24), atol=1e-6)


def test_patch_evidence_sums_to_the_logit():
    model = small(pooling="mean")
    with torch.inference_mode():
        logits = model(IMAGES)
    classes = torch.tensor([3, 5])
    parts = patch_evidence(model, IMAGES, classes)
    assert parts.shape == (2, 4, 6)
    assert torch.allclose(parts.mean((1, 2)), logits[torch.arange(2), classes] - logits.mean(1), atol=1e-5)


def test_unsupported_models_are_rejected():
    with pytest.raises(UserError, match="Block 0 of this model has no attention"):
        attention_rollout(small("vitrail_mini"), IMAGES)
    with pytest.raises(UserError, match="this model has the pooling 'class_attention'"):
        attention_rollout(small("cait_xxs24"), IMAGES)
    with pytest.raises(UserError, match="Patch evidence needs mean pooling"):
        patch_evidence(small(pooling="class"), IMAGES, torch.tensor([0, 1]))
