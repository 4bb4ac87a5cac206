"""Trainings for the tests on a GPU, each kind in a process of its own: what NCCL or a captured graph leaves in a process is no
matter of the next.

    python -m tests.training.on_gpu plain FOLDER

FOLDER/NAME.pt gets the weights and the statistics of each training, and which images it has seen.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.training.processes import TINY, trained
from vitrail.training import trainer
from vitrail.training.distributed import Devices, choose_device, connected, replicate
from vitrail.training.trainer import Options
from vitrail.training.training_state import gather

CHANGES = {"precision": "bf16", "schedule.length": "10 steps", "architecture.drop_path": 0.0}
# Batch norm in the stem, drop-path and a running mean: what a graph has to draw and to remember as the plain way does.
BUSY = CHANGES | {
    "architecture.drop_path": 0.2,
    "architecture.stem": "tower",
    "architecture.stem_kernels": [3, 3, 4],
    "architecture.stem_strides": [1, 1, TINY.architecture.get("patch_size", 4)],
    "ema.decay": 0.9,
}
STILL = {"optimizer.lr": 0.0}


def keep(folder, name, training):
    tensors = gather(training.model, training.options.sharding)
    weights = torch.cat([tensor.float().flatten().cpu() for tensor in tensors.values()])
    statistics = {
        key: value.cpu() for key, value in training.model.state_dict().items() if "running" in key or "num_batches" in key
    }
    torch.save({"weights": weights, "statistics": statistics, "seen": training.seen}, folder / f"{name}.pt")


def here(micro_batches):
    """This device alone; without one a processor, which compiles nothing, to try these functions out."""
    return Devices(choose_device(None), micro_batches=micro_batches)


def compiled(**more):
    return Options(compile=torch.cuda.is_available(), **more)


def plain(folder):
    """Without processes, and the start that is common to all."""
    keep(folder, "plain", trained(folder / "plain", here(2), CHANGES, compiled()))
    keep(folder, "start", trained(folder / "start", here(2), CHANGES | STILL, until=1))


def processes(folder, sharding):
    """One process of a group, replicated or sharded; whole, and stopped and resumed."""
    if sharding == "none":  # one process alone would not replicate
        trainer.wrap = lambda module, model, devices, _: replicate(module, model, devices)
    with connected() as devices:
        numbers = torch.ones(3, device=devices.device)
        dist.all_reduce(numbers)  # from device to device
        assert numbers.tolist() == [1, 1, 1]
        counts = torch.ones(3)
        dist.all_reduce(counts, dist.ReduceOp.MAX)  # from processor to processor
        found = [None]
        dist.all_gather_object(found, {"step": 3})
        assert found == [{"step": 3}]
        options = compiled(sharding=sharding, save_steps=5)
        whole = trained(folder / "whole", here(2), CHANGES, options)
        assert whole.best["images"] == 142
        keep(folder, "whole", whole)
        trained(folder / "part", here(2), CHANGES, options, until=5)
        resumed = trained(folder / "part", here(2), CHANGES, options)
        assert min(resumed.seen)[0] == 5
        keep(folder, "resumed", resumed)


def captured(folder):
    """Each step is a graph, from the first to the last."""
    keep(folder, "captured", by_graphs(folder / "captured"))


def begun(folder):
    """The same, stopped in the middle."""
    by_graphs(folder / "part", until=5)


def gone_on(folder):
    """And resumed, by a process that captures a graph of its own."""
    training = by_graphs(folder / "part")
    assert min(training.seen)[0] == 5
    keep(folder, "gone_on", training)


def by_graphs(place, **more):
    training = trained(place, here(1), BUSY, compiled(log_steps=1), logged=True, **more)
    assert not torch.cuda.is_available() or training.compute.graph is not None
    return training


def uncaptured(folder):
    trainer.Trainer._may_capture = lambda training: False
    keep(folder, "uncaptured", trained(folder / "uncaptured", here(1), BUSY, compiled()))
    keep(folder, "start", trained(folder / "start", here(1), BUSY | STILL, until=1))


if __name__ == "__main__":
    name, place, *rest = sys.argv[1:]
    Path(place).mkdir(parents=True, exist_ok=True)
    {each.__name__: each for each in (plain, processes, captured, begun, gone_on, uncaptured)}[name](Path(place), *rest)
