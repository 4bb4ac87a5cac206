"""What a teacher said about images, kept: written once by `vitrail annotate`, read at every step of a training.

A store is a folder. `manifest.json` says whose answers these are (the teacher's name, the digest of its weights, its classes and
preprocessing), what is kept and which shards there are; a shard is a safetensors file of `shard` images, the last of fewer.
For n images, each seen in v views, a shard holds

    key             uint8    [n, 16]            digest of the encoded image: images are found by their content
    logits.values   float16  [n, v, k]          the k largest logits, largest first; all of them, in their order, if k is 0
    logits.classes  uint16   [n, v, k]          their class numbers, uint32 above 65,536 classes; not there if k is 0
    logits.rest     float16  [n, v]             log-sum-exp of the logits not kept; not there if k is 0
    tokens.values   float16  [n, v, k, h, w]    the same for each cell of the teacher's grid over the whole image
    tokens.classes  uint16   [n, v, k, h, w]
    tokens.rest     float16  [n, v, h, w]
    features        float16  [n, v, D]          what the teacher's classifier reads

Values are raw scores, before any softmax: maps are cropped and resized first. View 0 is the image, view 1 its mirror image, as
the teacher saw it: the first column of its map is the right edge of the image.
"""

import hashlib
import json
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

from vitrail.aliases import upgrade_metrics
from vitrail.data.loader import free_memory
from vitrail.data.source import Source
from vitrail.errors import UserError
from vitrail.teachers.class_index import match_teacher
from vitrail.teachers.image_digests import find, keys_of
from vitrail.teachers.topk_logits import expand, probabilities

FORMAT, LAYOUT = "vitrail store", 1
MANIFEST = "manifest.json"
WHAT = ("logits", "tokens", "features")
# torch gathers no unsigned integers: they travel as signed ones of their width.
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32}


@dataclass(frozen=True, eq=False)
class Store:
    """Rows of answers. `open` maps the files; `to` brings them onto a device."""

    path: Path
    manifest: dict[str, Any]
    keys: np.ndarray  # uint8 [N, 16]
    skipped: np.ndarray  # int64: rows of images that could not be read
    shards: dict[str, list[Tensor]]  # by name; each [n, v, ...], mapped
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    resident: dict[str, Tensor] | None = None  # by name; each [N * v, ...] on the device

    @classmethod
    def open(cls, path: str | Path, check: bool = True) -> "Store":
        """The store at a path. Every shard's length is compared with the manifest, and its digest too unless `check` is off."""
        path = Path(path).expanduser()
        manifest = read_manifest(path)
        if not manifest["complete"]:
            done = sum(shard["images"] for shard in manifest["shards"])
            raise UserError(
                f"{path} is not finished ({done:,} of {manifest['images']:,} images); run the same vitrail annotate again."
            )
        check_shards(path, manifest, check)
        shards: dict[str, list[Tensor]] = {name: [] for name in manifest["arrays"]}
        keys, skipped, start = [], [], 0
        for shard in manifest["shards"]:
            arrays = open_shard(path / shard["name"], manifest["arrays"], shard["images"])
            keys.append(arrays.pop("key").numpy())
            for name, tensor in arrays.items():
                shards[name].append(tensor)
            skipped += [start + each["row"] for each in shard["skipped"]]
            start += shard["images"]
        return cls(path, manifest, np.concatenate(keys), np.array(skipped, dtype=np.int64), shards)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def what(self) -> list[str]:
        return list(self.manifest["what"])

    @property
    def classes(self) -> int:
        """The teacher's."""
        return int(self.manifest["teacher"]["classes"])

    @property
    def class_names(self) -> list[str] | None:
        return self.manifest["teacher"]["class_names"]

    @property
    def views(self) -> int:
        return len(self.manifest["views"])

    @property
    def covers(self) -> str | None:
        """What the maps lie over: "whole" for the whole image, "centre" for its centre square; None without maps."""
        return self.manifest["covers"]

    @property
    def grid(self) -> tuple[int, int] | None:
        """Height and width of the maps in cells."""
        found = self.manifest["arrays"].get("tokens.values")
        return (found["shape"][-2], found["shape"][-1]) if found else None

    @property
    def size(self) -> int:
        """Bytes of the answers, without keys and headers."""
        return sum(tensor.nbytes for tensors in self.shards.values() for tensor in tensors)

    def rows(self, source: Source, workers: int | None = None, advance: Callable[[int], Any] = lambda count: None) -> Tensor:
        """int64 [len(source)]: the row of each image, found by its content; -1 where the image itself cannot be read.

        Reads every image of the source once; `advance` is told how many more are done.
        """
        keys, readable = keys_of(source, workers, advance)
        rows = find(keys, self.keys)
        missing = np.flatnonzero((rows < 0) & readable)
        if len(missing):
            raise UserError(
                f"{self.path} knows nothing of {len(missing):,} of the {len(source):,} images of {source.name}, the first of "
                f"them {source.where(int(missing[0]))}; annotate this data, whose files must be the same to the byte."
            )
        rows[~readable | np.isin(rows, self.skipped)] = -1
        return torch.from_numpy(rows)

    def match(
        self,
        student_classes: Sequence[str],
        mapping: Mapping[str, Any] | None = None,
        ids: Mapping[str, str] | None = None,
    ) -> Tensor:
        """int64 [student's classes]: which of the store's each is; what does not fit is told with the first differences.

        The store's are the teacher's, or those of them that are the data's. WordNet ids that lie beside data are
        `read_ids(source.name)`.
        """
        return match_teacher(self, student_classes, mapping, ids)

    def logits(self, rows: Tensor, view: int | Tensor = 0) -> tuple[Tensor, Tensor]:
        """Values float32 and class numbers int64, [B, k] each; `view` is one for all, or int64 [B]."""
        return self._kept("logits", rows, view)

    def tokens(self, rows: Tensor, view: int | Tensor = 0) -> tuple[Tensor, Tensor]:
        """Values float32 and class numbers int64, [B, k, h, w] each."""
        return self._kept("tokens", rows, view)

    def features(self, rows: Tensor, view: int | Tensor = 0) -> Tensor:
        """float32 [B, D]"""
        return self._pick("features", rows, view).float()

    def class_scores(
        self, rows: Tensor, classes: Tensor | int | None = None, outside: str = "spread", view: int | Tensor = 0
    ) -> Tensor:
        """Logits [B, C], of the teacher's classes or, with what `match` gave, of the student's; for `outside` see `expanding`."""
        return self._expanded("logits", rows, classes, outside, view)

    def class_targets(
        self, rows: Tensor, classes: Tensor | int | None = None, outside: str = "spread", view: int | Tensor = 0
    ) -> Tensor:
        """Probabilities [B, C]."""
        return probabilities(self.class_scores(rows, classes, outside, view), outside)

    def dense_scores(
        self, rows: Tensor, classes: Tensor | int | None = None, outside: str = "zero", view: int | Tensor = 0
    ) -> Tensor:
        """Logits [B, C, h, w] at every cell: what is cropped and resized before the softmax."""
        return self._expanded("tokens", rows, classes, outside, view)

    def dense_targets(
        self, rows: Tensor, classes: Tensor | int | None = None, outside: str = "zero", view: int | Tensor = 0
    ) -> Tensor:
        """Probabilities [B, C, h, w] at every cell."""
        return probabilities(self.dense_scores(rows, classes, outside, view), outside)

    def to(self, device: torch.device | str, share: float = 0.25) -> "Store":
        """The same on a device: all of it there if that takes at most `share` of what is free, else gathered from the files.

        Rows may lie on the device or not; of a store that stays in files they are best given on the CPU, or the host waits.
        """
        device = torch.device(device)
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
        if self.size > share * free:
            return replace(self, device=device, resident=None)
        resident = {}
        for name, tensors in self.shards.items():
            whole = torch.empty((len(self), *tensors[0].shape[1:]), dtype=tensors[0].dtype, device=device)
            start = 0
            for tensor in tensors:
                whole[start : start + len(tensor)].copy_(tensor)
                start += len(tensor)
            resident[name] = whole.flatten(0, 1)
        return replace(self, device=device, resident=resident)

    def knows_rest(self, what: str) -> bool:
        """Whether it is known what probability the classes have that were not kept: also where all were."""
        return f"{what}.rest" in self.shards or f"{what}.classes" not in self.shards

    def outside(self, what: str, rows: Tensor, view: int | Tensor = 0) -> Tensor:
        """[B, ...]: the logit of each class that was not kept, if they share what is left alike; 0 where all were kept."""
        values = self.shards[f"{what}.values"][0]
        others = self.classes - values.shape[2]
        if not others:
            return torch.zeros((), device=self.device).expand(len(rows), *values.shape[3:])
        return self._pick(f"{what}.rest", rows, view).float() - math.log(others)

    def _expanded(self, what: str, rows: Tensor, classes: Tensor | int | None, outside: str, view: int | Tensor) -> Tensor:
        if isinstance(classes, int) and classes != self.classes:
            raise UserError(f"{self.path} is about {self.classes} classes, not {classes}; give what `match` says of yours.")
        rest = self._pick(f"{what}.rest", rows, view).float() if outside == "spread" and f"{what}.rest" in self.shards else None
        scores = expand(*self._kept(what, rows, view), self.classes, outside, rest)
        return scores if classes is None or isinstance(classes, int) else scores.index_select(1, classes.to(scores.device))

    def _kept(self, what: str, rows: Tensor, view: int | Tensor) -> tuple[Tensor, Tensor]:
        values = self._pick(f"{what}.values", rows, view).float()
        if f"{what}.classes" not in self.shards:  # all were kept, in their order
            order = torch.arange(values.shape[1], device=values.device)
            return values, order.view(1, -1, *[1] * (values.dim() - 2)).expand_as(values)
        found = self._pick(f"{what}.classes", rows, view)
        return values, found.long() & ((1 << 8 * found.element_size()) - 1)

    def _pick(self, name: str, rows: Tensor, view: int | Tensor) -> Tensor:
        """[B, ...] on the device."""
        if name not in self.shards:
            raise UserError(f"{self.path} keeps {' and '.join(self.what)}, not {name.split('.')[0]}; annotate again with --what.")
        if isinstance(view, int) and not 0 <= view < self.views:
            raise UserError(f"{self.path} has the views {', '.join(self.manifest['views'])}, no number {view}; see --views.")
        if rows.device.type == "cpu" and len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(self):
            raise UserError(f"{self.path} has the rows 0 to {len(self) - 1}, and another was asked for: an unreadable image?")
        if self.resident is not None:
            if isinstance(view, Tensor):
                view = view.to(self.device, non_blocking=True)
            return self.resident[name].index_select(0, rows.to(self.device, non_blocking=True) * self.views + view)
        return self._gather(name, rows.cpu(), view.cpu() if isinstance(view, Tensor) else torch.full((len(rows),), view))

    def _gather(self, name: str, rows: Tensor, views: Tensor) -> Tensor:
        shards, shard = self.shards[name], int(self.manifest["shard"])
        first = shards[0]
        pinned = self.device.type == "cuda"
        found = torch.empty((len(rows), *first.shape[2:]), dtype=first.dtype, pin_memory=pinned)
        # numpy picks a few rows with a fraction of torch's overhead, and a step asks nearly every shard for a few.
        result, numbers, which = found.numpy(), rows.numpy(), views.numpy()
        order = np.argsort(numbers, kind="stable")
        parts = np.split(order, np.flatnonzero(np.diff(numbers[order] // shard)) + 1)
        for places in parts if len(rows) else []:
            number, inside = int(numbers[places[0]]) // shard, numbers[places] % shard
            result[places] = shards[number].numpy()[inside, which[places]]
        return found.to(self.device, non_blocking=True)


def read_manifest(path: Path) -> dict[str, Any]:
    """What a store says of itself."""
    if not (path / MANIFEST).is_file():
        raise UserError(f"There is no store at {path}: give the folder that vitrail annotate has written.")
    try:
        found = upgrade_metrics(json.loads((path / MANIFEST).read_text(encoding="utf-8")))
        found["shards"] = [upgrade_metrics(shard) for shard in found["shards"]]
        known = found["format"] == FORMAT
        for name in ("complete", "teacher", "what", "views", "covers", "arrays", "images", "shard", "shards"):
            found[name]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path / MANIFEST} is damaged: remove {path} and annotate again.") from None
    if not known or found["layout"] != LAYOUT:
        raise UserError(f"{path} was written by another version of Vitrail: annotate again, into another folder.")
    return found


def check_shards(path: Path, manifest: dict[str, Any], digests: bool) -> None:
    """Refuses shards that are gone, cut off or changed."""

    def sound(shard: dict[str, Any]) -> bool:
        file = path / shard["name"]
        if not file.is_file() or file.stat().st_size != shard["bytes"]:
            return False
        return not digests or digest_of(file) == shard["sha256"]

    with ThreadPoolExecutor(4) as pool:  # hashing lets other threads run
        for shard, good in zip(manifest["shards"], pool.map(sound, manifest["shards"]), strict=True):
            if not good:
                raise UserError(
                    f"{path / shard['name']} is damaged or gone: run the same vitrail annotate again, which makes it anew."
                )


def open_shard(path: Path, arrays: Mapping[str, Any], count: int) -> dict[str, Tensor]:
    """The arrays of a shard, mapped, unsigned integers as signed ones."""
    found = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                found[name] = tensor.view(SIGNED.get(tensor.dtype, tensor.dtype))
        good = found.keys() == {"key", *arrays} and all(
            list(found[name].shape) == [count, *arrays[name]["shape"]] for name in arrays
        )
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): annotate again.") from None
    if not good:
        raise UserError(f"{path} does not hold what its manifest says: annotate again.")
    return found


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
