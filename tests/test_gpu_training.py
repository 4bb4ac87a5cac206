"""On a GPU: a process of NCCL, replicated and sharded, compiled, in bfloat16, against a training without processes.

Every training that makes a group of processes or captures a graph has a process of its own, and a time limit.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest
import torch

import vitrail
from tests.training.on_gpu import CHANGES
from tests.training.processes import ROOT, TINY, environment, free_port
from vitrail.layers.sdpa import attend
from vitrail.training.metrics import read_metrics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LIMIT = 240  # seconds


def finished(*words, **more):
    """What Python says to these words; a process that hangs is ended, with all that it has started."""
    own = {name: value for name, value in environment(**more).items() if name not in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")}
    visible = {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in os.environ}
    command = [sys.executable, *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    child = subprocess.Popen(command, cwd=ROOT, env=own | visible, start_new_session=True, **pipes)
    try:
        said = child.communicate(timeout=LIMIT)[0]
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        pytest.fail(f"{' '.join(command)} hung:\n{child.communicate()[0][-4000:]}")
    assert child.returncode == 0, said[-4000:]
    return said


def weights(folder, name):
    return torch.load(folder / f"{name}.pt", weights_only=True)["weights"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The weights of a training without processes, and where all start."""
    folder = tmp_path_factory.mktemp("plain")
    finished("-m", "tests.training.on_gpu", "plain", folder)
    return weights(folder, "plain"), weights(folder, "start")


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_one_process_of_nccl(sharding, plain, tmp_path):
    finished("-m", "tests.training.on_gpu", "processes", tmp_path, sharding, rank=0, world=1, port=free_port())
    expected, start = plain
    way = (expected - start).norm()
    assert way > 0
    for name in ("whole", "resumed"):
        assert (weights(tmp_path, name) - expected).norm() <= 0.05 * way


def test_torchrun_with_sharding(tmp_path):
    """From the command line: sharded, compiled, resumed by one process that holds everything itself."""
    out = tmp_path / "run"
    more = [f"--set={name}={value}" for name, value in CHANGES.items()]
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(json.dumps(TINY.to_dict()))  # which is YAML, too
    words = ["train", "digits", "--recipe", recipe, "--out", out, "--shard", "--workers", 0, *more]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 1, "-m", "vitrail"]
    finished(*launcher, *words)
    assert "This run is finished" in finished("-m", "vitrail", "resume", out, "--workers", 0)
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000000010.sharded"]
    assert vitrail.load(out / "best.safetensors").architecture.classes == 10


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """Trainings with batch norm in the stem, drop-path and a running mean: with graphs, without, and with, but interrupted."""
    folder = tmp_path_factory.mktemp("graphs")
    for name in ("captured", "uncaptured", "begun", "gone_on"):
        finished("-m", "tests.training.on_gpu", name, folder)
    return folder


def check_alike(folder, ours, theirs):
    """Weights and statistics of two trainings, up to the order of sums."""
    expected = weights(folder, theirs)
    way = (expected - weights(folder, "start")).norm()
    assert way > 0
    assert (weights(folder, ours) - expected).norm() <= 0.01 * way
    found, wanted = (torch.load(folder / f"{name}.pt", weights_only=True)["statistics"] for name in (ours, theirs))
    assert found.keys() == wanted.keys() != set()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-3, atol=1e-3)


def test_a_captured_step_is_the_same_step(graphs):
    """The graph draws and remembers as the plain way does."""
    check_alike(graphs, "captured", "uncaptured")


def test_a_captured_training_goes_on(graphs):
    """The same images and rates step by step; the graph that is captured in the middle remembers what was saved."""
    whole, rest = (torch.load(graphs / f"{name}.pt", weights_only=True)["seen"] for name in ("captured", "gone_on"))
    assert rest == {place: images for place, images in whole.items() if place[0] >= 5}
    lines, others = ([line for line in read_metrics(graphs / name) if line["kind"] == "train"] for name in ("captured", "part"))
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert [(line["step"], line["rate"]) for line in others] == [(line["step"], line["rate"]) for line in lines]
    assert [line["loss"] for line in others] == pytest.approx([line["loss"] for line in lines], rel=1e-2)
    check_alike(graphs, "gone_on", "captured")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("asking", "asked"), [(64, 64), (65, 65), (192, 192), (196, 196), (320, 320), (1, 64), (2, 198)])
def test_gradients_of_attention_are_numbers(asking, asked, compiled):
    """Far negative scores, as a head that attends to nothing much has them."""
    query = torch.randn(2, 2, asking, 64, device="cuda", dtype=torch.bfloat16) * 0.1
    key, value = torch.randn(2, 2, 2, asked, 64, device="cuda", dtype=torch.bfloat16).mul(0.1).unbind(0)
    query[..., 0], key[..., 0] = 1.0, -120.0 * 8
    parts = [part.clone().requires_grad_() for part in (query, key, value)]
    out = (torch.compile(attend, fullgraph=True, dynamic=False) if compiled else attend)(*parts)
    out.backward(torch.randn_like(out))
    assert all(part.grad.isfinite().all() for part in parts)
