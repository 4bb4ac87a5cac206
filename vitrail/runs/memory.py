"""Will it fit? Reckoned, and on a GPU measured with a few images, before anything is written. How long: `rehearsing.py`."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from vitrail.data.loader import free_memory
from vitrail.errors import UserError
from vitrail.formatting import size
from vitrail.models.flops import Cost, cost
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes.schema import Recipe
from vitrail.tasks.classification import Supervised
from vitrail.tasks.targets import Targets
from vitrail.teachers.teacher import Teacher

SHARE = 0.9  # of the free memory that a training may plan with
COPIES = {"adamw": 4, "adam": 4, "lamb": 4, "sgd": 3, "adagrad": 3}  # weights, gradients, what the optimizer keeps


@dataclass(frozen=True)
class Plan:
    """A prediction: memory = fixed + each x images in a unit."""

    fixed: float
    each: float
    free: float
    largest: int  # images that a unit may have
    teacher: float = 0.0  # bytes of `fixed` that are a teacher's weights

    def memory(self, images: int) -> float:
        return self.fixed + self.each * images

    def check(self, images: int) -> None:
        if not self.largest:
            raise UserError(
                f"A single image needs about {size(self.memory(1))} and {size(self.free)} are free: "
                "take a smaller model or smaller images, or give --recompute."
            )
        if images > self.largest:
            raise UserError(
                f"{images} images at a time need about {size(self.memory(images))} and {size(self.free)} are free: at most "
                f"{self.largest} fit; give --micro-batch, --recompute or a smaller model."
            )


def taste(model: VisionTransformer, recipe: Recipe, device: torch.device, count: int, teacher: Teacher | None = None) -> float:
    """Bytes beyond the weights that computing some empty images takes on a GPU. A teacher is asked about them first."""
    task, how = Supervised(model, recipe).train(), recipe.augmentation
    images = torch.zeros(count, 3, *how.image_size, device=device)
    targets = random_targets(model, recipe, device, count)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(recipe.precision)
    state = {name: value.clone() for name, value in model.named_buffers()}
    memory = 0.0
    for _ in range(2):  # the second time counts: libraries take their own memory first
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        if teacher is not None:
            teacher(images, how.mean, how.std)
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            loss = task(images, targets)
        loss.backward()
        memory = torch.cuda.max_memory_allocated(device) - before
        model.zero_grad(set_to_none=True)
    for name, value in model.named_buffers():
        value.copy_(state[name])
    return float(memory)


def now(device: torch.device) -> float:
    """The time at which all is done that was asked of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def check_room(folder: Path, model: VisionTransformer, recipe: Recipe, keep: int) -> None:
    """Complain if the checkpoints and artifacts of a training have no room on the disk of its folder."""
    count = sum(parameter.numel() for parameter in model.parameters())
    state = 4 * count * (COPIES[recipe.optimizer.kind] - 1 + bool(recipe.ema.decay))  # gradients are not saved
    need = (keep + 1) * state + 3 * 4 * count  # a file is written beside those that it replaces
    place = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(place).free
    if free < need:
        raise UserError(
            f"The run needs about {size(need)} on the disk of {folder} and {size(free)} are free: make room there, "
            "or give another --out."
        )


def random_targets(model: VisionTransformer, recipe: Recipe, device: torch.device, images: int) -> Targets:
    """Of the shapes that the recipe's own will have."""
    classes, patches = model.architecture.classes, model.grid[0] * model.grid[1]
    even = torch.full((images, classes), 1.0 / classes, device=device)
    teacher = even if recipe.distillation.kind != "none" else None
    tokens = even[:, None].expand(-1, patches, -1).contiguous() if recipe.token_labels.weight else None
    mixed = torch.zeros(patches, dtype=torch.bool, device=device) if recipe.token_labels.mixtoken else None
    return Targets(even, teacher, tokens, mixed)


def make_plan(
    model: VisionTransformer, recipe: Recipe, device: torch.device, at_most: int, shares: int = 1, teacher: Teacher | None = None
) -> Plan:
    """The model's weights and statistics are left as they were.

    `shares` is the number of processes that share weights, gradients and what the optimizer keeps. A `teacher`, which is asked
    at every step, lies on the device already; every process has all of it.
    """
    price = cost(model.architecture)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    fixed = 4.0 * (price.parameters * (1 + bool(recipe.ema.decay)) + trained * (COPIES[recipe.optimizer.kind] - 1)) / shares
    taught = weight_bytes(teacher)
    fixed += taught
    held = 4.0 * price.parameters + taught  # these weights are on the device already
    each = kept_bytes(model, price)
    if teacher is not None and device.type == "cpu":  # a GPU is measured; the teacher forgets all before the student begins
        each = max(each, answering_bytes(teacher, recipe))
    free = fixed + each * at_most  # where the system does not say
    if device.type == "cpu" and free_memory():
        free = SHARE * free_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", "1")) + held
        Plan(fixed, each, free, largest_micro_batch(fixed, each, free)).check(1)  # before the system would end the process for it
    if device.type == "cuda":
        few, many = max(min(at_most // 2, 4), 1), max(min(at_most, 32), 2)
        with enough_memory():
            model.to(device)
            first, second = (taste(model, recipe, device, images, teacher) for images in (few, many))
        each = max((second - first) / (many - few), 1.0)
        unused = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = SHARE * unused + held
    return Plan(fixed, each, free, largest_micro_batch(fixed, each, free), taught)


def weight_bytes(teacher: Teacher | None) -> float:
    return float(sum(tensor.nbytes for tensor in teacher.state_dict().values())) if teacher is not None else 0.0


def answering_bytes(teacher: Teacher, recipe: Recipe) -> float:
    """What a teacher holds at a time for one image: of its layers, the largest input and output, and as much for shortcuts."""
    most = 0

    def look(layer: nn.Module, given: tuple, answer: object) -> None:
        nonlocal most
        most = max(most, sum(each.nbytes for each in (*given, answer) if isinstance(each, Tensor)))

    hooks = [layer.register_forward_hook(look) for layer in teacher.modules() if not list(layer.children())]
    try:
        how = recipe.augmentation
        teacher(torch.zeros(1, len(how.mean), *how.image_size), how.mean, how.std)
    finally:
        for hook in hooks:
            hook.remove()
    return 2.0 * most


@contextmanager
def enough_memory() -> Iterator[None]:
    """A sentence instead of what the several allocators raise."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if type(error) is RuntimeError and "allocate memory" not in str(error):
            raise
        raise UserError(
            "Not even a few images of this model fit on the device: take a smaller model or smaller images."
        ) from None


def largest_micro_batch(fixed: float, each: float, free: float) -> int:
    return int(max((free - fixed) // max(each, 1.0), 0))


def kept_bytes(model: VisionTransformer, price: Cost) -> float:
    """What one image keeps for the backward pass; with recomputing, the input of every block and all of one block."""
    depth = len(model.blocks)
    if not model.recompute or depth < 2:
        return float(price.activation_bytes)
    return 4.0 * price.tokens * model.architecture.width * depth + price.activation_bytes / depth
