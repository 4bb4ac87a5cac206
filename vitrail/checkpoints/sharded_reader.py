"""Reading of sharded training checkpoints (torch's distributed format), without running anything that they contain.

torch pickles the listing of the tensors. It is read once, with stand-ins for the classes in it; its values are checked and copied
into a listing of our own, and the tensors are loaded with that. `torch.distributed.checkpoint.FileSystemReader` would unpickle
the listing without checks, and parts of the files that the listing declares as bytes.
"""

import io
import itertools
import math
import pickle
import pickletools
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, StorageReader, load
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future

from vitrail.checkpoints.readers import check_regular_file
from vitrail.checkpoints.torch_files import load_pickled
from vitrail.checkpoints.training_checkpoints import SHARD_INDEX, file_checksum, short_message
from vitrail.errors import UserError

MAX_CHUNKS = 1024  # of a tensor: one for each process
Span = tuple[tuple[int, ...], tuple[int, ...]]


class Record:
    """A stand-in for a class in the listing. It has only a state: pickle cannot set attributes of it, nor of its class."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


METADATA = "torch.distributed.checkpoint.metadata"
CLASSES = {
    METADATA: (
        *("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex", "StorageMeta"),
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("Path", "PosixPath", "WindowsPath"),
    "pathlib._local": ("Path", "PosixPath", "WindowsPath"),  # in Python 3.13
}
STAND_INS: dict[tuple[str, str], Any] = {
    (module, name): type(name, (Record,), {}) for module, names in CLASSES.items() for name in names
}
STAND_INS |= {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
STAND_INS["torch", "Size"] = tuple
# All that torch's listings need. Not PUT, which makes room for as many objects as the file says.
OPCODES = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD", "NONE"),
    *("NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE", "EMPTY_TUPLE", "TUPLE"),
    *("TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"),
}


class ShardIndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in STAND_INS:
            raise UserError(f"it contains {module}.{name}, which could run code, and was not opened")
        return STAND_INS[module, name]


class Part(NamedTuple):
    """Where a tensor, or a chunk of one, is stored."""

    file: str
    offset: int
    length: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class ShardedCheckpoint(StorageReader):
    """A sharded checkpoint whose listing has been checked; `load` reads its tensors from the files in the listing."""

    def __init__(self, path: Path, listing: Metadata) -> None:
        self.path, self.listing = path, listing

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Size, dtype and chunks of the tensors by name."""
        return self.listing.state_dict_metadata  # type: ignore[return-value]

    def load(self, tensors: dict[str, Tensor], no_dist: bool = True) -> None:
        """Copy the values into these tensors; with `no_dist=False` every process loads its own shards."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about reading in a single process, which is intended
                load(tensors, storage_reader=self, no_dist=no_dist)
        except CheckpointException as error:
            raise ValueError(first_failure(error)) from None

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            tensor = read_part(self.path, self.listing.storage_data[item.storage_index])
            for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                tensor = tensor.narrow(dimension, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(tensor)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read_metadata(self) -> Metadata:
        return self.listing

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def open_sharded(path: Path, complete: dict[str, Any], files: Iterable[Path]) -> ShardedCheckpoint:
    """A sharded checkpoint, after a check that no file is missing and that `files` have the right checksums."""
    sums = complete["sums"]
    for file in files:
        if file.is_symlink():
            raise ValueError(f"{file.name} is a link")
        check_regular_file(file)
        if sums.get(file.name) != file_checksum(file):
            raise ValueError(f"the checksum of {file.name} is wrong")
    missing = [name for name in sums if Path(name).name != name or not (path / name).is_file()]
    if missing or SHARD_INDEX not in sums:
        raise ValueError(f"{missing[0] if missing else SHARD_INDEX} is missing")
    sizes = {name: (path / name).stat().st_size for name in sums}
    try:
        listing = check_listing(unpickle_listing((path / SHARD_INDEX).read_bytes()), sizes)
    except UserError as error:
        raise UserError(f"{path} is not a training checkpoint: {error}.") from None
    except Exception as error:  # a pickle can raise any exception
        raise ValueError(f"the listing of its tensors is damaged ({short_message(error)})") from None
    return ShardedCheckpoint(path, listing)


def unpickle_listing(data: bytes) -> Any:
    unknown = next((code.name for code, _, _ in pickletools.genops(data) if code.name not in OPCODES), None)
    if unknown:
        raise ValueError(f"pickle opcode {unknown}")
    return ShardIndexUnpickler(io.BytesIO(data)).load()


def check_listing(pickled: Any, sizes: dict[str, int]) -> Metadata:
    """A listing made from the checked values of an unpickled one; `sizes` are those of the files."""
    content = state_of(pickled, "Metadata")
    places = {}
    for index, place in content["storage_data"].items():
        key = state_of(index, "MetadataIndex")
        if type(key["fqn"]) is not str:
            raise ValueError("a name")
        places[key["fqn"], as_shape(key["offset"])] = state_of(place, "_StorageInfo", "torch.distributed.checkpoint.filesystem")
    tensors: dict[str, Any] = {}
    parts: dict[MetadataIndex, Part] = {}
    for name, pickled_entry in content["state_dict_metadata"].items():
        entry = state_of(pickled_entry, "TensorStorageMetadata")
        dtype, shape = state_of(entry["properties"], "TensorProperties")[0], as_shape(entry["size"])
        if type(name) is not str or ":" not in name or not isinstance(dtype, torch.dtype):
            raise ValueError(f"the entry {name!r}")
        chunks = [state_of(chunk, "ChunkStorageMetadata") for chunk in entry["chunks"]]
        spans = [(as_shape(chunk["offsets"]), as_shape(chunk["sizes"])) for chunk in chunks]
        if len(spans) > MAX_CHUNKS or any(overlap(*pair) for pair in itertools.combinations(spans, 2)):
            raise ValueError(f"the chunks of {name!r}")
        for start, span in spans:
            inside = [first + count <= side for first, count, side in zip(start, span, shape, strict=True)]
            place = places[name, start]
            file, offset, length = place["relative_path"], place["offset"], place["length"]
            stored = type(offset) is type(length) is int and 0 <= offset < offset + length <= sizes.get(file, 0)
            if not all(inside) or not stored or math.prod(span) * dtype.itemsize > length or place.get("transform_descriptors"):
                raise ValueError(f"the place of {name!r}")
            parts[MetadataIndex(name, start)] = Part(file, offset, length, span, dtype)
        if sum(math.prod(span) for _, span in spans) != math.prod(shape):
            raise ValueError(f"the chunks of {name!r}")
        metadata = [ChunkStorageMetadata(torch.Size(start), torch.Size(span)) for start, span in spans]
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), metadata)
    if sum(part.length for part in parts.values()) > sum(sizes.values()):
        raise ValueError("its parts overlap")
    return Metadata(tensors, storage_data=parts)


def overlap(one: Span, other: Span) -> bool:
    """Whether two chunks, each (start, size), have a common element."""
    sides = zip(*one, *other, strict=True)
    return all(start < begin + length and begin < start + size for start, size, begin, length in sides)


def state_of(value: Any, name: str, module: str = METADATA) -> Any:
    """The state of an unpickled object, which must be of this class."""
    if type(value) is not STAND_INS[module, name]:
        raise ValueError(f"a {type(value).__name__} instead of a {name}")
    return value.state


def as_shape(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or len(value) > 16 or not all(type(side) is int and 0 <= side < 1 << 40 for side in value):
        raise ValueError("a shape")
    return value


def read_part(path: Path, part: Part) -> Tensor:
    with (path / part.file).open("rb") as file:
        file.seek(part.offset)
        data = file.read(part.length)
    tensor = load_pickled(io.BytesIO(data))
    if not isinstance(tensor, Tensor) or (tensor.shape, tensor.dtype, tensor.layout) != (part.shape, part.dtype, torch.strided):
        raise ValueError(f"{part.file} contains another tensor than the listing says")
    return tensor


def first_failure(error: Any) -> str:
    """The error of the first process that failed, from torch's CheckpointException."""
    return short_message(next(iter(error.failures.values()))[0] if error.failures else error)
