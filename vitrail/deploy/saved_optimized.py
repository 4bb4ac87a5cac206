"""Files of optimized models: the folded or quantized tensors as safetensors, and how the network was made as JSON.

A file is opened only on the kind of machine and with the version of torch that it was written with. The network is folded again
from its architecture, receives the tensors, is compiled, and must compute the logits that the file contains.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.atomic_files import atomic_write, describe_error
from vitrail.checkpoints.artifact import OPTIMIZED, fingerprint, write_safetensors
from vitrail.checkpoints.readers import read_weights
from vitrail.deploy.float8 import to_float8
from vitrail.deploy.fold import Notes, fold
from vitrail.deploy.onednn import pack_skeleton
from vitrail.deploy.optimize import Optimized, Report
from vitrail.deploy.options import DTYPES
from vitrail.deploy.parity import difference, make_check_images
from vitrail.errors import UserError
from vitrail.models.config import Architecture
from vitrail.models.inputs import check_input_size
from vitrail.models.preprocessing import Preprocessing
from vitrail.models.registry import build
from vitrail.version import __version__

LAYOUT = 2  # 2: the checksum covers the header too
CHECK = "check.logits"  # of `make_check_images`, computed when the file was written
# Difference of the logits relative to the largest; on a GPU other kernels may be chosen, and float32 is computed in TF32.
TOLERANCE, ROUNDED, QUANTIZED = 1e-4, 2e-2, 0.1
AGAIN = "optimize the original model again here"


def describe_machine(device: torch.device) -> dict[str, str]:
    """What the tensors and kernels of an optimized model depend on."""
    if device.type == "cuda":
        hardware = f"{torch.cuda.get_device_name(device)} (compute capability {torch.cuda.get_device_capability(device)})"
    else:
        hardware = f"a CPU with {torch.backends.cpu.get_cpu_capability()}"
    return {"vitrail": __version__, "torch": str(torch.__version__), "hardware": hardware}


def save_optimized(optimized: Optimized, path: Path) -> Path:
    """Write an optimized model."""
    if path.suffix != ".safetensors":
        raise UserError(f"The name of an optimized model must end in .safetensors, not {path.name!r}.")
    backbone = optimized.folded.backbone
    check_input_size(backbone.architecture.image_size, backbone.architecture.patch_size, str(path))
    tensors = {name: tensor.detach() for name, tensor in plain_tensors(optimized.folded).items()}
    for name, module in stored_modules(optimized.folded).items():
        tensors |= {f"{name}.{key}": tensor for key, tensor in module.stored().items()}
    tensors[CHECK] = check_logits(optimized)
    tensors = {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}  # safetensors have no shared memory
    header = {
        "layout": LAYOUT,
        "machine": describe_machine(optimized.device),
        "device": optimized.device.type,
        "name": optimized.name,
        "architecture": backbone.architecture.to_dict(),
        "preprocessing": optimized.preprocessing.to_dict(),
        "class_names": optimized.class_names,
        "compiled": optimized.compiled,
        "graphs": optimized.graphs is not None,
        "graph_batch": optimized.graphs.batch if optimized.graphs is not None else None,
        "packed": optimized.packed,
        "dtype": DTYPES[optimized.dtype],
        "report": optimized.report.to_dict(),
    }
    header["sha256"] = checksum(header, tensors)
    atomic_write(path, lambda temporary: write_safetensors(tensors, temporary, {OPTIMIZED: json.dumps(header)}))
    return path


def load_optimized(path: str | Path, device: str | torch.device | None = None) -> Optimized:
    """An optimized model from a file of `Optimized.save`, on the device it was made for.

    UserError if this machine or version of torch is another, or if the logits are not those that the file contains.
    """
    checkpoint = read_weights(path)
    if OPTIMIZED not in checkpoint.metadata:
        raise UserError(f"{path} is not an optimized model: open it with vitrail.load.")
    header = read_header(checkpoint.metadata[OPTIMIZED], checkpoint.tensors, path)
    check_input_size(header["architecture"].image_size, header["architecture"].patch_size, str(path))
    target = torch.device(device if device is not None else header["device"])
    check_machine(header, target, path)
    try:
        optimized = rebuild(header, checkpoint.tensors, target)
        change = difference(check_logits(optimized), checkpoint.tensors[CHECK].to(target))
    except UserError:
        raise
    except Exception as error:  # tensors of other shapes or names than the architecture has
        raise UserError(f"{path} does not contain the tensors of its architecture ({describe_error(error)}): {AGAIN}.") from None
    limit = ROUNDED if target.type == "cuda" or optimized.dtype == torch.bfloat16 else TOLERANCE
    limit = QUANTIZED if optimized.report.precision in ("int8", "fp8") else limit
    if not change <= limit:
        raise UserError(f"{path} computes other logits here than where it was written ({change:.1e} of the largest): {AGAIN}.")
    return optimized


def checksum(header: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """SHA-256 of all other fields of the header, and of the tensors."""
    fields = {name: value for name, value in header.items() if name != "sha256"}
    return hashlib.sha256((json.dumps(fields, sort_keys=True) + fingerprint(tensors)).encode()).hexdigest()


def read_header(text: str, tensors: dict[str, Tensor], path: str | Path) -> dict[str, Any]:
    """The header of an untrusted file, with the types that are used, after a comparison of the checksum."""
    try:
        header: dict[str, Any] = json.loads(text)
        if header["layout"] != LAYOUT:
            raise UserError(f"{path} was written by another version of Vitrail: {AGAIN}.")
        if header["sha256"] != checksum(header, tensors):
            raise UserError(f"{path} is damaged: its content does not match its checksum; copy or write it again.")
        header["architecture"] = Architecture.from_dict(header["architecture"])
        header["preprocessing"] = Preprocessing.from_dict(header["preprocessing"])
        header["preprocessing"].check()
        header["report"] = read_report(header["report"])
        header["dtype"] = {name: dtype for dtype, name in DTYPES.items()}[header["dtype"]]
        flags = [header[name] for name in ("compiled", "graphs", "packed")]
        names, batch = header["class_names"], header["graph_batch"]
        valid = all(type(flag) is bool for flag in flags) and header["device"] in ("cpu", "cuda")
        valid &= names is None or (
            type(names) is list and [type(name) for name in names] == [str] * header["architecture"].classes
        )
        valid &= batch is None or (type(batch) is int and 0 < batch < 1 << 16)
        valid &= {type(value) for value in (*header["machine"].values(), header["name"])} == {str}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        valid = False
    if not valid:
        raise UserError(f"{path} has a damaged header: {AGAIN}.")
    return header


def read_report(values: dict[str, Any]) -> Report:
    """A report with the types of its fields; ValueError for others."""
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    report = Report(**fields)
    lists = (report.applied, report.skipped, report.parameters, report.same_top1)
    valid = {type(each) for each in lists} == {tuple} and len(report.parameters) == len(report.same_top1) == 2
    texts, counts = (report.goal, report.precision, *report.applied, *report.skipped), (*report.parameters, *report.same_top1)
    errors = (report.folding_error, report.total_error, report.rounding_error)
    if not (valid and {type(text) for text in texts} == {str} and {type(count) for count in counts} == {int}):
        raise ValueError("texts or counts")
    if not {type(error) for error in errors} <= {int, float}:
        raise ValueError("errors")
    return report


def check_machine(header: dict[str, Any], device: torch.device, path: str | Path) -> None:
    """Raise UserError with the first difference between this machine and the one that the file was written on."""
    if device.type != header["device"]:
        raise UserError(f"{path} was optimized for {header['device']}, not for {device.type}: {AGAIN}.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"{path} was optimized for a GPU, and there is none: {AGAIN}.")
    here = describe_machine(device)
    for what, value in here.items():
        written = header["machine"].get(what)
        if written != value:
            name = "" if what == "hardware" else f"{what} "
            raise UserError(f"{path} was optimized for {name}{written}, and this is {name}{value}: {AGAIN}.")


def rebuild(header: dict[str, Any], tensors: dict[str, Tensor], device: torch.device) -> Optimized:
    """Fold a new network of the architecture, and give it the tensors."""
    weights = sum(parameter.numel() for parameter in build(header["architecture"], device="meta").parameters())
    if weights > 2 * sum(tensor.numel() for tensor in tensors.values()):  # before a file makes this process allocate them
        raise ValueError(f"{weights:,} weights in the architecture")
    model = build(header["architecture"], header["name"])
    model.preprocessing, model.class_names = header["preprocessing"], header["class_names"]
    folded, _ = fold(model.to(device))
    precision = header["report"].precision
    options = (header["compiled"], header["graphs"], header["packed"], precision == "int8", header["graph_batch"])
    optimized = Optimized(folded, header["dtype"], *options)
    if header["packed"]:
        pack_skeleton(folded, precision == "int8")
    if precision == "fp8":
        to_float8(folded.backbone, Notes())
    modules = stored_modules(folded)
    plain = plain_tensors(folded)
    known = {*plain, CHECK, *(f"{name}.{key}" for name, module in modules.items() for key in module.stored())}
    if known != set(tensors):
        raise ValueError(f"another set of names, such as {min(known ^ set(tensors))!r}")
    with torch.no_grad():
        for name, own in plain.items():
            if own.shape != tensors[name].shape or own.dtype != tensors[name].dtype:
                raise ValueError(f"{name} is {tensors[name].dtype} {list(tensors[name].shape)}")
            own.copy_(tensors[name])
    for name, module in modules.items():
        values = {key: tensors[f"{name}.{key}"].to(device) for key in module.stored()}
        for key, own in module.stored().items():
            if own.shape != values[key].shape or own.dtype != values[key].dtype:
                raise ValueError(f"{name}.{key} is {values[key].dtype} {list(values[key].shape)}")
        module.restore(values)
    optimized.report = header["report"]
    return optimized


def stored_modules(folded: nn.Module) -> dict[str, Any]:
    """Modules with tensors in a layout of their own, by name."""
    return {name: module for name, module in folded.named_modules() if hasattr(module, "stored")}


def plain_tensors(folded: nn.Module) -> dict[str, Tensor]:
    """All other tensors: parameters, and buffers."""
    packed = {id(module) for module in stored_modules(folded).values()}
    return {
        f"{name}.{key}": tensor
        for name, module in folded.named_modules()
        for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        if not (id(module) in packed and key in module.stored())
    }


@torch.no_grad()
def check_logits(optimized: Optimized) -> Tensor:
    """Logits of the fixed images, one by one: the batch size may change which kernels run."""
    backbone = optimized.folded.backbone
    images = make_check_images(backbone, backbone.architecture.image_size).to(optimized.device, optimized.dtype)
    return torch.cat([optimized(image[None]) for image in images])
