"""Parameter groups, and every optimizer against its formula in float64 and against torch's for-loop implementation."""

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
from vitrail.training.optimizers import clip_gradients, decayed_parameters, make_optimizer, parameter_groups, set_lr

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
LR = 1e-2


def lrs(steps):
    return [LR * (1 + step / steps) for step in range(steps)]


def gradients(steps):
    rng = np.random.default_rng(2)
    return [[rng.normal(size=shape) for shape in SHAPES] for _ in range(steps)]


def make(config, dtype=torch.float32):
    rng = np.random.default_rng(1)
    parameters = [nn.Parameter(torch.tensor(rng.normal(size=shape), dtype=dtype)) for shape in SHAPES]
    groups = [
        {"params": parameters[:2], "weight_decay": config.weight_decay, "lr_scale": 0.5},
        {"params": parameters[2:], "weight_decay": 0.0, "lr_scale": 1.0},
    ]
    return parameters, make_optimizer(groups, config, LR)


def feed(parameters, grads):
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = torch.tensor(grad, dtype=parameter.dtype)


def defined(config, weights, steps):
    """Each optimizer, tensor by tensor; the first two tensors have weight decay and half the learning rate."""
    weights = [weight.copy() for weight in weights]
    state = [[np.zeros_like(weight), np.zeros_like(weight)] for weight in weights]
    for step, (grads, lr) in enumerate(zip(steps, lrs(len(steps)), strict=True), 1):
        for index, grad in enumerate(grads):
            decay, scaled_lr = (config.weight_decay, lr / 2) if index < 2 else (0.0, lr)
            weight, (first, second) = weights[index], state[index]
            if config.weight_decay_coupled:
                grad = grad + decay * weight
            else:
                weight = weight - scaled_lr * decay * weight
            if config.kind in ("adam", "adamw"):
                first = config.betas[0] * first + (1 - config.betas[0]) * grad
                second = config.betas[1] * second + (1 - config.betas[1]) * grad**2
                mean, square = first / (1 - config.betas[0] ** step), second / (1 - config.betas[1] ** step)
                update = mean / (np.sqrt(square) + config.eps)
            elif config.kind == "sgd":
                first = config.momentum * first + grad
                update = grad + config.momentum * first if config.nesterov else first
            else:
                second = second + grad**2
                update = grad / (np.sqrt(second) + config.eps)
            weights[index], state[index] = weight - scaled_lr * update, [first, second]
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
    for grads, lr in zip(steps, lrs(25), strict=True):
        set_lr(optimizer, lr)
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
def test_against_torch(name):
    parameters, optimizer = make(RULES[name])
    twins = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    groups = [{"params": twins[:2], "weight_decay": RULES[name].weight_decay}, {"params": twins[2:], "weight_decay": 0.0}]
    theirs = TORCH[name](groups)
    for grads, lr in zip(gradients(25), lrs(25), strict=True):
        set_lr(optimizer, lr)
        for group, factor in zip(theirs.param_groups, (0.5, 1.0), strict=True):
            group["lr"] = lr * factor
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
def test_skipped_steps_have_no_effect(name, bad):
    """Weights and state are bit for bit those of a run without the skipped steps, also if the first one is skipped."""
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
    for overflow in (True, False):
        scaler.scale(sum(parameter.square().sum() for parameter in parameters)).backward()
        if overflow:
            parameters[0].grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert all(torch.equal(parameter, value) == overflow for parameter, value in zip(parameters, before, strict=True))


def test_coupled_decay_must_match_the_optimizer():
    for config in (
        OptimizerConfig("adam"),
        OptimizerConfig("adamw", weight_decay_coupled=True),
        OptimizerConfig("lamb", weight_decay_coupled=True),
    ):
        with pytest.raises(UserError, match="decay_coupled"):
            make(config)
    make(OptimizerConfig("adam", weight_decay=0.0))


def test_lamb_gets_its_options():
    _, optimizer = make(
        OptimizerConfig("lamb", clip_grad_norm=0.5, trust_ratio_on="all", max_trust_ratio=2.0, eps=1e-7, betas=(0.8, 0.9))
    )
    assert isinstance(optimizer, Lamb)
    assert (optimizer.clip_grad_norm, optimizer.trust_ratio_on, optimizer.max_trust_ratio) == (0.5, "all", 2.0)
    assert (optimizer.param_groups[0]["eps"], optimizer.param_groups[0]["betas"]) == (1e-7, (0.8, 0.9))


def test_lr_scales():
    _, optimizer = make(RULES["adamw"])
    assert [group["lr"] for group in optimizer.param_groups] == [LR / 2, LR]
    set_lr(optimizer, 4.0)
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
    decayed = {names[parameter] for group in groups if group["weight_decay"] for parameter in group["params"]}
    for parameter, key in names.items():
        table = key.startswith("pos_embed.") or key in ("prefix", "pooling.queries", "stem.position")
        exempt = parameter.ndim < 2 or key.endswith("bias") or table
        assert (key in decayed) != exempt or not parameter.requires_grad
    # In all models both rules select the same tensors.
    assert decayed_parameters(model, "kernels") == decayed_parameters(model, "matrices")
    for group in groups:
        for parameter in group["params"]:
            key, last = names[parameter], len(model.layers) + 1
            if key.startswith("blocks.") or (key.startswith("stem.blocks.") and model.architecture.convnet):
                layer = int(key.removeprefix("stem.").split(".")[1]) + 1
            else:
                layer = 0 if key.split(".")[0] in ("stem", "prefix", "pos_embed") else last
            assert group["lr_scale"] == 0.65 ** (last - layer)


def test_two_groups_without_layer_decay():
    model = vitrail.create("deit_tiny_distilled_patch16", device="meta", depth=2)
    groups = parameter_groups(model, OptimizerConfig(weight_decay=0.05))
    assert sorted(group["weight_decay"] for group in groups) == [0.0, 0.05]
    assert all(group["lr_scale"] == 1.0 for group in groups)
    (everything,) = parameter_groups(model, OptimizerConfig(weight_decay=0.05, weight_decay_on="all"))
    assert len(everything["params"]) == len(list(model.parameters()))
    added = decayed_parameters(model, "tensors") - decayed_parameters(model, "matrices")
    assert added == {"prefix", "pos_embed.0.table"}
    (together,) = parameter_groups(model, OptimizerConfig(weight_decay=0.0))
    assert together["weight_decay"] == 0.0


@pytest.mark.parametrize(("place", "layers"), [("layers", [1, 2]), ("shared", [3])])
def test_relative_tables_belong_to_their_blocks(place, layers):
    model = build(shrink(lookup("vit_base_patch16")[1]).replace(pos_embed="relative_bias", pos_embed_place=place))
    groups = parameter_groups(model, OptimizerConfig(weight_decay=0.05, layer_decay=0.5))
    tables = list(model.pos_embed.parameters())
    for table, layer in zip(tables, layers, strict=True):
        (group,) = [group for group in groups if any(parameter is table for parameter in group["params"])]
        assert group["lr_scale"] == 0.5 ** (3 - layer)
        assert group["weight_decay"] == 0.0


def test_frozen_parameters_are_not_optimized():
    model = build(shrink(lookup("deit_tiny_patch16")[1]))
    model.stem.requires_grad_(False)
    optimizer = make_optimizer(model, OptimizerConfig(), 0.1)
    members = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    assert members == {parameter for parameter in model.parameters() if parameter.requires_grad}
    model.requires_grad_(False)
    with pytest.raises(UserError, match="nothing to train"):
        make_optimizer(model, OptimizerConfig(), 0.1)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "lamb"])
def test_a_model_fits_a_batch(kind):
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
def test_gpu_agrees_and_is_not_synchronized(name):
    host, reference = make(RULES[name])
    parameters = [nn.Parameter(parameter.detach().cuda()) for parameter in host]
    groups = [
        {"params": parameters[:2], "weight_decay": RULES[name].weight_decay, "lr_scale": 0.5},
        {"params": parameters[2:], "weight_decay": 0.0, "lr_scale": 1.0},
    ]
    optimizer = make_optimizer(groups, RULES[name], LR)
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
