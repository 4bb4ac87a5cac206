"""Deltas: what a training has changed in a model's weights, as a file of its own beside the weights it started from.

A delta holds every tensor that differs from the base, in full (a new classifier and resampled positions have other shapes), all
that an artifact says about the trained model, and the fingerprint of the base: a hash of its tensors, not of its file, so that
the same weights in another format are the same base.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.atomic_files import write_aside
from vitrail.checkpoints.model_io import (
    DELTA,
    Header,
    artifact_header,
    build_flags,
    check_whole,
    load,
    read_header,
    write_safetensors,
)
from vitrail.checkpoints.readers import read_safetensors
from vitrail.errors import UserError
from vitrail.models.config import TRAINING_ONLY
from vitrail.models.registry import build
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.version import __version__

LAYOUT = 1  # version of the delta's metadata


@dataclass(frozen=True)
class Delta:
    """The tensors that differ, by name, and what they differ from."""

    tensors: dict[str, Tensor]
    header: str  # the trained model's, as in its artifact
    base: str  # fingerprint of the weights it was made for
    base_name: str
    base_bytes: int
    origin: str = "the delta"  # its file, for messages

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    @property
    def seal(self) -> str:
        """A hash of everything above, by which a damaged file is known."""
        facts = json.dumps([self.header, self.base, self.base_name, self.base_bytes])
        return hashlib.sha256((facts + fingerprint(self.tensors)).encode()).hexdigest()

    def describe(self, overrides: Mapping[str, Any] | None = None) -> Header:
        """The trained model: name, architecture, preprocessing, class names, notes."""
        return read_header(self.header, self.origin, dict(overrides or {}))


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(json.dumps([name, str(tensors[name].dtype), list(tensors[name].shape)]).encode())
        digest.update(raw(tensors[name]).numpy().data)
    return digest.hexdigest()


def raw(tensor: Tensor) -> Tensor:
    """The bytes [n] of a tensor: numbers that compare equal may be stored in two ways, and some equal not even themselves."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def is_same(one: Tensor | None, two: Tensor) -> bool:
    return one is not None and one.shape == two.shape and one.dtype == two.dtype and torch.equal(raw(one), raw(two))


def make_delta(base: VisionTransformer, tuned: VisionTransformer) -> Delta:
    """What has to be known beside `base` to have `tuned`."""
    base, tuned = unwrapped(base), check_whole(unwrapped(tuned))
    before, after = base.state_dict(), tuned.state_dict()
    changed = {name: tensor for name, tensor in after.items() if not is_same(before.get(name), tensor)}
    if not changed:
        raise UserError("The two hold the same weights: a delta would be empty.")
    if len(changed) == len(after):
        raise UserError(
            "Every tensor differs, so that a delta would be the whole model: keep the file as it is, "
            "or train with --scope attention for a small delta."
        )
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in changed.items()}
    size = sum(tensor.numel() * tensor.element_size() for tensor in before.values())
    return Delta(tensors, artifact_header(tuned)["vitrail"], fingerprint(before), base.name, size)


def save_delta(delta: Delta, path: str | Path) -> Path:
    path = Path(path)
    if path.suffix != ".safetensors":
        raise UserError(f"A delta ends in .safetensors, not {path.name!r}.")
    facts = {"layout": LAYOUT, "version": __version__, "seal": delta.seal, "header": delta.header, "base": delta.base}
    facts |= {"base_name": delta.base_name, "base_bytes": delta.base_bytes}
    write_aside(path, lambda side: write_safetensors(delta.tensors, side, {DELTA: json.dumps(facts)}))
    return path


def read_delta(path: str | Path) -> Delta:
    """A delta from its file, after a look at its seal."""
    if Path(path).is_dir():
        raise UserError(f"{path} is a folder, not a delta; `vitrail delta make` writes one.")
    if not Path(path).is_file():
        raise UserError(f"There is no file {path}.")
    try:
        with Path(path).open("rb") as file:
            safetensors = file.read(9)[8:] == b"{"
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    tensors, metadata = read_safetensors(Path(path)) if safetensors else ({}, {})
    if DELTA not in metadata:
        raise UserError(f"{path} is not a delta; `vitrail delta make` writes one.")
    try:
        facts = json.loads(metadata[DELTA])
        if facts["layout"] > LAYOUT:
            raise UserError(f"{path} was written by a newer Vitrail ({facts['version']}); update to read it.")
        fields = {key: facts[key] for key in ("header", "base", "base_name", "base_bytes")}
        if not all(isinstance(fields[key], str) for key in ("header", "base", "base_name")):
            raise TypeError("text expected")
        # Copied, as the tensors of an artifact are: in a file they lie at odd addresses, which not every kernel treats alike.
        delta = Delta({name: tensor.clone() for name, tensor in tensors.items()}, **fields, origin=str(path))
        whole = delta.seal == facts["seal"]
    except (ValueError, KeyError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise UserError(f"{path} is damaged: what it holds is not what was written; copy or make it again.")
    return delta


def attach(base: VisionTransformer, delta: Delta | str | Path, **overrides: Any) -> VisionTransformer:
    """The trained model, in evaluation mode on the base's device. It shares every unchanged parameter with `base`, so that many
    deltas on one trunk cost their own tensors alone; what is shared is frozen, because training it would change all of them.

    `overrides` are fields of the architecture that matter in training alone (`drop_path=0.1`).
    """
    found = delta if isinstance(delta, Delta) else read_delta(delta)
    base = unwrapped(base)
    shared = base.state_dict()
    theirs = fingerprint(shared)
    if theirs != found.base:
        raise UserError(
            f"{found.origin} was made for the weights {found.base[:12]} ({found.base_name or 'without a name'}), "
            f"and those given are {theirs[:12]} ({base.name or 'without a name'}): give those that it was made from."
        )
    header = found.describe(overrides)
    model = build(header.architecture, device="meta")
    device = next(base.parameters()).device
    state = {}
    for name, expected in model.state_dict().items():
        tensor = found.tensors.get(name, shared.get(name))
        if tensor is None or tensor.shape != expected.shape or tensor.dtype != expected.dtype:
            raise UserError(f"{found.origin} and its base do not make a whole model: {name} is missing or has another shape.")
        state[name] = tensor.to(device) if name in found.tensors else tensor
    for name, _ in model.named_buffers():
        # Statistics of a batch norm move in every model's own training.
        if name in state and name not in found.tensors:
            state[name] = state[name].clone()
    model.load_state_dict(state, assign=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in found.tensors)
    return header.put_on(model).eval()


def load_changed(base: str | Path, delta: str | Path, ema: bool, overrides: dict[str, Any]) -> VisionTransformer:
    """The model of two files; what `vitrail.load` does with "base+delta"."""
    found = read_delta(delta)
    training = {field: value for field, value in overrides.items() if field in TRAINING_ONLY}
    told = {field: value for field, value in overrides.items() if field not in TRAINING_ONLY}
    model = attach(load(base, ema=ema, **told), found, **training)
    for parameter, made in zip(model.parameters(), build_flags(model), strict=True):
        parameter.requires_grad_(made)  # nobody else has the base
    return model


def unwrapped(model: nn.Module) -> VisionTransformer:
    """A compiled model hides the one it was made from."""
    inner = getattr(model, "_orig_mod", model)
    assert isinstance(inner, VisionTransformer)
    return inner


def patterns(delta: Delta) -> dict[str, tuple[int, int]]:
    """Tensors by the pattern of their names (`blocks.*.mix.branches.*.body.qkv.weight`): how many, and their bytes."""
    found: dict[str, tuple[int, int]] = {}
    for name, tensor in delta.tensors.items():
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        count, size = found.get(pattern, (0, 0))
        found[pattern] = count + 1, size + tensor.numel() * tensor.element_size()
    return found


def summary(delta: Delta) -> dict[str, Any]:
    """Everything but the tensors, as plain values."""
    header = delta.describe()
    try:
        recipe = json.loads(header.notes.get("recipe", "null"))
    except ValueError:
        recipe = None  # somebody's own note
    return {
        "name": header.name,
        "base": {"name": delta.base_name, "sha256": delta.base, "bytes": delta.base_bytes},
        "tensors": len(delta.tensors),
        "parameters": sum(tensor.numel() for tensor in delta.tensors.values()),
        "bytes": delta.bytes,
        "parts": {name: {"tensors": count, "bytes": size} for name, (count, size) in patterns(delta).items()},
        "image_size": list(header.architecture.image_size),
        "class_names": header.class_names,
        "architecture": header.architecture.to_dict(),
        "preprocessing": header.preprocessing.to_dict(),
        "recipe": recipe if isinstance(recipe, dict) else None,
    }
