"""From a source and an order to batches of uint8 images, the same stream with any number of workers or none.

Worker processes (`workers.py`) take whole batches in turn; a step is reached without running through those before it.
Data sets that fit are decoded once and stay resident (`choose_store`, `Store`); `StoredLoader` then gives the same stream.
"""

import multiprocessing
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.multiprocessing  # teaches pipes to hand tensors over in shared memory
from torch import Tensor
from torch.nn.functional import pad

from vitrail.atomic_files import reason
from vitrail.data.decode import decode, decode_mask, decoded_size, fit_mask
from vitrail.data.sampler import Order, Samples
from vitrail.data.source import Source
from vitrail.data.workers import Workers, usual_workers
from vitrail.errors import UserError

IGNORE = 255  # what a mask holds where there is no image or no mask: the usual id of "no class"


@dataclass(frozen=True)
class Batch:
    """B images on a common canvas, each in the upper left corner, zero elsewhere; masks likewise, `IGNORE` elsewhere.

    `pixels` has the shape [B, 3, H, W] and lies in memory channels last, as decoders write it.
    """

    pixels: Tensor  # uint8 [B, 3, H, W]
    sizes: Tensor  # int64 [B, 2]: height, width
    index: Tensor  # int64 [B]: which images of the source
    repeat: Tensor  # int64 [B]: which copy of each
    position: Tensor  # int64 [B]: places in the epoch's stream
    labels: Tensor | None  # int64 [B]
    extra: dict[str, Tensor]  # further columns of labels, int64 [B] each
    masks: Tensor | None  # uint8 [B, H, W]

    def to(self, device: torch.device | str, non_blocking: bool = True) -> "Batch":
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        changed: dict[str, Any] = {"extra": {name: change(tensor) for name, tensor in self.extra.items()}}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                changed[field.name] = change(value)
        return replace(self, **changed)


class Problem(NamedTuple):
    where: str
    reason: str


def unreadable(problem: Problem) -> UserError:
    return UserError(f"{problem.where} cannot be read: {problem.reason}; mend or remove it, or let bad images be skipped.")


class Canvas(NamedTuple):
    """What a worker hands over: images [B, H, W, 3] (a bad one has the size 0, 0), the samples they are, what was bad."""

    pixels: Tensor
    sizes: np.ndarray
    masks: Tensor | None
    samples: Samples
    problems: list[Problem]


@dataclass(frozen=True)
class Reader:
    """Reads and decodes; all that a worker process needs to know about the data."""

    source: Source
    at_least: int | None
    masks: bool

    def image(self, index: int) -> tuple[np.ndarray, np.ndarray | None] | Problem:
        """Pixels [H, W, 3] and, if asked for, the mask [H, W]; or why not."""
        try:
            pixels = decode(self.source.encoded(index), self.at_least)
            encoded = self.source.mask(index) if self.masks else None
            return pixels, fit_mask(decode_mask(encoded), pixels) if encoded is not None else None
        except (OSError, ValueError) as error:
            return Problem(self.source.where(index), reason(error))

    def images(self, indices: np.ndarray) -> Canvas:
        found = [self.image(int(index)) for index in indices]
        still = np.zeros_like(indices)
        problems = [image for image in found if isinstance(image, Problem)]
        return self._canvas(found, Samples(indices, still, still), problems)

    def _canvas(self, found: list, samples: Samples, problems: list[Problem]) -> Canvas:
        good = [(row, image) for row, image in enumerate(found) if not isinstance(image, Problem)]
        sizes = np.zeros((len(found), 2), dtype=np.int64)
        for row, (pixels, _) in good:
            sizes[row] = pixels.shape[:2]
        shape = (len(found), *sizes.max(axis=0))
        canvas = shared((*shape, 3))
        masks = shared(shape).fill_(IGNORE) if self.masks else None
        for row, (pixels, mask) in good:
            height, width = sizes[row]
            canvas.numpy()[row, :height, :width] = pixels
            if masks is not None and mask is not None:
                masks.numpy()[row, :height, :width] = mask
        return Canvas(canvas, sizes, masks, samples, problems)


@dataclass(frozen=True)
class StepReader(Reader):
    """Reads the unit's part of a step of the order."""

    order: Order
    micro_batches: int
    fatal: bool

    def __call__(self, task: tuple[int, int, int]) -> Canvas:
        epoch, step, micro_batch = task
        seen: dict[int, Any] = {}

        def readable(index: int) -> bool:
            if index not in seen:
                seen[index] = self.image(index)
                if self.fatal and isinstance(seen[index], Problem):
                    raise unreadable(seen[index])
            return not isinstance(seen[index], Problem)

        samples = readable_samples(self.order, epoch, step, micro_batch, self.micro_batches, readable, self.source.name)
        problems = [image for image in seen.values() if isinstance(image, Problem)]
        return self._canvas([seen[int(index)] for index in samples.index], samples, problems)


def readable_samples(
    order: Order, epoch: int, step: int, micro_batch: int, micro_batches: int, readable: Callable[[int], bool], name: str
) -> Samples:
    """The unit's samples; an unreadable one gives its place to the next readable one of the whole step, round its end.

    The place keeps its position; index and repeat are the replacement's. The step is that of all units together, so that
    the stream still does not depend on how it is cut.
    """
    samples = order.micro_batch(epoch, step, micro_batch, micro_batches)
    index, repeat = samples.index.copy(), samples.repeat.copy()
    for row in range(len(index)):
        if not readable(int(index[row])):
            start = step * order.batch
            after = start + (samples.position[row] - start + np.arange(1, order.batch)) % order.batch
            others = order.at(epoch, after)
            found = next((place for place, other in enumerate(others.index) if readable(int(other))), None)
            if found is None:
                raise UserError(f"None of the {order.batch} images of a step of {name} can be read.")
            index[row], repeat[row] = others.index[found], others.repeat[found]
    return Samples(index, repeat, samples.position)


def shared(shape: tuple[int, ...]) -> Tensor:
    """uint8 zeros; in a worker they lie in shared memory from the start, which spares a copy."""
    if multiprocessing.parent_process() is None:
        return torch.zeros(shape, dtype=torch.uint8)
    count = int(np.prod(shape))
    storage = torch.UntypedStorage._new_shared(max(count, 1), device="cpu")
    return torch.empty(0, dtype=torch.uint8).set_(storage)[:count].view(shape)


def to_stderr(sentence: str) -> None:
    print(sentence, file=sys.stderr)


def make_batch(source: Source, canvas: Canvas) -> Batch:
    """Images with the labels that belong to them."""
    index = canvas.samples.index
    label, extra = source.label, source.extra
    return Batch(
        canvas.pixels.permute(0, 3, 1, 2),
        torch.from_numpy(canvas.sizes),
        torch.from_numpy(index),
        torch.from_numpy(canvas.samples.repeat),
        torch.from_numpy(canvas.samples.position),
        torch.from_numpy(label.values[index].astype(np.int64)) if label else None,
        {name: torch.from_numpy(labels.values[index].astype(np.int64)) for name, labels in extra.items()},
        canvas.masks,
    )


class Stream(ABC):
    """What both loaders share: labels, and the account of unreadable images.

    Of the `micro_batches` parts of every step a process computes one, or several one after the other (gradient accumulation).
    """

    def __init__(
        self, source: Source, order: Order, micro_batch: int | Sequence[int], micro_batches: int, warn: Callable[[str], None]
    ) -> None:
        self.source, self.order, self.micro_batches, self.warn = source, order, micro_batches, warn
        self.mine = (micro_batch,) if isinstance(micro_batch, int) else tuple(micro_batch)
        order.micro_batch(
            0, 0, self.mine[0], micro_batches
        )  # complains here, not in a worker, about a batch that cannot be divided
        self.problems: list[Problem] = []  # each unreadable image once
        self._told = 0

    @abstractmethod
    def run(self, start: int, stop: int) -> Iterator[Batch]:
        """The steps `start` ... `stop`, counted from the first epoch's first, each in its units."""

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """The steps `start_step` ... of an epoch, each in its units."""
        return self.run(epoch * self.order.steps + start_step, (epoch + 1) * self.order.steps)

    def _record(self, problems: Iterable[Problem]) -> None:
        known = {problem.where for problem in self.problems}
        for problem in problems:
            if problem.where not in known:
                self.problems.append(problem)
                known.add(problem.where)

    def _report(self) -> None:
        new, self._told = self.problems[self._told :], len(self.problems)
        if new:
            first = "{} ({})".format(*new[0])
            what = "1 image" if len(new) == 1 else f"{len(new)} images"
            self.warn(
                f"{self.source.name}: {what} could not be read and others stood in; the first: {first}. "
                f"`vitrail data inspect` lists them all."
            )


class Loader(Stream):
    """Batches decoded by worker processes (0: in this one), in page-locked memory where there is a GPU.

    `bad="skip"` lets another image of the same step stand in for an unreadable one (`readable_samples` says which), notes it in
    `problems` and tells through `warn` at the end of the epoch how many were new; "fatal" raises UserError at the first.
    """

    def __init__(
        self,
        source: Source,
        order: Order,
        micro_batch: int | Sequence[int] = 0,
        micro_batches: int = 1,
        workers: int | None = None,
        at_least: int | None = None,
        bad: Literal["skip", "fatal"] = "skip",
        masks: bool = False,
        warn: Callable[[str], None] = to_stderr,
    ) -> None:
        super().__init__(source, order, micro_batch, micro_batches, warn)
        work = StepReader(source, at_least, masks, order, micro_batches, bad == "fatal")
        self._workers = Workers(work, usual_workers() if workers is None else workers)
        self._pin = torch.cuda.is_available()

    def run(self, start: int, stop: int) -> Iterator[Batch]:
        """The steps `start` ... `stop`, counted from the first epoch's first, each in its units."""
        tasks = ((*divmod(step, self.order.steps), micro_batch) for step in range(start, stop) for micro_batch in self.mine)
        try:
            for number, canvas in enumerate(self._workers.run(tasks)):
                self._record(canvas.problems)
                batch = make_batch(self.source, canvas)
                yield batch.pin_memory() if self._pin else batch
                if (start + (number + 1) // len(self.mine)) % self.order.steps == 0:
                    self._report()
        finally:
            self._report()

    def close(self) -> None:
        """Ends the workers; they start again when batches are asked for again."""
        self._workers.close()


class Plan(NamedTuple):
    """Where the images of a data set stay, and the line that says so."""

    place: Literal["device", "memory", "files"]
    sentence: str


def choose_store(
    source: Source,
    device: torch.device | str = "cpu",
    at_least: int | None = None,
    device_share: float = 0.25,
    memory_share: float = 0.5,
    masks: bool = False,
    sampled: int = 256,
) -> Plan:
    """On the device if the decoded images take at most that share of what is free there, else in memory, else in files.

    The size is judged by the headers of `sampled` images spread over the set.
    """
    sizes = []
    for index in np.unique(np.linspace(0, len(source) - 1, sampled).astype(np.int64)):
        try:
            sizes.append(decoded_size(source.encoded(int(index)), at_least))
        except (OSError, ValueError):
            continue  # the loader will meet it again and account for it
    need = len(source) * (4 if masks else 3) * int(np.prod(np.max(sizes, axis=0))) if sizes else sys.maxsize
    free = {"device": 0, "memory": free_memory()}
    if torch.device(device).type == "cuda":
        free["device"] = torch.cuda.mem_get_info(torch.device(device))[0]
    size = f"{len(source):,} images, {need / 1e9:.2f} GB decoded"
    if need <= device_share * free["device"]:
        return Plan("device", f"{source.name}: {size}, kept on the device ({free['device'] / 1e9:.1f} GB free there).")
    if need <= memory_share * free["memory"]:
        return Plan("memory", f"{source.name}: {size}, kept in memory ({free['memory'] / 1e9:.1f} GB free).")
    return Plan("files", f"{source.name}: {size}, decoded from files each time ({free['memory'] / 1e9:.1f} GB of memory free).")


def free_memory() -> int:
    """Bytes this process may still take, within the limit of its control group; 0 where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 0
    try:
        group = Path("/sys/fs/cgroup")
        return max(min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())), 0)
    except (OSError, ValueError):  # no such group, or "max": no limit
        return free


@dataclass(frozen=True)
class Store:
    """A whole source as pixels on one device."""

    source: Source
    pixels: Tensor  # uint8 [N, H, W, 3]
    sizes: np.ndarray  # [N, 2]; 0, 0 for unreadable images
    masks: Tensor | None  # uint8 [N, H, W]
    problems: list[Problem]


def fill_store(
    source: Source,
    device: torch.device | str = "cpu",
    workers: int | None = None,
    at_least: int | None = None,
    masks: bool = False,
) -> Store:
    """Decodes all images once; `choose_store` tells whether they fit."""
    pool = Workers(Reader(source, at_least, masks).images, usual_workers() if workers is None else workers)
    pixels = torch.zeros((len(source), 0, 0, 3), dtype=torch.uint8, device=device)
    kept = torch.zeros((len(source), 0, 0), dtype=torch.uint8, device=device)
    sizes, problems = np.zeros((len(source), 2), dtype=np.int64), []
    for part in pool.run(np.split(np.arange(len(source)), range(64, len(source), 64))):
        rows = slice(part.samples.index[0], part.samples.index[-1] + 1)
        height, width = part.pixels.shape[1:3]
        lower, right = max(height - pixels.shape[1], 0), max(width - pixels.shape[2], 0)
        if lower or right:
            pixels = pad(pixels, (0, 0, 0, right, 0, lower))
            kept = pad(kept, (0, right, 0, lower), value=IGNORE) if masks else kept
        pixels[rows, :height, :width] = part.pixels.to(device)
        if part.masks is not None:
            kept[rows, :height, :width] = part.masks.to(device)
        sizes[rows] = part.sizes
        problems += part.problems
    pool.close()
    return Store(source, pixels, sizes, kept if masks else None, problems)


class StoredLoader(Stream):
    """The same stream as `Loader`'s, picked from a store on the store's device."""

    def __init__(
        self,
        store: Store,
        order: Order,
        micro_batch: int | Sequence[int] = 0,
        micro_batches: int = 1,
        bad: Literal["skip", "fatal"] = "skip",
        warn: Callable[[str], None] = to_stderr,
    ) -> None:
        super().__init__(store.source, order, micro_batch, micro_batches, warn)
        if bad == "fatal" and store.problems:
            raise unreadable(store.problems[0])
        self.store = store
        self._record(store.problems)

    def run(self, start: int, stop: int) -> Iterator[Batch]:
        """The steps `start` ... `stop`, counted from the first epoch's first, each in its units."""
        store, device = self.store, self.store.pixels.device
        readable = store.sizes[:, 0] > 0
        whole = bool(readable.all())
        self._report()
        for step, micro_batch in ((step, micro_batch) for step in range(start, stop) for micro_batch in self.mine):
            part = (*divmod(step, self.order.steps), micro_batch, self.micro_batches)
            if whole:
                samples = self.order.micro_batch(*part)
            else:
                samples = readable_samples(self.order, *part, lambda index: bool(readable[index]), self.source.name)
            sizes = store.sizes[samples.index]
            height, width = sizes.max(axis=0)
            rows = torch.from_numpy(samples.index).to(device, non_blocking=True)
            pixels = store.pixels.index_select(0, rows)[:, :height, :width].contiguous()
            masks = store.masks.index_select(0, rows)[:, :height, :width].contiguous() if store.masks is not None else None
            yield make_batch(store.source, Canvas(pixels, sizes, masks, samples, [])).to(device)

    def close(self) -> None:
        """Nothing to end: there are no workers."""
