"""`vitrail.export`: a model as a file that other programs run, compared with the model on real images before it is written."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.atomic_files import atomic_write, check_writable
from vitrail.checkpoints import load
from vitrail.data.datasets.lookup import open_source
from vitrail.data.decode import decode
from vitrail.data.progress import progress
from vitrail.deploy.export_metadata import INPUTS, PRECISIONS, Certificate, ExportMetadata
from vitrail.deploy.exported_outputs import OUTPUTS, ExportedNetwork, make_network, task_of
from vitrail.deploy.image_input import ImagePreprocessing
from vitrail.deploy.onnx_export import Run
from vitrail.errors import UserError
from vitrail.models.inputs import FIXED_GRID
from vitrail.models.preprocessing import Preprocessing, min_decode_side, pad_images
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.version import __version__

TARGETS = ("onnx", "torch-export", "aoti", "web")
SUFFIXES = {"onnx": ".onnx", "torch-export": ".pt2", "aoti": ".pt2", "web": ""}
IMAGES = 32  # of the comparison and of the calibration of int8
BUNDLED = "pets"
# The largest difference of float outputs, relative to the largest output: more is an error of the export and not rounding.
TOLERANCE = {"fp32": 1e-3, "fp16": 5e-2}


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
) -> Exported:
    """Write a model as a file that runs without this package, and compare both on real images.

    Args:
        model: a model, or weights: a file, a run directory, a name, or "base+delta".
        to: "onnx" (.onnx), "torch-export" (.pt2), "aoti" (.pt2 compiled by AOTInductor, for C++) or "web" (a folder that runs the
            model in a browser).
        input: "image": uint8 [B, height, width, 3] of any size, with the preprocessing inside; "tensor": normalized float32
            [B, 3, height, width].
        precision: "fp32", "fp16", or "int8" (ONNX and web), calibrated on `images`.
        dynamic_size: with input="tensor", height and width may be any multiple of the patch size.
        features: the pooled features instead of the logits; models without a head always have features.
        images: a folder or another data set for the comparison and the calibration; default: the bundled photographs.
        device: of "torch-export" and "aoti": "cpu" or "cuda".
        runtime: of "web": the npm package onnxruntime-web, as a folder or a .tgz file; default: downloaded by npm.
    """
    path = Path(path)
    check_options(path, to, input, precision, dynamic_size, device, overwrite)
    if not isinstance(model, VisionTransformer):
        model = load(find_weights(Path(model)))
    task = task_of(model, features)
    check_model(model, task, to, input, dynamic_size)
    pixels, source = read_images(images)
    reference = make_network(model, task)
    metadata = ExportMetadata(
        model.name,
        task,
        input,
        precision,
        model.preprocessing,
        class_names(model, task),
        min_decode_side(model.preprocessing, model.notes),
    )
    batches = [model.preprocessing.apply(*pad_images([image])) for image in pixels]
    step = model.architecture.patch_size if dynamic_size else None
    if to in ("onnx", "web"):
        content, metadata = export_onnx(model, reference, metadata, pixels, batches, step, source)
        if to == "web":
            from vitrail.deploy.web_export import write_site

            write_site(path, content, metadata, runtime)
        else:
            atomic_write(path, lambda temporary: temporary.write_bytes(content))
    else:
        from vitrail.deploy.program_export import export_program

        metadata = export_program(path, model, reference, metadata, (pixels, batches, source), step, to, torch.device(device))
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return Exported(path, metadata, sum(file.stat().st_size for file in files))


def export_onnx(
    model: VisionTransformer,
    reference: ExportedNetwork,
    metadata: ExportMetadata,
    pixels: Sequence[np.ndarray],
    batches: Sequence[Tensor],
    step: int | None,
    source: str,
) -> tuple[bytes, ExportMetadata]:
    """The bytes of an ONNX file, and its metadata with the certificate."""
    from vitrail.deploy import onnx_export

    onnx_export.import_onnx()
    network = make_network(model, metadata.task, half=True) if metadata.precision == "fp16" else reference
    graph = onnx_export.convert_network(network, model.preprocessing.image_size, OUTPUTS[metadata.task], step)
    if metadata.precision == "int8":
        graph = onnx_export.quantize(graph, batches)
    if metadata.input == "image":
        graph = onnx_export.merge(onnx_export.convert_preprocessing(ImagePreprocessing(model.preprocessing).eval()), graph)
    run, versions = onnx_export.open_session(graph)
    metadata = certify(run, reference, metadata, pixels, batches, source, versions)
    return onnx_export.add_metadata(graph, metadata), metadata


def certify(
    run: Run,
    reference: ExportedNetwork,
    metadata: ExportMetadata,
    pixels: Sequence[np.ndarray],
    batches: Sequence[Tensor],
    source: str,
    versions: dict[str, str],
) -> ExportMetadata:
    """Compare a program with the model, image by image; UserError if they differ by more than rounding."""
    difference, largest, same, total = 0.0, 0.0, 0, 0
    with progress("comparing", len(pixels)) as advance, torch.inference_mode():
        for image, batch in zip(pixels, batches, strict=True):
            expected = reference(batch)
            actual = torch.from_numpy(run(image[None] if metadata.input == "image" else batch.numpy()))
            if not expected.isfinite().all():
                raise UserError("The outputs of the model are NaN or Inf: its weights are damaged.")
            difference = max(difference, float((actual - expected).abs().max().nan_to_num(torch.inf)))
            largest = max(largest, float(expected.abs().max()))
            matches = actual.argmax(1) == expected.argmax(1)
            same, total = same + int(matches.sum()), total + matches.numel()
            advance(1)
    if difference > TOLERANCE.get(metadata.precision, float("inf")) * largest:
        advice = "give --precision fp32" if metadata.precision == "fp16" else "report it, with the model"
        raise UserError(
            f"The outputs of the exported program differ from the model's by up to {difference:.2g}, of {largest:.2g}: nothing was "
            f"written; {advice}."
        )
    versions = {"vitrail": __version__, "torch": str(torch.__version__)} | versions
    agreement = None if metadata.task == "features" else same / total
    certificate = Certificate(len(pixels), source, difference, largest, agreement, versions)
    return ExportMetadata(**{**vars(metadata), "certificate": certificate})


def class_names(model: VisionTransformer, task: str) -> list[str] | None:
    if task == "segmentation":
        assert model.task_head is not None
        return list(model.task_head.config.class_names)  # type: ignore[union-attr,arg-type]
    return model.class_names if task == "classification" else None


def check_options(
    path: Path, to: str, input: str, precision: str, dynamic_size: bool, device: str, overwrite: bool
) -> None:
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


def check_model(model: VisionTransformer, task: str, to: str, input: str, dynamic_size: bool) -> None:
    a = model.architecture
    if dynamic_size and (a.mixer in FIXED_GRID or a.pooling in FIXED_GRID):
        raise UserError(
            f"{model.name or 'The model'} has weights for each patch and takes one image size only: remove --dynamic-size."
        )
    if to == "web" and task != "classification":
        raise UserError(f"The page shows classes, and this model computes {task}: choose --to onnx.")


def find_weights(path: Path) -> Path:
    """The best weights of a run directory; any other path unchanged."""
    return path / "best.safetensors" if (path / "run.json").is_file() else path


def read_images(source: str | Path | None, count: int = IMAGES) -> tuple[list[np.ndarray], str]:
    """Up to `count` images, spread over a data set, uint8 [H, W, 3] at their full size, and the name of the data set."""
    name = BUNDLED if source is None else os.fspath(source)
    images = open_source(name, "test" if source is None else None)
    pixels: list[np.ndarray] = []
    for index in np.linspace(0, len(images) - 1, min(count, len(images))).round().astype(int).tolist():
        try:
            pixels.append(decode(images.encoded(index)))
        except (OSError, ValueError):
            continue
    if not pixels:
        raise UserError(f"{name} contains no image that can be read: give a folder of images.")
    return pixels, "the bundled pets" if source is None else Path(name).name
