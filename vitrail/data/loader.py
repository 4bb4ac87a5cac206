"""Loaders of training batches of uint8 images. The batches do not depend on the number of workers or on the starting step.

`WorkerLoader` decodes whole micro-batches in worker processes (`workers.py`). Data sets that fit into memory are decoded once
(`image_cache.py`).
"""

import multiprocessing
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.multiprocessing  # registers the transfer of tensors through shared memory
from torch import Tensor

from vitrail.atomic_files import describe_error
from vitrail.data.decode import decode, decode_mask, fit_mask
from vitrail.data.mask_classes import IGNORE
from vitrail.data.objects import (
    DecodedObjects,
    ObjectBatch,
    collate_objects,
    decode_objects,
    draw_class_mask,
)
from vitrail.data.sampler import EpochSampler, Samples, first_samples
from vitrail.data.source import Source
from vitrail.data.workers import Workers, default_workers
from vitrail.errors import UserError
from vitrail.formatting import escape_control


@dataclass(frozen=True)
class Batch:
    """B images padded to a common size: each is in the upper left corner, padded with 0 (masks with `IGNORE`).

    `pixels` has the shape [B, 3, H, W] in channels-last memory format, as the decoders write it.
    """

    pixels: Tensor  # uint8 [B, 3, H, W]
    sizes: Tensor  # int64 [B, 2]: height, width
    index: Tensor  # int64 [B]: images of the source
    repeat: Tensor  # int64 [B]: repeat numbers (repeated augmentation)
    position: Tensor  # int64 [B]: positions in the epoch
    labels: Tensor | None  # int64 [B]
    extra: dict[str, Tensor]  # extra label columns, int64 [B] each
    masks: Tensor | None  # uint8 [B, H, W]: class indices
    objects: ObjectBatch | None = None

    def to(self, device: torch.device | str, non_blocking: bool = True) -> "Batch":
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        changes: dict[str, Any] = {"extra": {name: function(tensor) for name, tensor in self.extra.items()}}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Tensor):
                changes[each.name] = function(value)
            elif isinstance(value, ObjectBatch):
                changes[each.name] = value.map(function)
        return replace(self, **changes)


class Problem(NamedTuple):
    """An unreadable image."""

    location: str
    reason: str


def unreadable_error(problem: Problem) -> UserError:
    return UserError(f"{problem.location} cannot be read: {problem.reason}; fix or remove it, or skip unreadable images.")


DecodedImage = tuple[np.ndarray, np.ndarray | None]  # pixels [H, W, 3] and mask [H, W]


class AnnotatedImage(NamedTuple):
    """What a reader reads of an image: pixels [H, W, 3], mask [H, W] and objects."""

    pixels: np.ndarray
    mask: np.ndarray | None
    objects: DecodedObjects | None


class DecodedBatch(NamedTuple):
    """The result of a worker: images [B, H, W, 3] with their samples. Unreadable images have the size (0, 0)."""

    pixels: Tensor
    sizes: np.ndarray
    masks: Tensor | None
    samples: Samples
    problems: list[Problem]
    objects: ObjectBatch | None = None


@dataclass(frozen=True)
class ImageReader:
    """Reads and decodes images of a source; sent to the worker processes."""

    source: Source
    min_side: int | None
    masks: bool = False
    objects: bool = False

    def read_image(self, index: int) -> DecodedImage | Problem:
        """Return the pixels [H, W, 3] and, with `masks`, the mask [H, W], or the problem if the image is unreadable."""
        image = self.read_annotated(index)
        return image if isinstance(image, Problem) else (image.pixels, image.mask)

    def read_annotated(self, index: int) -> AnnotatedImage | Problem:
        """Return an image with what is to be read of it, or the problem if a part of it is unreadable."""
        try:
            pixels = decode(self.source.encoded(index), self.min_side)
            mask = self.read_mask(index, pixels) if self.masks else None
            return AnnotatedImage(pixels, mask, self.read_objects(index, pixels) if self.objects else None)
        except (OSError, ValueError) as error:
            return Problem(self.source.location(index), describe_error(error))

    def read_mask(self, index: int, pixels: np.ndarray) -> np.ndarray | None:
        """Return the mask of an image: class indices [H, W], or the ids of the file if its classes are not known."""
        if self.source.draws_masks:
            return draw_class_mask(self.read_objects(index, pixels), *pixels.shape[:2])
        encoded, classes = self.source.mask(index), self.source.mask_classes
        if encoded is None and classes is not None:
            raise ValueError("it has no mask")
        if encoded is None:
            return None
        return fit_mask(decode_mask(encoded) if classes is None else classes.read(encoded), pixels)

    def read_objects(self, index: int, pixels: np.ndarray) -> DecodedObjects:
        found = self.source.objects(index)
        if found is None:
            raise ValueError("it has no list of objects")
        return decode_objects(found, *pixels.shape[:2])

    def read_images(self, indices: np.ndarray) -> DecodedBatch:
        images = [self.read_annotated(int(index)) for index in indices]
        problems = [image for image in images if isinstance(image, Problem)]
        return self._collate(images, first_samples(indices), problems)

    def _collate(self, images: Sequence[AnnotatedImage | Problem], samples: Samples, problems: list[Problem]) -> DecodedBatch:
        readable = [(row, image) for row, image in enumerate(images) if not isinstance(image, Problem)]
        sizes = np.zeros((len(images), 2), dtype=np.int64)
        for row, image in readable:
            sizes[row] = image.pixels.shape[:2]
        shape = (len(images), *sizes.max(axis=0))
        padded = shared_zeros((*shape, 3))
        masks = shared_zeros(shape).fill_(IGNORE) if self.masks else None
        for row, image in readable:
            height, width = sizes[row]
            padded.numpy()[row, :height, :width] = image.pixels
            if masks is not None and image.mask is not None:
                masks.numpy()[row, :height, :width] = image.mask
        objects = None
        if self.objects:
            items = [None if isinstance(image, Problem) else image.objects for image in images]
            objects = collate_objects(items, *shape[1:])
        return DecodedBatch(padded, sizes, masks, samples, problems, objects)


@dataclass(frozen=True)
class MicroBatchReader(ImageReader):
    """Reads one micro-batch of a training step."""

    sampler: EpochSampler = field(kw_only=True)
    micro_batches: int = field(kw_only=True)
    fatal: bool = field(kw_only=True)

    def __call__(self, task: tuple[int, int, int]) -> DecodedBatch:
        epoch, step, micro_batch = task
        images: dict[int, AnnotatedImage | Problem] = {}

        def readable(index: int) -> bool:
            if index not in images:
                image = images[index] = self.read_annotated(index)
                if self.fatal and isinstance(image, Problem):
                    raise unreadable_error(image)
            return not isinstance(images[index], Problem)

        samples = readable_samples(self.sampler, epoch, step, micro_batch, self.micro_batches, readable, self.source.name)
        problems = [image for image in images.values() if isinstance(image, Problem)]
        return self._collate([images[int(index)] for index in samples.index], samples, problems)


def readable_samples(
    sampler: EpochSampler, epoch: int, step: int, micro_batch: int, micro_batches: int, readable: Callable[[int], bool], name: str
) -> Samples:
    """Return the samples of a micro-batch, with each unreadable image replaced by the next readable sample of the step.

    The search wraps around at the end of the step. The position stays; index and repeat are those of the replacement. The search
    covers all micro-batches of the step, so the result does not depend on their number.
    """
    samples = sampler.micro_batch(epoch, step, micro_batch, micro_batches)
    index, repeat = samples.index.copy(), samples.repeat.copy()
    for row in range(len(index)):
        if not readable(int(index[row])):
            start, size = step * sampler.batch_size, sampler.batch_size
            following = start + (samples.position[row] - start + np.arange(1, size)) % size
            others = sampler.at(epoch, following)
            replacement = next((number for number, other in enumerate(others.index) if readable(int(other))), None)
            if replacement is None:
                raise UserError(f"None of the {size} images of a step of {name} can be read.")
            index[row], repeat[row] = others.index[replacement], others.repeat[replacement]
    return Samples(index, repeat, samples.position)


def shared_zeros(shape: tuple[int, ...]) -> Tensor:
    """Return uint8 zeros; in a worker process they are allocated in shared memory, which avoids a copy."""
    if multiprocessing.parent_process() is None:
        return torch.zeros(shape, dtype=torch.uint8)
    count = int(np.prod(shape))
    storage = torch.UntypedStorage._new_shared(max(count, 1), device="cpu")
    return torch.empty(0, dtype=torch.uint8).set_(storage)[:count].view(shape)


def log_to_stderr(message: str) -> None:
    print(escape_control(message), file=sys.stderr)


def make_batch(source: Source, decoded: DecodedBatch) -> Batch:
    """Return the decoded images together with their labels."""
    index = decoded.samples.index
    label, extra = source.label, source.extra
    return Batch(
        decoded.pixels.permute(0, 3, 1, 2),
        torch.from_numpy(decoded.sizes),
        torch.from_numpy(index),
        torch.from_numpy(decoded.samples.repeat),
        torch.from_numpy(decoded.samples.position),
        torch.from_numpy(label.values[index].astype(np.int64)) if label else None,
        {name: torch.from_numpy(labels.values[index].astype(np.int64)) for name, labels in extra.items()},
        decoded.masks,
        decoded.objects,
    )


class TrainLoader(ABC):
    """Base class of the loaders: yields the micro-batches of a process and records unreadable images.

    A process computes one or, with gradient accumulation, several of the `micro_batches` micro-batches of every step.
    """

    def __init__(
        self,
        source: Source,
        sampler: EpochSampler,
        own_micro_batches: Sequence[int],
        micro_batches: int,
        log: Callable[[str], None],
    ) -> None:
        self.source, self.sampler, self.micro_batches, self.log = source, sampler, micro_batches, log
        self.own_micro_batches = tuple(own_micro_batches)
        sampler.micro_batch(0, 0, 0, micro_batches)  # raise here, not in a worker, if the batch size is not divisible
        self.problems: list[Problem] = []  # each unreadable image once
        self._reported = 0

    @abstractmethod
    def iterate_steps(self, start: int, stop: int) -> Iterator[Batch]:
        """Yield the micro-batches of the steps `start` ... `stop - 1`, counted from the beginning of the first epoch."""

    def _record(self, problems: Iterable[Problem]) -> None:
        known = {problem.location for problem in self.problems}
        for problem in problems:
            if problem.location not in known:
                self.problems.append(problem)
                known.add(problem.location)

    def _report(self) -> None:
        new, self._reported = self.problems[self._reported :], len(self.problems)
        if new:
            images = "1 unreadable image was" if len(new) == 1 else f"{len(new)} unreadable images were"
            self.log(
                f"{self.source.name}: {images} replaced by others, first {new[0].location} ({new[0].reason}). "
                f"`vitrail data inspect` lists all of them."
            )


class WorkerLoader(TrainLoader):
    """Decodes batches in worker processes (0: in this process), into pinned memory if a GPU is available.

    With `unreadable="skip"` an unreadable image is replaced by another one of the same step (`readable_samples`), recorded in
    `problems` and reported through `log` at the end of the epoch. "fatal" raises UserError at the first one.
    """

    def __init__(
        self,
        source: Source,
        sampler: EpochSampler,
        own_micro_batches: Sequence[int] = (0,),
        micro_batches: int = 1,
        workers: int | None = None,
        min_side: int | None = None,
        unreadable: Literal["skip", "fatal"] = "skip",
        masks: bool = False,
        log: Callable[[str], None] = log_to_stderr,
        objects: bool = False,
    ) -> None:
        super().__init__(source, sampler, own_micro_batches, micro_batches, log)
        reader = MicroBatchReader(
            source, min_side, masks, objects, sampler=sampler, micro_batches=micro_batches, fatal=unreadable == "fatal"
        )
        self._workers = Workers(reader, default_workers() if workers is None else workers)
        self._pin = torch.cuda.is_available()

    def iterate_steps(self, start: int, stop: int) -> Iterator[Batch]:
        own, steps_per_epoch = self.own_micro_batches, self.sampler.steps
        tasks = ((*divmod(step, steps_per_epoch), micro_batch) for step in range(start, stop) for micro_batch in own)
        try:
            for number, decoded in enumerate(self._workers.run(tasks)):
                self._record(decoded.problems)
                batch = make_batch(self.source, decoded)
                yield batch.pin_memory() if self._pin else batch
                if (start + (number + 1) // len(own)) % steps_per_epoch == 0:
                    self._report()
        finally:
            self._report()

    def close(self) -> None:
        """Stop the worker processes; the next iteration starts them again."""
        self._workers.close()
