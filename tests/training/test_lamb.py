"""LAMB against its rule, written out anew in double precision."""

import numpy as np
import pytest
import torch

from vitrail.training.lamb import Lamb

SHAPES = [(7, 5), (3, 4, 2, 2), (6, 6), (5, 3), (8,), (), (4, 9)]
DECAYED = [0, 1, 2, 3]  # places of the tensors in the group with a decay
BETAS, EPS = (0.9, 0.999), 1e-8


def start_values():
    """Some weights; tensors 2 and 4 start at zero, one of them decayed and one not."""
    rng = np.random.default_rng(1)
    return [np.zeros(shape) if place in (2, 4) else rng.normal(size=shape) for place, shape in enumerate(SHAPES)]


def gradients(steps):
    """Of changing size, so that some are clipped and some are not; tensor 3 has none but zeros."""
    rng = np.random.default_rng(2)
    sizes = 10.0 ** rng.uniform(-3, 1, size=steps)
    return [[size * rng.normal(size=shape) * (place != 3) for place, shape in enumerate(SHAPES)] for size in sizes]


def defined(weights, steps, rate, decay, clip, trust, limit):
    """The rule of Apex's FusedLAMB (and of NvLamb, with trust "all"), tensor by tensor."""
    weights = [weight.copy() for weight in weights]
    first = [np.zeros_like(weight) for weight in weights]
    second = [np.zeros_like(weight) for weight in weights]
    for step, grads in enumerate(steps, 1):
        norm = np.sqrt(sum((grad**2).sum() for grad in grads))
        for place, grad in enumerate(grads):
            grad = grad / max(norm / clip, 1.0) if clip else grad
            pull = decay if place in DECAYED else 0.0
            first[place] = BETAS[0] * first[place] + (1 - BETAS[0]) * grad
            second[place] = BETAS[1] * second[place] + (1 - BETAS[1]) * grad**2
            mean, square = first[place] / (1 - BETAS[0] ** step), second[place] / (1 - BETAS[1] ** step)
            update = mean / (np.sqrt(square) + EPS) + pull * weights[place]
            ratio = 1.0
            if trust == "all" or pull:
                size, length = np.linalg.norm(weights[place]), np.linalg.norm(update)
                ratio = size / length if size > 0 and length > 0 else 1.0
                ratio = min(ratio, limit) if limit else ratio
            weights[place] = weights[place] - rate * ratio * update
    return weights


def make(dtype=torch.float32, decay=0.05, device="cpu", **options):
    parameters = [torch.nn.Parameter(torch.tensor(value, dtype=dtype, device=device)) for value in start_values()]
    decayed = [parameters[place] for place in DECAYED]
    others = [parameter for place, parameter in enumerate(parameters) if place not in DECAYED]
    groups = [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return parameters, Lamb(groups, lr=3e-3, betas=BETAS, eps=EPS, **options)


def feed(parameters, grads):
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = torch.tensor(grad, dtype=parameter.dtype, device=parameter.device)


def error(parameters, expected):
    """The largest relative distance of a tensor."""
    pairs = [(parameter.detach().double().numpy(), value) for parameter, value in zip(parameters, expected, strict=True)]
    return max(np.linalg.norm(ours - value) / max(np.linalg.norm(value), 1e-300) for ours, value in pairs)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize(
    ("clip", "trust", "trust_limit", "decay"),
    [
        (1.0, "decayed", 0.0, 0.05),  # Apex's FusedLAMB
        (1.0, "all", 0.0, 0.05),  # NvLamb
        (0.0, "all", 0.0, 0.01),  # as first published
        (1.0, "decayed", 1.0, 0.2),  # timm with trust_clip
        (0.5, "decayed", 0.0, 0.0),  # without a decay nobody is scaled
    ],
)
def test_rule(dtype, limit, clip, trust, trust_limit, decay):
    parameters, optimizer = make(dtype, decay, clip=clip, trust=trust, trust_limit=trust_limit)
    steps = gradients(30)
    for grads in steps:
        feed(parameters, grads)
        optimizer.step()
    expected = defined(start_values(), steps, 3e-3, decay, clip, trust, trust_limit)
    assert error(parameters, expected) <= limit
    if trust_limit:
        assert error(parameters, defined(start_values(), steps, 3e-3, decay, clip, trust, 0.0)) > limit


def test_defaults_are_those_of_apex():
    parameters = [torch.nn.Parameter(torch.ones(3, 3))]
    optimizer = Lamb(parameters)
    assert (optimizer.clip, optimizer.trust, optimizer.trust_limit) == (1.0, "decayed", 0.0)
    assert optimizer.defaults["betas"] == (0.9, 0.999)
    assert optimizer.defaults["eps"] == 1e-6


def everything(parameters, optimizer):
    """Weights and state as one list."""
    found = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        found += [value.clone() for _, value in sorted(optimizer.state[parameter].items())]
    return found


@pytest.mark.parametrize("trust", ["decayed", "all"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1.0])
def test_skipped_steps_leave_no_trace(trust, bad):
    steps = gradients(6)
    plain, reference = make(trust=trust)
    skipping, optimizer = make(trust=trust)
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
    """A loss multiplied by 2^10 whose gradients the optimizer divides: the norm that is clipped is the true one."""
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


def test_gradscaler_hands_its_flag_over():
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
def test_gpu_agrees_and_is_never_waited_for():
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
