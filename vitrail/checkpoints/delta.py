"""Deltas: the tensors that a training has changed in a model's weights, stored separately from the base weights.

A delta contains every tensor that differs from the base, in full (a new classifier and a resampled position table have other
shapes), the artifact header of the trained model, and a hash of the tensors of the base, not of its file: the same weights in
another format are the same base.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.aliases import old_tensor_name, upgrade_tensor
from vitrail.atomic_files import atomic_write
from vitrail.checkpoints.artifact import (
    DELTA,
    HEADER,
    Header,
    artifact_metadata,
    as_bytes,
    fingerprint,
    read_header,
    write_safetensors,
)
from vitrail.checkpoints.assembly import build_empty, check_architecture, reset_requires_grad, unwrap_compiled
from vitrail.checkpoints.model_io import load
from vitrail.checkpoints.readers import check_regular_file, read_safetensors
from vitrail.errors import UserError
from vitrail.models.config import TRAINING_ONLY
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.version import __version__

LAYOUT = 1  # version of the delta's metadata


@dataclass(frozen=True)
class Delta:
    """The changed tensors by name, and a description of the trained model and of the base."""

    tensors: dict[str, Tensor]
    header: str  # of the trained model's artifact
    base: str  # fingerprint of the base weights
    base_name: str
    base_bytes: int
    origin: str = "the delta"  # its file, for messages

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    @property
    def checksum(self) -> str:
        """SHA-256 of all of the above, to detect damage."""
        metadata = json.dumps([self.header, self.base, self.base_name, self.base_bytes])
        return hashlib.sha256((metadata + fingerprint(self.tensors)).encode()).hexdigest()

    def describe(self, overrides: Mapping[str, Any] | None = None) -> Header:
        """The trained model: name, architecture, preprocessing, class names, notes."""
        return read_header(self.header, self.origin, dict(overrides or {}))


def is_same(one: Tensor | None, two: Tensor) -> bool:
    return one is not None and one.shape == two.shape and one.dtype == two.dtype and torch.equal(as_bytes(one), as_bytes(two))


def make_delta(base: nn.Module, tuned: nn.Module) -> Delta:
    """The delta that turns `base` into `tuned`."""
    base, tuned = unwrap_compiled(base), check_architecture(unwrap_compiled(tuned))
    before, after = base.state_dict(), tuned.state_dict()
    changed = {name: tensor for name, tensor in after.items() if not is_same(before.get(name), tensor)}
    if not changed:
        raise UserError("Both models have the same weights: the delta would be empty.")
    if len(changed) == len(after):
        raise UserError(
            "Every tensor differs, so the delta would be as large as the model: keep the file as it is, or train with "
            "--scope attention for a small delta."
        )
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in changed.items()}
    size = sum(tensor.numel() * tensor.element_size() for tensor in before.values())
    return Delta(tensors, artifact_metadata(tuned)[HEADER], fingerprint(before), base.name, size)


def save_delta(delta: Delta, path: str | Path) -> Path:
    path = Path(path)
    if path.suffix != ".safetensors":
        raise UserError(f"The name of a delta must end in .safetensors, not {path.name!r}.")
    content = {"layout": LAYOUT, "version": __version__, "seal": delta.checksum, "header": delta.header, "base": delta.base}
    content |= {"base_name": delta.base_name, "base_bytes": delta.base_bytes}
    atomic_write(path, lambda temporary: write_safetensors(delta.tensors, temporary, {DELTA: json.dumps(content)}))
    return path


def read_delta(path: str | Path) -> Delta:
    """A delta from its file, after a check of its checksum."""
    if Path(path).is_dir():
        raise UserError(f"{path} is a folder, not a delta; `vitrail delta make` writes one.")
    if not Path(path).exists():
        raise UserError(f"There is no file {path}.")
    check_regular_file(Path(path))
    try:
        with Path(path).open("rb") as file:
            is_safetensors = file.read(9)[8:] == b"{"
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    tensors, metadata = read_safetensors(Path(path)) if is_safetensors else ({}, {})
    if DELTA not in metadata:
        raise UserError(f"{path} is not a delta; `vitrail delta make` writes one.")
    try:
        content = json.loads(metadata[DELTA])
        if content["layout"] > LAYOUT:
            raise UserError(f"{path} was written by a newer version of Vitrail ({content['version']}): update Vitrail.")
        fields = {key: content[key] for key in ("header", "base", "base_name", "base_bytes")}
        if not all(isinstance(fields[key], str) for key in ("header", "base", "base_name")):
            raise TypeError("text expected")
        # Copied like the tensors of an artifact: in a file they can be unaligned, which changes the results of some kernels.
        delta = Delta({name: tensor.clone() for name, tensor in tensors.items()}, **fields, origin=str(path))
        intact = delta.checksum == content["seal"]
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise UserError(f"{path} is damaged: copy or make it again.")
    return replace(delta, tensors={upgrade_tensor(name): tensor for name, tensor in delta.tensors.items()})


def attach(base: nn.Module, delta: Delta | str | Path, **overrides: Any) -> VisionTransformer:
    """The trained model, in evaluation mode on the device of `base`.

    It shares every unchanged parameter with `base`, so that several deltas on one base need memory for their own tensors only;
    shared parameters are frozen, since training them would change all of these models. `overrides` are fields of the
    architecture that matter in training only (`drop_path=0.1`).
    """
    delta = delta if isinstance(delta, Delta) else read_delta(delta)
    base = unwrap_compiled(base)
    shared = base.state_dict()
    check_base(delta, base.name, shared)
    header = delta.describe(overrides)
    model = build_empty(header.architecture, len(shared) + len(delta.tensors), delta.origin, header.task_head)
    device = next(base.parameters()).device
    state = {}
    for name, expected in model.state_dict().items():
        tensor = delta.tensors.get(name, shared.get(name))
        if tensor is None or tensor.shape != expected.shape or tensor.dtype != expected.dtype:
            raise UserError(f"{delta.origin} and its base are not a complete model: {name} is missing or has another shape.")
        state[name] = tensor.to(device) if name in delta.tensors else tensor
    for name, _ in model.named_buffers():
        # Batch norm statistics change in the training of each model.
        if name in state and name not in delta.tensors:
            state[name] = state[name].clone()
    model.load_state_dict(state, assign=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in delta.tensors)
    return header.apply_to(model).eval()


def check_base(delta: Delta, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise an error if a delta was made from other weights."""
    actual = fingerprint(tensors)
    if delta.base in (actual, fingerprint({old_tensor_name(key): tensor for key, tensor in tensors.items()})):
        return
    raise UserError(
        f"{delta.origin} was made from the weights {delta.base[:12]} ({delta.base_name or 'without a name'}), not from "
        f"{actual[:12]} ({name or 'without a name'}): give the weights that it was made from."
    )


def load_with_delta(base: str | Path, delta: str | Path, ema: bool, overrides: dict[str, Any]) -> VisionTransformer:
    """The model of two files, as `vitrail.load("base+delta")` returns it."""
    read = read_delta(delta)
    training = {field: value for field, value in overrides.items() if field in TRAINING_ONLY}
    inferred = {field: value for field, value in overrides.items() if field not in TRAINING_ONLY}
    return reset_requires_grad(attach(load(base, ema=ema, **inferred), read, **training))  # the base is not shared


def group_by_pattern(delta: Delta) -> dict[str, tuple[int, int]]:
    """(number of tensors, bytes) by the pattern of their names (`blocks.*.mix.branches.*.body.qkv.weight`)."""
    groups: dict[str, tuple[int, int]] = {}
    for name, tensor in delta.tensors.items():
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        count, size = groups.get(pattern, (0, 0))
        groups[pattern] = count + 1, size + tensor.numel() * tensor.element_size()
    return groups


def summarize(delta: Delta) -> dict[str, Any]:
    """All but the tensors, as plain values."""
    header = delta.describe()
    try:
        recipe = json.loads(header.notes.get("recipe", "null"))
    except ValueError:
        recipe = None  # a note of the user
    return {
        "name": header.name,
        "base": {"name": delta.base_name, "sha256": delta.base, "bytes": delta.base_bytes},
        "tensors": len(delta.tensors),
        "parameters": sum(tensor.numel() for tensor in delta.tensors.values()),
        "bytes": delta.bytes,
        "parts": {name: {"tensors": count, "bytes": size} for name, (count, size) in group_by_pattern(delta).items()},
        "image_size": list(header.architecture.image_size),
        "class_names": header.class_names,
        "architecture": header.architecture.to_dict(),
        "preprocessing": header.preprocessing.to_dict(),
        "recipe": recipe if isinstance(recipe, dict) else None,
    }
