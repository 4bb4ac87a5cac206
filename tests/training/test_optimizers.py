"""Groups of parameters, and every optimizer against its rule in double precision and against torch's plain loop."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import vitrail
from tests.small import shrink
from vitrail.errors import UserError
from vitrail.models.registry import build, list_models, lookup
from vitrail.recipes.schema import OptimizerConfig
from vitrail.training.lamb import Lamb
from vitrail.training.optimizers import clip_gradients, decayed, make_optimizer, parameter_groups, set_rate

SHAPES = [(7, 5), (3, 4, 2, 2), (8,), ()]
RULES = {
    "adamw": OptimizerConfig("adamw", weight_decay=0.05),
    "adam": OptimizerConfig("adam", weight_decay=0.05, weight_decay_coupled=True),
    "sgd": OptimizerConfig("sgd", weight_decay=0.05, weight_decay_coupled=True),
    "sgd, decoupled": OptimizerConfig("sgd", weight_decay=0.05),
    "sgd, heavy ball": OptimizerConfig("sgd", weight_decay=1e-4, weight_decay_coupled=True, nesterov=False),
    "sgd, bare": OptimizerConfig("sgd", weight_decay=0.0, momentum=0.0),
    "adagrad": OptimizerConfig("adagrad", weight_decay=0.05, weight_decay_coupled=True),
    "adagrad, decoupled": OptimizerConfig("adagrad", weight_decay=0.05),
    "lamb": OptimizerConfig("lamb", weight_decay=0.05, clip_grad_norm=1.0),
}
RATE = 1e-2


def rates(steps):
    return [RATE * (1 + step / steps) for step in range(steps)]


def gradients(steps):
    rng = np.random.default_rng(2)
    return [[rng.normal(size=shape) for shape in SHAPES] for _ in range(steps)]


def make(how, dtype=torch.float32):
    rng = np.random.default_rng(1)
    parameters = [nn.Parameter(torch.tensor(rng.normal(size=shape), dtype=dtype)) for shape in SHAPES]
    groups = [
        {"params": parameters[:2], "weight_decay": how.decay, "rate_factor": 0.5},
        {"params": parameters[2:], "weight_decay": 0.0, "rate_factor": 1.0},
    ]
    return parameters, make_optimizer(groups, how, RATE)


def feed(parameters, grads):
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = torch.tensor(grad, dtype=parameter.dtype)


def defined(how, weights, steps):
    """Each rule, tensor by tensor; the first two tensors decay and move at half the rate."""
    weights = [weight.copy() for weight in weights]
    state = [[np.zeros_like(weight), np.zeros_like(weight)] for weight in weights]
    for step, (grads, rate) in enumerate(zip(steps, rates(len(steps)), strict=True), 1):
        for place, grad in enumerate(grads):
            pull, pace = (how.decay, rate / 2) if place < 2 else (0.0, rate)
            weight, (first, second) = weights[place], state[place]
            if how.decay_coupled:
                grad = grad + pull * weight
            else:
                weight = weight - pace * pull * weight
            if how.kind in ("adam", "adamw"):
                first = how.betas[0] * first + (1 - how.betas[0]) * grad
                second = how.betas[1] * second + (1 - how.betas[1]) * grad**2
                mean, square = first / (1 - how.betas[0] ** step), second / (1 - how.betas[1] ** step)
                update = mean / (np.sqrt(square) + how.eps)
            elif how.kind == "sgd":
                first = how.momentum * first + grad
                update = grad + how.momentum * first if how.nesterov else first
            else:
                second = second + grad**2
                update = grad / (np.sqrt(second) + how.eps)
            weights[place], state[place] = weight - pace * update, [first, second]
    return weights


def error(parameters, expected):
    pairs = [(parameter.detach().double().numpy(), value) for parameter, value in zip(parameters, expected, strict=True)]
    return max(np.linalg.norm(ours - value) / np.linalg.norm(value) for ours, value in pairs)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("name", [name for name in RULES if name != "lamb"])
def test_rules(name, dtype, limit):
    parameters, optimizer = make(RULES[name], dtype)
    before = [parameter.detach().double().numpy().copy() for parameter in parameters]
    steps = gradients(25)
    for grads, rate in zip(steps, rates(25), strict=True):
        set_rate(optimizer, rate)
        feed(parameters, grads)
        optimizer.step()
    assert error(parameters, defined(RULES[name], before, steps)) <= limit


TORCH = {
    "adamw": lambda groups: torch.optim.AdamW(groups, foreach=False, fused=False),
    "adam": lambda groups: torch.optim.Adam(groups, foreach=False, fused=False),
    "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True, foreach=False, fused=False),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, eps=1e-8, foreach=False, fused=False),
}


@pytest.mark.parametrize("name", TORCH)
def test_plain_loops_of_torch(name):
    parameters, optimizer = make(RULES[name])
    twins = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    groups = [{"params": twins[:2], "weight_decay": RULES[name].decay}, {"params": twins[2:], "weight_decay": 0.0}]
    theirs = TORCH[name](groups)
    for grads, rate in zip(gradients(25), rates(25), strict=True):
        set_rate(optimizer, rate)
        for group, factor in zip(theirs.param_groups, (0.5, 1.0), strict=True):
            group["lr"] = rate * factor
        feed(parameters, grads)
        feed(twins, grads)
        optimizer.step()
        theirs.step()
    assert error(parameters, [twin.detach().double().numpy() for twin in twins]) <= 1e-6


def everything(parameters, optimizer):
    found = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        found += [value.clone() for _, value in sorted(optimizer.state[parameter].items())]
    return found


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1.0])
def test_skipped_steps_leave_no_trace(name, bad):
    """Skipped first, skipped in between: weights and state are bit by bit those of a run without these steps."""
    plain, reference = make(RULES[name])
    skipping, optimizer = make(RULES[name])
    for grads in gradients(6):
        feed(plain, grads)
        reference.found_inf = torch.tensor(0.0)
        reference.step()
        for found in (1.0, 0.0):
            feed(skipping, [np.full(shape, bad) for shape in SHAPES] if found else grads)
            optimizer.found_inf = torch.tensor(found)
            optimizer.step()
    for ours, theirs in zip(everything(skipping, optimizer), everything(plain, reference), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", RULES)
def test_resume_is_bit_equal(name):
    parameters, optimizer = make(RULES[name])
    steps = gradients(8)
    for grads in steps[:4]:
        feed(parameters, grads)
        optimizer.step()
    resumed, other = make(RULES[name])
    for parameter, value in zip(resumed, parameters, strict=True):
        parameter.data.copy_(value.data)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for grads in steps[4:]:
        for some, rule in ((parameters, optimizer), (resumed, other)):
            feed(some, grads)
            rule.step()
    for ours, theirs in zip(everything(resumed, other), everything(parameters, optimizer), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", RULES)
def test_gradscaler(name):
    parameters, optimizer = make(RULES[name])
    before = [parameter.detach().clone() for parameter in parameters]
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for spoiled in (True, False):
        scaler.scale(sum(parameter.square().sum() for parameter in parameters)).backward()
        if spoiled:
            parameters[0].grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert all(torch.equal(parameter, value) == spoiled for parameter, value in zip(parameters, before, strict=True))


def test_a_kind_and_its_decay_must_agree():
    for how in (
        OptimizerConfig("adam"),
        OptimizerConfig("adamw", weight_decay_coupled=True),
        OptimizerConfig("lamb", weight_decay_coupled=True),
    ):
        with pytest.raises(UserError, match="decay_coupled"):
            make(how)
    make(OptimizerConfig("adam", weight_decay=0.0))


def test_lamb_gets_its_options():
    _, optimizer = make(
        OptimizerConfig("lamb", clip_grad_norm=0.5, trust_ratio_on="all", max_trust_ratio=2.0, eps=1e-7, betas=(0.8, 0.9))
    )
    assert isinstance(optimizer, Lamb)
    assert (optimizer.clip, optimizer.trust, optimizer.trust_limit) == (0.5, "all", 2.0)
    assert (optimizer.param_groups[0]["eps"], optimizer.param_groups[0]["betas"]) == (1e-7, (0.8, 0.9))


def test_rates_follow_the_factors():
    _, optimizer = make(RULES["adamw"])
    assert [group["lr"] for group in optimizer.param_groups] == [RATE / 2, RATE]
    set_rate(optimizer, 4.0)
    assert [group["lr"] for group in optimizer.param_groups] == [2.0, 4.0]


def test_clipping():
    parameters, _ = make(RULES["sgd"])
    assert clip_gradients(parameters, 1.0) == 0.0
    grads = gradients(1)[0]
    norm = math.sqrt(sum((grad**2).sum() for grad in grads))
    for limit in (0.0, norm * 2, norm / 2, 1e-3):
        feed(parameters, grads)
        assert clip_gradients(iter(parameters), limit).item() == pytest.approx(norm, rel=1e-6)
        after = math.sqrt(sum(parameter.grad.double().square().sum() for parameter in parameters))
        assert after == pytest.approx(min(norm, limit) if limit else norm, rel=1e-6)
    parameters[1].grad[0, 0] = float("nan")
    assert clip_gradients(parameters, 1.0).isnan()


@pytest.mark.parametrize("name", list_models())
def test_groups_of_every_model(name):
    model = vitrail.create(name, device="meta", depth=min(lookup(name)[1].depth, 3))
    names = {parameter: key for key, parameter in model.named_parameters()}
    groups = parameter_groups(model, OptimizerConfig(weight_decay=0.05, layer_decay=0.65))
    members = [names[parameter] for group in groups for parameter in group["params"]]
    assert sorted(members) == sorted(key for key, parameter in model.named_parameters() if parameter.requires_grad)
    pulled = {names[parameter] for group in groups if group["weight_decay"] for parameter in group["params"]}
    for parameter, key in names.items():
        table = key.startswith("pos_embed.") or key in ("prefix", "pooling.queries", "stem.position")
        spared = parameter.ndim < 2 or key.endswith("bias") or table
        assert (key in pulled) != spared or not parameter.requires_grad
    # In all models the two rules name the same tensors: what has two axes and is no table is a kernel.
    assert decayed(model, "kernels") == decayed(model, "matrices")
    for group in groups:
        for parameter in group["params"]:
            key, last = names[parameter], model.architecture.depth + 1
            if key.startswith("blocks."):
                layer = int(key.split(".")[1]) + 1
            else:
                layer = 0 if key.split(".")[0] in ("stem", "prefix", "pos_embed") else last
            assert group["rate_factor"] == 0.65 ** (last - layer)


def test_two_groups_without_layer_decay():
    model = vitrail.create("deit_tiny_distilled_patch16", device="meta", depth=2)
    groups = parameter_groups(model, OptimizerConfig(weight_decay=0.05))
    assert sorted(group["weight_decay"] for group in groups) == [0.0, 0.05]
    assert all(group["rate_factor"] == 1.0 for group in groups)
    (everything,) = parameter_groups(model, OptimizerConfig(weight_decay=0.05, weight_decay_on="all"))
    assert len(everything["params"]) == len(list(model.parameters()))
    (together,) = parameter_groups(model, OptimizerConfig(weight_decay=0.0))
    assert together["weight_decay"] == 0.0


@pytest.mark.parametrize(("place", "layers"), [("layers", [1, 2]), ("shared", [3])])
def test_relative_tables_belong_to_their_blocks(place, layers):
    model = build(shrink(lookup("vit_base_patch16")[1]).replace(pos_embed="relative_bias", pos_embed_place=place))
    groups = parameter_groups(model, OptimizerConfig(weight_decay=0.05, layer_decay=0.5))
    tables = list(model.pos_embed.parameters())
    for table, layer in zip(tables, layers, strict=True):
        (group,) = [group for group in groups if any(parameter is table for parameter in group["params"])]
        assert group["rate_factor"] == 0.5 ** (3 - layer)
        assert group["weight_decay"] == 0.0


def test_frozen_parameters_are_left_out():
    model = build(shrink(lookup("deit_tiny_patch16")[1]))
    model.stem.requires_grad_(False)
    optimizer = make_optimizer(model, OptimizerConfig(), 0.1)
    members = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    assert members == {parameter for parameter in model.parameters() if parameter.requires_grad}
    model.requires_grad_(False)
    with pytest.raises(UserError, match="nothing to train"):
        make_optimizer(model, OptimizerConfig(), 0.1)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "lamb"])
def test_a_model_learns_a_batch(kind):
    torch.manual_seed(0)
    model = build(shrink(lookup("deit_tiny_patch16")[1]))
    optimizer = make_optimizer(model, OptimizerConfig(kind, clip_grad_norm=1.0), {"adamw": 3e-3, "sgd": 0.03, "lamb": 0.02}[kind])
    images, labels = torch.randn(8, 3, 8, 12), torch.arange(8) % 5
    for _ in range(40):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.2


@pytest.mark.gpu
@pytest.mark.parametrize("name", RULES)
def test_gpu_agrees_and_is_never_waited_for(name):
    host, reference = make(RULES[name])
    parameters = [nn.Parameter(parameter.detach().cuda()) for parameter in host]
    groups = [
        {"params": parameters[:2], "weight_decay": RULES[name].decay, "rate_factor": 0.5},
        {"params": parameters[2:], "weight_decay": 0.0, "rate_factor": 1.0},
    ]
    optimizer = make_optimizer(groups, RULES[name], RATE)
    for step, grads in enumerate(gradients(20)):
        found = torch.tensor(float(step % 3 == 0))
        feed(host, [grad * math.nan for grad in grads] if found else grads)
        for parameter, twin in zip(parameters, host, strict=True):
            parameter.grad = twin.grad.cuda()
        on_device = found.cuda()
        reference.found_inf, optimizer.found_inf = found, on_device
        reference.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            clip_gradients(parameters, 100.0)
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for ours, theirs in zip(everything(parameters, optimizer), everything(host, reference), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-6)
