import pytest
import torch
from torch import nn

from vitrail.bench.candidates import Candidate, WithLoss, open_candidate
from vitrail.bench.settings import Setting
from vitrail.bench.workloads import CannotRun, build_optimizer, compile_network, make_run
from vitrail.errors import UserError
from vitrail.models.registry import build
from vitrail.tasks.classification import ClassificationModule

CPU = torch.device("cpu")
SMALL = {"image_size": 32, "depth": 2, "classes": 5}


def small(name: str) -> Candidate:
    found = open_candidate(name)
    return Candidate(name, "vitrail", found.architecture.replace(**SMALL), found.recipe)


@pytest.fixture
def made(monkeypatch):
    """The networks that are made."""
    found, network = [], Candidate.network

    def make(self, setting, device):
        found.append(network(self, setting, device))
        return found[-1]

    monkeypatch.setattr(Candidate, "network", make)
    return found


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["deit_tiny_patch16", "deit_tiny_distilled_patch16", "lvvit_t", "deit3_tiny_patch16"])
def test_a_training_step_moves_every_weight(made, name, precision):
    run = make_run(small(name), Setting("train", precision, batch_size=4), CPU)
    (model,) = made
    before = {key: value.clone() for key, value in model.named_parameters()}
    assert model.training
    run()
    same = [key for key, value in model.named_parameters() if torch.equal(before[key], value)]
    assert not [key for key in same if "bias" not in key], same  # even targets move a zero bias by nothing where logits are even
    assert all(value.grad is None for value in model.parameters())


def test_inference_changes_nothing_and_keeps_no_graph(made):
    run = make_run(small("deit_tiny_patch16"), Setting("inference", "fp32", batch_size=2), CPU)
    (model,) = made
    seen = []
    model.register_forward_hook(lambda module, given, answer: seen.append(answer))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    run()
    assert (seen[0].shape, seen[0].requires_grad, model.training) == ((2, 5), False, False)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_another_network_is_trained(made):
    ours = small("deit_tiny_patch16")
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 5))
    groups = build_optimizer(network).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(1, 0.05), (1, 0.0)]

    class Other(Candidate):
        def network(self, setting, device):
            return network

    run = make_run(Other(ours.name, "timm", ours.architecture, ours.recipe, "other"), Setting("train", "fp32", batch_size=2), CPU)
    before = network[1].weight.clone()
    run()
    assert not torch.equal(network[1].weight, before)


def test_what_is_compiled(monkeypatch):
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda self: compiled.append(self))
    candidate = small("deit_tiny_patch16")
    model = build(candidate.architecture)
    task = candidate.task(model)
    assert isinstance(task, ClassificationModule)
    compile_network("eager", model, task)
    assert not compiled
    for mode in ("compiled", "graph"):
        compile_network(mode, model, task)
        assert compiled == list(model.blocks)
        compiled.clear()
    compile_network("fullgraph", model, task)
    assert compiled == [task]
    compiled.clear()
    other = nn.Linear(2, 2)
    judged = WithLoss(other, candidate.recipe.loss)
    compile_network("compiled", other, judged)
    assert compiled == [judged]


def test_what_cannot_run():
    with pytest.raises(CannotRun, match="needs a GPU"):
        make_run(small("deit_tiny_patch16"), Setting(mode="graph"), CPU)
    bare = small("deit_tiny_patch16")
    headless = Candidate(bare.name, "vitrail", bare.architecture.replace(classes=0), bare.recipe)
    with pytest.raises(UserError, match="no classifier to train"):
        make_run(headless, Setting("train", "fp32"), CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("task", ["train", "inference"])
@pytest.mark.parametrize("mode", ["eager", "compiled", "fullgraph", "graph"])
def test_every_mode_on_a_gpu(task, mode):
    run = make_run(small("deit_tiny_patch16"), Setting(task, "bf16", mode, 4), torch.device("cuda", 0))
    for _ in range(3):
        run()
    torch.cuda.synchronize()
