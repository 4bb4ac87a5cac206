"""Trainings for the GPU tests, each in a process of its own, since NCCL and CUDA graphs leave state in a process.

    python -m tests.training.on_gpu plain FOLDER

FOLDER/NAME.pt gets the weights, the running statistics and the images of each training.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.training.processes import TINY, trained
from vitrail.devices import choose_device
from vitrail.training import trainer
from vitrail.training.checkpointing import gather_weights
from vitrail.training.distributed import Devices, init_distributed, wrap_ddp
from vitrail.training.trainer import Options

CHANGES = {"precision": "bf16", "schedule.length": "10 steps", "architecture.drop_path": 0.0}
# BatchNorm in the stem, drop path and EMA: random numbers and buffers that a graph must handle like eager execution.
BUSY = CHANGES | {
    "architecture.drop_path": 0.2,
    "architecture.stem": "tower",
    "architecture.stem_kernels": [3, 3, 4],
    "architecture.stem_strides": [1, 1, TINY.architecture.get("patch_size", 4)],
    "ema.decay": 0.9,
}
ZERO_LR = {"optimizer.lr": 0.0}


def save(folder, name, training):
    tensors = gather_weights(training.model, training.options.sharding)
    weights = torch.cat([tensor.float().flatten().cpu() for tensor in tensors.values()])
    statistics = {
        key: value.cpu() for key, value in training.model.state_dict().items() if "running" in key or "num_batches" in key
    }
    torch.save({"weights": weights, "statistics": statistics, "seen": training.task.seen}, folder / f"{name}.pt")


def here(micro_batches):
    """A single GPU, or the CPU, without compilation, to try these functions."""
    return Devices(choose_device(None), micro_batches=micro_batches)


def compiled(**more):
    return Options(compile=torch.cuda.is_available(), **more)


def plain(folder):
    """Without a process group, and the initial weights of all."""
    save(folder, "plain", trained(folder / "plain", here(2), CHANGES, compiled()))
    save(folder, "start", trained(folder / "start", here(2), CHANGES | ZERO_LR, until=1))


def processes(folder, sharding):
    """One process of a group with DDP or FSDP2; uninterrupted, and stopped and resumed."""
    if sharding == "none":  # a single process would not use DDP
        trainer.wrap_module = lambda module, model, devices, _: wrap_ddp(module, model, devices)
    with init_distributed() as devices:
        numbers = torch.ones(3, device=devices.device)
        dist.all_reduce(numbers)  # NCCL
        assert numbers.tolist() == [1, 1, 1]
        counts = torch.ones(3)
        dist.all_reduce(counts, dist.ReduceOp.MAX)  # gloo
        found = [None]
        dist.all_gather_object(found, {"step": 3})
        assert found == [{"step": 3}]
        options = compiled(sharding=sharding, save_steps=5)
        complete = trained(folder / "complete", here(2), CHANGES, options)
        assert complete.best["images"] == 142
        save(folder, "complete", complete)
        trained(folder / "part", here(2), CHANGES, options, until=5)
        resumed = trained(folder / "part", here(2), CHANGES, options)
        assert min(resumed.task.seen)[0] == 5
        save(folder, "resumed", resumed)


def captured(folder):
    """Every step is replayed from a CUDA graph."""
    save(folder, "captured", train_with_graphs(folder / "captured"))


def interrupted(folder):
    """The same, stopped after 5 steps."""
    train_with_graphs(folder / "part", until=5)


def resumed_graph(folder):
    """And resumed, by a process that captures a new graph."""
    training = train_with_graphs(folder / "part")
    assert min(training.task.seen)[0] == 5
    save(folder, "resumed_graph", training)


def train_with_graphs(folder, **more):
    training = trained(folder, here(1), BUSY, compiled(log_steps=1), logged=True, **more)
    assert not torch.cuda.is_available() or training.compute.graph is not None
    return training


def uncaptured(folder):
    trainer.Trainer._may_capture = lambda training: False
    save(folder, "uncaptured", trained(folder / "uncaptured", here(1), BUSY, compiled()))
    save(folder, "start", trained(folder / "start", here(1), BUSY | ZERO_LR, until=1))


if __name__ == "__main__":
    name, output, *rest = sys.argv[1:]
    Path(output).mkdir(parents=True, exist_ok=True)
    {each.__name__: each for each in (plain, processes, captured, interrupted, resumed_graph, uncaptured)}[name](
        Path(output), *rest
    )
