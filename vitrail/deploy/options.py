"""Checks of the arguments of `vitrail.optimize`."""

import math

import torch
from torch import Tensor

from vitrail.deploy.float8 import has_fp8
from vitrail.deploy.onednn import can_quantize
from vitrail.errors import UserError
from vitrail.models.inputs import check_input
from vitrail.models.vision_transformer import VisionTransformer

GOALS = ("latency", "throughput")
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float64: "float64"}
PRECISIONS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int8": torch.float32,
    "fp8": torch.bfloat16,
}  # of everything that is not quantized
RESIZED = "of the original model and optimize it again"


def choose_dtype(own: Tensor, dtype: torch.dtype | None, precision: str | None) -> torch.dtype:
    if precision is not None and precision not in PRECISIONS:
        raise UserError(f"unknown precision={precision!r}; choose from {', '.join(PRECISIONS)}.")
    if precision is not None and dtype is not None:
        raise UserError("precision and dtype were both given; pass only one of them.")
    chosen = PRECISIONS[precision] if precision else dtype or own.dtype
    if chosen not in DTYPES or own.dtype not in DTYPES:
        raise UserError(f"{chosen} is not supported by optimize; use float32 or bfloat16.")
    return chosen


def check_precision(precision: str | None, device: torch.device, compiled: bool) -> None:
    """Reject int8 and fp8 where the device cannot multiply in them."""
    cuda = device.type == "cuda"
    if precision == "int8" and (cuda or compiled or not can_quantize()):
        raise UserError(int8_error(cuda, compiled))
    if precision == "fp8" and not has_fp8(device):
        raise UserError("fp8 needs a Hopper GPU or later; use precision='bf16', or 'int8' on a CPU.")


def int8_error(cuda: bool, compiled: bool) -> str:
    if cuda:
        return "int8 is only supported on the CPU; move the model there with .cpu(), or use precision='bf16' on the GPU."
    if compiled:
        return "int8 cannot be combined with torch.compile; remove compile=True."
    return "this build of torch has no int8 products (oneDNN) for this CPU; use precision='fp32' or 'bf16'."


def check_arguments(
    model: VisionTransformer, goal: str, batch_size: int | None, example: Tensor | None, tolerance: float
) -> None:
    if not isinstance(model, VisionTransformer):
        raise UserError(
            f"optimize takes a model from vitrail.create or vitrail.load, not {type(model).__name__}; unwrap or load it first."
        )
    if goal not in GOALS:
        raise UserError(f"unknown goal={goal!r}; choose from {', '.join(GOALS)}.")
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise UserError(f"invalid batch_size={batch_size!r}; pass an integer of at least 1.")
    if not isinstance(tolerance, int | float) or not 0 < tolerance < math.inf:
        raise UserError(f"invalid tolerance={tolerance!r}; pass a positive number such as 1e-4.")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UserError("this model is on the meta device and has no weights; load or create it on a real device.")
    if example is None:
        return
    check_input(example, model.architecture, model.stem, model.grid, "the example", RESIZED)
    if not len(example) or not example.isfinite().all():
        raise UserError("the example must contain at least one image, preprocessed for the model, without NaN or Inf.")


def example_warning(example: Tensor) -> str | None:
    """Reject an example on which int8 cannot be calibrated; a warning if it has one distinct image only."""
    if bool((example == example[..., :1, :1]).all()):
        raise UserError(
            "each image of the example has a single color, so int8 cannot be calibrated on it; pass some of your own images, or "
            "no example."
        )
    if bool((example == example[:1]).all()):
        return "calibration on several images: the example has one distinct image only; some dozens are better"
    return None
