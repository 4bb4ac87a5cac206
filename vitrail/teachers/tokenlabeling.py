"""Import of the label maps published by TokenLabeling (LV-ViT, arXiv 2104.10858) into a label store.

There is one pickled tensor per image, `class/name.pt`, with its file name up to the first dot: [2, k, h, w] in half precision,
the k largest logits at every position and their classes. Half precision represents integers up to 2,048 only, so that maps of
more classes are ambiguous. The maps are of the center square of each image.
"""

import os
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath

import numpy as np
import torch

from vitrail.checkpoints.readers import check_regular_file
from vitrail.checkpoints.torch_files import load_pickled
from vitrail.data.progress import Advance, Progress, no_progress
from vitrail.data.source import Source
from vitrail.data.workers import Workers, default_workers
from vitrail.errors import UserError
from vitrail.teachers.annotation import class_dtype
from vitrail.teachers.label_store_writer import (
    SHARD_SIZE,
    AnnotationResult,
    Arrays,
    PendingShard,
    Shard,
    Span,
    Warn,
    find_unique_images,
    no_warning,
    write_store,
)

MAX_CLASSES = {torch.float16: 1 << 11, torch.bfloat16: 1 << 8, torch.float32: 1 << 24}  # exact integers of a dtype
CHUNK = 128  # maps per task


def import_token_labels(
    folder: str | Path,
    source: Source,
    out: Path,
    classes: Sequence[str] | int | None = None,
    workers: int | None = None,
    progress: Progress = no_progress,
    warn: Warn = no_warning,
    shard_size: int = SHARD_SIZE,
) -> AnnotationResult:
    """Write a label store of the maps in `folder` for the image files of a source; `classes` defaults to those of the source."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}: give a folder that contains a folder of .pt files per class.")
    names = source.classes if classes is None else None if isinstance(classes, int) else list(classes)
    count = classes if isinstance(classes, int) else len(names or [])
    if not count:
        raise UserError(f"{source.name} has no classes: give the number of classes of the label maps with --classes.")
    images = find_unique_images(source, out, workers, progress)
    files = find_map_files(folder, images.source)
    first = read_label_map(files[0], count)
    values = {"dtype": "float16", "shape": [1, *first[0].shape]}
    header = {
        "teacher": {"name": "published label maps", "weights": None, "classes": count, "class_names": names},
        "outputs": ["tokens"],
        "values": "logits before the softmax, float16",
        "top_k": first.shape[1],
        "views": ["plain"],
        "size": None,
        "covers": "center",
        "arrays": {"tokens.values": values, "tokens.classes": values | {"dtype": class_dtype(count)}},
    }
    if workers is None:
        workers = default_workers() if len(files) > CHUNK else 0
    pool = Workers(MapReader(files, count, first.shape), workers)
    return write_store(out, images, header, partial(read_shards, pool), progress, warn, shard_size)


def read_shards(pool: Workers, spans: list[Span], advance: Advance) -> Generator[PendingShard, None, None]:
    tasks = [[(at, min(at + CHUNK, stop)) for at in range(start, stop, CHUNK)] for start, stop in spans]
    results = pool.run([task for shard in tasks for task in shard])
    try:
        for shard in tasks:
            arrays: list[Arrays] = []
            for start, stop in shard:
                arrays.append(next(results))
                advance(stop - start)
            yield partial(concatenate, arrays)
    finally:
        pool.close()


def concatenate(arrays: list[Arrays]) -> Shard:
    return Shard({name: np.concatenate([chunk[name] for chunk in arrays]) for name in arrays[0]}, [])


@dataclass(frozen=True)
class MapReader:
    """Reads maps; sent to the worker processes."""

    files: list[Path]
    classes: int
    shape: Sequence[int]

    def __call__(self, span: Span) -> Arrays:
        maps = []
        for index in range(*span):
            maps.append(read_label_map(self.files[index], self.classes))
            if maps[-1].shape != tuple(self.shape):
                raise UserError(
                    f"{self.files[index]} has shape {list(maps[-1].shape)}, but {self.files[0]} has {list(self.shape)}: all maps "
                    f"of a store must have the same shape."
                )
        stacked = np.stack(maps)[:, None]  # one view
        values, classes = stacked[:, :, 0].astype(np.float16), stacked[:, :, 1].astype(class_dtype(self.classes))
        return {"tokens.values": values, "tokens.classes": classes}


def find_map_files(folder: Path, source: Source) -> list[Path]:
    """The label map of every image."""
    if not os.path.isfile(source.location(0)):
        raise UserError(f"Published label maps are found by the names of image files, and {source.name} has no image files.")
    paths = [PurePath(source.location(index)) for index in range(len(source))]
    # As in the released code, the name ends at its first dot.
    files = [folder / ("/".join(path.parts[-2:]).split(".")[0] + ".pt") for path in paths]
    shared = next((file for file, uses in Counter(files).items() if uses > 1), None)
    if shared is not None:
        both = [path for path, file in zip(paths, files, strict=True) if file == shared]
        raise UserError(f"{both[0]} and {both[1]} share the label map {shared}: rename one image and its label map.")
    missing = [index for index, file in enumerate(files) if not file.is_file()]
    if missing:
        raise UserError(
            f"{folder} has no label map for {len(missing):,} of {len(files):,} images, such as {paths[missing[0]]}: there is no "
            f"{files[missing[0]]}."
        )
    return files


def read_label_map(path: Path, classes: int) -> np.ndarray:
    """float64 [2, k, h, w]: logits, and classes, which are integers below `classes`."""
    check_regular_file(path)
    try:
        content = load_pickled(path)
    except Exception:  # a pickle can raise any exception
        raise UserError(f"{path} is damaged, or contains more than a tensor, and was not opened: download it again.") from None
    is_map = isinstance(content, torch.Tensor) and content.dim() == 4 and len(content) == 2 and content.numel()
    if not is_map or content.dtype not in MAX_CLASSES or not is_stored(content):
        raise UserError(f"{path} is not a label map: expected a floating point tensor of shape [2, k, height, width].")
    if classes > MAX_CLASSES[content.dtype]:
        raise UserError(
            f"{path} stores classes as {str(content.dtype).removeprefix('torch.')}, which represents at most "
            f"{MAX_CLASSES[content.dtype]:,} classes, not {classes:,}: annotate with vitrail annotate, which stores integers."
        )
    maps: np.ndarray = content.double().numpy()
    indices = maps[1]
    if not np.isfinite(maps).all() or (indices != np.floor(indices)).any() or indices.min() < 0:
        raise UserError(f"{path} contains values that are not logits or classes: download it again.")
    if indices.max() >= classes:
        raise UserError(f"{path} contains class {int(indices.max())}, but there are {classes:,} classes: give --classes.")
    return maps


def is_stored(tensor: torch.Tensor) -> bool:
    """Whether a tensor is dense and has no more values than are stored, as one with strides of 0 would."""
    dense = tensor.layout is torch.strided and not tensor.is_meta
    return dense and tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()
