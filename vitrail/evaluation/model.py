"""Models of any origin that predict classes: Vitrail models, and the other networks that `open_teacher` opens."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from vitrail.checkpoints import load
from vitrail.checkpoints.bundled import announce_bundled
from vitrail.checkpoints.codecs import UnknownFormat
from vitrail.checkpoints.hub import is_built_by_timm
from vitrail.checkpoints.model_io import find_weights
from vitrail.devices import choose_device
from vitrail.errors import UserError
from vitrail.models.inputs import check_input_size
from vitrail.models.preprocessing import min_decode_side
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.teachers.sidecar import sidecar_path
from vitrail.teachers.teacher import Teacher

Model = VisionTransformer | Teacher
AnyModel = TypeVar("AnyModel", bound=Model)
Head = Literal["both", "class", "distillation"]
HEADS: tuple[Head, ...] = ("both", "class", "distillation")
PROGRAMS = (".onnx", ".pt2")


def open_model(weights: str | Path, device: str | torch.device | None = None) -> Model:
    """The model of a checkpoint, a run directory, or weights by name; by default on a GPU if one is available.

    Weights that `load` does not know, and weights with a sidecar file, are opened by `open_teacher`.
    """
    chosen = choose_device(str(device) if device is not None else None)
    announce_bundled(weights)
    path = find_weights(weights)
    if path.suffix not in PROGRAMS and not is_built_by_timm(str(weights)) and not sidecar_path(path).is_file():
        try:
            return check_size(load(path, device=chosen))
        except UnknownFormat:
            pass
    from vitrail.teachers.lookup import open_teacher

    return check_size(open_teacher(str(path), chosen))


def device_of(model: Model) -> torch.device:
    """The device of the weights; the CPU for an ONNX file, which has none."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def count_classes(model: Model) -> int:
    return model.architecture.classes if isinstance(model, VisionTransformer) else model.classes


def decode_side(model: Model) -> int | None:
    """The shorter side that JPEG files keep when they are decoded at reduced size; None: full size."""
    return model.decode_side if isinstance(model, Teacher) else min_decode_side(model.preprocessing, model.notes)


def digest_weights(model: Model, settings: Sequence[Any]) -> "hashlib._Hash":
    """SHA-256 of settings and of all weights of a model, to which more can be added."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest


def check_size(model: AnyModel, size: tuple[int, int] | None = None) -> AnyModel:
    """The model; UserError if its images, or those of another `size`, would need too much time and memory."""
    name = model.name or "This model"
    patch_size = model.architecture.patch_size if isinstance(model, VisionTransformer) else 0
    check_input_size(size or model.preprocessing.image_size, patch_size, name)
    config = getattr(getattr(model, "task_head", None), "config", None)
    side = max(getattr(config, "short_side", 0), getattr(config, "window", 0))
    check_input_size((side, side), 0, name)  # of a segmentation or detection, whose images have many patches
    return model


def check_head(model: Model, head: Head) -> None:
    if head not in HEADS:
        raise UserError(f"--head {head} is not known: choose from {', '.join(HEADS)}.")
    if head == "distillation" and not has_distillation_head(model):
        raise UserError(f"{model.name or 'This model'} has no distillation head: remove --head.")


def has_distillation_head(model: Model) -> bool:
    return isinstance(model, VisionTransformer) and model.head_distillation is not None


@contextmanager
def single_head(model: Model, head: Head) -> Iterator[None]:
    """Context in which the logits of a model, and maps of them, are those of one head; "both" changes nothing."""
    if isinstance(model, Teacher) or head == "both":
        yield
        return
    architecture = model.architecture
    model.architecture = architecture.replace(fusion=head, dense_weight=0.0)
    try:
        yield
    finally:
        model.architecture = architecture


def compute_logits(model: Model, images: Tensor, head: Head = "both") -> Tensor:
    """[B, 3, height, width] in the model's own normalization to [B, C]."""
    if isinstance(model, Teacher):
        return model.network.logits(model.adapt(images))  # not model(images), which is bfloat16 on a GPU
    with single_head(model, head):
        out: Tensor = model(images)
    return out
