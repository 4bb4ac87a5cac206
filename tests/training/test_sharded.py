"""Two processes with sharded parameters (DTensor, FSDP2) compute the same as one."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.small import shrink
from vitrail.models.registry import build, lookup
from vitrail.recipes.schema import OptimizerConfig
from vitrail.training.ema import ModelEma
from vitrail.training.optimizers import clip_gradients, make_optimizer

RULES = [
    OptimizerConfig("adamw"),
    OptimizerConfig("adam", weight_decay_coupled=True),
    OptimizerConfig("sgd"),
    OptimizerConfig("adagrad"),
    OptimizerConfig("lamb", clip_grad_norm=1.0),
    OptimizerConfig("lamb", clip_grad_norm=0.1, trust_ratio_on="all"),
]


def check_optimizers(mesh):
    """Tensors with shards of different sizes, one of which is empty on the second process."""
    from torch.distributed.tensor import Shard, distribute_tensor

    def shard(tensor, axis):
        return distribute_tensor(tensor, mesh, [Shard(axis)])

    axes = [0, 0, 0, 1]
    for config in RULES:
        torch.manual_seed(1)
        plain = [nn.Parameter(torch.randn(shape)) for shape in ((6, 4), (5,), (1, 7), (3, 4))]
        sharded = [nn.Parameter(shard(value.detach().clone(), axis)) for value, axis in zip(plain, axes, strict=True)]
        optimizers = []
        for some in (plain, sharded):
            groups = [{"params": some[:3], "weight_decay": config.weight_decay}, {"params": some[3:], "weight_decay": 0.0}]
            optimizers.append(make_optimizer(groups, config, 0.01))
        for step in range(4):
            found = torch.tensor(float(step in (0, 2)))
            for value, part, axis in zip(plain, sharded, axes, strict=True):
                value.grad = torch.randn_like(value) * (math.nan if found else 1.0)
                part.grad = shard(value.grad.clone(), axis)
            limit = 0.0 if config.kind == "lamb" else 2.0
            norms = [clip_gradients(some, limit) for some in (plain, sharded)]
            assert type(norms[1]) is torch.Tensor
            torch.testing.assert_close(norms[1], norms[0], equal_nan=True)
            for optimizer in optimizers:
                optimizer.found_inf = found
                optimizer.step()
        for value, part in zip(plain, sharded, strict=True):
            torch.testing.assert_close(part.full_tensor(), value.detach(), rtol=1e-6, atol=1e-7)


def check_training(mesh):
    """A sharded model is trained and evaluated with its EMA in between; the next step must not use the EMA weights."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(2)
    # In float64: the gradient of a key bias is only rounding error, which Adam would scale up to a full step.
    plain = build(shrink(lookup("deit_tiny_patch16")[1])).double()
    sharded = copy.deepcopy(plain)
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    pairs = [
        (model, make_optimizer(model, OptimizerConfig("lamb", clip_grad_norm=1.0), 0.01), ModelEma(model, 0.5))
        for model in (plain, sharded)
    ]
    images, labels = torch.randn(4, 3, 8, 12, dtype=torch.float64), torch.tensor([0, 1, 2, 3])
    for _ in range(3):
        outputs = []
        for model, optimizer, ema in pairs:
            model.train()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update(skip=torch.tensor(0.0))
            model.eval()
            with ema.applied(model), torch.no_grad():
                outputs.append(model(images))
        torch.testing.assert_close(*outputs, rtol=1e-7, atol=1e-7)
    for part, value in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(part.full_tensor(), value.detach(), rtol=1e-7, atol=1e-7)


def work(rank, path):
    torch.set_num_threads(1)
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    try:
        check_optimizers(mesh)
        check_training(mesh)
        store.set(f"done {rank}", "")
        store.wait(["done 0", "done 1"])  # gloo fails if the other process exits first
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
def test_two_processes(tmp_path):
    torch.multiprocessing.spawn(work, (str(tmp_path / "store"),), nprocs=2)
