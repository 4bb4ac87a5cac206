"""One run of a network: a forward pass or a training step, on data that is already on the device."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from vitrail.bench.candidates import Candidate
from vitrail.bench.settings import CAPTURED, REDUCE_OVERHEAD, Setting
from vitrail.bench.timing import Run
from vitrail.deploy.inference_graphs import MAX_GRAPH_BATCH
from vitrail.deploy.optimize import optimize
from vitrail.errors import UserError
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes.schema import OptimizerConfig
from vitrail.tasks.classification import random_targets
from vitrail.tasks.targets import ClassificationTargets
from vitrail.training.compile import compile_blocks
from vitrail.training.cuda_graphs import CapturedStep, CudaGraph
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
    if setting.mode == "native" and (candidate.configuration or not isinstance(network, VisionTransformer)):
        return make_peer_run(candidate, network, setting, images, targets)
    if setting.mode == "native" and setting.task == "inference":
        return optimized_inference(network, setting, images)
    task = candidate.task(network)
    compile_network(setting.mode, network, task if setting.task == "train" else network)
    compute = training_step(task, setting, device) if setting.task == "train" else inference_step(network, setting, device)
    capture = setting.mode == "graph" or (setting.mode == "native" and device.type == "cuda")
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


def optimized_inference(network: nn.Module, setting: Setting, images: Tensor) -> Run:
    """Inference with `vitrail.optimize`."""
    assert isinstance(network, VisionTransformer)
    dtype, batch_size = dtype_of(setting), setting.batch_size
    goal = "latency" if batch_size <= MAX_GRAPH_BATCH else "throughput"
    optimized, images = optimize(network, goal, batch_size=batch_size, dtype=dtype), images.to(dtype)

    def run() -> None:
        with torch.no_grad():
            optimized(images)

    return run


def make_peer_run(
    candidate: Candidate, network: nn.Module, setting: Setting, images: Tensor, targets: ClassificationTargets
) -> Run:
    """A run of a network of another library, compiled as one graph in the candidate's configuration.

    For inference its weights are in the precision. A captured step is a CUDA graph of the whole run: forward pass and, in
    training, backward pass and optimizer step.
    """
    device, configuration = images.device, candidate.configuration
    if configuration in (REDUCE_OVERHEAD, CAPTURED) and device.type != "cuda":
        raise CannotRun("needs a GPU")
    task = network.to(dtype_of(setting)).eval() if setting.task == "inference" else candidate.task(network).train()
    task.compile(**({"mode": "reduce-overhead"} if configuration == REDUCE_OVERHEAD else {}))
    images = images.to(dtype_of(setting)) if setting.task == "inference" else images
    optimizer = build_optimizer(network) if setting.task == "train" else None
    for group in optimizer.param_groups if optimizer is not None and configuration == CAPTURED else ():
        group["capturable"] = True

    def step(images: Tensor) -> Tensor | None:
        if configuration == REDUCE_OVERHEAD:
            torch.compiler.cudagraph_mark_step_begin()  # the outputs of the last run are not needed any more
        if optimizer is None:
            with torch.no_grad():
                logits: Tensor = task(images)
            return logits
        cache = configuration != CAPTURED  # a graph must not use casts of weights that were cached before its capture
        with torch.autocast(device.type, torch.bfloat16, enabled=setting.precision == "bf16", cache_enabled=cache):
            loss: Tensor = task(images, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return None

    if configuration != CAPTURED:
        return partial(step, images)
    graph = CudaGraph(step, [images])
    return partial(replay, graph, step)


def replay(graph: CudaGraph, step: Callable[[Tensor], Tensor | None]) -> None:
    """Run a captured step; `step` is an argument because it keeps the network, whose memory the graph uses."""
    graph.graph.replay()


def dtype_of(setting: Setting) -> torch.dtype:
    return torch.bfloat16 if setting.precision == "bf16" else torch.float32


def build_optimizer(network: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW with weight decay on matrices only."""
    if isinstance(network, VisionTransformer):
        return make_optimizer(network, OptimizerConfig(), LR)
    parts = ([each for each in network.parameters() if (each.ndim > 1) == matrices] for matrices in (True, False))
    groups = [
        {"params": part, "weight_decay": decay} for part, decay in zip(parts, (OptimizerConfig().weight_decay, 0.0), strict=True)
    ]
    return make_optimizer(groups, OptimizerConfig(), LR)
