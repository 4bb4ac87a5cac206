"""Reading of checkpoint files, recognized by their content. No pickle can run code; damaged files raise a `UserError`."""

import os
import pickle
import re
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitrail.checkpoints.hub import find_named, suggest
from vitrail.checkpoints.torch_files import load_pickled
from vitrail.errors import UserError
from vitrail.json_files import MissingFile, read_json

# Entries of training files that hold the weights, in order of precedence.
WRAPPERS = ("model", "state_dict", "module", "teacher", "student", "params")
EMA = ("model_ema", "state_dict_ema", "ema", "module_ema")
FOLDER_FILES = ("model.safetensors", "pytorch_model.bin")  # of a Hugging Face or timm folder
BEST = "best.safetensors"  # of a run directory
TRAINING_HEADER = "vitrail_checkpoint"  # the metadata entry of a training checkpoint in one file
SHARDED = ".sharded"  # the suffix of the folder of a sharded training checkpoint
MAX_SHARED = 2  # ratio of the sizes of the tensors of a PyTorch file, which may share data, to that of the file
PREFIXES = ("module.", "_orig_mod.", "backbone.", "model.")


@dataclass
class Checkpoint:
    """Tensors by name, and the metadata and configuration files stored with them."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str] = field(default_factory=dict)  # of a safetensors file
    config: dict[str, Any] | None = None  # of a folder
    preprocessor: dict[str, Any] | None = None


def read_weights(path: str | Path, ema: bool = False) -> Checkpoint:
    """The weights in a file or folder of any supported format, or weights by name; `ema` selects the EMA weights."""
    path = find_named(path) or Path(path)
    if not os.path.exists(path):  # which has no exception for a name that is too long
        hint = suggest(str(path)) or " Give a checkpoint, a run directory, or one of the names in docs/weights.md."
        raise UserError(f"There is no file {path}.{hint}")
    if path.suffix == SHARDED and path.is_dir():
        return read_training_checkpoint(path, ema)
    if path.is_dir():
        return read_folder(path, ema)
    check_regular_file(path)
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    config = read_json_object(path.with_name("config.json")) if path.name in FOLDER_FILES else None
    preprocessor = read_json_object(path.with_name("preprocessor_config.json")) if path.name in FOLDER_FILES else None
    if len(head) < 16:
        raise UserError(f"{path} is too short to be a checkpoint: it may be an incomplete download.")
    header = int.from_bytes(head[:8], "little")
    safetensors = head[8:9] == b"{" and (header < path.stat().st_size or head[:1] != b"\x80")
    if not safetensors and (head[:1] == b"\x80" or (head[:2] == b"PK" and not is_npz(path))):
        return Checkpoint(read_torch(path, ema), {}, config, preprocessor)
    tensors, metadata = read_safetensors(path) if safetensors else ({}, {})
    if TRAINING_HEADER in metadata:
        return read_training_checkpoint(path, ema)
    if ema:
        raise UserError(f"{path} contains no EMA weights.")
    if safetensors:
        return Checkpoint(tensors, metadata, config, preprocessor)
    if head[:2] == b"PK":
        return Checkpoint(read_npz(path))
    raise UserError(f"{path} is not a safetensors, PyTorch or npz file.")


def check_regular_file(path: Path) -> None:
    """Raise UserError for a pipe, a socket or a device, from which a reader could wait or read forever."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a regular file: give a file on a disk.")


def read_training_checkpoint(path: Path, ema: bool) -> Checkpoint:
    from vitrail.checkpoints.training_checkpoints import read_training_weights  # which imports this module

    return read_training_weights(path, ema)


def read_folder(path: Path, ema: bool) -> Checkpoint:
    for name in (*FOLDER_FILES, BEST):
        if (path / name).exists():
            return read_weights(path / name, ema)  # and the config.json next to it
    index = read_json_object(path / "model.safetensors.index.json")
    if index is None:
        known = f"{', '.join(FOLDER_FILES)} or {BEST}"
        raise UserError(f"The folder {path} contains none of {known}: give a folder with weights, or a file.")
    config, preprocessor = (read_json_object(path / name) for name in ("config.json", "preprocessor_config.json"))
    return Checkpoint(read_shards(path, index), {}, config, preprocessor)


def read_shards(path: Path, index: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of all files in an index; the files must be in the same folder."""
    places = index.get("weight_map")
    names = list(places.values()) if isinstance(places, dict) else []
    if not names or not all(
        isinstance(name, str) and Path(name).name == name and not os.path.isdir(path / name) for name in names
    ):
        raise UserError(f"The index in {path} does not list files of that folder.")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(names)):
        tensors |= read_weights(path / name).tensors
    return tensors


def read_json_object(path: Path) -> dict[str, Any] | None:
    """The object of a JSON file; None if there is no file."""
    try:
        value = read_json(path)
    except MissingFile:
        return None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object.")
    return value


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        raise UserError(f"{path} is a damaged or incomplete safetensors file ({error}).") from None


def is_npz(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{path} is a damaged or incomplete archive ({error}).") from None
    return any(name.endswith(".npy") for name in names) and not any(name.endswith("data.pkl") for name in names)


def read_npz(path: Path) -> dict[str, Tensor]:
    try:
        with zipfile.ZipFile(path) as archive_file:
            members = archive_file.infolist()
        if any(member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for member in members):
            raise ValueError("its compression is not that of numpy")
        inflated = sum(member.file_size for member in members)
        if inflated > 50 * path.stat().st_size + (1 << 20):
            raise ValueError("its content is more than fifty times its size")
        with np.load(path, allow_pickle=False) as archive:
            return {name: from_numpy(archive[name]) for name in archive.files}
    except Exception as error:  # of zipfile, of each compression, and of the parser of array headers
        raise UserError(f"{path} is a damaged or unsafe npz archive ({first_line(error)}).") from None


def from_numpy(array: np.ndarray) -> Tensor:
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:  # numpy has no bfloat16 and stores it as raw bytes
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
        raise ValueError(f"an array of type {array.dtype}")
    return torch.from_numpy(array)


def read_torch(path: Path, ema: bool) -> dict[str, Tensor]:
    try:
        content = load_pickled(path)
    except Exception as error:  # a pickle can raise any exception
        blocked = re.search(r"(?:GLOBAL|global:?) ([\w.]+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if blocked:
            raise UserError(
                f"{path} contains {blocked[1]}, which could run code, and was not opened: use a file of tensors only."
            ) from None
        if isinstance(error, pickle.UnpicklingError):
            raise UserError(f"{path} is a damaged PyTorch file, or not a checkpoint.") from None
        raise UserError(f"{path} is a damaged or incomplete PyTorch file ({first_line(error)}).") from None
    tensors = unwrap(content, path, ema)
    if sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) > MAX_SHARED * path.stat().st_size + (1 << 20):
        raise UserError(f"{path}: its tensors share data and would need more than {MAX_SHARED} times the memory of the file.")
    return tensors


def first_line(error: Exception) -> str:
    return str(error).split("\n")[0].rstrip(".") or type(error).__name__


def unwrap(content: Any, path: Path, ema: bool) -> dict[str, Tensor]:
    """The state dict inside a training file, without the name prefixes of wrappers."""
    if ema:
        inner = next((plain(content)[name] for name in EMA if name in plain(content)), None)
        if inner is None:
            raise UserError(f"{path} contains no EMA weights.")
        content = inner
    for _ in range(3):
        inner = next((plain(content)[name] for name in WRAPPERS if isinstance(plain(content).get(name), dict)), None)
        if inner is None:
            break
        content = inner
    if not isinstance(content, dict):
        raise UserError(f"{path} contains a {type(content).__name__}, not a dictionary of tensors.")
    tensors = {
        key: Tensor.detach(value) for key, value in plain(content).items() if isinstance(key, str) and isinstance(value, Tensor)
    }
    if not tensors:
        has_ema = any(name in plain(content) for name in EMA)
        raise UserError(f"{path} contains no tensors{' except EMA weights: load it with ema=True (--ema)' if has_ema else ''}.")
    for name, tensor in tensors.items():
        if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_complex():
            raise UserError(
                f"{path}: the tensor {name!r} is nested, sparse, quantized, complex or without data: use dense tensors."
            )
        if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
            raise UserError(f"{path}: the shape of the tensor {name!r} is larger than its data.")
    return strip_prefixes(tensors)


def plain(content: Any) -> dict[Any, Any]:
    """The items of an unpickled dictionary, which can have attributes that hide its methods; {} for other values."""
    return dict(dict.items(content)) if isinstance(content, dict) else {}


def strip_prefixes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors without prefixes such as `module.` that all names (or all but those of a projection head) have."""
    while True:
        prefix = next((p for p in PREFIXES if all(key.startswith(p) for key in tensors)), None)
        if prefix is None and any(key.startswith("backbone.") for key in tensors):
            # DINO files contain a projection head, which is dropped; a classifier is kept.
            tensors = {key: value for key, value in tensors.items() if not key.startswith(("head.mlp.", "head.last_layer."))}
            if all(key.startswith(("backbone.", "head.")) for key in tensors):
                return {key.removeprefix("backbone."): value for key, value in tensors.items()}
        if prefix is None:
            return tensors
        tensors = {key[len(prefix) :]: value for key, value in tensors.items()}
