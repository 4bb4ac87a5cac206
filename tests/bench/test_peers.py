"""The mode native compares with the fastest configuration of the other library."""

import dataclasses
import sys

import pytest
import torch
from torch import nn

from tests.bench.test_candidates import Timm
from tests.bench.test_measurement import CPU, PLAIN, small
from vitrail.bench.candidates import Candidate, WithLoss, make_timm
from vitrail.bench.measurement import fastest_configurations, make_groups, speedup, timm_counterpart
from vitrail.bench.output import make_document
from vitrail.bench.settings import CAPTURED, CONFIGURATIONS, DEFAULT, REDUCE_OVERHEAD, Setting
from vitrail.bench.workloads import CannotRun, make_run
from vitrail.models.registry import lookup
from vitrail.recipes.schema import LossConfig
from vitrail.tasks.targets import ClassificationTargets

OURS, THEIRS = small("deit_tiny_patch16"), small("deit_tiny_patch16", "timm")
NATIVE = PLAIN._replace(mode="native")


def measured(**seconds):
    """Measurements of a group on a GPU, with the seconds of each configuration; None: it failed."""
    (group,) = make_groups([OURS], [THEIRS], [NATIVE], "cuda")
    measurements = [entry.new_measurement(None) for entry in group]
    for measurement in measurements:
        name = (
            measurement.configuration.split()[0].replace("torch.", "").replace("-", "_") if measurement.configuration else "ours"
        )
        if seconds[name] is None:
            measurement.error = "failed: no"
        else:
            measurement.seconds = [seconds[name]] * 3
    return measurements


def test_configurations_of_the_counterpart():
    for mode, device_type, expected in (
        ("native", "cuda", ["", DEFAULT, REDUCE_OVERHEAD, CAPTURED]),
        ("native", "cpu", ["", DEFAULT]),
        ("compiled", "cuda", ["", ""]),
    ):
        (group,) = make_groups([OURS], [THEIRS], [PLAIN._replace(mode=mode)], device_type)
        assert [entry.candidate.configuration for entry in group] == expected
        assert [entry.candidate.project for entry in group] == ["vitrail"] + ["timm"] * (len(expected) - 1)


@pytest.mark.parametrize(
    ("seconds", "fastest"),
    [
        ({"compile": 4.0, "reduce_overhead": 2.0, "captured": 3.0}, REDUCE_OVERHEAD),
        ({"compile": 4.0, "reduce_overhead": 3.0, "captured": 2.0}, CAPTURED),
        ({"compile": 2.0, "reduce_overhead": 3.0, "captured": 4.0}, DEFAULT),
        ({"compile": 2.0, "reduce_overhead": None, "captured": 4.0}, DEFAULT),
    ],
)
def test_the_fastest_configuration_counts(seconds, fastest):
    measurements = measured(ours=1.0, **seconds)
    ours = measurements[0]
    other = timm_counterpart(ours, measurements)
    assert (other.configuration, speedup(ours, other).median) == (fastest, 2.0)
    assert make_document({}, None, measurements, 3, True)["measurements"][0]["speedup"]["median"] == 2.0
    shown = fastest_configurations(measurements)
    assert [each.configuration for each in shown if each.seconds] == ["", fastest]
    assert sum(bool(each.error) for each in shown) == (seconds["reduce_overhead"] is None)  # failures are shown


def test_all_configurations_failed():
    measurements = measured(ours=1.0, compile=None, reduce_overhead=None, captured=None)
    assert timm_counterpart(measurements[0], measurements) is None
    assert fastest_configurations(measurements) == measurements


class Other(Candidate):
    """A network of another library."""

    def network(self, setting, device):
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 1000)).to(device)


@pytest.mark.parametrize("task", ["train", "inference"])
def test_how_the_other_network_is_compiled(task, monkeypatch):
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compiled.append((type(self), options)))
    other = Other(THEIRS.name, "timm", THEIRS.architecture, THEIRS.recipe, "other", DEFAULT)
    make_run(other, NATIVE._replace(task=task), CPU)()
    assert compiled == [(WithLoss if task == "train" else nn.Sequential, {})]  # as one graph, with the loss
    for configuration in CONFIGURATIONS["cuda"][1:]:
        with pytest.raises(CannotRun, match="needs a GPU"):
            make_run(dataclasses.replace(other, configuration=configuration), NATIVE._replace(task=task), CPU)


def test_dense_logits_of_another_network():
    network = nn.Linear(4, 6)
    images, targets = torch.randn(2, 4), torch.softmax(torch.randn(2, 3), 1)

    class Dense(nn.Module):
        def forward(self, images):
            logits, dense = network(images).split(3, 1)
            return logits, dense[:, None].expand(-1, 5, -1), (0, 0, 0, 0)

    loss = WithLoss(Dense(), LossConfig(label_smoothing=0.0))(images, ClassificationTargets(targets))
    expected = sum(nn.functional.cross_entropy(part, targets) for part in network(images).split(3, 1))
    torch.testing.assert_close(loss, expected)


def test_models_that_their_authors_register(monkeypatch):
    class Registry(Timm):
        def model_entrypoint(self, name):
            assert name == "lvvit_s"
            return lambda pretrained, img_size, num_classes, in_chans, drop_path_rate: Mixing()

    class Mixing(nn.Module):
        mix_token = True

    monkeypatch.setitem(sys.modules, "timm", Registry("lvvit_s"))
    assert make_timm("lvvit_s", lookup("lvvit_s")[1], False).mix_token is False


@pytest.mark.gpu
@pytest.mark.parametrize("task", ["train", "inference"])
@pytest.mark.parametrize("configuration", CONFIGURATIONS["cuda"])
def test_every_configuration_on_a_gpu(task, configuration, monkeypatch):
    made, network = [], Other.network
    monkeypatch.setattr(Other, "network", lambda *given: made.append(network(*given)) or made[-1])
    other = Other(THEIRS.name, "timm", THEIRS.architecture, THEIRS.recipe, "other", configuration)
    run = make_run(other, Setting(task, "bf16", "native", 4), torch.device("cuda", 0))
    run()
    before = made[0][1].weight.clone()
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    assert torch.equal(before, made[0][1].weight) == (task == "inference")
