"""The state of a training as weights: a checkpoint of its own folder, one file or sharded, read as the artifact of that moment.

What the tensors are (architecture, classes, preprocessing) is said by the run.json of the run that the checkpoint lies in.
"""

import json
import pickle
import warnings
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from vitrail.aliases import upgrade_checkpoint_key, upgrade_run
from vitrail.checkpoints.model_io import LAYOUT as ARTIFACT_LAYOUT
from vitrail.checkpoints.readers import Checkpoint
from vitrail.errors import UserError
from vitrail.models.preprocessing import Preprocessing

LAYOUT = 1
HEADER = "vitrail_checkpoint"  # the metadata entry of a state in one file
SHARDED, CLOSING = ".sharded", "complete.json"  # the folder of a state in parts; written last: without it there is none
State = tuple[int, dict[str, dict[str, Tensor]], dict[str, Any]]  # step, groups of tensors, facts
# What reading a file with arbitrary bytes in it may raise.
DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, MemoryError, safetensors.SafetensorError)

# torch keeps the list of a sharded state's tensors as a pickle, and may open it once it is made of nothing but these.
LISTING = ".metadata"
LISTED = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))),
    "pathlib": ("Path", "PosixPath", "WindowsPath"),
}


class Listing(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in LISTED.get(module, ()):
            raise UserError(f"it holds {module}.{name}, which could run code, and was not opened")
        return super().find_class(module, name)


def is_state(path: str | Path) -> bool:
    path = Path(path)
    if path.is_dir():
        return path.suffix == SHARDED
    try:
        with safetensors.safe_open(path, "pt") as file:
            return HEADER in (file.metadata() or {})
    except (safetensors.SafetensorError, OSError, ValueError):
        return False


def read_state(path: str | Path, ema: bool = False) -> Checkpoint:
    """The weights that the training would report at this moment: the running mean where its recipe says so, or with `ema`."""
    path = Path(path)
    try:
        step, groups, facts = read_parts(path) if path.is_dir() else read_checkpoint(path)
        recipe = facts["recipe"]
        if ema and "ema" not in groups:
            raise UserError(f"{path} holds no averaged (EMA) weights.")
        reported = groups.get("ema", {}) if ema or recipe["ema"]["evaluate"] else {}
        metadata = {"vitrail": json.dumps(header_of(path, recipe, step))}
    except DAMAGE as error:
        raise UserError(f"{path} is not a whole state of a training: {problem(error)}.") from None
    return Checkpoint(groups["model"] | reported, metadata)  # frozen weights have no mean


def header_of(path: Path, recipe: dict[str, Any], step: int) -> dict[str, Any]:
    """What the training writes into its artifacts."""
    place = path.absolute().parents[1] / "run.json"
    if not place.is_file():
        raise UserError(f"{path} does not say what its weights are: leave it in checkpoints/ of its run, whose run.json does.")
    run = upgrade_run(json.loads(place.read_text(encoding="utf-8")))
    view, how = recipe["validation"], recipe["augmentation"]
    seen = (how["image_size"], view["crop_ratio"], view["resize"], view["interpolation"], how["mean"], how["std"])
    return {
        "layout": ARTIFACT_LAYOUT,
        "version": run["version"],
        "name": run["model"]["name"],
        "architecture": run["architecture"],
        "preprocessing": dict(zip(Preprocessing._fields, seen, strict=True)),
        "class_names": run["data"]["classes"],
        "notes": {"recipe": json.dumps(run["recipe"]), "metrics": json.dumps({"step": step})},
    }


def read_checkpoint(path: Path) -> State:
    """A state in one file, to the last bit, or one of DAMAGE."""
    with safetensors.safe_open(path, "pt") as file:
        header = json.loads((file.metadata() or {})[HEADER])
        # Copies: what is read lies in the mapped file, whose space would stay taken after it has been removed.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    if header["layout"] != LAYOUT:
        raise ValueError("another version of Vitrail wrote it")
    if checksum(tensors, words_of(header["step"], header["facts"])) != header["checksum"]:
        raise ValueError("its checksum is wrong")
    return header["step"], grouped(tensors), upgrade_run(header["facts"])


def read_parts(path: Path) -> State:
    """The weights and their mean from a sharded state, put together in this process, or one of DAMAGE."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    closing = json.loads((path / CLOSING).read_text())
    check_parts(path, closing, (each for each in path.iterdir() if each.name != CLOSING))
    entries: Any = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    wanted = {key: entry for key, entry in entries.items() if upgrade_checkpoint_key(key).startswith(("model:", "ema:"))}
    tensors = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in wanted.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it reads alone is what one process means to do
            dcp.load(tensors, checkpoint_id=path, no_dist=True)
    except CheckpointException as error:
        raise ValueError(str(error).split("\n")[0]) from None
    return closing["step"], grouped(tensors), upgrade_run(closing["facts"])


def check_parts(path: Path, closing: dict[str, Any], files: Iterable[Path]) -> None:
    """Complain about a part that is missing, or of these files one that is not what was written."""
    if closing["layout"] > LAYOUT:
        raise UserError(f"{path} was written by a newer Vitrail; update to go on.")
    for file in files:
        if closing["sums"].get(file.name) != sum_of(file):
            raise ValueError(f"{file.name} is not what was written")
    missing = [name for name in closing["sums"] if not (path / name).exists()]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    with (path / LISTING).open("rb") as listing:
        try:
            Listing(listing).load()
        except UserError as error:
            raise UserError(f"{path} is not a state that a training wrote: {error}.") from None
        except Exception as error:  # a pickle may fail in any way
            raise ValueError(problem(error)) from None


def sum_of(path: Path) -> list[int]:
    """Size and checksum of a file."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            value = zlib.crc32(block, value)
    return [path.stat().st_size, value]


def grouped(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        group, rest = upgrade_checkpoint_key(name).split(":", 1)
        groups.setdefault(group, {})[rest] = tensor
    return groups


def checksum(tensors: dict[str, Tensor], words: str) -> int:
    """Over the tensors, their names, shapes and types, and the text that goes with them."""
    value = zlib.crc32(words.encode())
    for name, tensor in sorted(tensors.items()):
        value = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), value)
        value = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, value)
    return value


def words_of(step: int, facts: dict[str, Any]) -> str:
    """One spelling for what JSON holds in many."""
    return json.dumps([step, facts], sort_keys=True)


def problem(error: BaseException) -> str:
    """The first line of what an exception says; a key that is missing says little without its kind."""
    words = str(error).strip().split("\n")[0].rstrip(".")
    return f"it has no {words}" if isinstance(error, KeyError) else words or type(error).__name__
