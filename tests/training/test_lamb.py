"""LAMB against its formula in float64."""

import numpy as np
import pytest
import torch

from vitrail.models.registry import create
from vitrail.recipes.schema import OptimizerConfig
from vitrail.training.lamb import Lamb
from vitrail.training.optimizers import parameter_groups

SHAPES = [(7, 5), (3, 4, 2, 2), (6, 6), (5, 3), (8,), (), (4, 9)]
DECAYED = [0, 1, 2, 3]  # indices of the tensors with weight decay
BETAS, EPS = (0.9, 0.999), 1e-8


def start_values():
    """Initial weights; tensors 2 (with weight decay) and 4 (without) are zero."""
    rng = np.random.default_rng(1)
    return [np.zeros(shape) if index in (2, 4) else rng.normal(size=shape) for index, shape in enumerate(SHAPES)]


def gradients(steps):
    """Gradients of different norms, of which some are clipped; those of tensor 3 are zero."""
    rng = np.random.default_rng(2)
    sizes = 10.0 ** rng.uniform(-3, 1, size=steps)
    return [[size * rng.normal(size=shape) * (index != 3) for index, shape in enumerate(SHAPES)] for size in sizes]


def defined(weights, steps, lr, decay, clip_grad_norm, trust_ratio_on, limit):
    """The rule of Apex's FusedLAMB (and of NvLamb, with trust_ratio_on "all"), tensor by tensor."""
    weights = [weight.copy() for weight in weights]
    first = [np.zeros_like(weight) for weight in weights]
    second = [np.zeros_like(weight) for weight in weights]
    for step, grads in enumerate(steps, 1):
        norm = np.sqrt(sum((grad**2).sum() for grad in grads))
        for index, grad in enumerate(grads):
            grad = grad / max(norm / clip_grad_norm, 1.0) if clip_grad_norm else grad
            weight_decay = decay if index in DECAYED else 0.0
            first[index] = BETAS[0] * first[index] + (1 - BETAS[0]) * grad
            second[index] = BETAS[1] * second[index] + (1 - BETAS[1]) * grad**2
            mean, square = first[index] / (1 - BETAS[0] ** step), second[index] / (1 - BETAS[1] ** step)
            update = mean / (np.sqrt(square) + EPS) + weight_decay * weights[index]
            ratio = 1.0
            if trust_ratio_on == "all" or weight_decay:
                size, length = np.linalg.norm(weights[index]), np.linalg.norm(update)
                ratio = size / length if size > 0 and length > 0 else 1.0
                ratio = min(ratio, limit) if limit else ratio
            weights[index] = weights[index] - lr * ratio * update
    return weights


def make(dtype=torch.float32, decay=0.05, device="cpu", **options):
    parameters = [torch.nn.Parameter(torch.tensor(value, dtype=dtype, device=device)) for value in start_values()]
    decayed = [parameters[index] for index in DECAYED]
    others = [parameter for index, parameter in enumerate(parameters) if index not in DECAYED]
    groups = [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return parameters, Lamb(groups, lr=3e-3, betas=BETAS, eps=EPS, **options)


def feed(parameters, grads):
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = torch.tensor(grad, dtype=parameter.dtype, device=parameter.device)


def error(parameters, expected):
    """The largest relative error of a tensor."""
    pairs = [(parameter.detach().double().numpy(), value) for parameter, value in zip(parameters, expected, strict=True)]
    return max(np.linalg.norm(ours - value) / max(np.linalg.norm(value), 1e-300) for ours, value in pairs)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize(
    ("clip_grad_norm", "trust_ratio_on", "max_trust_ratio", "decay"),
    [
        (1.0, "decayed", 0.0, 0.05),  # Apex's FusedLAMB
        (1.0, "all", 0.0, 0.05),  # NvLamb
        (0.0, "all", 0.0, 0.01),  # as first published
        (1.0, "decayed", 1.0, 0.2),  # timm with trust_clip
        (0.5, "decayed", 0.0, 0.0),  # no trust ratio without weight decay
    ],
)
def test_formula(dtype, limit, clip_grad_norm, trust_ratio_on, max_trust_ratio, decay):
    parameters, optimizer = make(
        dtype, decay, clip_grad_norm=clip_grad_norm, trust_ratio_on=trust_ratio_on, max_trust_ratio=max_trust_ratio
    )
    steps = gradients(30)
    for grads in steps:
        feed(parameters, grads)
        optimizer.step()
    expected = defined(start_values(), steps, 3e-3, decay, clip_grad_norm, trust_ratio_on, max_trust_ratio)
    assert error(parameters, expected) <= limit
    if max_trust_ratio:
        assert error(parameters, defined(start_values(), steps, 3e-3, decay, clip_grad_norm, trust_ratio_on, 0.0)) > limit


def test_defaults_are_those_of_apex():
    parameters = [torch.nn.Parameter(torch.ones(3, 3))]
    optimizer = Lamb(parameters)
    assert (optimizer.clip_grad_norm, optimizer.trust_ratio_on, optimizer.max_trust_ratio) == (1.0, "decayed", 0.0)
    assert optimizer.defaults["betas"] == (0.9, 0.999)
    assert optimizer.defaults["eps"] == 1e-6


def everything(parameters, optimizer):
    """Weights and state as one list."""
    found = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        found += [value.clone() for _, value in sorted(optimizer.state[parameter].items())]
    return found


@pytest.mark.parametrize("trust_ratio_on", ["decayed", "all"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1.0])
def test_skipped_steps_have_no_effect(trust_ratio_on, bad):
    steps = gradients(6)
    plain, reference = make(trust_ratio_on=trust_ratio_on)
    skipping, optimizer = make(trust_ratio_on=trust_ratio_on)
    for grads in steps:
        feed(plain, grads)
        reference.step()
        for found in (1.0, 0.0):
            feed(skipping, [np.full(shape, bad) for shape in SHAPES] if found else grads)
            optimizer.found_inf = torch.tensor(found)
            optimizer.step()
    for ours, theirs in zip(everything(skipping, optimizer), everything(plain, reference), strict=True):
        assert torch.equal(ours, theirs)


def test_scaled_gradients():
    """With grad_scale the norm of the unscaled gradients is clipped."""
    plain, reference = make()
    scaled, optimizer = make()
    for grads in gradients(8):
        feed(plain, grads)
        reference.step()
        feed(scaled, [1024 * grad for grad in grads])
        optimizer.grad_scale = torch.tensor(1024.0)
        optimizer.step()
    for ours, theirs in zip(everything(scaled, optimizer), everything(plain, reference), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_gradscaler_sets_found_inf():
    parameters, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    outputs = scaler.scale(sum(parameter.sum() for parameter in parameters))
    outputs.backward()
    parameters[0].grad[0, 0] = float("inf")
    before = [parameter.detach().clone() for parameter in parameters]
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(parameter, value) for parameter, value in zip(parameters, before, strict=True))
    assert scaler.get_scale() == 8.0
    assert all(optimizer.state[parameter]["step"] == 0 for parameter in parameters)


def test_resume_is_bit_equal(tmp_path):
    steps = gradients(10)
    parameters, optimizer = make()
    for grads in steps[:5]:
        feed(parameters, grads)
        optimizer.step()
    torch.save({"weights": [p.detach() for p in parameters], "optimizer": optimizer.state_dict()}, tmp_path / "state")
    saved = torch.load(tmp_path / "state", weights_only=True)
    resumed, other = make()
    for parameter, value in zip(resumed, saved["weights"], strict=True):
        parameter.data.copy_(value)
    other.load_state_dict(saved["optimizer"])
    for grads in steps[5:]:
        for some, rule in ((parameters, optimizer), (resumed, other)):
            feed(some, grads)
            rule.step()
    for ours, theirs in zip(everything(resumed, other), everything(parameters, optimizer), strict=True):
        assert torch.equal(ours, theirs)


def test_a_ratio_per_row_is_that_of_separate_layers():
    """PatchConvNet's code has a linear layer for each class, so that LAMB scales the update of each class by itself."""
    torch.manual_seed(0)
    model = create("patchconvnet_s20_multi", classes=3, image_size=32, width=16, depth=1)
    groups = parameter_groups(model, OptimizerConfig(kind="lamb", weight_decay=0.05))
    (own,) = (group for group in groups if group.get("per_row"))
    assert own["params"] == [model.head.weight]
    assert own["weight_decay"] == 0.05
    assert not any(group.get("per_row") for group in parameter_groups(model, OptimizerConfig(weight_decay=0.05)))

    start = torch.randn(3, 16, dtype=torch.float64) * torch.tensor([[1.0], [0.1], [0.0]])
    rows = [torch.nn.Parameter(row[None].clone()) for row in start]
    joint = torch.nn.Parameter(start.clone())
    separate, together = Lamb(rows, lr=0.01), Lamb([{"params": [joint], "per_row": True}], lr=0.01)
    for _ in range(3):
        joint.grad = torch.randn_like(start)
        for row, grad in zip(rows, joint.grad.clone(), strict=True):
            row.grad = grad[None]
        separate.step(), together.step()
    torch.testing.assert_close(joint.detach(), torch.cat([row.detach() for row in rows]), rtol=1e-12, atol=0)


def test_parameters_without_a_gradient_stay():
    parameters, optimizer = make()
    feed(parameters, gradients(1)[0])
    parameters[0].grad = None
    before = parameters[0].detach().clone()
    optimizer.step()
    assert torch.equal(parameters[0], before)
    assert not optimizer.state[parameters[0]]
    optimizer.zero_grad()
    optimizer.step()


@pytest.mark.gpu
def test_gpu_agrees_and_is_not_synchronized():
    parameters, optimizer = make(device="cuda")
    host, reference = make()
    steps = gradients(25)
    found = torch.zeros((), device="cuda")
    for grads in steps:
        feed(host, grads)
        reference.step()
        feed(parameters, grads)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.found_inf = found
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for ours, theirs in zip(everything(parameters, optimizer), everything(host, reference), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-7)
