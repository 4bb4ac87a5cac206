"""Label stores: a teacher's predictions for images, written once by `vitrail annotate` and read at every training step.

A store is a folder. `manifest.json` contains the teacher (name, digest of its weights, classes, preprocessing), the stored
outputs and the list of shards; a shard is a safetensors file of `shard_size` images, or fewer for the last one.
For n images in v views, a shard contains

    key             uint8    [n, 16]            digest of the encoded image, by which it is found
    logits.values   float16  [n, v, k]          the k largest logits in descending order; all logits, by class, if top_k is 0
    logits.classes  uint16   [n, v, k]          their classes, uint32 above 65,536 classes; absent if top_k is 0
    logits.rest     float16  [n, v]             log-sum-exp of the other logits; absent if top_k is 0
    tokens.values   float16  [n, v, k, h, w]    the same for each position of the teacher's feature grid over the full image
    tokens.classes  uint16   [n, v, k, h, w]
    tokens.rest     float16  [n, v, h, w]
    features        float16  [n, v, D]          the input of the teacher's classifier

Values are logits before the softmax, since maps are cropped and resized first. View 0 is the image, view 1 its horizontal flip,
in the teacher's coordinates: the first column of its map is the right edge of the image.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitrail.aliases import upgrade_manifest
from vitrail.atomic_files import file_sha256
from vitrail.data.source import Source
from vitrail.devices import free_memory
from vitrail.errors import UserError
from vitrail.json_files import read_json
from vitrail.teachers.class_index import match_teacher
from vitrail.teachers.image_digests import KEY_BYTES, find_keys, image_keys
from vitrail.teachers.topk_logits import class_probabilities, expand_top_k

FORMAT, LAYOUT = "vitrail store", 1
MANIFEST = "manifest.json"
OUTPUTS = ("logits", "tokens", "features")
# torch cannot gather unsigned integers: they are viewed as signed integers of the same width.
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32}


@dataclass(frozen=True, eq=False)
class LabelStore:
    """Predictions by row. `open` maps the files; `to` moves them to a device."""

    path: Path
    manifest: dict[str, Any]
    keys: np.ndarray  # uint8 [N, 16]
    skipped: np.ndarray  # int64: rows of unreadable images
    shards: dict[str, list[Tensor]]  # by array name; each [n, v, ...], memory-mapped
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    resident: dict[str, Tensor] | None = None  # by array name; each [N * v, ...] on the device

    @classmethod
    def open(cls, path: str | Path, check: bool = True) -> "LabelStore":
        """The store in a folder, after a check of the sizes of all shards, and of their digests if `check`."""
        path = Path(path).expanduser()
        manifest = read_manifest(path)
        if not manifest["complete"]:
            done = sum(shard["images"] for shard in manifest["shards"])
            raise UserError(
                f"{path} is incomplete ({done:,} of {manifest['images']:,} images): run the same vitrail annotate command again."
            )
        check_shards(path, manifest, check)
        shards: dict[str, list[Tensor]] = {name: [] for name in manifest["arrays"]}
        keys, skipped, start = [], [], 0
        for shard in manifest["shards"]:
            arrays = open_shard(path / shard["name"], manifest["arrays"], shard["images"])
            stored = [unsigned(array).max() for name, array in arrays.items() if check and name.endswith(".classes")]
            if max(stored, default=0) >= manifest["teacher"]["classes"]:
                raise UserError(f"{path / shard['name']} contains classes that the teacher does not have: annotate again.")
            keys.append(arrays.pop("key").numpy())
            for name, tensor in arrays.items():
                shards[name].append(tensor)
            skipped += [start + image["row"] for image in shard["skipped"]]
            start += shard["images"]
        return cls(path, manifest, np.concatenate(keys), np.array(skipped, dtype=np.int64), shards)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def outputs(self) -> list[str]:
        """One or more of logits, tokens, features."""
        return list(self.manifest["outputs"])

    @property
    def classes(self) -> int:
        """The number of the teacher's classes, or of the subset that was stored."""
        return int(self.manifest["teacher"]["classes"])

    @property
    def class_names(self) -> list[str] | None:
        names: list[str] | None = self.manifest["teacher"]["class_names"]
        return names

    @property
    def views(self) -> int:
        return len(self.manifest["views"])

    @property
    def covers(self) -> str | None:
        """The part of the image that maps cover: "whole", or "center" for the center square; None without maps."""
        covers: str | None = self.manifest["covers"]
        return covers

    @property
    def grid(self) -> tuple[int, int] | None:
        """Height and width of the maps."""
        array = self.manifest["arrays"].get("tokens.values")
        return (array["shape"][-2], array["shape"][-1]) if array else None

    @property
    def nbytes(self) -> int:
        """Size of the predictions, without keys and headers."""
        return sum(tensor.nbytes for tensors in self.shards.values() for tensor in tensors)

    def rows(self, source: Source, workers: int | None = None, advance: Callable[[int], Any] = lambda count: None) -> Tensor:
        """int64 [len(source)]: the row of each image, found by its content; -1 for unreadable images.

        Reads every image of the source once; `advance` is called with the number of images read.
        """
        keys, readable = image_keys(source, workers, advance)
        rows = find_keys(keys, self.keys)
        missing = np.flatnonzero((rows < 0) & readable)
        if len(missing):
            raise UserError(
                f"{self.path} has no predictions for {len(missing):,} of the {len(source):,} images of {source.name}, such as "
                f"{source.location(int(missing[0]))}: annotate this data set (images are found by the content of their files)."
            )
        rows[~readable | np.isin(rows, self.skipped)] = -1
        return torch.from_numpy(rows)

    def match(
        self,
        student_classes: Sequence[str],
        mapping: Mapping[str, Any] | None = None,
        ids: Mapping[str, str] | None = None,
    ) -> Tensor:
        """int64 [student's classes]: their indices among the classes of the store; see `match_teacher`."""
        return match_teacher(self, student_classes, mapping, ids)

    def logits(self, rows: Tensor, view: int | Tensor = 0) -> tuple[Tensor, Tensor]:
        """Values float32 and classes int64, [B, k] each; `view` is one index, or int64 [B]."""
        return self._top_k("logits", rows, view)

    def tokens(self, rows: Tensor, view: int | Tensor = 0) -> tuple[Tensor, Tensor]:
        """Values float32 and classes int64, [B, k, h, w] each."""
        return self._top_k("tokens", rows, view)

    def features(self, rows: Tensor, view: int | Tensor = 0) -> Tensor:
        """float32 [B, D]"""
        return self._select("features", rows, view).float()

    def class_scores(
        self, rows: Tensor, classes: Tensor | int | None = None, outside: str = "spread", view: int | Tensor = 0
    ) -> Tensor:
        """Logits [B, C] of all classes, or of those at the indices that `match` returns; `outside` is that of `topk_logits`."""
        return self._expanded("logits", rows, classes, outside, view)

    def class_targets(
        self, rows: Tensor, classes: Tensor | int | None = None, outside: str = "spread", view: int | Tensor = 0
    ) -> Tensor:
        """Probabilities [B, C]."""
        return class_probabilities(self.class_scores(rows, classes, outside, view), outside)

    def dense_scores(
        self, rows: Tensor, classes: Tensor | int | None = None, outside: str = "zero", view: int | Tensor = 0
    ) -> Tensor:
        """Logits [B, C, h, w], to be cropped and resized before the softmax."""
        return self._expanded("tokens", rows, classes, outside, view)

    def dense_targets(
        self, rows: Tensor, classes: Tensor | int | None = None, outside: str = "zero", view: int | Tensor = 0
    ) -> Tensor:
        """Probabilities [B, C, h, w]."""
        return class_probabilities(self.dense_scores(rows, classes, outside, view), outside)

    def to(self, device: torch.device | str, max_fraction: float = 0.25) -> "LabelStore":
        """The store with outputs on a device: copied to it if it needs at most `max_fraction` of the free memory, else read from
        the files at each access; then rows on the CPU avoid a synchronization.
        """
        device = torch.device(device)
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
        if self.nbytes > max_fraction * free:
            return replace(self, device=device, resident=None)
        resident = {}
        for name, tensors in self.shards.items():
            joined = torch.empty((len(self), *tensors[0].shape[1:]), dtype=tensors[0].dtype, device=device)
            start = 0
            for tensor in tensors:
                joined[start : start + len(tensor)].copy_(tensor)
                start += len(tensor)
            resident[name] = joined.flatten(0, 1)
        return replace(self, device=device, resident=resident)

    def has_rest(self, output: str) -> bool:
        """Whether the probability outside the stored classes can be computed; true if all classes are stored."""
        return f"{output}.rest" in self.shards or f"{output}.classes" not in self.shards

    def rest_logit(self, output: str, rows: Tensor, view: int | Tensor = 0) -> Tensor:
        """[B, ...]: the logit of each class that is not stored if they share the rest equally; 0 if all classes are stored."""
        values = self.shards[f"{output}.values"][0]
        others = self.classes - values.shape[2]
        if not others:
            return torch.zeros((), device=self.device).expand(len(rows), *values.shape[3:])
        return self._select(f"{output}.rest", rows, view).float() - math.log(others)

    def _expanded(self, output: str, rows: Tensor, classes: Tensor | int | None, outside: str, view: int | Tensor) -> Tensor:
        if isinstance(classes, int) and classes != self.classes:
            raise UserError(f"{self.path} has {self.classes} classes, not {classes}: give the indices that `match` returns.")
        has_rest = outside == "spread" and f"{output}.rest" in self.shards
        rest = self._select(f"{output}.rest", rows, view).float() if has_rest else None
        scores = expand_top_k(*self._top_k(output, rows, view), self.classes, outside, rest)
        return scores if classes is None or isinstance(classes, int) else scores.index_select(1, classes.to(scores.device))

    def _top_k(self, output: str, rows: Tensor, view: int | Tensor) -> tuple[Tensor, Tensor]:
        values = self._select(f"{output}.values", rows, view).float()
        if f"{output}.classes" not in self.shards:  # all classes are stored, in order
            order = torch.arange(values.shape[1], device=values.device)
            return values, order.view(1, -1, *[1] * (values.dim() - 2)).expand_as(values)
        classes = self._select(f"{output}.classes", rows, view)
        return values, unsigned(classes)

    def _select(self, name: str, rows: Tensor, view: int | Tensor) -> Tensor:
        """[B, ...] on the device."""
        if name not in self.shards:
            raise UserError(
                f"{self.path} contains {' and '.join(self.outputs)}, not {name.split('.')[0]}: annotate again with --outputs."
            )
        if isinstance(view, int) and not 0 <= view < self.views:
            raise UserError(
                f"{self.path} has the views {', '.join(self.manifest['views'])}, not view {view}: annotate again with --views 2."
            )
        if rows.device.type == "cpu" and len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(self):
            raise UserError(
                f"{self.path} has the rows 0 to {len(self) - 1}; another was requested, perhaps of an unreadable image."
            )
        if self.resident is not None:
            if isinstance(view, Tensor):
                view = view.to(self.device, non_blocking=True)
            return self.resident[name].index_select(0, rows.to(self.device, non_blocking=True) * self.views + view)
        return self._gather(name, rows.cpu(), view.cpu() if isinstance(view, Tensor) else torch.full((len(rows),), view))

    def _gather(self, name: str, rows: Tensor, views: Tensor) -> Tensor:
        shards, shard_size = self.shards[name], int(self.manifest["shard_size"])
        first = shards[0]
        pinned = self.device.type == "cuda"
        gathered = torch.empty((len(rows), *first.shape[2:]), dtype=first.dtype, pin_memory=pinned)
        # A batch has a few rows in nearly every shard, which numpy indexes with less overhead than torch.
        result, row, view = gathered.numpy(), rows.numpy(), views.numpy()
        order = np.argsort(row, kind="stable")
        by_shard = np.split(order, np.flatnonzero(np.diff(row[order] // shard_size)) + 1)
        for batch in by_shard if len(rows) else []:
            shard, within = int(row[batch[0]]) // shard_size, row[batch] % shard_size
            result[batch] = shards[shard].numpy()[within, view[batch]]
        return gathered.to(self.device, non_blocking=True)


def read_manifest(path: Path) -> dict[str, Any]:
    if not (path / MANIFEST).is_file():
        raise UserError(f"There is no label store at {path}: give a folder written by vitrail annotate.")
    try:
        manifest = upgrade_manifest(read_json(path / MANIFEST))
        current = (manifest["format"], manifest["layout"]) == (FORMAT, LAYOUT)
        invalid = find_invalid_entry(manifest) if current else None
    except (UserError, ValueError, KeyError, TypeError, AttributeError):
        current, invalid = True, "an entry"
    if invalid is not None:
        raise UserError(f"{path / MANIFEST} is damaged ({invalid} is missing or invalid): remove {path} and annotate again.")
    if not current:
        raise UserError(f"{path} was written by another version of Vitrail: annotate again into another folder.")
    return manifest


def find_invalid_entry(manifest: dict[str, Any]) -> str | None:
    """The name of an entry that has another type or value than those that are written; a missing one may raise an exception."""
    teacher, arrays, shards, outputs, views = (manifest[name] for name in ("teacher", "arrays", "shards", "outputs", "views"))
    names, subset, size = teacher["class_names"], manifest.get("class_subset"), manifest["size"]
    valid = {
        "complete": type(manifest["complete"]) is bool,
        "images": is_count(manifest["images"], 1),
        "shard_size": is_count(manifest["shard_size"], 1),
        "outputs": bool(outputs) and outputs == [name for name in OUTPUTS if name in outputs],
        "views": views in (["plain"], ["plain", "mirrored"]),
        "covers": manifest["covers"] in (None, "whole", "center"),
        "top_k": is_count(manifest["top_k"]),
        "size": size is None or (is_list_of(size, int) and len(size) == 2),
        "class_subset": subset is None or (is_count(subset["of"]) and is_list_of(subset["classes"], int)),
        "values": all(type(manifest[name]) is str for name in ("values", "vitrail")),
        "teacher": type(teacher["name"]) is str
        and isinstance(teacher["weights"], str | None)
        and is_count(teacher["classes"], 1),
        "class_names": names is None or (is_list_of(names, str) and len(names) == teacher["classes"]),
        "shards": is_list_of(shards, dict),
    }
    for name, is_valid in valid.items():
        if not is_valid:
            return name
    if not are_valid_arrays(arrays, outputs, len(views), teacher["classes"]):
        return "arrays"
    return None if are_valid_shards(shards, manifest) else "shards"


def is_count(value: Any, minimum: int = 0) -> bool:
    return type(value) is int and minimum <= value < 1 << 48


def is_list_of(values: Any, kind: type) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


def are_valid_arrays(arrays: dict[str, Any], outputs: list[str], views: int, classes: int) -> bool:
    """Whether names, dtypes and shapes are those of the table above."""
    expected: dict[str, tuple[tuple[str, ...], list[int]]] = {}  # dtypes and shape by name
    for output in outputs:
        values = arrays["features" if output == "features" else f"{output}.values"]
        shape = values["shape"]
        if not is_list_of(shape, int) or min(shape) < 1 or max(shape) >= 1 << 32:
            return False
        if len(shape) != (4 if output == "tokens" else 2) or shape[0] != views:
            return False
        expected[output if output == "features" else f"{output}.values"] = (("float16",), shape)
        if f"{output}.classes" in arrays:
            expected[f"{output}.classes"] = (("uint16", "uint32"), shape)
        if f"{output}.rest" in arrays:
            expected[f"{output}.rest"] = (("float16",), [views, *shape[2:]])
        if output != "features" and (shape[1] > classes if f"{output}.classes" in arrays else shape[1] != classes):
            return False
    return arrays.keys() == expected.keys() and all(
        arrays[name]["dtype"] in dtypes and arrays[name]["shape"] == shape for name, (dtypes, shape) in expected.items()
    )


def are_valid_shards(shards: list[dict[str, Any]], manifest: dict[str, Any]) -> bool:
    """Whether shards are listed in order, all of them if the store is complete, with the number of images that each contains."""
    size, total = manifest["shard_size"], manifest["images"]
    numbers = [int(shard["name"].removeprefix("shard-").removesuffix(".safetensors")) for shard in shards]
    if numbers != sorted(set(numbers)) or (manifest["complete"] and len(shards) != -(-total // size)):
        return False
    return all(
        shard["name"] == f"shard-{number:05d}.safetensors"
        and is_count(shard["images"], 1)
        and shard["images"] == min(size, total - number * size)
        and is_count(shard["bytes"])
        and type(shard["sha256"]) is str
        and is_list_of(shard["skipped"], dict)
        and all(is_count(image["row"]) and image["row"] < shard["images"] for image in shard["skipped"])
        and all(type(image[key]) is str for image in shard["skipped"] for key in ("where", "reason"))
        for number, shard in zip(numbers, shards, strict=True)
    )


def check_shards(path: Path, manifest: dict[str, Any], digests: bool) -> None:
    """Raise an error if a shard is missing, incomplete or, with `digests`, changed."""

    def is_intact(shard: dict[str, Any]) -> bool:
        file = path / shard["name"]
        if not file.is_file() or file.stat().st_size != shard["bytes"]:
            return False
        return not digests or file_sha256(file) == shard["sha256"]

    with ThreadPoolExecutor(4) as pool:  # hashing releases the GIL
        for shard, intact in zip(manifest["shards"], pool.map(is_intact, manifest["shards"]), strict=True):
            if not intact:
                raise UserError(
                    f"{path / shard['name']} is damaged or missing: run the same vitrail annotate command again to restore it."
                )


def open_shard(path: Path, arrays: Mapping[str, Any], count: int) -> dict[str, Tensor]:
    """The memory-mapped arrays of a shard; unsigned integers as signed ones."""
    tensors = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensors[name] = file.get_tensor(name)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{path} cannot be read ({error}): annotate again.") from None
    expected = {"key": {"dtype": "uint8", "shape": [KEY_BYTES]}, **arrays}
    found = {
        name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)} for name, tensor in tensors.items()
    }
    if found != {name: {"dtype": array["dtype"], "shape": [count, *array["shape"]]} for name, array in expected.items()}:
        raise UserError(f"{path} does not match its manifest: annotate again.")
    return {name: tensor.view(SIGNED.get(tensor.dtype, tensor.dtype)) for name, tensor in tensors.items()}


def unsigned(classes: Tensor) -> Tensor:
    """int64 of class indices, which are unsigned integers viewed as signed ones."""
    return classes.long() & ((1 << 8 * classes.element_size()) - 1)
