"""From a teacher and images to a store of its answers."""

import hashlib
import json
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.loader import Canvas, Problem, Reader
from vitrail.data.source import Source
from vitrail.data.transforms.pipeline import Augmentation, augment, look
from vitrail.data.workers import Workers, usual_workers
from vitrail.errors import UserError
from vitrail.evaluation.accuracy import test_view
from vitrail.evaluation.predict import FEW
from vitrail.teachers.class_index import Chosen
from vitrail.teachers.fixed_shape import Fixed, first_line
from vitrail.teachers.label_store import WHAT
from vitrail.teachers.label_store_writer import (
    SHARD,
    Advance,
    Arrays,
    Finish,
    Part,
    Shelf,
    Span,
    Watch,
    Written,
    shelve,
    unwatched,
    write_store,
)
from vitrail.teachers.network import Size
from vitrail.teachers.prefetch import ahead
from vitrail.teachers.teacher import Teacher

VIEWS = ("plain", "mirrored")
CHUNK = 64  # images that one process decodes at a time, so that several share a large batch
DETAIL = 2  # JPEGs are decoded at this many times the teacher's size at least, as for a model that is tested


@dataclass(frozen=True)
class Wanted:
    """What is kept of a teacher's answers."""

    what: tuple[str, ...] = ("logits",)
    top_k: int = 0  # 0: all classes
    views: int = 1  # 1: the image; 2: and its mirror image
    batch: int = 64  # images computed at a time

    def __post_init__(self) -> None:
        unknown = next((name for name in self.what if name not in WHAT), None)
        if unknown is not None or not self.what:
            raise UserError(f"A teacher is asked for {', '.join(WHAT)}, one or several of them, not {unknown or 'nothing'!r}.")
        if self.views not in (1, 2):
            raise UserError(f"There are 1 or 2 views, the image and its mirror image, not {self.views}.")
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
    chosen: Chosen | None = None,
) -> Written:
    """Asks the teacher about every image of a source once and keeps what it says below `out`.

    Equal images are asked about once. Logits and features are of the image as the teacher is tested with it; maps are of
    the whole image, squashed to the teacher's size, so that every crop of it finds its part. Interrupted and called again, it
    goes on and gives the same to the byte: batches are cut within a shard. `file` is where a program comes from, whose weights
    cannot be looked at. Of `chosen` classes alone answers are kept, in their order and by their names: all others are left out
    before the largest are taken.
    """
    annotator = Annotator(teacher, wanted, workers, chosen)  # complains about the teacher before any image is read
    shelf = shelve(source, out, workers, watch)
    head = annotator.head() | {"teacher": identity(teacher, file, chosen)}
    with repeatable():
        return write_store(out, shelf, head, partial(annotator.parts, shelf), watch, warn, shard)


def usual_batch(device: torch.device) -> int:
    """Images at a time that keep a device busy."""
    return 256 if device.type == "cuda" else 64


class Chunk(NamedTuple):
    """Images as one process has decoded them, without those that it could not read."""

    pixels: Tensor  # uint8 [n, H, W, 3], page-locked where there is a GPU
    sizes: Tensor  # int64 [n, 2]
    rows: Tensor  # int64 [n]: which of those given
    given: int
    skipped: list[tuple[int, Problem]]


@dataclass
class Annotator:
    """A teacher, and what it is asked."""

    teacher: Teacher
    wanted: Wanted
    workers: int | None
    chosen: Chosen | None = None
    arrays: dict[str, dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        teacher, self.views = self.teacher, VIEWS[: self.wanted.views]
        self.device = next((tensor.device for tensor in teacher.network.state_dict().values()), torch.device("cpu"))
        self.index = self.chosen.numbers.to(self.device) if self.chosen is not None else None
        self.classes = teacher.classes if self.index is None else len(self.index)
        self.kept = min(self.wanted.top_k or self.classes, self.classes)
        own = teacher.preprocessing
        self.size: Size = teacher.size or own.image_size
        self.tested = test_view(own._replace(image_size=self.size))
        self.whole = Augmentation(self.size, "squash", interpolation=own.interpolation, mean=own.mean, std=own.std)
        self.aside = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        try:
            found = self.answers({"tested": self.blank()}, same=True)
        except UserError:
            raise
        except Exception as error:  # a stranger's network may raise anything
            height, width = self.size
            raise UserError(
                f"{teacher.name} fails on an image of {height} x {width} ({first_line(error)}): give another --size."
            ) from None
        self.arrays = {
            name: {"dtype": dtype_of(tensor, name, self.classes), "shape": [len(self.views), *tensor.shape[1:]]}
            for name, tensor in found.items()
        }

    def head(self) -> dict[str, Any]:
        """What the manifest says beside teacher and images."""
        return {
            "what": [name for name in WHAT if name in self.wanted.what],
            "values": "logits before the softmax, float16",
            "top_k": self.kept if self.kept < self.classes else 0,
            "views": list(self.views),
            "size": list(self.size),
            "covers": "whole" if "tokens" in self.wanted.what else None,
            "arrays": self.arrays,
            "chosen": {"of": self.teacher.classes, "classes": self.index.tolist()} if self.index is not None else None,
            "batch": self.wanted.batch,
            "device": self.device.type,
        }

    def blank(self) -> Tensor:
        return torch.zeros(1, len(self.teacher.preprocessing.mean), *self.size, device=self.device)

    def questions(self, same: bool) -> dict[str, list[str]]:
        """What is asked about which view: everything about one where both are the same, which takes one pass of the network."""
        asked = [name for name in WHAT if name in self.wanted.what]
        if same:
            return {"tested": asked}
        parts = {"tested": [name for name in asked if name != "tokens"], "whole": [name for name in asked if name == "tokens"]}
        return {view: names for view, names in parts.items() if names}

    def answers(self, views: dict[str, Tensor], same: bool) -> dict[str, Tensor]:
        """Of views [B, 3, height, width] to what is kept of each image, [B, ...]; class numbers are int64."""
        said: dict[str, Tensor] = {}
        for view, names in self.questions(same).items():
            said |= self.teacher.answers(views[view], names)
        found: dict[str, Tensor] = {}
        for name in ("logits", "tokens"):
            if name in said:
                found |= largest(name, said[name] if self.index is None else said[name][:, self.index], self.kept)
        return found | {name: said[name] for name in ("features",) if name in said}

    def parts(self, shelf: Shelf, spans: list[Span], advance: Advance) -> Generator[Finish, None, None]:
        """What each span is to be, not waited for. Processes decode ahead, across spans, and a thread hands over what they made:
        on a GPU this one does nothing but launch.
        """
        count = self.workers if self.workers is not None else usual_workers() if len(shelf.keys) > FEW else 0
        pool = Workers(Reader(shelf.source, DETAIL * max(self.size), False).images, count)
        step = self.wanted.batch
        batches = [(at, min(at + step, stop)) for start, stop in spans for at in range(start, stop, step)]
        cuts = [np.arange(at, min(at + CHUNK, stop)) for start, stop in batches for at in range(start, stop, CHUNK)]
        try:
            with closing(ahead(map(self.sorted_out, pool.run(cuts)))) as chunks:
                for start, stop in spans:
                    yield self.part(shelf, start, stop, chunks, advance)
        except torch.OutOfMemoryError:
            raise UserError(
                f"The device's memory is too small for {self.wanted.batch} images at a time: give a smaller --batch."
            ) from None
        finally:
            pool.close()

    def sorted_out(self, canvas: Canvas) -> Chunk:
        bad, good = (np.flatnonzero(each) for each in (canvas.sizes[:, 0] == 0, canvas.sizes[:, 0] > 0))
        rows = torch.from_numpy(good)
        pixels = canvas.pixels[rows] if len(bad) else canvas.pixels
        if self.device.type == "cuda":
            pixels = pixels.pin_memory()
        skipped = [(int(row), problem) for row, problem in zip(bad, canvas.problems, strict=True)]
        return Chunk(pixels, torch.from_numpy(canvas.sizes[good]), rows, len(canvas.sizes), skipped)

    def part(self, shelf: Shelf, start: int, stop: int, chunks: Iterator[Chunk], advance: Advance) -> Finish:
        room = {
            name: torch.zeros(stop - start, *each["shape"], dtype=SHORT[each["dtype"]], device=self.device)
            for name, each in self.arrays.items()
        }
        skipped, done = [], 0
        while done < stop - start:
            end = min(done + self.wanted.batch, stop - start)
            found = []
            while done < end:
                chunk = next(chunks)
                skipped += [(done + row, problem) for row, problem in chunk.skipped]
                if len(chunk.rows):
                    found.append(chunk._replace(rows=chunk.rows + done))
                done += chunk.given
                advance(chunk.given)
            if found:
                self.ask(found, room)
        if len(skipped) == stop - start:
            where, why = skipped[0][1]
            raise UserError(f"None of {stop - start:,} images one after the other can be read; {where}: {why}.")
        computed = torch.cuda.current_stream(self.device).record_event() if self.aside is not None else None
        return partial(self.finished, shelf, start, room, skipped, computed)

    def ask(self, found: list[Chunk], room: dict[str, Tensor]) -> None:
        """Answers for a batch of readable images, into their rows."""
        same = all(self.is_same(chunk.sizes) for chunk in found)
        views: dict[str, list[Tensor]] = {view: [] for view in self.questions(same)}
        for chunk in found:
            pixels = chunk.pixels.to(self.device, non_blocking=True).permute(0, 3, 1, 2)
            sizes = chunk.sizes.to(self.device, non_blocking=True)
            still = torch.zeros(len(sizes), dtype=torch.int64, device=self.device)
            for view, images in views.items():
                images.append(augment(pixels, sizes, still, self.tested if view == "tested" else self.whole).images)
        rows = torch.cat([chunk.rows for chunk in found]).to(self.device, non_blocking=True)
        seen = {view: torch.cat(images) for view, images in views.items()}
        for number in range(len(self.views)):
            turned = {view: images.flip(3) for view, images in seen.items()} if number else seen
            for name, tensor in self.answers(turned, same).items():
                room[name][rows, number] = tensor.to(room[name].dtype)

    def is_same(self, sizes: Tensor) -> bool:
        """Whether what the teacher is tested with is the whole image, for images of `sizes` [n, 2] that lie on the host."""
        if self.tested.crop == self.whole.crop:
            return True
        still = torch.zeros_like(sizes[:, 0])
        both = [look(sizes, still, how) for how in (self.tested, self.whole)]
        return all(
            torch.equal(*map(torch.as_tensor, parts)) for axes in zip(*both, strict=True) for parts in zip(*axes, strict=True)
        )

    def finished(self, shelf: Shelf, start: int, room: dict[str, Tensor], skipped: list, computed: Any) -> Part:
        """On the host. The device goes on with the next span meanwhile: a stream of its own waits for this one alone."""
        if self.aside is not None:
            with torch.cuda.stream(self.aside):
                self.aside.wait_event(computed)
                room = {name: tensor.cpu() for name, tensor in room.items()}
        arrays = {name: tensor.numpy().view(self.arrays[name]["dtype"]) for name, tensor in room.items()}
        return Part(self.checked(arrays, shelf.source, start), skipped)

    def checked(self, arrays: Arrays, source: Source, start: int) -> Arrays:
        for name, array in arrays.items():
            if array.dtype == np.float16 and not np.isfinite(array).all():
                row = int(np.argwhere(~np.isfinite(array))[0, 0])
                raise UserError(
                    f"The {name.split('.')[0]} of {self.teacher.name} are not finite, or above what half precision holds, for "
                    f"{source.where(start + row)}: the weights are damaged, or its preprocessing is another."
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


def identity(teacher: Teacher, file: Path | None = None, chosen: Chosen | None = None) -> dict[str, Any]:
    """Who answered: name, digest of its weights and of how they are put together, the classes asked about, preprocessing."""
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
        "classes": teacher.classes if chosen is None else len(chosen.names),
        "class_names": teacher.class_names if chosen is None else chosen.names,
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
