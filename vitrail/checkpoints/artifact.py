"""Vitrail's own file: safetensors with a JSON header of architecture, preprocessing, class names, notes and a checksum."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from vitrail.aliases import upgrade_metrics, upgrade_name, upgrade_recipe, upgrade_tensor
from vitrail.atomic_files import atomic_write
from vitrail.checkpoints.assembly import assemble
from vitrail.checkpoints.readers import Checkpoint
from vitrail.errors import UserError
from vitrail.heads.task_heads import read_config, write_config
from vitrail.models.config import TRAINING_ONLY, Architecture
from vitrail.models.preprocessing import Preprocessing
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.version import __version__

LAYOUT = 1  # version of the header
HEADER = "vitrail"  # the metadata entry of an artifact
DELTA = "vitrail_delta"  # the metadata entry of a file with only the tensors that differ from other weights
OPTIMIZED = "vitrail_optimized"  # the metadata entry of a model that was optimized for one kind of machine
FIELDS = {
    "layout",
    "version",
    "name",
    "architecture",
    "preprocessing",
    "class_names",
    "notes",
    "sha256",
    "task_head",
}  # of the header
UPGRADES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"recipe": upgrade_recipe, "metrics": upgrade_metrics}


class Header(NamedTuple):
    """The description of a model in its artifact."""

    name: str | None
    architecture: Architecture
    preprocessing: Preprocessing
    class_names: list[str] | None
    notes: dict[str, str]
    sha256: str | None = None  # `fingerprint` of the tensors; files of older versions have none
    task_head: Any = None  # the configuration of a head, see `vitrail.heads.task_heads`

    def apply_to(self, model: VisionTransformer) -> VisionTransformer:
        model.name = model.name if self.name is None else self.name
        model.preprocessing, model.class_names, model.notes = self.preprocessing, self.class_names, self.notes
        return model


def read_header(text: str, path: str | Path, overrides: dict[str, Any]) -> Header:
    """The header of an artifact; `overrides` replace fields of the architecture that matter in training only."""
    fixed = sorted(set(overrides) - TRAINING_ONLY)
    if fixed:
        raise UserError(f"{path} contains its architecture: {fixed[0]} cannot be changed when loading it.")
    try:
        content = json.loads(text)
        newer = content["version"] if content["layout"] > LAYOUT else None
        header = parse_header(content) if newer is None else None
    except UserError as error:
        raise UserError(f"{path} has a damaged Vitrail header: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} has a damaged Vitrail header ({error!r}).") from None
    if header is None:
        raise UserError(f"{path} was written by a newer version of Vitrail ({newer}): update Vitrail.")
    return header._replace(architecture=header.architecture.replace(**overrides))


def parse_header(content: dict[str, Any]) -> Header:
    unknown = set() if "header_sha256" in content else set(content) - FIELDS
    unknown |= set(content["preprocessing"]) - set(Preprocessing._fields)
    if unknown:
        raise UserError(f"{min(unknown)!r} is unknown.")
    expected = header_fingerprint(content)
    if content.get("header_sha256", expected) != expected:
        raise UserError("it does not match its checksum; copy or download the file again.")
    architecture = Architecture.from_dict(content["architecture"])
    preprocessing = Preprocessing.from_dict(content["preprocessing"])
    preprocessing.check()
    names = content.get("class_names")
    if names is not None and [type(name) for name in list(names)] != [str] * architecture.classes:
        raise ValueError("class names")
    notes = {str(key): str(value) for key, value in (content.get("notes") or {}).items()}
    name = upgrade_name(str(content["name"])) if "name" in content else None
    task_head = read_config(content["task_head"]) if content.get("task_head") is not None else None
    return Header(name, architecture, preprocessing, names, upgrade_notes(notes), content.get("sha256"), task_head)


def upgrade_notes(notes: dict[str, str]) -> dict[str, str]:
    """Notes with the JSON of recipe and metrics under the names of today; other notes unchanged."""
    upgraded = dict(notes)
    for name, upgrade in UPGRADES.items():
        try:
            value = json.loads(notes.get(name, "null"))
        except (ValueError, RecursionError):  # a note of the user
            continue
        if isinstance(value, dict) and (changed := upgrade(value)) != value:
            upgraded[name] = json.dumps(changed)
    return upgraded


def load_artifact(checkpoint: Checkpoint, path: str | Path, overrides: dict[str, Any]) -> VisionTransformer:
    header = read_header(checkpoint.metadata[HEADER], path, overrides)
    if header.sha256 is not None and header.sha256 != fingerprint(checkpoint.tensors):
        raise UserError(f"{path} is damaged: its tensors do not match their checksum; copy or download it again.")
    tensors = {upgrade_tensor(key): tensor for key, tensor in checkpoint.tensors.items()}
    return header.apply_to(assemble(header.architecture, tensors, path, task_head=header.task_head))


def artifact_metadata(
    model: VisionTransformer, notes: dict[str, str] | None = None, tensors: Mapping[str, Tensor] | None = None
) -> dict[str, str]:
    """The metadata of an artifact: its header as JSON, with a checksum of its `tensors`; `notes` are added to the model's."""
    header: dict[str, Any] = {
        "layout": LAYOUT,
        "version": __version__,
        "name": model.name,
        "architecture": model.architecture.to_dict(),
        "preprocessing": model.preprocessing.to_dict(),
        "class_names": model.class_names,
        "notes": model.notes | (notes or {}),
    }
    if model.task_head is not None:
        header["task_head"] = write_config(model.task_head)
    if tensors is not None:
        header["sha256"] = fingerprint(tensors)
        header["header_sha256"] = header_fingerprint(header)
    return {HEADER: json.dumps(header)}


def save_tensors(
    path: Path, model: VisionTransformer, tensors: dict[str, Tensor] | None = None, notes: dict[str, str] | None = None
) -> None:
    """Write an artifact of a model, with other `tensors` than its own if given, such as the best or the EMA weights."""
    content = {key: tensor.detach().cpu() for key, tensor in (model.state_dict() if tensors is None else tensors).items()}
    metadata = artifact_metadata(model, notes, content)
    atomic_write(path, lambda temporary: write_safetensors(content, temporary, metadata))


def write_safetensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    contiguous = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    safetensors.torch.save_file(contiguous, path, metadata=metadata)


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(json.dumps([name, str(tensors[name].dtype), list(tensors[name].shape)]).encode())
        digest.update(as_bytes(tensors[name]).numpy().data)
    return digest.hexdigest()


def header_fingerprint(header: dict[str, Any]) -> str:
    """SHA-256 of the fields of a header that affect predictions; name and notes can be changed with other tools."""
    fields = [header.get(name) for name in ("architecture", "preprocessing", "class_names", "sha256")]
    fields += [header["task_head"]] if header.get("task_head") is not None else []
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def as_bytes(tensor: Tensor) -> Tensor:
    """uint8 [n]; bytes, not values, are compared: -0.0 equals 0.0, and NaN does not equal itself."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
