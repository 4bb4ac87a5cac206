"""The running mean of weights: its rule, skipped steps, changing places with the weights, going on after a stop."""

import copy

import pytest
import torch
from torch import nn

from tests.small import shrink
from vitrail.errors import UserError
from vitrail.models.registry import build, lookup
from vitrail.training.ema import ModelEma, tensors_of


def small():
    """Batch statistics in the stem: floating buffers and counters of steps."""
    return build(shrink(lookup("lvvit_s")[1]))


def wander(model):
    """What a step of training does: other weights, other statistics (variances stay positive), a higher counter."""
    with torch.no_grad():
        for tensor in tensors_of(model).values():
            tensor.add_(torch.rand_like(tensor) if tensor.is_floating_point() else 1)


def snapshot(model):
    return {name: tensor.clone() for name, tensor in tensors_of(model).items()}


def same(some, others):
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def test_the_model_has_all_kinds_of_tensors():
    kinds = {tensor.dtype for tensor in tensors_of(small()).values()}
    assert kinds == {torch.float32, torch.int64}


@pytest.mark.parametrize("decay", [0.0, 0.9, 0.99996])
def test_rule(decay):
    model = small()
    average = ModelEma(model, decay)
    expected = {name: tensor.double() for name, tensor in snapshot(model).items()}
    for _ in range(20):
        wander(model)
        live = snapshot(model)
        average.update()
        assert same(live, tensors_of(model))
        for name, tensor in live.items():
            expected[name] = decay * expected[name] + (1 - decay) * tensor if tensor.is_floating_point() else tensor
    for name, mean in average.state_dict().items():
        torch.testing.assert_close(mean.double(), expected[name].double(), rtol=1e-5, atol=1e-5)
        assert mean.dtype == tensors_of(model)[name].dtype


def test_weights_of_every_precision():
    """Weights that stay where they are have a mean that stays there too, to the last bit."""
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(2, 2).double(), nn.Linear(4, 1).bfloat16()])
    before = snapshot(model)
    average = ModelEma(model, 0.99)
    for _ in range(5):
        average.update(torch.tensor(0.0))
    assert same(average.state_dict(), before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3.0])
def test_skipped_steps_leave_no_trace(bad):
    model = small()
    twin = copy.deepcopy(model)
    average, reference = ModelEma(model, 0.9), ModelEma(twin, 0.9)
    for _ in range(4):
        wander(model)
        for name, tensor in tensors_of(twin).items():
            tensor.copy_(tensors_of(model)[name])
        average.update(skip=torch.tensor(0.0))
        reference.update()
        before = snapshot(model)
        with torch.no_grad():
            for tensor in tensors_of(model).values():
                tensor.fill_(bad if tensor.is_floating_point() else 7)
        average.update(skip=torch.tensor(1.0))
        model.load_state_dict(before)
    assert same(average.state_dict(), reference.state_dict())


def test_applied_and_back():
    model = small().eval()
    average = ModelEma(model, 0.5)
    image = torch.randn(2, 3, *model.architecture.image_size)
    for _ in range(3):
        wander(model)
        average.update()
    before, mean = snapshot(model), {name: tensor.clone() for name, tensor in average.state_dict().items()}
    places = {name: tensor.data_ptr() for name, tensor in tensors_of(model).items()}
    with average.applied(model):
        assert same(snapshot(model), mean)
        assert {name: tensor.data_ptr() for name, tensor in tensors_of(model).items()} == places
        inside = model(image)
    assert same(snapshot(model), before)
    assert same(average.state_dict(), mean)
    other = small().eval()
    other.load_state_dict(mean)
    assert torch.equal(other(image), inside)
    with average.applied(other):
        assert same(snapshot(other), mean)


def test_weights_come_back_after_an_exception():
    model = small()
    average = ModelEma(model, 0.5)
    wander(model)
    before = snapshot(model)

    def interrupted():
        with average.applied(model):
            wander(model)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert same(snapshot(model), before)


def test_going_on_is_bit_equal(tmp_path):
    model = small()
    average = ModelEma(model, 0.99)
    for _ in range(3):
        wander(model)
        average.update()
    torch.save({"model": model.state_dict(), "average": average.state_dict()}, tmp_path / "state")
    saved = torch.load(tmp_path / "state", weights_only=True)
    resumed = small()
    again = ModelEma(resumed, 0.99)
    resumed.load_state_dict(saved["model"])
    again.load_state_dict(saved["average"])
    for step in range(3):
        for some, mean in ((model, average), (resumed, again)):
            torch.manual_seed(step)
            wander(some)
            mean.update()
    assert same(average.state_dict(), again.state_dict())


def test_loading_copies():
    model = small()
    average = ModelEma(model, 0.5)
    state = {name: tensor.clone() for name, tensor in average.state_dict().items()}
    average.load_state_dict(state)
    kept = {name: tensor.clone() for name, tensor in state.items()}
    wander(model)
    average.update()
    assert same(state, kept)


def test_another_model_is_refused():
    average = ModelEma(small(), 0.5)
    with pytest.raises(UserError, match="another model"), average.applied(nn.Linear(2, 2)):
        pass
    state = average.state_dict()
    missing = {name: tensor for name, tensor in state.items() if not name.startswith("head.")}
    with pytest.raises(UserError, match=r"head\.bias differs"):
        average.load_state_dict(missing)
    with pytest.raises(UserError, match=r"head\.bias differs"):
        average.load_state_dict(state | {"head.bias": torch.zeros(3)})
    with pytest.raises(UserError, match="decay"):
        ModelEma(small(), 1.0)


@pytest.mark.gpu
def test_gpu_agrees_and_is_never_waited_for():
    model = small()
    twin = copy.deepcopy(model).cuda()
    average, on_device = ModelEma(model, 0.9), ModelEma(twin, 0.9)
    for step in range(6):
        wander(model)
        for name, tensor in tensors_of(twin).items():
            tensor.copy_(tensors_of(model)[name])
        skip = torch.tensor(float(step % 2))
        flag = skip.cuda()
        average.update(skip)
        torch.cuda.set_sync_debug_mode("error")
        try:
            on_device.update(flag)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert same({name: tensor.cpu() for name, tensor in tensors_of(twin).items()}, tensors_of(model))
    for name, mean in on_device.state_dict().items():
        torch.testing.assert_close(mean.cpu(), average.state_dict()[name], rtol=1e-6, atol=1e-6)


def test_the_decay_grows_from_low():
    """After n steps it is (1 + n) / (10 + n) at most; with decay 0.5 from the eighth on as without."""
    model = small()
    average, name = ModelEma(model, 0.5), next(iter(dict(model.named_parameters())))
    expected = dict(model.named_parameters())[name].detach().double().clone()
    for step in range(12):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * dict(model.named_parameters())[name].detach().double()
        average.update(steps=step)
    torch.testing.assert_close(average.state_dict()[name].double(), expected, rtol=1e-5, atol=1e-5)
