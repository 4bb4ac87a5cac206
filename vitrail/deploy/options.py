"""What may be asked of `vitrail.optimize` and of what it makes; everything else is refused in a sentence."""

import math

import torch
from torch import Tensor

from vitrail.deploy.float8 import can_multiply
from vitrail.deploy.onednn import can_code
from vitrail.errors import UserError
from vitrail.models.inputs import check_given
from vitrail.models.vision_transformer import VisionTransformer

AIMS = ("latency", "throughput")
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float64: "float64"}
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.float32, "fp8": torch.bfloat16}  # beside eight bits
RESIZED = "of the original model and optimize that"


def choose_dtype(own: Tensor, dtype: torch.dtype | None, precision: str | None) -> torch.dtype:
    if precision is not None and precision not in PRECISIONS:
        raise UserError(f"precision={precision!r} is not known; choose from {', '.join(PRECISIONS)}.")
    if precision is not None and dtype is not None:
        raise UserError("precision and dtype both say in which numbers to compute; give one of them.")
    found = PRECISIONS[precision] if precision else dtype or own.dtype
    if found not in DTYPES or own.dtype not in DTYPES:
        raise UserError(f"{found} is not a precision for an optimized model; use float32 or bfloat16.")
    return found


def check_precision(precision: str | None, device: torch.device, compiled: bool) -> None:
    """Refuses eight bits where there are no products in them."""
    cuda = device.type == "cuda"
    if precision == "int8" and (cuda or compiled or not can_code()):
        raise UserError(why_not_coded(cuda, compiled))
    if precision == "fp8" and not can_multiply(device):
        raise UserError("fp8 needs a GPU of Hopper's kind or later; use precision='bf16', or 'int8' on a processor.")


def why_not_coded(cuda: bool, compiled: bool) -> str:
    if cuda:
        return "int8 is for processors; move the model there with .cpu(), or use precision='bf16' on the GPU."
    if compiled:
        return "int8 is packed and not compiled; leave compile out."
    return "this build of torch has no products in int8 (oneDNN) for this processor; use precision='fp32' or 'bf16'."


def check_arguments(model: VisionTransformer, for_: str, batch: int | None, example: Tensor | None, tolerance: float) -> None:
    if not isinstance(model, VisionTransformer):
        raise UserError(
            f"optimize takes a model of vitrail.create or vitrail.load, not {type(model).__name__}; unwrap or load it first."
        )
    if for_ not in AIMS:
        raise UserError(f"for_={for_!r} is not known; choose from {', '.join(AIMS)}.")
    if batch is not None and (type(batch) is not int or batch < 1):
        raise UserError(f"batch={batch!r} is not a number of images; give a whole number of at least 1.")
    if not isinstance(tolerance, int | float) or not 0 < tolerance < math.inf:
        raise UserError(f"tolerance={tolerance!r} is not a share; give a positive number such as 1e-4.")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UserError("this model has no weights yet (it is on the meta device); load or create it on a real one.")
    if example is None:
        return
    check_given(example, model.architecture, model.stem, model.grid, "the example", RESIZED)
    if not len(example) or not example.isfinite().all():
        raise UserError("the example must be images prepared as for the model: at least one, of finite numbers.")


def check_told(example: Tensor) -> str | None:
    """Refuses images that tell nothing of the ranges of eight bits; of those that tell little, what is missing."""
    if bool((example == example[..., :1, :1]).all()):
        raise UserError(
            "the example's images are of one color each, which says nothing of the ranges that int8 learns from them; give "
            "images like yours, or leave the example out."
        )
    if bool((example == example[:1]).all()):
        return "ranges of eight bits learned from several images: the example is one image only, some tens are better"
    return None
