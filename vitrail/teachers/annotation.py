"""Annotation: a teacher's predictions for all images of a source, written to a label store."""

import hashlib
import json
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.loader import DecodedBatch, ImageReader, Problem
from vitrail.data.progress import Advance, Progress, no_progress
from vitrail.data.source import Source
from vitrail.data.workers import Workers, default_workers
from vitrail.errors import UserError
from vitrail.models.preprocessing import DECODE_SCALE
from vitrail.teachers.class_index import ClassSubset
from vitrail.teachers.fixed_shape import FixedShapeNetwork, first_line
from vitrail.teachers.label_store import OUTPUTS
from vitrail.teachers.label_store_writer import (
    SHARD_SIZE,
    AnnotationResult,
    Arrays,
    PendingShard,
    Shard,
    Span,
    UniqueImages,
    Warn,
    find_unique_images,
    no_warning,
    write_store,
)
from vitrail.teachers.network import Size
from vitrail.teachers.prefetch import prefetch
from vitrail.teachers.teacher import Teacher

VIEWS = ("plain", "mirrored")
CHUNK = 64  # images that a process decodes at a time, so that several processes decode a large batch
MIN_FOR_WORKERS = 64  # starting worker processes takes longer than decoding fewer images
# Classes are stored as unsigned integers; torch computes with signed integers of the same width.
DTYPES = {"float16": torch.float16, "uint16": torch.int16, "uint32": torch.int32}


@dataclass(frozen=True)
class AnnotationRequest:
    """The predictions to store."""

    outputs: tuple[str, ...] = ("logits",)
    top_k: int = 0  # 0: all classes
    views: int = 1  # 1: the image; 2: the image and its horizontal flip
    batch_size: int = 64

    def __post_init__(self) -> None:
        unknown = next((name for name in self.outputs if name not in OUTPUTS), None)
        if unknown is not None or not self.outputs:
            raise UserError(f"The outputs are one or more of {', '.join(OUTPUTS)}, not {unknown or 'nothing'!r}.")
        if self.views not in (1, 2):
            raise UserError(f"views must be 1, or 2 with the horizontal flip, not {self.views}.")
        if self.top_k < 0 or self.batch_size < 1:
            raise UserError("top_k must be 0 (all classes) or positive, and batch_size positive.")


def annotate(
    teacher: Teacher,
    source: Source,
    out: Path,
    request: AnnotationRequest = AnnotationRequest(),  # noqa: B008 - frozen
    workers: int | None = None,
    progress: Progress = no_progress,
    warn: Warn = no_warning,
    file: Path | None = None,
    shard_size: int = SHARD_SIZE,
    class_subset: ClassSubset | None = None,
) -> AnnotationResult:
    """Run the teacher on every unique image of a source and write its predictions into the folder `out`.

    Logits and features are of the image with the teacher's preprocessing; maps are of the full image, resized to the teacher's
    size without a crop, so that they cover every training crop. An interrupted call can be repeated and gives the same bytes:
    batches do not cross shards. `file` is the file of an exported program, whose weights are not in its state dict. With a
    `class_subset`, only these classes are stored, in that order, and `top_k` is of these classes.
    """
    annotator = Annotator(teacher, request, workers, class_subset)  # fails for an unsuitable teacher before images are read
    images = find_unique_images(source, out, workers, progress)
    header = annotator.header() | {"teacher": describe_teacher(teacher, file, class_subset)}
    with deterministic_convolutions():
        return write_store(out, images, header, partial(annotator.compute_shards, images), progress, warn, shard_size)


def default_batch_size(device: torch.device) -> int:
    return 256 if device.type == "cuda" else 64


class Chunk(NamedTuple):
    """The readable images of those that one process has decoded."""

    pixels: Tensor  # uint8 [n, H, W, 3], page-locked for a GPU
    sizes: Tensor  # int64 [n, 2]
    rows: Tensor  # int64 [n]: indices of the readable images
    num_images: int  # with the unreadable ones
    skipped: list[tuple[int, Problem]]


@dataclass
class Annotator:
    """Computes the shards of a label store."""

    teacher: Teacher
    request: AnnotationRequest
    workers: int | None
    class_subset: ClassSubset | None = None
    arrays: dict[str, dict[str, Any]] = field(init=False)  # dtype and shape [views, ...] by name

    def __post_init__(self) -> None:
        teacher, self.views = self.teacher, VIEWS[: self.request.views]
        self.device = next((tensor.device for tensor in teacher.network.state_dict().values()), torch.device("cpu"))
        self.class_index = self.class_subset.indices.to(self.device) if self.class_subset is not None else None
        self.classes = teacher.classes if self.class_index is None else len(self.class_index)
        self.top_k = min(self.request.top_k or self.classes, self.classes)
        self.size: Size = teacher.size or teacher.preprocessing.image_size
        # "cropped": the teacher's preprocessing; "full": without a crop.
        cropped = teacher.preprocessing._replace(image_size=self.size)
        self.preprocessing = {"cropped": cropped, "full": cropped._replace(resize="square")}
        cropped.check()
        self.copy_stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        image = torch.zeros(1, len(teacher.preprocessing.mean), *self.size, device=self.device)
        try:
            predictions = self.predict({"cropped": image}, same=True)
        except UserError:
            raise
        except Exception as error:  # a foreign network can raise any exception
            height, width = self.size
            raise UserError(
                f"{teacher.name} fails on an image of {height} x {width} ({first_line(error)}): give another --size."
            ) from None
        self.arrays = {
            name: {
                "dtype": class_dtype(self.classes) if name.endswith(".classes") else "float16",
                "shape": [len(self.views), *tensor.shape[1:]],
            }
            for name, tensor in predictions.items()
        }

    def header(self) -> dict[str, Any]:
        """The entries of the manifest about outputs and options."""
        subset = {"of": self.teacher.classes, "classes": self.class_index.tolist()} if self.class_index is not None else None
        return {
            "outputs": [name for name in OUTPUTS if name in self.request.outputs],
            "values": "logits before the softmax, float16",
            "top_k": self.top_k if self.top_k < self.classes else 0,
            "views": list(self.views),
            "size": list(self.size),
            "covers": "whole" if "tokens" in self.request.outputs else None,
            "arrays": self.arrays,
            "class_subset": subset,
            "batch_size": self.request.batch_size,
            "device": self.device.type,
        }

    def outputs_by_image(self, same: bool) -> dict[str, list[str]]:
        """The outputs to compute from the cropped and from the full image; all from one forward pass if both are the `same`."""
        outputs = [name for name in OUTPUTS if name in self.request.outputs]
        if same:
            return {"cropped": outputs}
        split = {
            "cropped": [name for name in outputs if name != "tokens"],
            "full": [name for name in outputs if name == "tokens"],
        }
        return {image: names for image, names in split.items() if names}

    def predict(self, images: dict[str, Tensor], same: bool) -> dict[str, Tensor]:
        """The arrays to store, [B, ...] by name, from images [B, 3, height, width]; classes are int64."""
        outputs: dict[str, Tensor] = {}
        for image, names in self.outputs_by_image(same).items():
            outputs |= self.teacher.predict(images[image], names)
        arrays: dict[str, Tensor] = {}
        for name in ("logits", "tokens"):
            if name in outputs:
                logits = outputs[name] if self.class_index is None else outputs[name][:, self.class_index]
                arrays |= split_top_k(name, logits, self.top_k)
        return arrays | {name: outputs[name] for name in ("features",) if name in outputs}

    def compute_shards(self, images: UniqueImages, spans: list[Span], advance: Advance) -> Generator[PendingShard, None, None]:
        """The shards of `spans`, without waiting for the device. Worker processes decode ahead, across shards; a thread receives
        their images, so that this thread only launches kernels.
        """
        workers = self.workers
        if workers is None:
            workers = default_workers() if len(images.keys) > MIN_FOR_WORKERS else 0
        pool = Workers(ImageReader(images.source, int(DECODE_SCALE * max(self.size)), False).read_images, workers)
        step = self.request.batch_size
        batches = [(at, min(at + step, stop)) for start, stop in spans for at in range(start, stop, step)]
        tasks = [np.arange(at, min(at + CHUNK, stop)) for start, stop in batches for at in range(start, stop, CHUNK)]
        try:
            with closing(prefetch(map(self.remove_unreadable, pool.run(tasks)))) as chunks:
                for start, stop in spans:
                    yield self.compute_shard(images, start, stop, chunks, advance)
        except torch.OutOfMemoryError:
            raise UserError(f"Out of device memory with batch size {step}: give a smaller --batch-size.") from None
        finally:
            pool.close()

    def remove_unreadable(self, decoded: DecodedBatch) -> Chunk:
        readable = decoded.sizes[:, 0] > 0
        rows = torch.from_numpy(np.flatnonzero(readable))
        pixels = decoded.pixels if readable.all() else decoded.pixels[rows]
        if self.device.type == "cuda":
            pixels = pixels.pin_memory()
        skipped = [(int(row), problem) for row, problem in zip(np.flatnonzero(~readable), decoded.problems, strict=True)]
        return Chunk(pixels, torch.from_numpy(decoded.sizes[readable]), rows, len(decoded.sizes), skipped)

    def compute_shard(
        self, images: UniqueImages, start: int, stop: int, chunks: Iterator[Chunk], advance: Advance
    ) -> PendingShard:
        arrays = {
            name: torch.zeros(stop - start, *array["shape"], dtype=DTYPES[array["dtype"]], device=self.device)
            for name, array in self.arrays.items()
        }
        skipped, done = [], 0
        while done < stop - start:
            end = min(done + self.request.batch_size, stop - start)
            batch = []
            while done < end:
                chunk = next(chunks)
                skipped += [(done + row, problem) for row, problem in chunk.skipped]
                if len(chunk.rows):
                    batch.append(chunk._replace(rows=chunk.rows + done))
                done += chunk.num_images
                advance(chunk.num_images)
            if batch:
                self.predict_batch(batch, arrays)
        if len(skipped) == stop - start:
            location, reason = skipped[0][1]
            raise UserError(f"None of {stop - start:,} consecutive images can be read, such as {location}: {reason}.")
        computed = torch.cuda.current_stream(self.device).record_event() if self.copy_stream is not None else None
        return partial(self.fetch_shard, images, start, arrays, skipped, computed)

    def predict_batch(self, batch: list[Chunk], arrays: dict[str, Tensor]) -> None:
        """Write the predictions for a batch of readable images into their rows."""
        same = all(self.is_uncropped(chunk.sizes) for chunk in batch)
        parts: dict[str, list[Tensor]] = {image: [] for image in self.outputs_by_image(same)}
        for chunk in batch:
            pixels = chunk.pixels.to(self.device, non_blocking=True).permute(0, 3, 1, 2)
            sizes = chunk.sizes.to(self.device, non_blocking=True)
            for image, tensors in parts.items():
                tensors.append(self.preprocessing[image].apply(pixels, sizes))
        rows = torch.cat([chunk.rows for chunk in batch]).to(self.device, non_blocking=True)
        images = {image: torch.cat(tensors) for image, tensors in parts.items()}
        for view in range(len(self.views)):
            flipped = {image: tensor.flip(3) for image, tensor in images.items()} if view else images
            for name, tensor in self.predict(flipped, same).items():
                arrays[name][rows, view] = tensor.to(arrays[name].dtype)

    def is_uncropped(self, sizes: Tensor) -> bool:
        """Whether the teacher's preprocessing keeps the full image, for images of `sizes` [n, 2] on the CPU."""
        cropped, full = self.preprocessing["cropped"], self.preprocessing["full"]
        if cropped.resize == full.resize:
            return True
        return all(
            torch.equal(*map(torch.as_tensor, values))
            for axes in zip(cropped.view(sizes), full.view(sizes), strict=True)
            for values in zip(*axes, strict=True)
        )

    def fetch_shard(
        self, images: UniqueImages, start: int, arrays: dict[str, Tensor], skipped: list[tuple[int, Problem]], computed: Any
    ) -> Shard:
        """A shard on the CPU. Its copy has a stream of its own, so that the device computes the next shard meanwhile."""
        if self.copy_stream is not None:
            with torch.cuda.stream(self.copy_stream):
                self.copy_stream.wait_event(computed)
                arrays = {name: tensor.cpu() for name, tensor in arrays.items()}
        stored = {name: tensor.numpy().view(self.arrays[name]["dtype"]) for name, tensor in arrays.items()}
        self.check_finite(stored, images.source, start)
        return Shard(stored, skipped)

    def check_finite(self, arrays: Arrays, source: Source, start: int) -> None:
        for name, array in arrays.items():
            if array.dtype == np.float16 and not np.isfinite(array).all():
                row = int(np.argwhere(~np.isfinite(array))[0, 0])
                raise UserError(
                    f"The {name.split('.')[0]} of {self.teacher.name} contain NaN or Inf, or exceed float16, for "
                    f"{source.location(start + row)}: check its weights and its preprocessing."
                )


def split_top_k(name: str, logits: Tensor, k: int) -> dict[str, Tensor]:
    """The arrays of logits [B, C, ...]: the `k` largest, their classes, log-sum-exp of the others; only values if k is C."""
    if k == logits.shape[1]:
        return {f"{name}.values": logits}
    values, classes = logits.topk(k, 1)
    rest = logits.scatter(1, classes, -torch.inf).logsumexp(1)
    return {f"{name}.values": values, f"{name}.classes": classes, f"{name}.rest": rest}


def class_dtype(classes: int) -> str:
    """The smallest dtype for class indices."""
    return "uint16" if classes <= 1 << 16 else "uint32"


def describe_teacher(teacher: Teacher, file: Path | None = None, class_subset: ClassSubset | None = None) -> dict[str, Any]:
    """The teacher's entry of the manifest: name, digest of weights and configuration, classes, preprocessing."""
    network = teacher.network
    model = getattr(network, "model", network)
    config = getattr(model, "architecture", None) or getattr(model, "config", None)
    digest = hashlib.sha256(type(model).__name__.encode())
    digest.update(repr(config).encode() if config is not None else b"")
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    if isinstance(network, FixedShapeNetwork) and file is not None:
        digest.update(file.read_bytes())
    return {
        "name": teacher.name,
        "weights": digest.hexdigest(),
        "classes": teacher.classes if class_subset is None else len(class_subset.names),
        "class_names": teacher.class_names if class_subset is None else class_subset.names,
        "preprocessing": json.loads(json.dumps(teacher.preprocessing.to_dict())),
        "order": teacher.channel_order,
    }


@contextmanager
def deterministic_convolutions() -> Iterator[None]:
    """Use the same cuDNN algorithms before and after an interruption."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before
