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
from vitrail.layers.attending import attend

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


def test_a_captured_step_is_the_same_step(tmp_path):
    """With batch norm in the stem, drop-path and a running mean: the graph draws and remembers as the plain way does."""
    for name in ("captured", "uncaptured"):
        finished("-m", "tests.training.on_gpu", name, tmp_path)
    expected = weights(tmp_path, "uncaptured")
    way = (expected - weights(tmp_path, "start")).norm()
    assert way > 0
    assert (weights(tmp_path, "captured") - expected).norm() <= 0.01 * way
    ours, theirs = (torch.load(tmp_path / f"{name}.pt", weights_only=True)["statistics"] for name in ("captured", "uncaptured"))
    assert ours.keys() == theirs.keys() != set()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-3)


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
