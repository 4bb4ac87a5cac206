"""One run of a network: a forward pass, or a whole training step, on data that lies on the device already."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitrail.bench.candidates import Contender
from vitrail.bench.settings import Setting
from vitrail.bench.timing import Run
from vitrail.deploy.inference_graphs import LARGEST
from vitrail.deploy.optimize import optimize
from vitrail.errors import UserError
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes.schema import OptimizerConfig
from vitrail.runs.memory import random_targets
from vitrail.tasks.targets import Targets
from vitrail.training.compile import compile_blocks
from vitrail.training.cuda_graphs import Captured
from vitrail.training.optimizers import make_optimizer

RATE = 1e-6  # weights hardly move, so that no number leaves the range in which arithmetic is as fast as usual
UNCAPTURED = "cannot be captured"  # or there was no memory for that: torch does not tell these apart
Compute = Callable[[Tensor, Targets], Tensor]


class CannotRun(Exception):
    """This way of running is not for this network or this device; the text says why."""


def make_run(contender: Contender, setting: Setting, device: torch.device) -> Run:
    """A network on the device, ready to be run as the setting says."""
    if setting.mode == "graph" and device.type != "cuda":
        raise CannotRun("needs a GPU")
    network = contender.network(setting, device)
    architecture = contender.at(setting)
    images = torch.randn(setting.batch, architecture.channels, *architecture.image_size, device=device)
    targets = Targets(torch.zeros(0, device=device))
    if setting.task == "train":
        if not architecture.classes:
            raise UserError(f"{contender.name} has no classifier to train: give one that has, or --task inference.")
        targets = make_targets(network, contender, setting.batch, device)
    if setting.mode == "own" and setting.task == "inference":
        return answerer_of_its_own(network, setting, images)
    task = contender.task(network)
    compile_as(setting.mode, network, task if setting.task == "train" else network)
    compute = trainer(task, setting, device) if setting.task == "train" else answerer(network, setting, device)
    capture = setting.mode == "graph" or (
        setting.mode == "own" and isinstance(network, VisionTransformer) and device.type == "cuda"
    )
    captured = Captured(compute, network, list(network.buffers()), device) if capture else None
    optimizer = stepper(network) if setting.task == "train" else None

    def run() -> None:
        (captured or compute)(images, targets)
        if captured is not None and captured.graph is None:
            raise CannotRun(UNCAPTURED)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return run


def make_targets(network: nn.Module, contender: Contender, batch: int, device: torch.device) -> Targets:
    """Even distributions in the shapes of the model's own training."""
    if isinstance(network, VisionTransformer):
        return random_targets(network, contender.recipe, device, batch)
    classes = contender.architecture.classes
    return Targets(torch.full((batch, classes), 1.0 / classes, device=device))


def compile_as(mode: str, network: nn.Module, outermost: nn.Module) -> None:
    """As its own project trains: ours block by block, others as one graph, and with "whole" both as one."""
    if mode == "eager":
        return
    if isinstance(network, VisionTransformer) and mode != "whole":
        compile_blocks(network)
    else:
        outermost.compile()


def trainer(task: nn.Module, setting: Setting, device: torch.device) -> Compute:
    task.train()

    def compute(images: Tensor, targets: Targets) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=setting.precision == "bf16"):
            loss = task(images, targets)
        loss.backward()
        return loss.detach()

    return compute


def answerer(network: nn.Module, setting: Setting, device: torch.device) -> Compute:
    network.eval()

    def compute(images: Tensor, targets: Targets) -> Tensor:
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=setting.precision == "bf16"):
            return network(images)

    return compute


def answerer_of_its_own(network: nn.Module, setting: Setting, images: Tensor) -> Run:
    """Each as its project would ship it: ours optimized, others compiled as one graph, with weights in the precision."""
    dtype = torch.bfloat16 if setting.precision == "bf16" else torch.float32
    images = images.to(dtype)
    answer: nn.Module = network
    if isinstance(network, VisionTransformer):
        answer = optimize(network, "latency" if setting.batch <= LARGEST else "throughput", batch=setting.batch, dtype=dtype)
    else:
        network.to(dtype).eval().compile()

    def run() -> None:
        with torch.no_grad():
            answer(images)

    return run


def stepper(network: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW over all weights, the matrices of which decay."""
    if isinstance(network, VisionTransformer):
        return make_optimizer(network, OptimizerConfig(), RATE)
    parts = ([each for each in network.parameters() if (each.ndim > 1) == matrices] for matrices in (True, False))
    groups = [
        {"params": part, "weight_decay": decay} for part, decay in zip(parts, (OptimizerConfig().weight_decay, 0.0), strict=True)
    ]
    return make_optimizer(groups, OptimizerConfig(), RATE)
