"""Programs of torch: `torch.export` for Python, and AOTInductor packages, compiled for one kind of device, for C++."""

import shutil
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.export import Dim
from torch.export.passes import move_to_device_pass

from vitrail.atomic_files import atomic_write, describe_error
from vitrail.checkpoints.export_metadata import ENTRY, ExportMetadata
from vitrail.deploy.export_comparison import Comparison
from vitrail.deploy.exported_outputs import ExportedNetwork, ImageProgram
from vitrail.deploy.image_input import ImagePreprocessing
from vitrail.errors import UserError

METADATA_FILE = f"{ENTRY}.json"


def write_program(
    path: Path,
    network: ExportedNetwork,
    comparison: Comparison,
    metadata: ExportMetadata,
    step: int | None,
    device: torch.device,
    compiled: bool,
) -> ExportMetadata:
    """Write a program that was compared with the model; the metadata with the result is an extra file inside."""
    image, preprocessing = metadata.input == "image", metadata.preprocessing
    separate = image and not network.takes_pixels
    module = ImageProgram(ImagePreprocessing(preprocessing), network).eval() if separate else network
    program = trace(module, image, preprocessing.image_size, step, device)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.pt2"  # torch requires this suffix
        if compiled:
            compile_package(program, file)
        call = torch._inductor.aoti_load_package(str(file)) if compiled else program.module()

        def run(images: np.ndarray) -> list[np.ndarray]:
            found = call(torch.from_numpy(images).to(device))
            outputs = [found] if isinstance(found, torch.Tensor) else found
            return [each.cpu().numpy() for each in outputs]

        metadata = comparison.certify(run, metadata, {"device": describe_device(device)})
        if compiled:
            add_metadata(file, metadata)
        else:
            torch.export.save(program, file, extra_files={METADATA_FILE: metadata.to_json()})
        atomic_write(path, lambda temporary: shutil.copyfile(file, temporary))
    return metadata


def describe_device(device: torch.device) -> str:
    """What a compiled program needs: the name of the GPU, or the instruction set of the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()


def trace(module: nn.Module, image: bool, size: tuple[int, int], step: int | None, device: torch.device) -> Any:
    """The exported program of a module, with a dynamic batch size and, of images or with a `step`, dynamic height and width."""
    dims: dict[int, Any] = {0: Dim("batch", max=4096)}
    if image:
        dims |= {1: Dim("height", max=1 << 15), 2: Dim("width", max=1 << 15)}
        example = torch.zeros(2, 301, 203, 3, dtype=torch.uint8)
    else:
        if step is not None:
            dims |= {2: step * Dim("rows", min=2, max=1024), 3: step * Dim("columns", min=2, max=1024)}
        example = torch.zeros(2, 3, *size)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(module, (example,), dynamic_shapes=(dims,))
            # Not the module: numbers in its code would become constants on the CPU, which torch 2.11 cannot load for a GPU.
            return move_to_device_pass(program, device)
    except Exception as error:  # of torch, of many kinds
        raise UserError(f"torch cannot export this model ({describe_error(error)}): choose --to onnx.") from error


def compile_package(program: Any, path: Path) -> None:
    """Compile a program into an AOTInductor package."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    except Exception as error:  # of torch or the compiler
        raise UserError(
            f"AOTInductor could not compile the model ({describe_error(error)}): choose --to torch-export."
        ) from error


def add_metadata(package: Path, metadata: ExportMetadata) -> None:
    """Add the metadata to a package, which is a zip file, beside its other extra files."""
    with zipfile.ZipFile(package, "a", zipfile.ZIP_STORED) as archive:
        root = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{root}/extra/{METADATA_FILE}", metadata.to_json())
