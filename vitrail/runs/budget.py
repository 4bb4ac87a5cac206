"""A training within a time budget: the image size and the number of epochs that fit."""

import time

import torch

from vitrail.data.source import Source
from vitrail.models.flops import cost
from vitrail.models.inputs import has_fixed_grid
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes.data_defaults import median_side
from vitrail.runs.step_timing import Pace
from vitrail.training.trainer import Trainer

SIZES = (64, 96, 128, 160, 192, 224)
MIN_EPOCHS = 12  # for a larger image size: below that more epochs give more than more pixels
MAX_EPOCHS = 40  # of a classifier that starts from weights; more give little
ENLARGED = 1.2  # of objects in random crops with an area of 0.35 to 1 of the image, in the mean
TIMED_IMAGES, ROUNDS = 16, 3


def choose_image_size(
    model: VisionTransformer, source: Source, device: torch.device, minutes: float, dtype: torch.dtype | None = None
) -> tuple[int, int]:
    """The largest size, from that of the weights to that of the images, at which MIN_EPOCHS fit into the budget.

    Weights that are not square keep their size. `dtype` is that of the training's autocast, None for float32.
    """
    native, width = model.architecture.image_size
    if native != width:
        return model.architecture.image_size
    seconds = image_seconds(model, device, dtype) / cost(model.architecture).macs
    chosen = native
    for size in SIZES:
        if native < size <= max(median_side(source), native) and size % model.architecture.patch_size == 0:
            macs = cost(model.architecture.replace(image_size=(size, size))).macs
            if seconds * macs * len(source) * MIN_EPOCHS <= 60 * minutes:
                chosen = size
    return chosen, chosen


def choose_validation_size(model: VisionTransformer, size: tuple[int, int]) -> tuple[int, int]:
    """The size for whole images that shows objects about as large as random crops do at `size`, in whole patches.

    "Fixing the train-test resolution discrepancy" (arXiv 1906.06423). (0, 0), the same size, for weights of a fixed grid.
    """
    if has_fixed_grid(model.architecture):
        return 0, 0
    patch = model.architecture.patch_size
    height, width = (round(ENLARGED * side / patch) * patch for side in size)
    return height, width


def image_seconds(model: VisionTransformer, device: torch.device, dtype: torch.dtype | None = None) -> float:
    """Seconds of a forward and backward pass per image, the fastest of ROUNDS; the model is left unchanged."""
    height, width = model.architecture.image_size
    images = torch.zeros(TIMED_IMAGES, model.architecture.channels, height, width, device=device)
    before, times = next(model.parameters()).device, []
    model.to(device).eval()  # BatchNorm does not update its statistics
    for _ in range(ROUNDS):
        start = time.perf_counter()
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            loss = model(images).sum()
        loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    model.zero_grad(set_to_none=True)
    model.to(before)
    return min(times) / TIMED_IMAGES


def choose_length(trainer: Trainer, pace: Pace, minutes: float) -> str:
    """The duration that fits into the budget, validations included: at most MAX_EPOCHS of fine-tuning, at least one step."""
    recipe, steps = trainer.recipe, trainer.sampler.steps
    epoch = steps * pace.step + pace.validation * max(steps / trainer.validate_every, 1.0)
    seconds = 60 * minutes - pace.fixed
    if seconds >= epoch:
        epochs = int(seconds / epoch)
        fine_tuning = recipe.task == "classification" and recipe.init.weights
        return f"{min(epochs, MAX_EPOCHS) if fine_tuning else epochs} epochs"
    return f"{max(int((seconds - pace.validation) / pace.step), 1)} steps"
