"""How large a micro-batch fits into memory: estimated on a CPU, measured with a few images on a GPU."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.data.image_cache import plan_cache
from vitrail.data.loader import Batch
from vitrail.data.source import Splits
from vitrail.devices import free_memory
from vitrail.errors import UserError
from vitrail.formatting import format_bytes, pluralize
from vitrail.models.flops import Cost, cost
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes.schema import Recipe
from vitrail.tasks.registry import find_task
from vitrail.training.task import Position, Task
from vitrail.training.trainer import DTYPES

USABLE = 0.9  # share of the free memory that a training may use
COPIES = {"adamw": 4, "adam": 4, "lamb": 4, "sgd": 3, "adagrad": 3}  # weights, gradients, optimizer state


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of a training: fixed + per_image * images of a micro-batch."""

    fixed: float
    per_image: float
    free: float
    max_images: int  # of a micro-batch
    teacher: float = 0.0  # part of `fixed`: a teacher's weights
    cached: float = 0.0  # part of `fixed`: decoded images

    def memory(self, images: int) -> float:
        return self.fixed + self.per_image * images

    def check(self, images: int) -> None:
        if not self.max_images:
            raise UserError(
                f"A single image needs about {format_bytes(self.memory(1))} and {format_bytes(self.free)} are free: "
                "use a smaller model or smaller images, or give --recompute."
            )
        if images > self.max_images:
            raise UserError(
                f"A micro-batch of {pluralize(images, 'image')} needs about {format_bytes(self.memory(images))} and "
                f"{format_bytes(self.free)} are free: at most {pluralize(self.max_images, 'image')} fit; "
                "give --micro-batch-size, --recompute or a smaller model."
            )


def plan_memory(
    model: VisionTransformer, task: Task, device: torch.device, max_images: int, sharded_over: int = 1, cached: float = 0.0
) -> MemoryPlan:
    """The memory of a training; weights and buffers of the model are left unchanged.

    `sharded_over` is the number of processes that share weights, gradients and optimizer state, `cached` the bytes of the
    decoded images that are kept on the device.
    """
    recipe, price = task.recipe, cost(model.architecture)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    fixed = 4.0 * (price.parameters * (1 + bool(recipe.ema.decay)) + trained * (COPIES[recipe.optimizer.kind] - 1)) / sharded_over
    heads = [p for name, p in task.module.named_parameters() if not name.startswith("model.")]
    fixed += 4.0 * sum(p.numel() * (COPIES[recipe.optimizer.kind] if p.requires_grad else 1) for p in heads)
    teacher = float(sum(tensor.nbytes for tensor in task.teacher.state_dict().values())) if task.teacher is not None else 0.0
    fixed += teacher + cached
    held = 4.0 * price.parameters + teacher  # allocated already
    per_image = activation_bytes(model, price) * task.relative_cost
    if task.teacher is not None and device.type == "cpu":  # on a GPU it is measured; the teacher runs before the student
        per_image = max(per_image, teacher_activation_bytes(task))
    free = fixed + per_image * max_images  # where the system does not report it
    if device.type == "cpu" and free_memory():
        free = USABLE * free_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", "1")) + held
        MemoryPlan(fixed, per_image, free, images_that_fit(fixed, per_image, free)).check(1)
    if device.type == "cuda":
        few, many = max(min(max_images // 2, 4), 1), max(min(max_images, 32), 2)
        with explain_out_of_memory():
            task.module.to(device)
            first, second = (measure_memory(task, device, images) for images in (few, many))
        per_image = max((second - first) / (many - few), 1.0)
        unused = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = USABLE * unused + held
    return MemoryPlan(fixed, per_image, free, images_that_fit(fixed, per_image, free), teacher, cached)


def cached_bytes(splits: Splits, recipe: Recipe, device: torch.device) -> float:
    """Bytes of the decoded training and validation images, with their masks, that will be kept on the device of the training."""
    kind = find_task(recipe.task)
    fraction, kept = 0.5 / int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 0.0
    for part in (splits.train, splits.validation):
        plan = plan_cache(part, device, recipe.min_decode_side, fraction, kind.reads_masks, kind.reads_objects)
        if plan.location == ("device" if device.type == "cuda" else "memory"):
            kept += plan.bytes
            fraction /= 2  # of what is left for the next one
    return kept


def measure_memory(task: Task, device: torch.device, images: int) -> float:
    """Peak bytes beyond the weights of a forward and backward pass over blank images, their targets included."""
    dtype = DTYPES.get(task.recipe.precision)
    module = task.module.train()
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    batch, memory = blank_batch(task.recipe, images, device), 0.0
    for _ in range(2):  # the second pass counts: in the first, libraries allocate memory of their own
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        inputs, targets = task.prepare_batch(batch, Position(0, 1, 0, 0))
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            values = module(inputs, targets).reshape(-1)
        values[0].backward()
        memory = torch.cuda.max_memory_allocated(device) - before
        module.zero_grad(set_to_none=True)
    for name, value in module.named_buffers():
        value.copy_(buffers[name])
    return float(memory)


def blank_batch(recipe: Recipe, images: int, device: torch.device) -> Batch:
    """Black images of the network's size, all with index and label 0."""
    height, width = recipe.augmentation.image_size
    pixels = torch.zeros(images, 3, height, width, dtype=torch.uint8, device=device)
    sizes = torch.tensor([[height, width]], device=device).expand(images, -1).contiguous()
    zeros = torch.zeros(images, dtype=torch.int64, device=device)
    return Batch(pixels, sizes, zeros, zeros.clone(), zeros.clone(), zeros.clone(), {}, None)


def teacher_activation_bytes(task: Task) -> float:
    """Bytes per image that a teacher holds at a time: twice the largest input and output of its layers, for shortcuts."""
    largest = 0

    def record(layer: nn.Module, inputs: tuple[Any, ...], output: object) -> None:
        nonlocal largest
        largest = max(largest, sum(each.nbytes for each in (*inputs, output) if isinstance(each, Tensor)))

    assert task.teacher is not None
    hooks = [layer.register_forward_hook(record) for layer in task.teacher.modules() if not list(layer.children())]
    try:
        augmentation = task.recipe.augmentation
        task.run_teacher(torch.zeros(1, len(augmentation.mean), *augmentation.image_size))
    finally:
        for hook in hooks:
            hook.remove()
    return 2.0 * largest


def activation_bytes(model: VisionTransformer, price: Cost) -> float:
    """Bytes that one image keeps for the backward pass; with recomputing, the input of every block and all of one block."""
    depth = len(model.layers)
    if not model.recompute or depth < 2 or model.architecture.convnet:  # whose blocks differ: the estimate is an upper bound
        return float(price.activation_bytes)
    return 4.0 * price.tokens * model.architecture.width * depth + price.activation_bytes / depth


def images_that_fit(fixed: float, per_image: float, free: float) -> int:
    return int(max((free - fixed) // max(per_image, 1.0), 0))


def check_disk_space(folder: Path, model: VisionTransformer, task: Task, keep: int) -> None:
    """Raise UserError if checkpoints and artifacts of a training do not fit on the disk of its run directory."""
    recipe, parameters = task.recipe, list(task.module.parameters())
    moments = (COPIES[recipe.optimizer.kind] - 2) * sum(part.nbytes for part in parameters if part.requires_grad)
    weights = sum(part.nbytes for part in model.parameters())
    saved = sum(part.nbytes for part in task.module.state_dict().values())  # of the heads and the frozen networks of the task too
    state = saved + moments + weights * bool(recipe.ema.decay)
    needed = (keep + 1) * state + 3 * weights  # a file is written before the one that it replaces is removed
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(
            f"The run needs about {format_bytes(needed)} on the disk of {folder} and {format_bytes(free)} are free: "
            "free some space, or give another --out."
        )


@contextmanager
def explain_out_of_memory() -> Iterator[None]:
    """Turn the allocators' out-of-memory errors into one UserError."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if type(error) is RuntimeError and "allocate memory" not in str(error):
            raise
        raise UserError(
            "Not even a few images of this model fit into the device's memory: use a smaller model or smaller images."
        ) from None
