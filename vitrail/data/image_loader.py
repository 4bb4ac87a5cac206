"""Batches of a source on one device: from a cache of decoded images if they fit into memory, else decoded by worker processes."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
import torch

from vitrail.data.image_cache import CachedLoader, ImageCache, build_cache, plan_cache
from vitrail.data.loader import Batch, DecodedBatch, ImageReader, TrainLoader, WorkerLoader, log_to_stderr, make_batch
from vitrail.data.sampler import EpochSampler, first_samples
from vitrail.data.source import Source
from vitrail.data.workers import Workers, default_workers


class ImageLoader:
    """Loads a source to one device: `train_loader` for training steps, `iterate` for every image once."""

    def __init__(
        self,
        source: Source,
        device: torch.device | str = "cpu",
        workers: int | None = None,
        min_side: int | None = None,
        unreadable: Literal["skip", "fatal"] = "skip",
        log: Callable[[str], None] = log_to_stderr,
        masks: bool = False,
        objects: bool = False,
    ) -> None:
        self.source, self.device, self.masks, self.objects = source, torch.device(device), masks, objects
        self.min_side, self.unreadable, self.log = min_side, unreadable, log
        self.workers = default_workers() if workers is None else workers
        fraction = 0.5 / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # every process on this machine has its own cache
        plan = plan_cache(source, self.device, min_side, memory_fraction=fraction, masks=masks, objects=objects)
        self.message = plan.message
        self.cache: ImageCache | None = None
        if plan.location != "files":
            place = self.device if plan.location == "device" else "cpu"
            self.cache = build_cache(source, place, self.workers, min_side, masks, objects)
        self._pool: Workers | None = None

    def train_loader(self, sampler: EpochSampler, own_micro_batches: Sequence[int], micro_batches: int) -> TrainLoader:
        """Return the loader of the micro-batches `own_micro_batches`, out of `micro_batches` per step."""
        if self.cache is not None:
            return CachedLoader(self.cache, sampler, own_micro_batches, micro_batches, self.unreadable, self.log)
        place = (own_micro_batches, micro_batches, self.workers, self.min_side, self.unreadable)
        return WorkerLoader(self.source, sampler, *place, masks=self.masks, log=self.log, objects=self.objects)

    def iterate(self, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """Yield every `world_size`-th image once, starting at `rank`, in batches on the device; unreadable images are skipped."""
        images = np.arange(rank, len(self.source), world_size)
        chunks = [images[start : start + batch_size] for start in range(0, len(images), batch_size)]
        if self.cache is not None:
            decoded_batches: Iterator[DecodedBatch] = map(self.cache.select, map(first_samples, chunks))
        else:
            if self._pool is None:
                self._pool = Workers(ImageReader(self.source, self.min_side, self.masks, self.objects).read_images, self.workers)
            decoded_batches = self._pool.run(chunks)
        for decoded in decoded_batches:
            readable = decoded.sizes[:, 0] > 0
            if readable.any():
                rows = torch.from_numpy(np.flatnonzero(readable))
                pixels, masks, objects = decoded.pixels, decoded.masks, decoded.objects
                if not readable.all():
                    pixels = pixels[rows.to(pixels.device)]
                    masks = masks[rows.to(masks.device)] if masks is not None else None
                    objects = objects.select(rows) if objects is not None else None
                samples = first_samples(decoded.samples.index[readable])
                readable_part = DecodedBatch(pixels, decoded.sizes[readable], masks, samples, [], objects)
                yield make_batch(self.source, readable_part).to(self.device)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
