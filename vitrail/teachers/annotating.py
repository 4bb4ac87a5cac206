"""From a teacher and pictures to a store of its answers."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data.augment.pipeline import Augmentation, augment
from vitrail.data.loader import Canvas, Reader
from vitrail.data.source import Source
from vitrail.data.workers import Workers, usual_workers
from vitrail.errors import UserError
from vitrail.evaluation.accuracy import test_view
from vitrail.evaluation.predicting import FEW
from vitrail.teachers.fixed import Fixed
from vitrail.teachers.network import Size
from vitrail.teachers.store import WHAT
from vitrail.teachers.storing import SHARD, Advance, Arrays, Part, Shelf, Span, Watch, Written, shelve, unwatched, write_store
from vitrail.teachers.teacher import Teacher

VIEWS = ("plain", "mirrored")
DETAIL = 2  # JPEGs are decoded at this many times the teacher's size at least, as for a model that is tested


@dataclass(frozen=True)
class Wanted:
    """What is kept of a teacher's answers."""

    what: tuple[str, ...] = ("logits",)
    top_k: int = 0  # 0: all classes
    views: int = 1  # 1: the picture; 2: and its mirror image
    batch: int = 64  # pictures computed at a time

    def __post_init__(self) -> None:
        unknown = next((name for name in self.what if name not in WHAT), None)
        if unknown is not None or not self.what:
            raise UserError(f"A teacher is asked for {', '.join(WHAT)}, one or several of them, not {unknown or 'nothing'!r}.")
        if self.views not in (1, 2):
            raise UserError(f"There are 1 or 2 views, the picture and its mirror image, not {self.views}.")
        if self.top_k < 0 or self.batch < 1:
            raise UserError("top_k is 0 for all classes or a number above it, and batch a number above 0.")


def annotate(
    teacher: Teacher,
    source: Source,
    out: Path,
    wanted: Wanted = Wanted(),  # noqa: B008 - frozen
    workers: int | None = None,
    watch: Watch = unwatched,
    warn: Callable[[str], Any] = lambda sentence: None,
    file: Path | None = None,
    shard: int = SHARD,
) -> Written:
    """Asks the teacher about every picture of a source once and keeps what it says below `out`.

    Equal pictures are asked about once. Logits and features are of the picture as the teacher is tested with it; maps are of
    the whole picture, squashed to the teacher's size, so that every crop of it finds its part. Interrupted and called again, it
    goes on and gives the same to the byte: batches are cut within a shard. `file` is where a program comes from, whose weights
    cannot be looked at.
    """
    shelf = shelve(source, out, workers, watch)
    annotator = Annotator(teacher, wanted, shelf, workers)
    head = annotator.head() | {"teacher": identity(teacher, file)}
    with repeatable():
        return write_store(out, shelf, head, annotator.parts, watch, warn, shard)


@dataclass
class Annotator:
    """One run: a teacher, and the pictures that it is asked about."""

    teacher: Teacher
    wanted: Wanted
    shelf: Shelf
    workers: int | None
    arrays: dict[str, dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        teacher, self.views = self.teacher, VIEWS[: self.wanted.views]
        self.device = next((tensor.device for tensor in teacher.network.state_dict().values()), torch.device("cpu"))
        self.kept = min(self.wanted.top_k or teacher.classes, teacher.classes)
        own = teacher.preprocessing
        self.size: Size = teacher.size or own.image_size
        self.tested = test_view(own._replace(image_size=self.size))
        self.whole = Augmentation(self.size, "squash", filter=own.interpolation, mean=own.mean, std=own.std)
        self.arrays = {
            name: {"dtype": dtype_of(tensor, name, teacher.classes), "shape": [len(self.views), *tensor.shape[1:]]}
            for name, tensor in self.answers(self.blank(), self.blank()).items()
        }

    def head(self) -> dict[str, Any]:
        """What the manifest says beside teacher and pictures."""
        return {
            "what": [name for name in WHAT if name in self.wanted.what],
            "values": "logits before the softmax, float16",
            "top_k": self.kept if self.kept < self.teacher.classes else 0,
            "views": list(self.views),
            "size": list(self.size),
            "covers": "whole" if "tokens" in self.wanted.what else None,
            "arrays": self.arrays,
            "batch": self.wanted.batch,
            "device": self.device.type,
        }

    def blank(self) -> Tensor:
        return torch.zeros(1, len(self.teacher.preprocessing.mean), *self.size, device=self.device)

    def answers(self, tested: Tensor, whole: Tensor) -> dict[str, Tensor]:
        """Of views [B, 3, height, width] to what is kept of each picture, [B, ...]; class numbers are int64."""
        found: dict[str, Tensor] = {}
        if "logits" in self.wanted.what:
            found |= largest("logits", self.teacher(tested), self.kept)
        if "tokens" in self.wanted.what:
            found |= largest("tokens", self.teacher.dense(whole), self.kept)
        if "features" in self.wanted.what:
            found["features"] = self.teacher.features(tested)
        return found

    def parts(self, spans: list[Span], advance: Advance) -> Iterator[Part]:
        """The arrays of each span; pictures are decoded ahead, across spans. The host waits for the device once per span."""
        count = self.workers if self.workers is not None else usual_workers() if len(self.shelf.keys) > FEW else 0
        pool = Workers(Reader(self.shelf.source, DETAIL * max(self.size), False).pictures, count)
        step = self.wanted.batch
        cuts = [np.arange(at, min(at + step, stop)) for start, stop in spans for at in range(start, stop, step)]
        canvases = pool.run(cuts)
        try:
            for start, stop in spans:
                yield self.part(start, stop, canvases, advance)
        except torch.OutOfMemoryError:
            raise UserError(
                f"The device's memory is too small for {self.wanted.batch} pictures at a time: give a smaller --batch."
            ) from None
        finally:
            pool.close()

    def part(self, start: int, stop: int, canvases: Iterator[Canvas], advance: Advance) -> Part:
        room = {
            name: torch.zeros(stop - start, *each["shape"], dtype=SHORT[each["dtype"]], device=self.device)
            for name, each in self.arrays.items()
        }
        skipped, done = [], start
        while done < stop:
            canvas = next(canvases)
            bad = np.flatnonzero(canvas.sizes[:, 0] == 0)
            skipped += [(done - start + int(row), problem) for row, problem in zip(bad, canvas.problems, strict=True)]
            good = np.flatnonzero(canvas.sizes[:, 0] > 0)
            if len(good):
                self.ask(canvas, good, room, done - start)
            done += len(canvas.sizes)
            advance(len(canvas.sizes))
        if len(skipped) == stop - start:
            where, why = skipped[0][1]
            raise UserError(f"None of {stop - start:,} pictures one after the other can be read; {where}: {why}.")
        arrays = {name: as_numpy(tensor, self.arrays[name]["dtype"]) for name, tensor in room.items()}
        return Part(self.checked(arrays, start), skipped)

    def ask(self, canvas: Canvas, good: np.ndarray, room: dict[str, Tensor], first: int) -> None:
        """Answers for the readable pictures of a canvas, into their rows."""
        rows = torch.from_numpy(good)
        pixels = (canvas.pixels if len(good) == len(canvas.pixels) else canvas.pixels[rows]).to(self.device, non_blocking=True)
        pixels, sizes = pixels.permute(0, 3, 1, 2), torch.from_numpy(canvas.sizes[good]).to(self.device, non_blocking=True)
        rows = (rows + first).to(self.device, non_blocking=True)
        still = torch.zeros_like(rows)
        dense = "tokens" in self.wanted.what
        # Each view is rendered if somebody is asked about it.
        tested = augment(pixels, sizes, still, self.tested).images if self.wanted.what != ("tokens",) else self.blank()
        whole = augment(pixels, sizes, still, self.whole).images if dense else self.blank()
        for number in range(len(self.views)):
            for name, tensor in self.answers(*(view.flip(3) if number else view for view in (tested, whole))).items():
                room[name][rows, number] = tensor.to(room[name].dtype)

    def checked(self, arrays: Arrays, start: int) -> Arrays:
        for name, array in arrays.items():
            if array.dtype == np.float16 and not np.isfinite(array).all():
                row = int(np.argwhere(~np.isfinite(array))[0, 0])
                raise UserError(
                    f"The {name.split('.')[0]} of {self.teacher.name} are not finite, or above what half precision holds, for "
                    f"{self.shelf.source.where(start + row)}: the weights are damaged, or its preprocessing is another."
                )
        return arrays


# Class numbers are kept unsigned; torch computes with signed ones of the same bits.
SHORT = {"float16": torch.float16, "uint16": torch.int16, "uint32": torch.int32}


def largest(name: str, logits: Tensor, kept: int) -> dict[str, Tensor]:
    """The `kept` largest of [B, C, ...], their classes, and log-sum-exp of the others; all of them where all are kept."""
    if kept == logits.shape[1]:
        return {f"{name}.values": logits}
    values, classes = logits.topk(kept, 1)
    rest = logits.scatter(1, classes, -torch.inf).logsumexp(1)
    return {f"{name}.values": values, f"{name}.classes": classes, f"{name}.rest": rest}


def dtype_of(tensor: Tensor, name: str, classes: int) -> str:
    return class_dtype(classes) if name.endswith(".classes") else "float16"


def class_dtype(classes: int) -> str:
    """The narrowest that holds every class number."""
    return "uint16" if classes <= 1 << 16 else "uint32"


def as_numpy(tensor: Tensor, dtype: str) -> np.ndarray:
    return tensor.cpu().numpy().view(dtype)


def identity(teacher: Teacher, file: Path | None = None) -> dict[str, Any]:
    """Who answered: name, digest of its weights and of how they are put together, classes, preprocessing."""
    network = teacher.network
    digest = hashlib.sha256(type(network).__name__.encode())
    plan = getattr(network, "plan", None) or getattr(getattr(network, "model", None), "architecture", None)
    digest.update(repr(plan).encode() if plan is not None else b"")
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    if isinstance(network, Fixed) and file is not None:
        digest.update(file.read_bytes())
    return {
        "name": teacher.name,
        "weights": digest.hexdigest(),
        "classes": teacher.classes,
        "class_names": teacher.class_names,
        "preprocessing": json.loads(json.dumps(teacher.preprocessing.to_dict())),
        "order": teacher.order,
    }


@contextmanager
def repeatable() -> Iterator[None]:
    """The same convolution algorithms before and after an interruption."""
    flags = torch.backends.cudnn
    before = flags.benchmark, flags.deterministic
    flags.benchmark, flags.deterministic = False, True
    try:
        yield
    finally:
        flags.benchmark, flags.deterministic = before
