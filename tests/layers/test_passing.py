"""Parts that would give back what they get are not called, unless somebody waits for it."""

import pytest
import torch
from torch import nn

from vitrail.layers.passing import through
from vitrail.models.config import Architecture
from vitrail.models.registry import build

TINY = Architecture(width=32, depth=2, heads=2, classes=5, image_size=(32, 48), drop_path=0.2)
HOOKS = ("register_forward_pre_hook", "register_forward_hook", "register_full_backward_pre_hook", "register_full_backward_hook")


@pytest.fixture
def called(monkeypatch):
    calls = []
    for kind in (nn.Identity, nn.Dropout):
        forward = kind.forward
        monkeypatch.setattr(kind, "forward", lambda self, x, forward=forward: calls.append(self) or forward(self, x))
    return calls


def test_what_is_called(called):
    class Other(nn.Identity):
        pass

    x = torch.ones(1000)
    for idle in (nn.Identity(), nn.Dropout(0.0), nn.Dropout(0.5).eval()):
        assert through(idle, x) is x
    assert called == []
    assert through(nn.Dropout(0.5), x).eq(0).any()
    assert through(Other(), x) is x
    assert through(nn.ReLU(), -x).eq(0).all()
    assert len(called) == 2


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("part", [nn.Identity, nn.Dropout])
def test_who_waits_for_a_call_sees_it(hook, part):
    part, seen = part(0.0), []
    handle = getattr(part, hook)(lambda *_: seen.append(1))
    through(part, torch.ones(2, requires_grad=True)).sum().backward()
    handle.remove()
    through(part, torch.ones(2, requires_grad=True)).sum().backward()
    assert seen == [1]


@pytest.mark.parametrize("kind", ["each", "skip"])
def test_a_block_calls_nothing_that_is_idle(called, kind):
    model = build(TINY.replace(drop_path_kind=kind)).train()
    called.clear()
    x, layout = model._start(*model.embed(torch.randn(4, 3, 32, 48)))
    called.clear()
    model.block(0)(x, layout).sum().backward()
    assert called == []
    assert all(parameter.grad is not None for parameter in model.block(0).parameters())
