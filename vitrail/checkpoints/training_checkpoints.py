"""Training checkpoints, in one file or sharded, and their weights as those of an artifact.

Architecture, classes and preprocessing are read from the run.json of the run directory that contains the checkpoint.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from vitrail.aliases import upgrade_checkpoint_key, upgrade_run
from vitrail.checkpoints.artifact import HEADER as ARTIFACT_HEADER
from vitrail.checkpoints.artifact import LAYOUT as ARTIFACT_LAYOUT
from vitrail.checkpoints.readers import SHARDED, TRAINING_HEADER, Checkpoint, check_regular_file, read_json_object
from vitrail.errors import UserError
from vitrail.json_files import read_json
from vitrail.models.preprocessing import Preprocessing

LAYOUT = 1
COMPLETE = "complete.json"  # the last file written of a sharded checkpoint; without it the checkpoint is incomplete
TrainingState = tuple[int, dict[str, dict[str, Tensor]], dict[str, Any]]  # step, groups of tensors, run metadata
# Errors that a damaged file can cause.
READ_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, MemoryError, safetensors.SafetensorError)

SHARD_INDEX = ".metadata"  # the pickled listing of the tensors of a sharded checkpoint


def is_training_checkpoint(path: str | Path) -> bool:
    path = Path(path)
    if not path.is_file():
        return path.suffix == SHARDED and path.is_dir()
    try:
        with safetensors.safe_open(path, "pt") as file:
            return TRAINING_HEADER in (file.metadata() or {})
    except (safetensors.SafetensorError, OSError, ValueError):
        return False


def read_training_weights(path: Path, ema: bool = False) -> Checkpoint:
    """The weights that the training would evaluate: those of the EMA if its recipe says so, or with `ema`."""
    try:
        step, groups, metadata = read_sharded(path) if path.is_dir() else read_checkpoint(path)
        recipe = metadata["recipe"]
        if ema and "ema" not in groups:
            raise UserError(f"{path} contains no EMA weights.")
        averaged = groups.get("ema", {}) if ema or recipe["ema"]["evaluate"] else {}
        weights = groups["model"] | averaged  # frozen weights have no EMA
        header = artifact_header(path, recipe, step)
    except READ_ERRORS as error:
        raise UserError(f"{path} is not a complete training checkpoint: {short_message(error)}.") from None
    return Checkpoint(weights, {ARTIFACT_HEADER: json.dumps(header)})


def artifact_header(path: Path, recipe: dict[str, Any], step: int) -> dict[str, Any]:
    """The header that the training writes into its artifacts."""
    file = path.absolute().parents[1] / "run.json"
    if not file.is_file():
        raise UserError(
            f"{path} does not contain its architecture: keep it in checkpoints/ of its run directory, with the run.json."
        )
    run = upgrade_run(read_json(file))
    validation, augmentation = recipe["validation"], recipe["augmentation"]
    preprocessing = Preprocessing(
        image_size=next(size for size in (validation.get("image_size", (0, 0)), augmentation["image_size"]) if any(size)),
        crop_ratio=validation["crop_ratio"],
        resize=validation["resize"],
        interpolation=validation["interpolation"],
        mean=augmentation["mean"],
        std=augmentation["std"],
    )
    return {
        "layout": ARTIFACT_LAYOUT,
        "version": run["version"],
        "name": run["model"]["name"],
        "architecture": run["architecture"],
        "preprocessing": preprocessing._asdict(),
        "class_names": run["data"]["classes"],
        "notes": {"recipe": json.dumps(run["recipe"]), "metrics": json.dumps({"step": step})},
    }


def read_checkpoint(path: Path) -> TrainingState:
    """The content of a checkpoint in one file; raises one of READ_ERRORS if it is damaged."""
    check_regular_file(path)
    with safetensors.safe_open(path, "pt") as file:
        header = json.loads((file.metadata() or {})[TRAINING_HEADER])
        # Copies: tensors mapped from the file would keep its disk space in use after its removal.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    if header["layout"] != LAYOUT:
        raise ValueError("it was written by another version of Vitrail")
    if type(header["step"]) is not int or not 0 <= header["step"] < 1 << 62:
        raise ValueError("its step is not a number of steps")
    if checksum(tensors, canonical_json(header["step"], header["facts"])) != header["checksum"]:
        raise ValueError("its checksum is wrong")
    return header["step"], split_groups(tensors), upgrade_run(header["facts"])


def read_sharded(path: Path) -> TrainingState:
    """The weights and the EMA of a sharded checkpoint, gathered in this process; raises one of READ_ERRORS if it is damaged."""
    from vitrail.checkpoints.sharded_reader import open_sharded  # imports torch's distributed package

    complete = read_complete(path)
    checkpoint = open_sharded(path, complete, list_files(path))
    weights = {
        name: entry for name, entry in checkpoint.tensors.items() if upgrade_checkpoint_key(name).startswith(("model:", "ema:"))
    }
    tensors = {name: torch.zeros(entry.size, dtype=entry.properties.dtype) for name, entry in weights.items()}
    checkpoint.load(tensors)
    return complete["step"], split_groups(tensors), upgrade_run(complete["facts"])


def read_complete(path: Path) -> dict[str, Any]:
    """The content of `complete.json`: layout, step, metadata of the training, and size and checksum of every other file."""
    try:
        complete = read_json_object(path / COMPLETE)
    except UserError as error:
        raise ValueError(short_message(error)) from None
    if complete is None:
        raise ValueError(f"{COMPLETE} is missing")
    if complete["layout"] > LAYOUT:
        raise UserError(f"{path} was written by a newer version of Vitrail: update Vitrail.")
    if type(complete["step"]) is not int or type(complete["facts"]) is not dict or type(complete["sums"]) is not dict:
        raise ValueError(f"{COMPLETE} is damaged")
    return complete


def list_files(path: Path) -> list[Path]:
    """The files of a sharded checkpoint except `complete.json`."""
    return sorted(file for file in path.iterdir() if file.name != COMPLETE)


def file_checksum(path: Path) -> list[int]:
    """[size, CRC-32] of a file."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            value = zlib.crc32(block, value)
    return [path.stat().st_size, value]


def split_groups(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Tensors named group:name as {group: {name: tensor}}."""
    groups: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        group, name = upgrade_checkpoint_key(key).split(":", 1)
        groups.setdefault(group, {})[name] = tensor
    return groups


def checksum(tensors: dict[str, Tensor], text: str) -> int:
    """CRC-32 of the tensors, their names, shapes and dtypes, and a text."""
    value = zlib.crc32(text.encode())
    for name, tensor in sorted(tensors.items()):
        value = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), value)
        value = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, value)
    return value


def canonical_json(step: int, metadata: dict[str, Any]) -> str:
    return json.dumps([step, metadata], sort_keys=True)


def short_message(error: BaseException) -> str:
    """The first line of an exception's message, readable for a KeyError too."""
    text = str(error).strip().split("\n")[0].rstrip(".")
    return f"the entry {text} is missing" if isinstance(error, KeyError) else text or type(error).__name__
