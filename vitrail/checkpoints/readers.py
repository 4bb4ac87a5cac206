"""Opening checkpoint files by their content, safely: no pickle may run code, a broken file gets one sentence."""

import argparse
import difflib
import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitrail.checkpoints.bundled import NAMES, find_bundled
from vitrail.errors import UserError

# Where projects put the weights inside their training files, in the order of trust.
WRAPPERS = ("model", "state_dict", "module", "teacher", "student", "params")
EMA = ("model_ema", "state_dict_ema", "ema", "module_ema")
FOLDER_FILES = ("model.safetensors", "pytorch_model.bin")  # of a Hugging Face or timm folder
BEST = "best.safetensors"  # of the folder of a training
PREFIXES = ("module.", "_orig_mod.", "backbone.", "model.")


@dataclass
class Checkpoint:
    """Flat tensors by name, and what lay beside them."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str] = field(default_factory=dict)  # of a safetensors file
    config: dict[str, Any] | None = None  # of a folder
    preprocessor: dict[str, Any] | None = None


def read(path: str | Path, ema: bool = False) -> Checkpoint:
    """Read a file or folder of any of the known kinds, or the weights of a bundled name."""
    path = find_bundled(path) or Path(path)
    if not path.exists():
        meant = difflib.get_close_matches(str(path), NAMES, 1, 0.6)
        hint = f" Weights that come with the package: {', '.join(NAMES)}." if meant else ""
        raise UserError(f"There is no file {path}.{hint}")
    if path.is_dir():
        return read_folder(path, ema)
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    config = read_json(path.with_name("config.json")) if path.name in FOLDER_FILES else None
    preprocessor = read_json(path.with_name("preprocessor_config.json")) if path.name in FOLDER_FILES else None
    if len(head) < 16:
        raise UserError(f"{path} is too short to be a checkpoint; was the download cut off?")
    header = int.from_bytes(head[:8], "little")
    safetensors = head[8:9] == b"{" and (header < path.stat().st_size or head[:1] != b"\x80")
    if not safetensors and (head[:1] == b"\x80" or (head[:2] == b"PK" and not is_npz(path))):
        return Checkpoint(read_torch(path, ema), {}, config, preprocessor)
    if ema:
        raise UserError(f"{path} holds no averaged (EMA) weights.")
    if head[:2] == b"PK":
        return Checkpoint(read_npz(path))
    if safetensors:
        tensors, metadata = read_safetensors(path)
        return Checkpoint(tensors, metadata, config, preprocessor)
    raise UserError(f"{path} is not a safetensors, PyTorch or npz file.")


def read_folder(path: Path, ema: bool) -> Checkpoint:
    for name in (*FOLDER_FILES, BEST):
        if (path / name).exists():
            return read(path / name, ema)  # which looks at config.json beside it
    index = read_json(path / "model.safetensors.index.json")
    if index is None:
        known = f"{', '.join(FOLDER_FILES)} or, of a run, {BEST}"
        raise UserError(f"The folder {path} has none of {known}: give a folder with weights, or their file.")
    return Checkpoint(read_shards(path, index), {}, read_json(path / "config.json"), read_json(path / "preprocessor_config.json"))


def read_shards(path: Path, index: dict[str, Any]) -> dict[str, Tensor]:
    """The files that an index names, which must lie in the same folder."""
    names = sorted(set(map(str, (index.get("weight_map") or {}).values())))
    if not names or any(Path(name).name != name for name in names):
        raise UserError(f"The index in {path} does not name files of that folder.")
    tensors: dict[str, Tensor] = {}
    for name in names:
        tensors |= read(path / name).tensors
    return tensors


def read_json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} does not hold a JSON object.")
    return value


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is a damaged or cut-off safetensors file ({error}).") from None


def is_npz(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError) as error:
        raise UserError(f"{path} is a damaged or cut-off archive ({error}).") from None
    return any(name.endswith(".npy") for name in names) and not any(name.endswith("data.pkl") for name in names)


def read_npz(path: Path) -> dict[str, Tensor]:
    try:
        with zipfile.ZipFile(path) as archive_file:
            inflated = sum(member.file_size for member in archive_file.infolist())
        if inflated > 50 * path.stat().st_size + (1 << 20):
            raise ValueError("it would grow more than fifty times when opened")
        with np.load(path, allow_pickle=False) as archive:
            return {name: from_numpy(archive[name]) for name in archive.files}
    except (ValueError, OSError, zipfile.BadZipFile, EOFError, MemoryError) as error:
        raise UserError(f"{path} is a damaged or unsafe npz archive ({error}).") from None


def from_numpy(array: np.ndarray) -> Tensor:
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:  # numpy has no bfloat16 and stores it as raw bytes
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
        raise ValueError(f"an array of type {array.dtype}")
    return torch.from_numpy(array)


def read_torch(path: Path, ema: bool) -> dict[str, Tensor]:
    # Training files of the DeiT line keep their command line beside the weights; a Namespace holds values only.
    allowed: list = [argparse.Namespace]
    mapped = zipfile.is_zipfile(path) and path.suffix != ".safetensors"  # by that name torch takes it for something else
    try:
        with torch.serialization.safe_globals(allowed), warnings.catch_warnings(), path.open("rb") as file:
            warnings.simplefilter("ignore")  # about pickle protocols
            content = torch.load(path if mapped else file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        wanted = re.search(r"(?:GLOBAL|global:?) ([\w.]+)", str(error))
        if wanted:
            raise UserError(
                f"{path} holds {wanted[1]} beside its tensors, which could run code, and was not opened; ask for tensors only."
            ) from None
        raise UserError(f"{path} is a damaged PyTorch file or no checkpoint at all.") from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError, IndexError, TypeError) as error:
        raise UserError(
            f"{path} is a damaged or cut-off PyTorch file ({str(error).splitlines()[0] if str(error) else error!r})."
        ) from None
    return unwrap(content, path, ema)


def unwrap(content: Any, path: Path, ema: bool) -> dict[str, Tensor]:
    """The state dict inside a training file, prefixes of wrappers taken off its names."""
    if ema:
        inner = next((content[name] for name in EMA if isinstance(content, Mapping) and name in content), None)
        if inner is None:
            raise UserError(f"{path} holds no averaged (EMA) weights.")
        content = inner
    for _ in range(3):
        inner = next(
            (content[name] for name in WRAPPERS if isinstance(content, Mapping) and isinstance(content.get(name), Mapping)), None
        )
        if inner is None:
            break
        content = inner
    if not isinstance(content, Mapping):
        raise UserError(f"{path} holds a {type(content).__name__}, not a dictionary of tensors.")
    tensors = {str(key): value for key, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        averaged = isinstance(content, Mapping) and any(name in content for name in EMA)
        raise UserError(f"{path} holds no tensors{' but averaged ones; load it with ema=True (--ema)' if averaged else ''}.")
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_complex():
            raise UserError(f"{path}: the tensor {name!r} is sparse, quantized, complex or empty of data; ask for plain numbers.")
        if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
            raise UserError(f"{path}: the tensor {name!r} claims more numbers than the file holds.")
    return strip_prefixes(tensors)


def strip_prefixes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take `module.` and the like off, as long as every tensor (or all but a training head's) has it."""
    while True:
        prefix = next((p for p in PREFIXES if all(key.startswith(p) for key in tensors)), None)
        if prefix is None and any(key.startswith("backbone.") for key in tensors):
            # DINO keeps its projection head beside the backbone; a classifier beside it stays.
            tensors = {key: value for key, value in tensors.items() if not key.startswith(("head.mlp.", "head.last_layer."))}
            if all(key.startswith(("backbone.", "head.")) for key in tensors):
                return {key.removeprefix("backbone."): value for key, value in tensors.items()}
        if prefix is None:
            return tensors
        tensors = {key[len(prefix) :]: value for key, value in tensors.items()}
