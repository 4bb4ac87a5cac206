"""`load` and `save`: models from and to checkpoints of all supported formats."""

import os
from pathlib import Path
from typing import Any

import torch

from vitrail.checkpoints.artifact import DELTA, HEADER, OPTIMIZED, load_artifact, save_tensors
from vitrail.checkpoints.assembly import check_architecture, unwrap_compiled
from vitrail.checkpoints.readers import read_weights
from vitrail.errors import UserError
from vitrail.models.config import as_size, check_fields
from vitrail.models.vision_transformer import VisionTransformer

SUFFIXES = {
    "vitrail": (".safetensors",),
    "deit": (".pth", ".pt", ".bin", ".tar"),
    "timm": (".safetensors", ".pth", ".pt", ".bin"),
    "torchvision": (".safetensors", ".pth", ".pt"),
    "hf": (),  # a folder
    "npz": (".npz",),
}
FORMATS = tuple(SUFFIXES)


def load(
    path: str | Path,
    image_size: int | tuple[int, int] | None = None,
    ema: bool = False,
    device: torch.device | str | None = None,
    delta: str | Path | None = None,
    **overrides: Any,
) -> VisionTransformer:
    """A model from a checkpoint of any supported format, recognized by its content; in evaluation mode, float32.

    `image_size` is the size of a foreign file whose position table is not square; an artifact is resized to it.
    `overrides` replace inferred fields of the architecture (`heads=12`); `ema=True` loads the EMA weights of a training file.
    `delta` is a file of the tensors that a training has changed in these weights; the path "base+delta" means the same.
    """
    check_fields(overrides)
    size = as_size(image_size) if image_size is not None else None
    base, delta = split_delta_path(path) if delta is None else (path, delta)
    own = True
    if delta is not None:
        from vitrail.checkpoints.delta import load_with_delta  # which loads its base through this function

        model = load_with_delta(base, delta, ema, overrides)
    else:
        checkpoint = read_weights(path, ema)
        own = HEADER in checkpoint.metadata
        if DELTA in checkpoint.metadata:
            raise UserError(f"{path} is a delta: give the weights that it was made from too, as BASE+{path}.")
        if OPTIMIZED in checkpoint.metadata:
            raise UserError(f"{path} is an optimized model: open it with vitrail.load_optimized.")
        if own:
            model = load_artifact(checkpoint, path, overrides)
        else:
            from vitrail.checkpoints.conversion import load_foreign  # not needed for an artifact

            model = load_foreign(checkpoint, path, overrides | ({"image_size": size} if size else {}), overrides)
    if own and size and size != model.architecture.image_size:
        model.resize(*size)
    model = model.eval()
    return model.to(device) if device is not None else model


def find_weights(path: str | Path) -> Path:
    """The best weights of a run directory; any other path unchanged."""
    path = Path(path)
    return path / "best.safetensors" if (path / "run.json").is_file() else path


def split_delta_path(path: str | Path) -> tuple[str | Path, str | Path | None]:
    """(base, delta) of "base.pth+delta.safetensors"; (path, None) of other paths, including files with a plus in their name."""
    text = str(path)
    if os.path.exists(text):
        return path, None
    for position in (position for position in range(len(text) - 1, 0, -1) if text[position] == "+"):
        if os.path.isfile(text[position + 1 :]):
            return text[:position], text[position + 1 :]
    base, _, delta = text.partition("+")
    if delta and os.path.exists(base):
        raise UserError(f"There is no file {delta}.")
    return path, None


def save(model: VisionTransformer, path: str | Path, format: str = "vitrail", approximate: bool = False) -> Path:
    """Write a model in one of the formats, atomically.

    A format that cannot represent the model exactly is rejected with the name of the part; `approximate=True` writes
    anyway if only numerics differ (the form of GELU, an epsilon, the fusion of two heads).
    """
    path = Path(path)
    if format not in FORMATS:
        raise UserError(f"Unknown format {format!r}: choose from {', '.join(FORMATS)}.")
    if SUFFIXES[format] and path.suffix not in SUFFIXES[format]:
        raise UserError(
            f"The name of a file in the format {format} must end in {' or '.join(SUFFIXES[format])}, not {path.name!r}."
        )
    inner = check_architecture(unwrap_compiled(model))
    if format == "vitrail":
        save_tensors(path, inner)
    else:
        from vitrail.checkpoints.conversion import save_foreign

        save_foreign(inner, path, format, approximate)
    return path


def logit_difference(first: VisionTransformer, second: VisionTransformer) -> tuple[float, float]:
    """(largest absolute difference, largest absolute logit) on two fixed inputs at the first model's image size."""
    size = first.architecture.image_size
    images = torch.randn(2, first.architecture.channels, *size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        one, two = first.eval()(images), second.eval()(images)
    if one.shape != two.shape:
        return float("inf"), one.abs().max().item()
    return (one - two).abs().max().item(), one.abs().max().item()
