"""Label maps as TokenLabeling (LV-ViT, arXiv 2104.10858) publishes them, into a store.

There is one pickled tensor per image, `class/name.pt`, the name up to its first dot: [2, k, h, w] in half precision, the k
largest logits of every cell and their class numbers. Half precision holds whole numbers up to 2,048 alone, so that maps of more
classes have lost which they are. They were made from the centre square of each image.
"""

import os
import pickle
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from vitrail.data.source import Source
from vitrail.data.workers import Workers, usual_workers
from vitrail.errors import UserError
from vitrail.teachers.annotation import class_dtype
from vitrail.teachers.label_store_writer import (
    SHARD,
    Advance,
    Arrays,
    Finish,
    Part,
    Span,
    Watch,
    Written,
    shelve,
    unwatched,
    write_store,
)

EXACT = {torch.float16: 1 << 11, torch.bfloat16: 1 << 8, torch.float32: 1 << 24}  # whole numbers that a type tells apart
CHUNK = 128  # maps per task


def import_published(
    folder: str | Path,
    source: Source,
    out: Path,
    classes: Sequence[str] | int | None = None,
    workers: int | None = None,
    watch: Watch = unwatched,
    warn: Callable[[str], Any] = lambda sentence: None,
    shard: int = SHARD,
) -> Written:
    """A store of the maps in `folder` that belong to the image files of a source; `classes` are the source's if not given."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}: give the one that holds a folder of .pt files per class.")
    names = source.classes if classes is None else None if isinstance(classes, int) else list(classes)
    count = classes if isinstance(classes, int) else len(names or [])
    if not count:
        raise UserError(f"{source.name} has no classes: say with --classes how many the label maps have.")
    shelf = shelve(source, out, workers, watch)
    files = files_of(folder, shelf.source)
    first = read_map(files[0], count)
    values = {"dtype": "float16", "shape": [1, *first[0].shape]}
    head = {
        "teacher": {"name": "published label maps", "weights": None, "classes": count, "class_names": names},
        "what": ["tokens"],
        "values": "logits before the softmax, float16",
        "top_k": first.shape[1],
        "views": ["plain"],
        "size": None,
        "covers": "centre",
        "arrays": {"tokens.values": values, "tokens.classes": values | {"dtype": class_dtype(count)}},
    }
    usual = usual_workers() if len(files) > CHUNK else 0
    pool = Workers(Maps(files, count, first.shape), usual if workers is None else workers)
    return write_store(out, shelf, head, lambda spans, advance: parts(pool, spans, advance), watch, warn, shard)


def parts(pool: Workers, spans: list[Span], advance: Advance) -> Generator[Finish, None, None]:
    cuts = [[(at, min(at + CHUNK, stop)) for at in range(start, stop, CHUNK)] for start, stop in spans]
    found = pool.run([cut for each in cuts for cut in each])
    try:
        for each in cuts:
            arrays: list[Arrays] = []
            for start, stop in each:
                arrays.append(next(found))
                advance(stop - start)
            yield partial(joined, arrays)
    finally:
        pool.close()


def joined(arrays: list[Arrays]) -> Part:
    return Part({name: np.concatenate([one[name] for one in arrays]) for name in arrays[0]}, [])


@dataclass(frozen=True)
class Maps:
    """Reads maps; all that a worker process needs to know about them."""

    files: list[Path]
    classes: int
    shape: Sequence[int]

    def __call__(self, span: Span) -> Arrays:
        found = []
        for index in range(*span):
            maps = read_map(self.files[index], self.classes)
            if maps.shape != tuple(self.shape):
                raise UserError(
                    f"{self.files[index]} has the shape {list(maps.shape)}, and {self.files[0]} {list(self.shape)}: a store "
                    f"holds maps of one size."
                )
            found.append(maps)
        both = np.stack(found)[:, None]  # one view
        values, numbers = both[:, :, 0].astype(np.float16), both[:, :, 1].astype(class_dtype(self.classes))
        return {"tokens.values": values, "tokens.classes": numbers}


def files_of(folder: Path, source: Source) -> list[Path]:
    """The label file of every image."""
    if not os.path.isfile(source.where(0)):
        raise UserError(f"Published label maps are found by the names of image files, and {source.name} is not made of such.")
    paths = [PurePath(source.where(index)) for index in range(len(source))]
    # As the released code does: everything behind the first dot is taken for the ending.
    files = [folder / ("/".join(path.parts[-2:]).split(".")[0] + ".pt") for path in paths]
    shared = next((file for file, uses in Counter(files).items() if uses > 1), None)
    if shared is not None:
        both = [path for path, file in zip(paths, files, strict=True) if file == shared]
        raise UserError(f"{both[0]} and {both[1]} share the label file {shared}: rename one of them, with its label file.")
    missing = [number for number, file in enumerate(files) if not file.is_file()]
    if missing:
        raise UserError(
            f"{folder} has no label map for {len(missing):,} of {len(files):,} images; the first, {paths[missing[0]]}, would "
            f"have {files[missing[0]]}."
        )
    return files


def read_map(path: Path, classes: int) -> np.ndarray:
    """float64 [2, k, h, w]: logits and class numbers, which are whole and below `classes`."""
    try:
        with path.open("rb") as file:
            maps = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError, IndexError, TypeError):
        raise UserError(f"{path} is damaged, or holds more than a tensor, and was not opened; fetch it again.") from None
    if not isinstance(maps, torch.Tensor) or maps.dim() != 4 or len(maps) != 2 or maps.dtype not in EXACT or not maps.numel():
        raise UserError(f"{path} is no label map: it should hold one tensor of floating point numbers, [2, k, height, width].")
    if classes > EXACT[maps.dtype]:
        raise UserError(
            f"{path} keeps class numbers as {str(maps.dtype).removeprefix('torch.')}, which tells {EXACT[maps.dtype]:,} classes "
            f"apart, not {classes:,}: annotate again with vitrail annotate, which keeps whole numbers."
        )
    found = maps.double().numpy()
    numbers = found[1]
    if not np.isfinite(found).all() or (numbers != np.floor(numbers)).any() or numbers.min() < 0:
        raise UserError(f"{path} holds values that are no logits or no class numbers; fetch it again.")
    if numbers.max() >= classes:
        raise UserError(f"{path} names class {int(numbers.max())}, and there are {classes:,}: say with --classes how many.")
    return found
