"""`vitrail.export`: a model as a file that other programs run, compared with the model on real images before it is written."""

import copy
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import torch

from vitrail.atomic_files import atomic_write, check_writable
from vitrail.checkpoints import load
from vitrail.checkpoints.export_metadata import INPUTS, PRECISIONS, Certificate, ExportMetadata
from vitrail.checkpoints.model_io import find_weights
from vitrail.deploy.export_comparison import Comparison
from vitrail.deploy.exported_outputs import make_network, task_of
from vitrail.deploy.web_export import find_runtime, write_site
from vitrail.errors import UserError
from vitrail.models.config import as_size, format_size
from vitrail.models.inputs import check_input_size, has_fixed_grid
from vitrail.models.preprocessing import min_decode_side
from vitrail.models.vision_transformer import VisionTransformer

TARGETS = ("onnx", "torch-export", "aoti", "web")
SUFFIXES = {"onnx": ".onnx", "torch-export": ".pt2", "aoti": ".pt2", "web": ""}


class Exported(NamedTuple):
    """A file or folder that was written, and how it compares with the model."""

    path: Path
    metadata: ExportMetadata
    bytes: int

    @property
    def certificate(self) -> Certificate:
        assert self.metadata.certificate is not None
        return self.metadata.certificate


def export(
    model: VisionTransformer | str | Path,
    path: str | Path,
    to: str = "onnx",
    input: str = "image",
    precision: str = "fp32",
    dynamic_size: bool = False,
    features: bool = False,
    images: str | Path | None = None,
    device: str = "cpu",
    runtime: str | Path | None = None,
    overwrite: bool = False,
    image_size: int | tuple[int, int] | None = None,
) -> Exported:
    """Write a model as a file that runs without this package, and compare both on real images.

    Args:
        model: a model, or weights: a file, a run directory, a name, or "base+delta".
        to: "onnx" (.onnx), "torch-export" (.pt2), "aoti" (.pt2 compiled by AOTInductor, for C++) or "web" (a folder that runs the
            model in a browser).
        input: "image": uint8 [B, height, width, 3] of any size, with the preprocessing inside; "tensor": normalized float32
            [B, 3, height, width]. Segmentations and detections show the whole image in a frame of the model's image size.
        precision: "fp32", "fp16", or "int8" (ONNX and web), calibrated on `images`.
        dynamic_size: with input="tensor", height and width may be any multiple of the patch size.
        features: instead of the logits, the embedding of a projector or the pooled features; always of models without a head.
        images: a folder or another data set for the comparison and the calibration; default: the bundled photographs.
        device: of "torch-export" and "aoti": "cpu" or "cuda".
        runtime: of "web": the npm package onnxruntime-web, as a folder or a .tgz file; default: downloaded by npm.
        image_size: another image size of the network, (height, width), in whole patches.
    """
    path = Path(path)
    check_options(path, to, input, precision, dynamic_size, device, overwrite)
    if not isinstance(model, VisionTransformer):
        model = load(find_weights(model))
    if image_size is not None:
        model = resize_model(model, as_size(image_size))
    task = task_of(model, features)
    check_model(model, task, to, dynamic_size)
    package = find_runtime(runtime) if to == "web" else None
    comparison = Comparison.read(make_network(model, task, input), images, precision == "int8")
    side = min_decode_side(model.preprocessing, model.notes)
    names = class_names(model, task)
    metadata = ExportMetadata(model.name, task, input, precision, model.preprocessing, names, side)
    network = make_network(model, task, input, half=precision == "fp16")
    step = model.architecture.patch_size if dynamic_size else None
    if to in ("torch-export", "aoti"):
        from vitrail.deploy.program_export import write_program

        metadata = write_program(path, network, comparison, metadata, step, torch.device(device), compiled=to == "aoti")
    else:
        from vitrail.deploy.onnx_export import build_model, split

        content, metadata = build_model(network, comparison, metadata, step)
        if package is not None:
            write_site(path, split(content), metadata, package)
        else:
            atomic_write(path, lambda temporary: temporary.write_bytes(content))
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return Exported(path, metadata, sum(file.stat().st_size for file in files))


def resize_model(model: VisionTransformer, size: tuple[int, int]) -> VisionTransformer:
    """A copy of the model with another image size."""
    patch, name = model.architecture.patch_size, model.name or "The model"
    if any(side % patch for side in size):
        raise UserError(f"--image-size {format_size(size)} is not a whole number of patches of {patch} x {patch} pixels.")
    check_input_size(size, patch, name)
    return copy.deepcopy(model).resize(*size)


def class_names(model: VisionTransformer, task: str) -> list[str] | None:
    if task in ("segmentation", "detection"):
        assert model.task_head is not None
        return list(model.task_head.config.class_names)  # type: ignore[union-attr,arg-type]
    return model.class_names if task == "classification" else None


def check_options(path: Path, to: str, input: str, precision: str, dynamic_size: bool, device: str, overwrite: bool) -> None:
    """Raise UserError for options that do not exist or exclude each other, before anything is computed."""
    for name, value, choices in (("to", to, TARGETS), ("input", input, INPUTS), ("precision", precision, PRECISIONS)):
        if value not in choices:
            raise UserError(f"--{name} {value} is not known: choose {', '.join(choices[:-1])} or {choices[-1]}.")
    suffix = SUFFIXES[to]
    if suffix and path.suffix != suffix:
        raise UserError(f"The name of an exported file of --to {to} ends in {suffix}, not {path.name!r}.")
    if not suffix and path.is_file():
        raise UserError(f"{path} is a file: give a folder.")
    if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())) and not overwrite:
        raise UserError(f"{path} exists: give another name, or --overwrite.")
    if path.is_dir() and suffix:
        raise UserError(f"{path} is a folder: give a file name.")
    if precision == "int8" and to not in ("onnx", "web"):
        raise UserError(f"int8 is not available with --to {to}: choose onnx, or vitrail.optimize(model, precision='int8').")
    if dynamic_size and input == "image":
        raise UserError("An exported program with preprocessing takes images of any size: --dynamic-size needs --input tensor.")
    if to == "web" and input != "image":
        raise UserError("A page needs the preprocessing inside: remove --input tensor.")
    if device != "cpu" and to in ("onnx", "web"):
        raise UserError(f"A file of --to {to} has no device: remove --device.")
    if device not in ("cpu", "cuda"):
        raise UserError(f"--device {device} is not known: choose cpu or cuda.")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("There is no GPU: remove --device cuda.")
    if to == "aoti" and shutil.which(os.environ.get("CXX", "g++")) is None:
        raise UserError("AOTInductor needs a C++ compiler: install g++, or choose --to torch-export.")
    check_writable(path)


def check_model(model: VisionTransformer, task: str, to: str, dynamic_size: bool) -> None:
    """Raise UserError for what this model does not have."""
    a = model.architecture
    if dynamic_size and has_fixed_grid(a):
        raise UserError(
            f"{model.name or 'The model'} has weights for each patch and takes one image size only: remove --dynamic-size."
        )
    if dynamic_size and task == "detection":
        raise UserError("A detection is exported for one image size: remove --dynamic-size.")
    if to == "web" and task != "classification":
        raise UserError(f"The page shows classes, and this model computes {task}: choose --to onnx.")
