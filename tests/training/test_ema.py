"""The EMA of weights: its formula, skipped steps, applying it to a model, resuming."""

import copy

import pytest
import torch
from torch import nn

from tests.small import shrink
from vitrail.errors import UserError
from vitrail.models.registry import build, lookup
from vitrail.training.ema import ModelEma, named_tensors


def small():
    """BatchNorm in the stem: floating-point and integer buffers."""
    return build(shrink(lookup("lvvit_s")[1]))


def change_weights(model):
    """Change the tensors like a training step: weights, running statistics (variances stay positive), step counts."""
    with torch.no_grad():
        for tensor in named_tensors(model).values():
            tensor.add_(torch.rand_like(tensor) if tensor.is_floating_point() else 1)


def snapshot(model):
    return {name: tensor.clone() for name, tensor in named_tensors(model).items()}


def same(some, others):
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def test_the_model_has_all_kinds_of_tensors():
    kinds = {tensor.dtype for tensor in named_tensors(small()).values()}
    assert kinds == {torch.float32, torch.int64}


@pytest.mark.parametrize("decay", [0.0, 0.9, 0.99996])
def test_rule(decay):
    model = small()
    ema = ModelEma(model, decay)
    expected = {name: tensor.double() for name, tensor in snapshot(model).items()}
    for _ in range(20):
        change_weights(model)
        live = snapshot(model)
        ema.update()
        assert same(live, named_tensors(model))
        for name, tensor in live.items():
            expected[name] = decay * expected[name] + (1 - decay) * tensor if tensor.is_floating_point() else tensor
    for name, ema_value in ema.state_dict().items():
        torch.testing.assert_close(ema_value.double(), expected[name].double(), rtol=1e-5, atol=1e-5)
        assert ema_value.dtype == named_tensors(model)[name].dtype


def test_weights_of_every_precision():
    """The EMA of constant weights stays constant, bit for bit."""
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(2, 2).double(), nn.Linear(4, 1).bfloat16()])
    before = snapshot(model)
    ema = ModelEma(model, 0.99)
    for _ in range(5):
        ema.update(torch.tensor(0.0))
    assert same(ema.state_dict(), before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3.0])
def test_skipped_steps_have_no_effect(bad):
    model = small()
    twin = copy.deepcopy(model)
    ema, reference = ModelEma(model, 0.9), ModelEma(twin, 0.9)
    for _ in range(4):
        change_weights(model)
        for name, tensor in named_tensors(twin).items():
            tensor.copy_(named_tensors(model)[name])
        ema.update(skip=torch.tensor(0.0))
        reference.update()
        before = snapshot(model)
        with torch.no_grad():
            for tensor in named_tensors(model).values():
                tensor.fill_(bad if tensor.is_floating_point() else 7)
        ema.update(skip=torch.tensor(1.0))
        model.load_state_dict(before)
    assert same(ema.state_dict(), reference.state_dict())


def test_applied():
    model = small().eval()
    ema = ModelEma(model, 0.5)
    image = torch.randn(2, 3, *model.architecture.image_size)
    for _ in range(3):
        change_weights(model)
        ema.update()
    before, ema_value = snapshot(model), {name: tensor.clone() for name, tensor in ema.state_dict().items()}
    addresses = {name: tensor.data_ptr() for name, tensor in named_tensors(model).items()}
    with ema.applied(model):
        assert same(snapshot(model), ema_value)
        assert {name: tensor.data_ptr() for name, tensor in named_tensors(model).items()} == addresses
        inside = model(image)
    assert same(snapshot(model), before)
    assert same(ema.state_dict(), ema_value)
    other = small().eval()
    other.load_state_dict(ema_value)
    assert torch.equal(other(image), inside)
    with ema.applied(other):
        assert same(snapshot(other), ema_value)


def test_weights_are_restored_after_an_exception():
    model = small()
    ema = ModelEma(model, 0.5)
    change_weights(model)
    before = snapshot(model)

    def interrupted():
        with ema.applied(model):
            change_weights(model)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert same(snapshot(model), before)


def test_resume_is_bit_equal(tmp_path):
    model = small()
    ema = ModelEma(model, 0.99)
    for _ in range(3):
        change_weights(model)
        ema.update()
    torch.save({"model": model.state_dict(), "ema": ema.state_dict()}, tmp_path / "state")
    saved = torch.load(tmp_path / "state", weights_only=True)
    resumed = small()
    again = ModelEma(resumed, 0.99)
    resumed.load_state_dict(saved["model"])
    again.load_state_dict(saved["ema"])
    for step in range(3):
        for some, ema_value in ((model, ema), (resumed, again)):
            torch.manual_seed(step)
            change_weights(some)
            ema_value.update()
    assert same(ema.state_dict(), again.state_dict())


def test_loading_copies():
    model = small()
    ema = ModelEma(model, 0.5)
    state = {name: tensor.clone() for name, tensor in ema.state_dict().items()}
    ema.load_state_dict(state)
    kept = {name: tensor.clone() for name, tensor in state.items()}
    change_weights(model)
    ema.update()
    assert same(state, kept)


def test_another_model_is_rejected():
    ema = ModelEma(small(), 0.5)
    with pytest.raises(UserError, match="another model"), ema.applied(nn.Linear(2, 2)):
        pass
    state = ema.state_dict()
    missing = {name: tensor for name, tensor in state.items() if not name.startswith("head.")}
    with pytest.raises(UserError, match=r"head\.bias differs"):
        ema.load_state_dict(missing)
    with pytest.raises(UserError, match=r"head\.bias differs"):
        ema.load_state_dict(state | {"head.bias": torch.zeros(3)})
    with pytest.raises(UserError, match="decay"):
        ModelEma(small(), 1.0)


@pytest.mark.gpu
def test_gpu_agrees_and_is_not_synchronized():
    model = small()
    twin = copy.deepcopy(model).cuda()
    ema, on_device = ModelEma(model, 0.9), ModelEma(twin, 0.9)
    for step in range(6):
        change_weights(model)
        for name, tensor in named_tensors(twin).items():
            tensor.copy_(named_tensors(model)[name])
        skip = torch.tensor(float(step % 2))
        flag = skip.cuda()
        ema.update(skip)
        torch.cuda.set_sync_debug_mode("error")
        try:
            on_device.update(flag)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert same({name: tensor.cpu() for name, tensor in named_tensors(twin).items()}, named_tensors(model))
    for name, ema_value in on_device.state_dict().items():
        torch.testing.assert_close(ema_value.cpu(), ema.state_dict()[name], rtol=1e-6, atol=1e-6)


def test_decay_warmup():
    """After n steps the decay is at most (1 + n) / (10 + n)."""
    model = small()
    ema, name = ModelEma(model, 0.5), next(iter(dict(model.named_parameters())))
    expected = dict(model.named_parameters())[name].detach().double().clone()
    for step in range(12):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * dict(model.named_parameters())[name].detach().double()
        ema.update(steps=step)
    torch.testing.assert_close(ema.state_dict()[name].double(), expected, rtol=1e-5, atol=1e-5)
