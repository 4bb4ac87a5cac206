"""The way from a source to batches, chosen by what fits: decoded once and kept, or decoded by workers each time."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
import torch

from vitrail.data.loader import (
    Batch,
    Canvas,
    Loader,
    Reader,
    Store,
    StoredLoader,
    Stream,
    choose_store,
    fill_store,
    make_batch,
    to_stderr,
)
from vitrail.data.sampler import Order, Samples
from vitrail.data.source import Source
from vitrail.data.workers import Workers, usual_workers


class Feed:
    """One source on its way to one device: `stream` for training, `sweep` to see every image once."""

    def __init__(
        self,
        source: Source,
        device: torch.device | str = "cpu",
        workers: int | None = None,
        at_least: int | None = None,
        bad: Literal["skip", "fatal"] = "skip",
        say: Callable[[str], None] = to_stderr,
    ) -> None:
        self.source, self.device, self.at_least, self.bad, self.say = source, torch.device(device), at_least, bad, say
        self.workers = usual_workers() if workers is None else workers
        share = 0.5 / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # every process of this machine keeps a copy
        plan = choose_store(source, self.device, at_least, memory_share=share)
        self.sentence = plan.sentence
        self.store: Store | None = None
        if plan.place != "files":
            self.store = fill_store(source, self.device if plan.place == "device" else "cpu", self.workers, at_least)
        self._sweepers: Workers | None = None

    def stream(self, order: Order, mine: Sequence[int], micro_batches: int) -> Stream:
        """The parts `mine` of the `micro_batches` parts of every step."""
        if self.store is not None:
            return StoredLoader(self.store, order, mine, micro_batches, self.bad, self.say)
        return Loader(self.source, order, mine, micro_batches, self.workers, self.at_least, self.bad, warn=self.say)

    def sweep(self, batch: int, part: int = 0, parts: int = 1) -> Iterator[Batch]:
        """Every `parts`-th image once, from `part` on, in batches on the device; unreadable ones are left out."""
        images = np.arange(part, len(self.source), parts)
        chunks = [images[start : start + batch] for start in range(0, len(images), batch)]
        if self.store is not None:
            canvases: Iterator[Canvas] = map(self._stored, chunks)
        else:
            if self._sweepers is None:
                self._sweepers = Workers(Reader(self.source, self.at_least, False).images, self.workers)
            canvases = self._sweepers.run(chunks)
        for canvas in canvases:
            good = canvas.sizes[:, 0] > 0
            if good.any():
                rows = torch.from_numpy(np.flatnonzero(good))
                pixels = canvas.pixels if good.all() else canvas.pixels[rows.to(canvas.pixels.device)]
                samples = Samples(canvas.samples.index[good], canvas.samples.repeat[good], canvas.samples.position[good])
                yield make_batch(self.source, Canvas(pixels, canvas.sizes[good], None, samples, [])).to(self.device)

    def _stored(self, indices: np.ndarray) -> Canvas:
        assert self.store is not None
        sizes = self.store.sizes[indices]
        height, width = sizes.max(axis=0)
        rows = torch.from_numpy(indices).to(self.store.pixels.device)
        pixels = self.store.pixels.index_select(0, rows)[:, :height, :width].contiguous()
        still = np.zeros_like(indices)
        return Canvas(pixels, sizes, None, Samples(indices, still, still), [])

    def close(self) -> None:
        if self._sweepers is not None:
            self._sweepers.close()
