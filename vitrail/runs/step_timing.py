"""Estimate how long a training takes: real steps on a few images are timed for about a second, then the state is restored.

A timed step is the trainer's own, with augmentation, teacher, optimizer, EMA and communication between processes.
"""

import dataclasses
import math
import operator
import os
import shlex
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from vitrail.data.image_cache import plan_cache
from vitrail.data.image_loader import ImageLoader
from vitrail.data.loader import Batch, DecodedBatch, ImageReader, make_batch
from vitrail.data.sampler import Samples
from vitrail.data.source import Source, Splits, Subset
from vitrail.data.workers import count_cores, default_workers
from vitrail.devices import OtherPrograms, describe_load
from vitrail.formatting import format_bytes, format_rate, format_time_span, percent, pluralize
from vitrail.runs.memory import MemoryPlan, explain_out_of_memory
from vitrail.tasks.probe_head import MAX_IMAGES
from vitrail.training.distributed import Devices
from vitrail.training.schedules import duration_to_steps
from vitrail.training.task import Task
from vitrail.training.trainer import Trainer

BUDGET = 1.0  # seconds for all timed steps but the first
FIRST_IMAGES = 2  # of the first step
GROWTH = 4  # factor of the number of images from one step to the next
ROUNDS = 3  # of the whole step, where there is time for it
BUSY = 0.25  # share of the cores that other programs use above which a forecast says so
TOLERANCE = 1.1  # of a time budget above which the forecast says that it does not fit
LONG = 4 * 60 * 60  # seconds on a CPU above which cheaper trainings are named
SHOWN_BYTES = 1e8  # of decoded images; less are not worth mentioning
SMALL_SIDE = 64  # pixels; smaller images are not suggested
DECODED = 16  # images that are decoded; larger batches repeat them
TimedStep = Callable[[int, int], float]  # images in each of so many micro-batches: seconds


@dataclasses.dataclass(frozen=True)
class Pace:
    """Seconds, on the slowest of the processes."""

    step: float  # the whole batch
    validation: float = 0.0  # all validation images
    teacher: float = 0.0  # the teacher's part of a step
    busy_cores: float = 0.0  # cores that other programs used meanwhile
    fixed: float = 0.0  # before the first and after the last step: the fit of the classifier, the evaluation of the best weights


class Timed(NamedTuple):
    """Images of one micro-batch and the seconds of a step with them."""

    images: int
    seconds: float


def measure_pace(trainer: Trainer, splits: Splits, workers: int | None = None) -> Pace:
    """Measured by all processes together, without compilation; the trainer is left unchanged."""
    recipe, devices = trainer.recipe, trainer.devices
    min_side = recipe.min_decode_side
    train, validation = (SampleLoader(part, devices, min_side) for part in (splits.train, splits.validation))
    others = OtherPrograms()
    with explain_out_of_memory(), undone(trainer), torch.compiler.set_stance("force_eager"):
        trainer.compute, trainer.validation = trainer.forward_backward, validation
        seconds, per_image = time_steps(trainer, train, validation)
        share = recipe.batch_size // devices.world_size
        teacher = share * time_teacher(trainer.task, devices, validation.images)
    busy_cores = others.cores()
    if devices.device.type == "cuda":
        torch.cuda.empty_cache()  # the training allocates its memory anew
    decoding = [part.decoding_seconds(workers, min_side, trainer.task) for part in (train, validation)]
    # Workers decode in parallel to a GPU; on a CPU they compete with the steps for the cores.
    combine: Callable[[float, float], float] = max if devices.device.type == "cuda" else operator.add
    validated = len(splits.validation) / devices.world_size
    times = [combine(seconds, share * decoding[0]), combine(validated * per_image, validated * decoding[1]), teacher]
    step, validation_seconds, teacher = devices.all_reduce_max(times)
    evaluated = [splits.validation] * (1 + recipe.validation.at_start) + ([splits.test] if splits.test is not None else [])
    images = sum(map(len, evaluated)) + (min(len(splits.train), MAX_IMAGES) if recipe.init.probe_head else 0)
    fixed = validation_seconds * images / len(splits.validation)
    return Pace(step, validation_seconds, min(teacher, step), busy_cores, fixed)  # the teacher's part is timed separately


@contextmanager
def undone(trainer: Trainer) -> Iterator[None]:
    """Restore weights, optimizer, EMA, task state and counters afterwards."""
    module, kept = trainer.task.module, (trainer.compute, trainer.devices, trainer.validation)
    tensors = [*module.parameters(), *module.buffers(), trainer.window]
    if trainer.ema:
        tensors += trainer.ema.state_dict().values()
    before = [tensor.detach().clone() for tensor in tensors]
    task_state = {name: tensor.clone() for name, tensor in trainer.task.state_dict().items()}
    scaler = trainer.scaler.state_dict() if trainer.scaler else None
    training = module.training
    # SGD and Adagrad have a state before the first step.
    optimizer_state = {
        parameter: {name: value.clone() for name, value in state.items()} for parameter, state in trainer.optimizer.state.items()
    }
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
        trainer.task.load_state_dict(task_state)
        trainer.optimizer.state.clear()
        trainer.optimizer.state.update(optimizer_state)
        trainer.optimizer.zero_grad(set_to_none=True)
        if trainer.scaler and scaler:
            trainer.scaler.load_state_dict(scaler)
        trainer.set_mode(training)
        trainer.step = 0
        trainer.compute, trainer.devices, trainer.validation = kept


def time_steps(trainer: Trainer, train: "SampleLoader", validation: "SampleLoader") -> tuple[float, float]:
    """Seconds of a step, and of a validation image."""
    devices, micro_batch_size = trainer.devices, trainer.recipe.batch_size // trainer.devices.micro_batches

    def step(images: int, micro_batches: int) -> float:
        batch = train.batch(images)
        trainer.step, trainer.devices = 0, dataclasses.replace(devices, micro_batches=micro_batches)
        return clock(devices, lambda: trainer.train_step(lambda: batch))

    first, last = grow(step, micro_batch_size, devices.world_size)
    seconds = time_whole_step(step, first, last, micro_batch_size, devices)
    trainer.devices = devices
    validation.limit(last.images)
    trainer.evaluate()
    return seconds, clock(devices, trainer.evaluate) / last.images


def grow(step: TimedStep, micro_batch_size: int, world_size: int) -> tuple[Timed, Timed]:
    """Steps of one micro-batch with more and more images within the budget: the first and the last."""
    first = last = time_step(step, min(micro_batch_size, FIRST_IMAGES), world_size)
    spent = 0.0
    while last.images < micro_batch_size:
        images = min(GROWTH * last.images, micro_batch_size)
        # One measurement does not separate the cost per image from the cost per step: assume half of each.
        per_image = slope(first, last) if last is not first else last.seconds / last.images / 2
        if spent + 2 * (last.seconds + per_image * (images - last.images)) <= BUDGET:
            last = time_step(step, images, world_size)
            spent += 2 * last.seconds
        elif last is first and first.seconds < 2 * BUDGET:  # an estimate from one size may be far too long: measure once
            last = Timed(images, step(images, world_size))
            break
        else:
            break
    return first, last


def time_step(step: TimedStep, images: int, world_size: int) -> Timed:
    """The fastest of up to ROUNDS steps after a warm-up: other load on the machine would distort single short steps."""
    step(images, world_size)
    times = [step(images, world_size)]
    while len(times) < ROUNDS and sum(times) < BUDGET / 2:
        times.append(step(images, world_size))
    return Timed(images, min(times))


def time_whole_step(step: TimedStep, first: Timed, last: Timed, micro_batch_size: int, devices: Devices) -> float:
    """Seconds of a step with all its micro-batches: measured, or extrapolated where that takes too long."""
    if last.images == micro_batch_size and ROUNDS * last.seconds * devices.accumulation <= BUDGET:
        return statistics.median(step(micro_batch_size, devices.micro_batches) for _ in range(ROUNDS))
    return devices.accumulation * (last.seconds + slope(first, last) * (micro_batch_size - last.images))


def slope(first: Timed, last: Timed) -> float:
    """Seconds of one more image."""
    highest = last.seconds / last.images
    if last.images == first.images:
        return highest
    return min(max((last.seconds - first.seconds) / (last.images - first.images), 0.0), highest)


def time_teacher(task: Task, devices: Devices, images: int) -> float:
    """Seconds per image of the teacher's forward pass, 0 without a teacher."""
    if task.teacher is None:
        return 0.0
    augmentation = task.recipe.augmentation
    blank = torch.zeros(images, len(augmentation.mean), *augmentation.image_size, device=devices.device)
    return time_step(lambda *_: clock(devices, lambda: task.run_teacher(blank)), images, 1).seconds / images


def clock(devices: Devices, work: Callable[[], object]) -> float:
    """Seconds of the slowest process, so that all processes decide alike what there is time for."""
    start = now(devices.device)
    work()
    return devices.all_reduce_max([now(devices.device) - start])[0]


def now(device: torch.device) -> float:
    """The time when all work queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def forecast(
    trainer: Trainer,
    memory: MemoryPlan,
    pace: Pace,
    source: str = "SOURCE",
    others: Sequence[float] = (),
    minutes: float | None = None,
) -> list[str]:
    """Messages: steps, time and memory, then what makes the time uncertain and what would save most of it.

    `others` are the trainings that follow, as multiples of the time of this one; `minutes` is the time budget.
    """
    recipe, devices, steps = trainer.recipe, trainer.devices, trainer.total
    validations = math.ceil(steps / max(duration_to_steps(recipe.validation.every, trainer.sampler.steps, steps), 1))
    validating = validations * pace.validation
    seconds = pace.step * steps + validating + pace.fixed
    whole = seconds * (1 + sum(others))
    used = memory.memory(recipe.batch_size // devices.micro_batches)
    message = (
        f"{describe_length(steps, trainer.sampler.steps)}, about {format_time_span(seconds)} at "
        f"{format_rate(recipe.batch_size / pace.step)} images/s{' before compiling' if trainer.options.compile else ''}"
        + (f", {percent(validating / seconds)} of it validation" if validating >= 0.005 * seconds else "")
        + (f"; all {1 + len(others)} trainings about {format_time_span(whole)}" if others else "")
        + f"; {format_bytes(used)} of {format_bytes(memory.free)} memory"
        + (f", {format_bytes(memory.cached)} of it decoded images" if memory.cached >= SHOWN_BYTES else "")
        + (
            f"; the teacher takes {percent(pace.teacher / pace.step)} of a step and {format_bytes(memory.teacher)}"
            if memory.teacher
            else ""
        )
    )
    on_cpu = devices.device.type == "cpu"
    advice = []
    if on_cpu and pace.busy_cores >= BUSY * count_cores():
        factor = max(1 + pace.busy_cores / count_cores(), 1.5)
        advice.append(f"{describe_load(pace.busy_cores)}: it may take up to {factor:.1f} times longer or shorter")
    if minutes and seconds > TOLERANCE * 60 * minutes:
        advice.append(
            f"{minutes:g} minutes are too few for {pluralize(steps, 'step')} and {pluralize(validations, 'validation')}"
        )
    if on_cpu and recipe.distillation.teacher and pace.teacher > 0.5 * pace.step:
        advice.append(suggest_annotation(trainer, pace, source))
    if on_cpu and whole > LONG:
        advice.append(suggest_shorter(trainer, seconds, whole, source))
    return [message, *advice]


def describe_length(steps: int, epoch: int) -> str:
    """The text "12 epochs of 8 steps", or "5 steps" if they are no whole number of epochs."""
    epochs, rest = divmod(steps, epoch)
    return pluralize(steps, "step") if rest else f"{pluralize(epochs, 'epoch')} of {pluralize(epoch, 'step')}"


def suggest_annotation(trainer: Trainer, pace: Pace, source: str) -> str:
    """The command that computes the teacher's predictions once, and how long it takes."""
    teacher, recipe = trainer.recipe.distillation.teacher, trainer.recipe
    command = shlex.join(["vitrail", "annotate", teacher, source, "--out", "labels"])
    once = format_time_span(len(trainer.source) * pace.teacher / recipe.batch_size)
    return f"most of the time is the teacher's: `{command}` stores its predictions in about {once}; then give --teacher labels"


def suggest_shorter(trainer: Trainer, seconds: float, whole: float, source: str) -> str:
    """Cheaper alternatives to a training of many hours, with the time that they take."""
    epochs = trainer.total / trainer.sampler.steps
    fitting = max(int(epochs * LONG / whole), 1)
    height, width = trainer.recipe.augmentation.image_size
    ideas = ["give --minutes 60 for a training that ends after an hour"]
    if fitting < epochs:
        ideas.append(f"--epochs {fitting} (about {format_time_span(whole * fitting / epochs)})")
    if min(height, width) >= 2 * SMALL_SIDE:
        ideas.append(f"--image-size {height // 2} (about {format_time_span(whole / 4)})")
    if not trainer.recipe.init.weights:
        start = shlex.join(["vitrail", "train", source, "--from", "vitrail_tiny"])
        ideas.append(f"`{start}`, which starts from bundled weights and takes minutes")
    return f"this is more than {format_time_span(LONG)}: {', or '.join(ideas)}"


class SampleLoader(ImageLoader):
    """A few images of a source, decoded once, in batches of any size."""

    def __init__(self, source: Source, devices: Devices, min_side: int | None) -> None:
        self.source = self.whole = source
        self.device, self.world_size, self.images = devices.device, devices.world_size, 1
        indices = source.spread(DECODED)
        start = time.perf_counter()
        decoded = ImageReader(source, min_side, False).read_images(indices)
        self.seconds = (time.perf_counter() - start) / len(indices)  # per image
        readable = np.flatnonzero(decoded.sizes[:, 0])
        if len(readable):
            samples = blank_samples(indices[readable])
            self.decoded = decoded._replace(pixels=decoded.pixels[readable], sizes=decoded.sizes[readable], samples=samples)
        else:  # the training will report why they are unreadable
            pixels = torch.zeros(1, 8, 8, 3, dtype=torch.uint8)
            self.decoded = DecodedBatch(pixels, np.array([[8, 8]]), None, blank_samples(indices[:1]), [])

    def limit(self, images: int) -> None:
        """From now on a pass over the source is one batch of so many images for each process."""
        self.images, self.source = images, Subset(self.whole, np.arange(min(images * self.world_size, len(self.whole))))

    def batch(self, images: int) -> Batch:
        rows = np.arange(images) % len(self.decoded.sizes)
        samples = blank_samples(self.decoded.samples.index[rows])
        return make_batch(self.whole, DecodedBatch(self.decoded.pixels[rows], self.decoded.sizes[rows], None, samples, []))

    def iterate(self, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        yield self.batch(self.images).to(self.device)

    def decoding_seconds(self, workers: int | None, min_side: int | None, task: Task) -> float:
        """Seconds per image that decoding adds to every step; 0 where all images are decoded once and kept in memory."""
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        plan = plan_cache(self.whole, self.device, min_side, 0.5 / processes, task.reads_masks, task.reads_objects)
        kept = plan.location != "files"
        return 0.0 if kept else self.seconds / max(default_workers() if workers is None else workers, 1)


def blank_samples(index: np.ndarray) -> Samples:
    return Samples(index, np.zeros_like(index), np.arange(len(index)))
