"""Two optimized models, one compiled with mode="reduce-overhead" and a training in one process, captured in the given order.

`python -m tests.training.graphs_together overhead optimized training` raises if a graph gives another result than before the
others were captured.
"""

import sys
from pathlib import Path

import torch

import vitrail
from tests.training.on_gpu import CHANGES
from tests.training.processes import prepared, train_images
from vitrail.training.distributed import Devices
from vitrail.training.trainer import Options

BATCH, ROUNDS = 256, 3
DEVICE = torch.device("cuda", 0)


def optimized():
    """Predictions of two models, for throughput and for latency."""
    models = [vitrail.create("deit_small_patch16", depth=4).to(DEVICE).eval() for _ in range(2)]
    large = vitrail.optimize(models[0], "throughput", BATCH, dtype=torch.bfloat16)
    small = vitrail.optimize(models[1], "latency", 1, dtype=torch.bfloat16)
    images = torch.randn(BATCH, 3, 224, 224, device=DEVICE)
    return lambda: torch.cat([large(images), small(images[:1])]).float()


def overhead():
    """Predictions of a model that torch.compile captures."""
    model = vitrail.create("deit_small_patch16", depth=3).to(DEVICE).eval()
    compiled = torch.compile(model, mode="reduce-overhead")
    images = torch.randn(BATCH, 3, 224, 224, device=DEVICE)

    @torch.no_grad()
    def call():
        with torch.autocast("cuda", torch.bfloat16):
            for _ in range(3):  # the third call replays the graph
                torch.compiler.cudagraph_mark_step_begin()
                out = compiled(images).clone()
        return out.float()

    return call


def training():
    """Gradients of a captured training step."""
    trainer = prepared(Path("nowhere"), Devices(DEVICE), CHANGES, Options(compile=True))
    trainer.task.module.train()
    (batch,) = train_images(trainer).train_loader(trainer.sampler, (0,), 1).iterate_steps(0, 1)
    batch = batch.to(DEVICE)
    position = trainer.position(0, len(batch.index))
    images, targets = trainer.task.prepare_batch(batch, position)

    def call():
        for parameter in trainer.parameters:
            parameter.grad = None
        with trainer.drop_path_noise.applied(batch.position, position):
            trainer.compute(images, targets)
        assert trainer.compute.graph is not None, "the step was not captured"
        return torch.cat([parameter.grad.flatten() for parameter in trainer.parameters if parameter.grad is not None])

    return call


def main(names):
    calls, first = {}, {}
    for name in names:
        torch.manual_seed(0)
        calls[name] = globals()[name]()
        first[name] = calls[name]().clone()
        torch.cuda.synchronize()
    for _ in range(ROUNDS):
        for name in names:
            torch.cuda.empty_cache()
            torch.full((1 << 26,), torch.nan, device=DEVICE)  # overwrites memory that has been freed
            found = calls[name]()
            torch.cuda.synchronize()
            # Kernels of the compiler may round a value in bfloat16 up once and down the next time.
            error = ((found - first[name]).norm() / first[name].norm()).item()
            assert error < 1e-3, f"{name}: relative error {error}"
    print("equal")


if __name__ == "__main__":
    main(sys.argv[1:])
