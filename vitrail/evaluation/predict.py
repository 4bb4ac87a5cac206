"""Predictions for images: from files, folders, PIL images or arrays to the most probable classes."""

import glob
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from vitrail.atomic_files import describe_error
from vitrail.data.class_matching import class_titles
from vitrail.data.datasets.folder import MAX_DEPTH, Paths, count_visit, listing
from vitrail.data.decode import decode
from vitrail.data.image_formats import EXTENSIONS, is_image_file
from vitrail.data.loader import ImageReader, Problem
from vitrail.data.source import Encoded, Source, Subset
from vitrail.data.workers import Workers, default_workers
from vitrail.errors import UserError
from vitrail.evaluation.model import Model, compute_logits, count_classes, decode_side, device_of, open_model
from vitrail.heads.task_heads import CALLS
from vitrail.models.evaluation_mode import evaluation_mode
from vitrail.models.preprocessing import list_images, pad_images, to_pixels
from vitrail.models.vision_transformer import VisionTransformer

if TYPE_CHECKING:
    from vitrail.models.preprocessing import ImageInput

    ImagesInput = ImageInput | Sequence[ImageInput]

Result = TypeVar("Result")
DIGITS = 16  # number of built-in images to predict
IN_PROCESS = 64  # up to this many images are decoded in this process: starting workers would take longer


@dataclass(frozen=True)
class ClassProbability:
    index: int  # of the class
    name: str
    probability: float


class Prediction(NamedTuple):
    """The most probable classes of one image, highest probability first."""

    image: str  # path, or "image 3" for the fourth image of a list without a path
    classes: list[ClassProbability]
    label: str | None  # of labeled data

    @property
    def name(self) -> str:
        """The predicted class."""
        return self.classes[0].name

    @property
    def probability(self) -> float:
        """The probability of the predicted class."""
        return self.classes[0].probability


@dataclass(frozen=True)
class DecodedImages:
    """The readable images of a batch, and the problems of the others by index."""

    index: np.ndarray  # int64 [B]: indices in the source
    pixels: Tensor  # uint8 [B, 3, H, W], each image in the upper left corner
    sizes: Tensor  # int64 [B, 2]
    problems: dict[int, Problem]


def predict(
    weights: "str | Path | Model",
    images: "ImagesInput",
    top: int = 5,
    batch_size: int = 32,
    workers: int | None = None,
    device: str | torch.device | None = None,
) -> list[Prediction]:
    """The `top` most probable classes of each image.

    `weights` is a checkpoint of any kind, a run directory, the name of bundled weights, or a model. `images` is one
    of, or a list of: a path, a folder, a pattern such as `photos/**/*.jpg`, a PIL image, a uint8 array [H, W, 3], a uint8 tensor
    [3, H, W]. Images are preprocessed as in the model's validation. An image that cannot be read raises UserError.
    """
    model = open_model(weights, device) if isinstance(weights, str | Path) else weights
    source, problems = open_inputs(images)
    return require_readable(chain(problems, iterate_predictions(model, source, top, batch_size, workers)))


def require_readable(results: Iterable[Result | Problem]) -> list[Result]:
    """All results; UserError at the first image that cannot be read."""
    found: list[Result] = []
    for result in results:
        if isinstance(result, Problem):
            raise UserError(f"{result.location} cannot be read: {result.reason}.")
        found.append(result)
    return found


class ImageList(Source):
    """Images of a list: paths, PIL images, arrays, tensors."""

    def __init__(self, images: "Sequence[ImageInput] | Paths") -> None:
        self.name, self.label, self.extra = "", None, {}
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def encoded(self, index: int) -> Encoded:
        image = self.images[index]
        return Path(image).read_bytes() if isinstance(image, str | os.PathLike) else to_pixels(image)

    def location(self, index: int) -> str:
        image = self.images[index]
        return os.fspath(image) if isinstance(image, str | os.PathLike) else f"image {index}"


def open_inputs(images: "ImagesInput") -> tuple[Source, list[Problem]]:
    """The images of a path, folder, pattern, PIL image, array, tensor or a list of these, and paths that are not images."""
    items = list_images(images)
    if all(isinstance(item, str | os.PathLike) for item in items):
        return open_images(items)  # type: ignore[arg-type]
    expanded: list[ImageInput] = []
    problems: list[Problem] = []
    for item in items:
        if isinstance(item, str | os.PathLike):
            source, missing = open_images([item])
            expanded += [source.location(index) for index in range(len(source))]
            problems += missing
        else:
            expanded.append(item)
    return ImageList(expanded), problems


def open_images(paths: "Iterable[str | os.PathLike[str]]") -> tuple[Source, list[Problem]]:
    """The images of files, folders and patterns in the order given, and paths that are not images.

    A path with wildcards (`photos/**/*.jpg`) is a pattern unless a file has this name. `digits` stands for built-in images.
    """
    given = [os.fspath(path) for path in paths]
    if "" in given:
        raise UserError("The path of an image is empty: give files, folders or patterns such as 'photos/**/*.jpg'.")
    if given == ["digits"] and not os.path.exists("digits"):
        from vitrail.data.datasets.lookup import open_source

        return Subset(open_source("digits", "test"), np.arange(DIGITS)), []
    files: list[str] = []
    problems: list[Problem] = []
    for path in map(os.path.expanduser, given):
        matches = expand_pattern(path)
        for match in matches:
            if not os.path.isdir(match):
                add_file(match, files, problems)
            elif "**" in path and matches != [path]:  # the pattern itself matches the files of the folder
                if not find_images(match, []):
                    problems.append(Problem(match, "a folder with an image extension in its name"))
            else:
                before = len(problems)
                inside = find_images(match, problems)
                files += inside
                if not inside and len(problems) == before:
                    problems.append(Problem(match, "the folder contains no images"))
    return ImageList(files if len(files) <= IN_PROCESS else Paths(files)), problems


def expand_pattern(path: str) -> list[str]:
    """The matches of a pattern in byte order; a path that exists, or a pattern without matches, is returned as it is.

    `**` matches files of any kind in every subfolder, so only image extensions are kept.
    """
    if os.path.lexists(path) or not glob.has_magic(path):
        return [path]
    matches = sorted(glob.iglob(path, recursive=True), key=os.fsencode)
    if "**" in path:
        matches = [match for match in matches if has_image_extension(match)]
    return matches or [path]


def has_image_extension(path: str) -> bool:
    return path.rpartition(".")[2].lower() in EXTENSIONS


def add_file(path: str, files: list[str], problems: list[Problem]) -> None:
    """Append a regular file or standard input to `files`, anything else to `problems`: reading a named pipe could block."""
    if os.path.isfile(path) or (os.path.exists(path) and path.startswith(("/dev/fd/", "/dev/stdin"))):
        files.append(path)
    elif os.path.exists(path):
        problems.append(Problem(path, "not a file"))
    else:
        problems.append(Problem(path, "broken symbolic link" if os.path.islink(path) else "no such file"))


def find_images(
    folder: str, problems: list[Problem], parents: tuple[str, ...] = (), visits: Counter[str] | None = None
) -> list[str]:
    """The images of a folder at any depth, in byte order; symbolic links to a parent folder are not followed."""
    resolved = os.path.realpath(folder)
    visits = Counter() if visits is None else visits
    if resolved in parents:
        return []
    if len(parents) > MAX_DEPTH:
        problems.append(Problem(folder, f"more than {MAX_DEPTH} folders deep"))
        return []
    count_visit(resolved, visits)
    try:
        entries = listing(folder)
    except UserError as error:
        problems.append(Problem(folder, str(error)))
        return []
    files: list[str] = []
    for entry in entries:
        if os.path.isdir(entry.path):
            before = len(problems)
            inside = find_images(entry.path, problems, (*parents, resolved), visits)
            files += inside
            if has_image_extension(entry.name) and not inside and len(problems) == before:
                problems.append(Problem(entry.path, "a folder with an image extension in its name"))
        elif has_image_extension(entry.name) or (entry.is_file() and is_image_file(entry.path)):
            add_file(entry.path, files, problems)
    return files


def parse_path_list(content: bytes) -> list[str]:
    """Paths, one per line, or each ended by a zero byte as `find -print0` writes them."""
    lines = content.split(b"\0") if b"\0" in content else content.splitlines()
    return [os.fsdecode(line) for line in lines if line]


def iterate_predictions(
    model: Model, source: Source, top: int = 5, batch_size: int = 32, workers: int | None = None
) -> Iterator[Prediction | Problem]:
    """A prediction for each image of a source in order, or the reason why the image cannot be read."""
    if call := CALLS.get(getattr(model, "task", "")):
        raise UserError(f"These weights {call}.")
    if not count_classes(model):
        raise UserError("This model has no classifier: it cannot predict classes.")
    names = class_titles(model.class_names, count_classes(model))
    device, min_side = device_of(model), decode_side(model)
    try:
        with evaluation_mode(model):
            for batch in read_batches(source, device, min_side, batch_size, workers):
                results: dict[int, Prediction | Problem] = dict(batch.problems)
                for index, probabilities, classes in zip(batch.index.tolist(), *top_classes(model, batch, top), strict=True):
                    label = int(source.label.values[index]) if source.label else -1
                    results[index] = Prediction(
                        source.location(index),
                        [ClassProbability(number, names[number], p) for p, number in zip(probabilities, classes, strict=True)],
                        source.classes[label] if label >= 0 else None,
                    )
                yield from (results[index] for index in sorted(results))
    except torch.OutOfMemoryError:
        raise UserError(f"Out of GPU memory with a batch size of {batch_size}: give a smaller --batch-size.") from None


@torch.inference_mode()
def top_classes(model: Model, batch: DecodedImages, top: int) -> tuple[list[list[float]], list[list[int]]]:
    """Probabilities and indices of the `top` most probable classes: two lists [B, top]."""
    if not len(batch.index):
        return [], []
    logits = compute_logits(model, model.preprocessing.apply(batch.pixels, batch.sizes)).float()
    if not logits.isfinite().all():
        raise UserError("The model's logits are NaN or Inf: its weights are damaged.")
    probabilities, classes = logits.softmax(1).topk(min(top, logits.shape[1]), 1)
    return probabilities.tolist(), classes.tolist()


def read_batches(
    source: Source, device: torch.device, min_side: int | None, batch_size: int, workers: int | None = None
) -> Iterator[DecodedImages]:
    """All images of a source in order, decoded by worker processes or in this one, without caching."""
    if workers is None:
        workers = default_workers() if len(source) > IN_PROCESS else 0
    chunks = np.split(np.arange(len(source)), range(batch_size, len(source), batch_size)) if len(source) else []
    if not workers:
        yield from (decode_chunk(source, chunk, min_side, device) for chunk in chunks)
        return
    pool = Workers(ImageReader(source, min_side, False).read_images, min(workers, len(chunks)))
    try:
        for decoded in pool.run(chunks):
            index, readable = decoded.samples.index, decoded.sizes[:, 0] > 0
            pixels = decoded.pixels if readable.all() else decoded.pixels[torch.from_numpy(readable)]
            sizes = torch.from_numpy(decoded.sizes[readable])
            problems = dict(zip(index[~readable].tolist(), decoded.problems, strict=True))
            yield DecodedImages(index[readable], pixels.permute(0, 3, 1, 2).to(device), sizes.to(device), problems)
    finally:
        pool.close()


def decode_chunk(source: Source, chunk: np.ndarray, min_side: int | None, device: torch.device) -> DecodedImages:
    """The images of a source with these indices, decoded in this process."""
    images: dict[int, np.ndarray] = {}
    problems: dict[int, Problem] = {}
    for index in chunk.tolist():
        try:
            images[index] = decode(source.encoded(index), min_side)
        except (OSError, ValueError) as error:
            problems[index] = Problem(source.location(index), describe_error(error))
    pixels, sizes = pad_images(list(images.values()))
    return DecodedImages(np.array(list(images), dtype=np.int64), pixels.to(device), sizes.to(device), problems)


def open_transformer(weights: str | Path | Model, device: str | torch.device | None, task: str) -> VisionTransformer:
    """The model of weights, or the given one; UserError for a network of another library, which has no head of a `task`."""
    model = open_model(weights, device) if isinstance(weights, str | Path) else weights
    if not isinstance(model, VisionTransformer):
        raise UserError(f"{weights} is a classifier: give weights of a {task}.")
    return model


def to_batch(pixels: np.ndarray, model: VisionTransformer) -> Tensor:
    """uint8 [H, W, 3] to uint8 [1, 3, H, W] on the device of a model."""
    return torch.from_numpy(pixels).permute(2, 0, 1)[None].to(device_of(model))


def iterate_images(
    model: VisionTransformer, source: Source, compute: Callable[[str, np.ndarray, Tensor], Result]
) -> Iterator[Result | Problem]:
    """What `compute` returns for the location, pixels and batch of each image in order, or why the image cannot be read."""
    model.eval()
    for index in range(len(source)):
        location = source.location(index)
        try:
            pixels = decode(source.encoded(index))
        except (OSError, ValueError) as error:
            yield Problem(location, describe_error(error))
        else:
            yield compute(location, pixels, to_batch(pixels, model))
