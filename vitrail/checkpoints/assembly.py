"""Models from tensors: every tensor must match the architecture in name, shape and kind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.checkpoints.codecs import SAME, Pair
from vitrail.errors import UserError
from vitrail.models.config import Architecture
from vitrail.models.registry import build
from vitrail.models.vision_transformer import VisionTransformer

ToPair = Callable[[str, Architecture], Pair]  # the name of one of our tensors to its counterpart in a format


def own_names(key: str, architecture: Architecture) -> Pair:
    return Pair(key, (key,), SAME)


def assemble(
    architecture: Architecture, tensors: dict[str, Tensor], path: str | Path, to_pair: ToPair = own_names, task_head: Any = None
) -> VisionTransformer:
    """A model of an architecture, and of the configuration of a task head, with these tensors; all must match."""
    model = build_empty(architecture, len(tensors), path, task_head)
    title = model.name or ("convnet" if architecture.convnet else "vision transformer")
    state: dict[str, Tensor] = {}
    used: set[str] = set()
    for key, expected in model.state_dict().items():
        pair = to_pair(key, architecture)
        missing = [name for name in pair.theirs if name not in tensors]
        if missing:
            raise UserError(f"{path}: the tensor {missing[0]!r} of a {title} is missing.")
        try:
            tensor = pair.codec.read([tensors[name] for name in pair.theirs])
        except (RuntimeError, IndexError):
            tensor = None
        same_size = sum(tensors[name].numel() for name in pair.theirs) == expected.numel()
        if tensor is None or tensor.shape != expected.shape or not same_size:
            shape = tuple(tensors[pair.theirs[0]].shape)
            raise UserError(f"{path}: the tensor {pair.theirs[0]!r} has shape {shape}, which does not match the other tensors.")
        used.update(pair.theirs)
        if expected.is_floating_point() and not tensor.is_floating_point():
            raise UserError(f"{path}: the tensor {pair.theirs[0]!r} has dtype {tensor.dtype}, not a floating point dtype.")
        tensor = tensor.to(expected.dtype)
        state[key] = tensor.contiguous().clone() if tensor._is_view() or len(pair.theirs) == 1 else tensor
    surplus = sorted(set(tensors) - used)
    if surplus:
        raise UserError(
            f"{path}: {len(surplus)} tensors do not belong to a {model.name or 'known model'}, such as {surplus[0]!r}."
        )
    model.load_state_dict(state, assign=True)
    return reset_requires_grad(model)


def build_empty(architecture: Architecture, num_tensors: int, path: str | Path, task_head: Any = None) -> VisionTransformer:
    """A model without data, for the weights of a file with this number of tensors.

    An architecture in a file may say anything; to build layers for which there are no tensors could take hours.
    """
    a = architecture
    layers = a.depth * a.branches + (a.pooling_depth if a.has_query_pooling else 0)
    layers += sum(a.convnet.depths) if a.convnet else 0
    layers += sum(a.stem_layers) + max(len(a.stem_kernels), len(a.stem_strides))
    if layers > num_tensors:
        raise UserError(f"{path}: {num_tensors} tensors are too few for the {layers} layers of its architecture.")
    try:
        model = build(architecture, device="meta")
        with torch.device("meta"):
            return model if task_head is None else model.set_task_head(task_head)
    except RuntimeError as error:
        raise UserError(f"{path}: its architecture cannot be built ({error}).") from None


def reset_requires_grad(model: VisionTransformer) -> VisionTransformer:
    """Mark the parameters that the architecture trains; `load_state_dict(assign=True)` keeps the flags of the tensors instead."""
    frozen = model.architecture.layerscale_frozen
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and ".scale" in name))
    return model


def unwrap_compiled(model: nn.Module) -> VisionTransformer:
    """The model inside one that `torch.compile` returned; other models unchanged."""
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, VisionTransformer):
        raise UserError(
            f"A {type(inner).__name__} is not a model of vitrail.create or vitrail.load: save the model before vitrail.optimize."
        )
    return inner


def check_architecture(model: VisionTransformer) -> VisionTransformer:
    """The model, if its tensors are those of its architecture; with a replaced head its file could not be loaded."""
    empty = build(model.architecture, name="-", device="meta")
    if model.task_head is not None:
        with torch.device("meta"):
            empty.set_task_head(model.task_head.config)
    expected = {key: tensor.shape for key, tensor in empty.state_dict().items()}
    actual = {key: tensor.shape for key, tensor in model.state_dict().items()}
    wrong = sorted(key for key in expected.keys() | actual.keys() if expected.get(key) != actual.get(key))
    if wrong:
        raise UserError(
            f"The model's {wrong[0]} does not match its architecture: create a model with the changed parts and load the weights "
            "into it."
        )
    names = model.class_names
    if names is not None and len(names) != model.architecture.classes:
        raise UserError(f"The model has {len(names)} class names for {model.architecture.classes} classes.")
    return model
