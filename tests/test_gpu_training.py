"""On a GPU: a process of NCCL, replicated and sharded, compiled, in bfloat16, against a training without processes."""

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import vitrail
from tests.training.processes import TINY, environment, free_port, trained
from vitrail.training import loop
from vitrail.training.devices import Devices, choose_device, connected, replicate
from vitrail.training.loop import Options
from vitrail.training.state import gather

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
CHANGES = {"precision": "bf16", "schedule.length": "10 steps", "architecture.drop_path": 0.0}


def weights_of(training):
    return torch.cat([tensor.float().flatten().cpu() for tensor in gather(training.model, training.options.sharding).values()])


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_one_process_of_nccl(sharding, tmp_path, monkeypatch):
    options, plainly = Options(sharding=sharding, compile=True, save_steps=5), loop.wrap
    for name, value in environment(0, 1, free_port()).items():
        if name != "CUDA_VISIBLE_DEVICES":
            monkeypatch.setenv(name, value)
    with connected() as devices:
        assert devices.device.type == "cuda"
        numbers = torch.ones(3, device="cuda")
        dist.all_reduce(numbers)  # from device to device
        assert numbers.tolist() == [1, 1, 1]
        counts = torch.ones(3)
        dist.all_reduce(counts, dist.ReduceOp.MAX)  # from processor to processor
        found = [None]
        dist.all_gather_object(found, {"step": 3})
        assert found == [{"step": 3}]

        two = Devices(devices.device, units=2)
        expected = weights_of(trained(tmp_path / "plain", two, CHANGES, Options(compile=True)))
        if sharding == "none":  # one process alone would not replicate
            monkeypatch.setattr(loop, "wrap", lambda module, model, devices, _: replicate(module, model, devices))
        whole = trained(tmp_path / "whole", two, CHANGES, options)
        trained(tmp_path / "part", two, CHANGES, options, until=5)
        resumed = trained(tmp_path / "part", two, CHANGES, options)
        assert min(resumed.seen)[0] == 5
        monkeypatch.setattr(loop, "wrap", plainly)
        start = weights_of(trained(tmp_path / "start", two, CHANGES | {"optimiser.rate": 0.0}, until=1))
        way = (expected - start).norm()
        assert way > 0
        for ours in (weights_of(whole), weights_of(resumed)):
            assert (ours - expected).norm() <= 0.05 * way
        assert whole.best["pictures"] == 142


def test_torchrun_with_sharding(tmp_path):
    """From the command line: sharded, compiled, resumed by one process that holds everything itself."""
    out = tmp_path / "run"
    more = [f"--set={name}={value}" for name, value in CHANGES.items()]
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(json.dumps(TINY.to_dict()))  # which is YAML, too
    words = ["train", "digits", "--recipe", recipe, "--out", out, "--shard", "--workers", 0, *more]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 1, "-m", "vitrail"]
    for command in ([*launcher, *words], ["-m", "vitrail", "resume", out, "--workers", 0]):
        done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert "This run is finished" in done.stderr
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000000010.sharded"]
    assert vitrail.load(out / "best.safetensors").architecture.classes == 10


def test_a_captured_step_is_the_same_step(tmp_path, monkeypatch):
    """With batch norm in the stem, drop-path and a running mean: the graph draws and remembers as the plain way does."""
    changes = CHANGES | {
        "architecture.drop_path": 0.2,
        "architecture.stem": "tower",
        "architecture.stem_kernels": [3, 3, 4],
        "architecture.stem_strides": [1, 1, TINY.architecture.get("patch_size", 4)],
        "average.decay": 0.9,
    }
    alone = Devices(torch.device("cuda", 0))
    captured = trained(tmp_path / "captured", alone, changes, Options(compile=True))
    assert captured.compute.graph is not None
    monkeypatch.setattr(loop.Training, "_may_capture", lambda training: False)
    plain = trained(tmp_path / "plain", alone, changes, Options(compile=True))
    start = trained(tmp_path / "start", alone, changes | {"optimiser.rate": 0.0}, Options(), until=1)
    way = (weights_of(plain) - weights_of(start)).norm()
    assert way > 0
    assert (weights_of(captured) - weights_of(plain)).norm() <= 0.01 * way
    state = plain.model.state_dict()
    for name, tensor in captured.model.state_dict().items():
        if "running" in name or "num_batches" in name:
            torch.testing.assert_close(tensor, state[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tokens", [64, 65, 192, 196])
def test_gradients_of_attention_are_numbers(tokens):
    """Far negative scores, as a head that attends to nothing much has them."""
    device = choose_device("cuda")
    query, key, value = torch.randn(3, 2, 2, tokens, 64, device=device, dtype=torch.bfloat16).mul(0.1).unbind(0)
    query[..., 0], key[..., 0] = 1.0, -120.0 * 8
    parts = [part.clone().requires_grad_() for part in (query, key, value)]
    out = torch.nn.functional.scaled_dot_product_attention(*parts)
    out.backward(torch.randn_like(out))
    assert all(part.grad.isfinite().all() for part in parts)
