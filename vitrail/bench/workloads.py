"""One run of a network: a forward pass or a training step, on data that is already on the device."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitrail.bench.candidates import Candidate
from vitrail.bench.settings import Setting
from vitrail.bench.timing import Run
from vitrail.deploy.inference_graphs import MAX_GRAPH_BATCH
from vitrail.deploy.optimize import optimize
from vitrail.errors import UserError
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes.schema import OptimizerConfig
from vitrail.tasks.classification import random_targets
from vitrail.tasks.targets import ClassificationTargets
from vitrail.training.compile import compile_blocks
from vitrail.training.cuda_graphs import CapturedStep
from vitrail.training.optimizers import make_optimizer

LR = 1e-6  # weights hardly change, so that no value becomes subnormal, NaN or Inf, which would change the speed
NOT_CAPTURED = "CUDA graph capture failed"  # possibly for lack of memory: torch raises the same error
Compute = Callable[[Tensor, ClassificationTargets], Tensor]


class CannotRun(Exception):
    """The network or the device does not support the setting."""


def make_run(candidate: Candidate, setting: Setting, device: torch.device) -> Run:
    """A function that runs the candidate once as the setting describes."""
    if setting.mode == "graph" and device.type != "cuda":
        raise CannotRun("needs a GPU")
    network = candidate.network(setting, device)
    architecture = candidate.at(setting)
    images = torch.randn(setting.batch_size, architecture.channels, *architecture.image_size, device=device)
    targets = ClassificationTargets(torch.zeros(0, device=device))
    if setting.task == "train":
        if not architecture.classes:
            raise UserError(f"{candidate.name} has no classifier to train: use another model, or --task inference.")
        targets = make_targets(network, candidate, setting.batch_size, device)
    if setting.mode == "native" and setting.task == "inference":
        return native_inference(network, setting, images)
    task = candidate.task(network)
    compile_network(setting.mode, network, task if setting.task == "train" else network)
    compute = training_step(task, setting, device) if setting.task == "train" else inference_step(network, setting, device)
    capture = setting.mode == "graph" or (
        setting.mode == "native" and isinstance(network, VisionTransformer) and device.type == "cuda"
    )
    captured = CapturedStep(compute, network, list(network.buffers()), device) if capture else None
    optimizer = build_optimizer(network) if setting.task == "train" else None

    def run() -> None:
        (captured or compute)(images, targets)
        if captured is not None and captured.graph is None:
            raise CannotRun(NOT_CAPTURED)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return run


def make_targets(network: nn.Module, candidate: Candidate, batch_size: int, device: torch.device) -> ClassificationTargets:
    """Uniform targets in the shapes that the model's recipe uses."""
    if isinstance(network, VisionTransformer):
        return random_targets(network, candidate.recipe, device, batch_size)
    classes = candidate.architecture.classes
    return ClassificationTargets(torch.full((batch_size, classes), 1.0 / classes, device=device))


def compile_network(mode: str, network: nn.Module, outermost: nn.Module) -> None:
    """Compile as each project does in training: ours block by block, others as one graph; with "fullgraph" both as one graph."""
    if mode == "eager":
        return
    if isinstance(network, VisionTransformer) and mode != "fullgraph":
        compile_blocks(network)
    else:
        outermost.compile()


def training_step(task: nn.Module, setting: Setting, device: torch.device) -> Compute:
    task.train()

    def compute(images: Tensor, targets: ClassificationTargets) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=setting.precision == "bf16"):
            loss: Tensor = task(images, targets)
        loss.backward()
        return loss.detach()

    return compute


def inference_step(network: nn.Module, setting: Setting, device: torch.device) -> Compute:
    network.eval()

    def compute(images: Tensor, targets: ClassificationTargets) -> Tensor:
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=setting.precision == "bf16"):
            out: Tensor = network(images)
            return out

    return compute


def native_inference(network: nn.Module, setting: Setting, images: Tensor) -> Run:
    """Inference as each project deploys it: ours by `optimize`, others compiled as one graph with weights in the precision."""
    dtype = torch.bfloat16 if setting.precision == "bf16" else torch.float32
    images = images.to(dtype)
    optimized: nn.Module = network
    if isinstance(network, VisionTransformer):
        optimized = optimize(
            network,
            "latency" if setting.batch_size <= MAX_GRAPH_BATCH else "throughput",
            batch_size=setting.batch_size,
            dtype=dtype,
        )
    else:
        network.to(dtype).eval().compile()

    def run() -> None:
        with torch.no_grad():
            optimized(images)

    return run


def build_optimizer(network: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW with weight decay on matrices only."""
    if isinstance(network, VisionTransformer):
        return make_optimizer(network, OptimizerConfig(), LR)
    parts = ([each for each in network.parameters() if (each.ndim > 1) == matrices] for matrices in (True, False))
    groups = [
        {"params": part, "weight_decay": decay} for part, decay in zip(parts, (OptimizerConfig().weight_decay, 0.0), strict=True)
    ]
    return make_optimizer(groups, OptimizerConfig(), LR)
