"""Data sets that fit into memory, or onto the device, are decoded once: `CachedLoader` yields the batches of `WorkerLoader`."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from vitrail.data.decode import decoded_size
from vitrail.data.loader import (
    Batch,
    DecodedBatch,
    ImageReader,
    Problem,
    TrainLoader,
    log_to_stderr,
    make_batch,
    readable_samples,
    unreadable_error,
)
from vitrail.data.mask_classes import IGNORE
from vitrail.data.objects import ObjectBatch, join_objects, plane_count, select_objects
from vitrail.data.sampler import EpochSampler, Samples
from vitrail.data.source import Source
from vitrail.data.workers import Workers, default_workers
from vitrail.devices import free_memory
from vitrail.formatting import format_bytes

DEVICE_FRACTION = 0.25  # of the free memory of a device that a cache may take
SAMPLES = 256  # images whose headers are read to estimate the size of a cache
MAX_PADDING = 2.0  # times the pixels of a batch that may be padded so that all batches have one shape


class CachePlan(NamedTuple):
    """Where the decoded images are kept, and the message about it."""

    location: Literal["device", "memory", "files"]
    message: str
    bytes: float = 0.0  # of the cache


def plan_cache(
    source: Source,
    device: torch.device | str = "cpu",
    min_side: int | None = None,
    memory_fraction: float = 0.5,
    masks: bool = False,
    objects: bool = False,
) -> CachePlan:
    """Choose the device if the decoded images fit into DEVICE_FRACTION of its free memory, else main memory, else no cache.

    The decoded size is estimated from the headers of images spread over the source.
    """
    sizes = []
    for index in source.spread(SAMPLES).tolist():
        try:
            sizes.append(decoded_size(source.encoded(index), min_side))
        except (OSError, ValueError):
            continue  # the loader reports it
    planes = bool(masks) + (max_planes(source) if objects and source.has_instances else 0)
    required = len(source) * (3 + planes) * int(np.prod(np.max(sizes, axis=0))) if sizes else sys.maxsize
    free = {"device": 0, "memory": free_memory()}
    if torch.device(device).type == "cuda":
        free["device"] = torch.cuda.mem_get_info(torch.device(device))[0]
    size = f"{source.name}: {len(source):,} images" + (f", {format_bytes(required)} decoded" if sizes else "")
    available = {name: format_bytes(count) for name, count in free.items()}
    if required <= DEVICE_FRACTION * free["device"]:
        return CachePlan("device", f"{size}, cached on the device ({available['device']} free).", required)
    if required <= memory_fraction * free["memory"]:
        return CachePlan("memory", f"{size}, cached in memory ({available['memory']} free).", required)
    return CachePlan("files", f"{size}, not cached but decoded every epoch ({available['memory']} of memory free).")


def max_planes(source: Source) -> int:
    """The most planes of masks that some images spread over the source have."""
    most = 0
    for index in source.spread(SAMPLES).tolist():
        try:
            most = max(most, len(source.objects(index) or ()))
        except (OSError, ValueError):
            continue  # the loader reports it
    return plane_count(most)


@dataclass(frozen=True)
class ImageCache:
    """All decoded images of a source on one device."""

    source: Source
    pixels: Tensor  # uint8 [N, H, W, 3]
    sizes: np.ndarray  # [N, 2]; 0, 0 for unreadable images
    masks: Tensor | None  # uint8 [N, H, W]
    problems: list[Problem]
    objects: ObjectBatch | None = None

    def select(self, samples: Samples) -> DecodedBatch:
        """Return the images of `samples`, padded to a common size."""
        sizes = self.sizes[samples.index]
        height, width = self._padded_size(sizes)
        rows = torch.from_numpy(samples.index).to(self.pixels.device, non_blocking=True)
        pixels = self.pixels.index_select(0, rows)[:, :height, :width].contiguous()
        masks = self.masks.index_select(0, rows)[:, :height, :width].contiguous() if self.masks is not None else None
        objects = None if self.objects is None else select_objects(self.objects, rows, height, width)
        return DecodedBatch(pixels, sizes, masks, samples, [], objects)

    def _padded_size(self, sizes: np.ndarray) -> tuple[int, int]:
        """The height and width of the largest of `sizes`; on a GPU those of all images, unless that is much more.

        Batches of one shape can be augmented by a CUDA graph.
        """
        height, width = (int(side) for side in sizes.max(axis=0))
        all_heights, all_widths = self.pixels.shape[1:3]
        if self.pixels.is_cuda and all_heights * all_widths <= MAX_PADDING * height * width:
            return all_heights, all_widths
        return height, width


def build_cache(
    source: Source,
    device: torch.device | str = "cpu",
    workers: int | None = None,
    min_side: int | None = None,
    masks: bool = False,
    objects: bool = False,
) -> ImageCache:
    """Decode all images of a source. `plan_cache` estimates whether they fit."""
    pool = Workers(ImageReader(source, min_side, masks, objects).read_images, default_workers() if workers is None else workers)
    pixels = torch.zeros((len(source), 0, 0, 3), dtype=torch.uint8, device=device)
    all_masks = torch.zeros((len(source), 0, 0), dtype=torch.uint8, device=device)
    sizes, problems = np.zeros((len(source), 2), dtype=np.int64), []
    all_objects: list[ObjectBatch] = []
    for chunk in pool.run(np.split(np.arange(len(source)), range(64, len(source), 64))):
        rows = slice(chunk.samples.index[0], chunk.samples.index[-1] + 1)
        height, width = chunk.pixels.shape[1:3]
        bottom, right = max(height - pixels.shape[1], 0), max(width - pixels.shape[2], 0)
        if bottom or right:
            pixels = pad(pixels, (0, 0, 0, right, 0, bottom))
            all_masks = pad(all_masks, (0, right, 0, bottom), value=IGNORE) if masks else all_masks
        pixels[rows, :height, :width] = chunk.pixels.to(device)
        if chunk.masks is not None:
            all_masks[rows, :height, :width] = chunk.masks.to(device)
        if chunk.objects is not None:
            all_objects.append(chunk.objects.map(lambda tensor: tensor.to(device)))
        sizes[rows] = chunk.sizes
        problems += chunk.problems
    pool.close()
    kept = join_objects(all_objects) if all_objects else None
    return ImageCache(source, pixels, sizes, all_masks if masks else None, problems, kept)


class CachedLoader(TrainLoader):
    """Yields the same batches as `WorkerLoader` from a cache, on the device of the cache."""

    def __init__(
        self,
        cache: ImageCache,
        sampler: EpochSampler,
        own_micro_batches: Sequence[int] = (0,),
        micro_batches: int = 1,
        unreadable: Literal["skip", "fatal"] = "skip",
        log: Callable[[str], None] = log_to_stderr,
    ) -> None:
        super().__init__(cache.source, sampler, own_micro_batches, micro_batches, log)
        if unreadable == "fatal" and cache.problems:
            raise unreadable_error(cache.problems[0])
        self.cache = cache
        self._record(cache.problems)

    def iterate_steps(self, start: int, stop: int) -> Iterator[Batch]:
        readable = self.cache.sizes[:, 0] > 0
        all_readable = bool(readable.all())
        self._report()
        for step in range(start, stop):
            for micro_batch in self.own_micro_batches:
                task = (*divmod(step, self.sampler.steps), micro_batch, self.micro_batches)
                if all_readable:
                    samples = self.sampler.micro_batch(*task)
                else:
                    samples = readable_samples(self.sampler, *task, lambda index: bool(readable[index]), self.source.name)
                yield make_batch(self.source, self.cache.select(samples)).to(self.cache.pixels.device)

    def close(self) -> None:
        """Do nothing: there are no worker processes."""
