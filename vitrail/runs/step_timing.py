"""How long will it take? The training itself, for a few steps on a copy of the model, before anything is written.

A rehearsed step is the loop's own, with the recipe's augmentation, teacher, optimizer and running mean, and with what processes
say to each other: whatever a step comes to contain is counted.
"""

import copy
import dataclasses
import operator
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from vitrail.data.feed import Feed
from vitrail.data.loader import Batch, Canvas, Reader, choose_store, make_batch
from vitrail.data.sampler import Samples
from vitrail.data.source import Source, Splits, Subset
from vitrail.data.workers import usual_workers
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes.schema import Recipe
from vitrail.runs.memory import enough_memory, now
from vitrail.tasks.supervision import Guide
from vitrail.training.distributed import Devices
from vitrail.training.trainer import Options, Trainer

BUDGET = 1.0  # seconds that the steps of a rehearsal may take in all, but for the first
FEW = 2  # images, of the first step
GROWTH = 4  # of the images from one step to the next
ROUNDS = 3  # of the whole step, where there is time for it
DIFFERENT = 16  # images that are decoded; more are these again
Step = Callable[[int, int], float]  # images in each of so many units: seconds


@dataclasses.dataclass(frozen=True)
class Pace:
    """What takes how many seconds, on the slowest of the processes."""

    step: float  # the whole batch: preparing, learning, settling
    looking: float = 0.0  # a validation, all of its images
    asking: float = 0.0  # of a step, the teacher's part


class Timed(NamedTuple):
    """Some images, and how long a step of one unit with them took."""

    images: int
    seconds: float


def rehearse(
    model: VisionTransformer,
    recipe: Recipe,
    devices: Devices,
    splits: Splits,
    options: Options,
    guide: Guide,
    workers: int | None = None,
) -> Pace:
    """Measured by all processes together; the model is left as it was, and not compiled."""
    at_least = round(max(recipe.augmentation.image_size) * recipe.data.decode_scale) or None
    train, validation = (Sample(part, devices, at_least) for part in (splits.train, splits.validation))
    with enough_memory():
        plain = dataclasses.replace(options, compile=False)
        training = Trainer(recipe, copy.deepcopy(model), devices, train, validation, Path(), plain, guide)
        seconds, looking = perform(training, train, validation)
        share = recipe.batch_size // devices.world_size
        asking = share * ask(guide, recipe, devices, validation.few)
    del training
    if devices.device.type == "cuda":
        torch.cuda.empty_cache()  # the training lays its memory out anew
    fetching = [part.waiting(workers, at_least) for part in (train, validation)]
    # Workers decode beside a GPU; on the processor they take the cores that the steps need.
    both: Callable[[float, float], float] = max if devices.device.type == "cuda" else operator.add
    tested = len(splits.validation) / devices.world_size
    times = [both(seconds, share * fetching[0]), both(tested * looking, tested * fetching[1]), asking]
    step, looking, asking = devices.all_reduce_max(times)
    return Pace(step, looking, min(asking, step))  # a part of it, though clocked by itself


def perform(training: Trainer, train: "Sample", validation: "Sample") -> tuple[float, float]:
    """Seconds of a step, and of a validation image."""
    devices, micro_batch = training.devices, training.recipe.batch_size // training.devices.micro_batches

    def step(images: int, micro_batches: int) -> float:
        batch = train.batch(images)
        training.step, training.devices = 0, dataclasses.replace(devices, micro_batches=micro_batches)
        return clock(devices, lambda: training._step(lambda: batch))

    first, last = approach(step, micro_batch, devices.world_size)
    seconds = whole_step(step, first, last, micro_batch, devices)
    training.devices = devices
    validation.narrow(last.images)
    training.evaluate()
    return seconds, clock(devices, training.evaluate) / last.images


def approach(step: Step, micro_batch: int, world: int) -> tuple[Timed, Timed]:
    """Steps of one unit with more and more images, as many as the time allows: the first and the last."""
    first = last = timed(step, min(micro_batch, FEW), world)
    spent = 0.0
    while last.images < micro_batch:
        images = min(GROWTH * last.images, micro_batch)
        # Of the first few images nobody knows yet what is theirs and what every step takes: half of the time, say.
        each = slope(first, last) if last is not first else last.seconds / last.images / 2
        if spent + 2 * (last.seconds + each * (images - last.images)) <= BUDGET:
            last = timed(step, images, world)
            spent += 2 * last.seconds
        elif last is first and first.seconds < 2 * BUDGET:  # a guess from one size may be many times too long: look once
            last = Timed(images, step(images, world))
            break
        else:
            break
    return first, last


def timed(step: Step, images: int, world: int) -> Timed:
    """After a first step, which loads and lays out what others find ready; where steps are short, the quickest of some, because
    a moment of other work on the machine would say little about the next size.
    """
    step(images, world)
    times = [step(images, world)]
    while len(times) < ROUNDS and sum(times) < BUDGET / 2:
        times.append(step(images, world))
    return Timed(images, min(times))


def whole_step(step: Step, first: Timed, last: Timed, micro_batch: int, devices: Devices) -> float:
    """Seconds of a step with all its units: measured, or where that takes too long reckoned from smaller ones."""
    if last.images == micro_batch and ROUNDS * last.seconds * devices.accumulation <= BUDGET:
        return statistics.median(step(micro_batch, devices.micro_batches) for _ in range(ROUNDS))
    return devices.accumulation * (last.seconds + slope(first, last) * (micro_batch - last.images))


def slope(first: Timed, last: Timed) -> float:
    """Seconds that one more image takes."""
    most = last.seconds / last.images
    if last.images == first.images:
        return most
    return min(max((last.seconds - first.seconds) / (last.images - first.images), 0.0), most)


def ask(guide: Guide, recipe: Recipe, devices: Devices, count: int) -> float:
    """Seconds in which the teacher answers about an image, 0 where none is asked."""
    if guide.teacher is None:
        return 0.0
    how, teacher = recipe.augmentation, guide.teacher
    images = torch.zeros(count, len(how.mean), *how.image_size, device=devices.device)
    return timed(lambda *_: clock(devices, lambda: teacher(images, how.mean, how.std)), count, 1).seconds / count


def clock(devices: Devices, work: Callable[[], object]) -> float:
    """Seconds that the slowest process takes: all must judge alike what there is time for."""
    start = now(devices.device)
    work()
    return devices.all_reduce_max([now(devices.device) - start])[0]


class Sample(Feed):
    """Some images of a source, decoded once, in batches of any size."""

    def __init__(self, source: Source, devices: Devices, at_least: int | None) -> None:
        self.source = self.whole = source
        self.device, self.world, self.few = devices.device, devices.world_size, 1
        indices = np.unique(np.linspace(0, len(source) - 1, DIFFERENT).astype(np.int64))
        start = time.perf_counter()
        canvas = Reader(source, at_least, False).images(indices)
        self.decoding = (time.perf_counter() - start) / len(indices)  # seconds an image
        good = np.flatnonzero(canvas.sizes[:, 0])
        if len(good):
            self.canvas = canvas._replace(pixels=canvas.pixels[good], sizes=canvas.sizes[good], samples=blank(indices[good]))
        else:  # the training will say what is wrong with them
            self.canvas = Canvas(torch.zeros(1, 8, 8, 3, dtype=torch.uint8), np.array([[8, 8]]), None, blank(indices[:1]), [])

    def narrow(self, images: int) -> None:
        """From now on a sweep is one batch of so many images for each process."""
        self.few, self.source = images, Subset(self.whole, np.arange(min(images * self.world, len(self.whole))))

    def batch(self, images: int) -> Batch:
        rows = np.arange(images) % len(self.canvas.sizes)
        index = self.canvas.samples.index[rows]
        return make_batch(self.whole, Canvas(self.canvas.pixels[rows], self.canvas.sizes[rows], None, blank(index), []))

    def sweep(self, batch: int, part: int = 0, parts: int = 1) -> Iterator[Batch]:
        yield self.batch(self.few).to(self.device)

    def waiting(self, workers: int | None, at_least: int | None) -> float:
        """Seconds for an image that are spent on decoding at every step; 0 where all are decoded once and kept."""
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        kept = choose_store(self.whole, self.device, at_least, memory_share=0.5 / processes).place != "files"
        return 0.0 if kept else self.decoding / max(usual_workers() if workers is None else workers, 1)


def blank(index: np.ndarray) -> Samples:
    return Samples(index, np.zeros_like(index), np.arange(len(index)))
