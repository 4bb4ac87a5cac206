"""Freezing: what is trained of which network, and that the rest costs nothing."""

import numpy as np
import pytest
import torch
from rich.console import Console

import vitrail
from tests.small import structures
from vitrail.data.feeding import Feed
from vitrail.data.opening import open_splits
from vitrail.data.source import Subset
from vitrail.recipes import lookup
from vitrail.training.devices import Devices
from vitrail.training.display import Display
from vitrail.training.loop import Training
from vitrail.training.preparing import build
from vitrail.training.scope import apply_scope
from vitrail.training.speed import Speed

SCOPES = ("full", "attention", "ffn", "head", "norm", "last:1")


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def share(model):
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return sum(sizes[name] for name in trained(model)) / sum(sizes.values())


@pytest.mark.parametrize(("scope", "least", "most"), [("attention", 0.32, 0.35), ("ffn", 0.64, 0.68), ("last:4", 0.32, 0.35)])
def test_shares_of_a_vit(scope, least, most):
    model = vitrail.create("deit_base_patch16", device="meta")
    count = apply_scope(model, scope)
    assert least < share(model) < most
    assert count == sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def test_what_lies_in_a_scope():
    def inside(scope, name="deit_tiny_patch16", **parts):
        model = vitrail.create(name, 3, 32, device="meta", depth=3, **parts)
        apply_scope(model, scope)
        return trained(model)

    head = {"head.weight", "head.bias"}
    assert inside("head") == head
    assert inside("norm") == head | {name for name in inside("full") if "norm" in name}
    attention = inside("attention")
    assert {name.split(".")[2] for name in attention if name.startswith("blocks")} == {"mix"}
    assert not any("norm" in name or "ffn" in name for name in attention)
    assert any(name.startswith("positions") for name in attention)  # which a new size changes
    assert {name.split(".")[2] for name in inside("ffn") if name.startswith("blocks")} == {"ffn"}
    assert {name.split(".")[1] for name in inside("last:2") if name.startswith("blocks")} == {"1", "2"}
    assert not any(name.startswith(("stem", "positions", "special")) for name in inside("last:2"))
    assert inside("last:0") == head | {"norm.weight", "norm.bias"}
    assert inside("last:99") >= {name for name in inside("full") if name.startswith("blocks")}
    branches = inside("attention", "vit_tiny_patch16_6x2_ls")
    assert {name.split(".")[4] for name in branches if name.startswith("blocks")} == {"0", "1"}
    cait = inside("attention", "cait_xxs24")
    assert any(name.startswith("readout") and ".attention." in name for name in cait)
    assert not any("scale" in name for name in cait)


@pytest.mark.parametrize("name", structures())
@pytest.mark.parametrize("scope", SCOPES)
def test_every_network_has_something_in_every_scope(name, scope):
    """At least the classifier, which always learns; gradients reach it."""
    model = vitrail.build(structures()[name])
    before = trained(model)
    apply_scope(model, scope)
    assert trained(model) <= before
    assert {part for part in before if part.startswith("head")} <= trained(model)
    if scope == "full":
        assert trained(model) == before


def test_what_is_frozen_costs_nothing_and_stays(tmp_path):
    changes = {"model": "deit_tiny_patch16", "architecture.width": 16, "architecture.depth": 2, "architecture.heads": 2}
    changes |= {"architecture.patch_size": 4, "augmentation.size": 8, "batch": 8, "schedule.length": "2 steps"}
    changes |= {"start.scope": "attention", "average.decay": 0.5, "optimiser.layer_decay": 0.9}
    recipe = lookup("laptop").set(changes)
    feed = Feed(Subset(open_splits("digits").train, np.arange(16)), workers=0, say=lambda sentence: None)
    model = build(recipe, feed.source)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    training = Training(recipe, model, Devices(torch.device("cpu")), feed, feed, tmp_path)
    gradients = set()
    take = training.optimiser.step

    def step():
        gradients.update(name for name, parameter in model.named_parameters() if parameter.grad is not None)
        take()

    training.optimiser.step = step
    training.run(Display(2, 2, 8, console=Console(quiet=True)), None, Speed(model, torch.device("cpu"), 1))
    inside = trained(model)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert gradients == inside
    assert {names[parameter] for parameter in training.optimiser.state} == inside
    assert changed == inside
    assert 0.2 < share(model) < 0.5
