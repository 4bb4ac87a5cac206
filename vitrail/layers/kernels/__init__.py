"""Kernels for what torch does not fuse, most of them in Triton, and the one place that says where they can be used.

Nothing here imports Triton before a tensor lies on a GPU (torch brings Triton along there). Launches go to the tensors' device.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import TypeVar

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None
MOST, WIDEST, LONGEST = 16, 64, 2048  # heads, channels of a head, and tokens that talking heads have a kernel for
ENABLED = frozenset(("talking_heads", "bias_gelu"))
Answer = TypeVar("Answer", bound=Callable[..., bool])


def constant(function: Answer) -> Answer:
    """The mark of `torch.compiler.assume_constant_result`, which would load the compiler: seconds that few commands need."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@cache
def shared_memory(device: int | None) -> int:
    """Bytes that a program may have for itself."""
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)


@cache
def multiprocessors(device: int | None) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def capability(device: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@constant
def is_ampere(device: int | None) -> bool:
    """Or later: the kernels' matrix products need it."""
    return capability(device) >= (8, 0)


@constant
def exporting() -> bool:
    """Asked when a graph is made: in some versions a compiler that asks for itself always hears yes."""
    return torch.compiler.is_exporting()


def may_run(name: str, x: Tensor) -> bool:
    """Whether a kernel is chosen and can work on what a product of such a tensor gives: half precision, here and now."""
    if name not in ENABLED or not (x.is_cuda and HAS_TRITON) or torch.version.hip or exporting():
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    return dtype in (torch.bfloat16, torch.float16)


def bias_gelu_for(x: Tensor) -> Callable[[Tensor, Tensor], Tensor] | None:
    """gelu(product of x + bias) with a backward of one pass; without gradients a compiler does as well."""
    if not torch.is_grad_enabled() or not may_run("bias_gelu", x):
        return None
    from vitrail.layers.kernels.bias_gelu import BiasGelu, bias_gelu

    real = type(x) is Tensor and not torch.compiler.is_compiling()  # and none that stands for one, which no kernel can work on
    return BiasGelu.apply if real else bias_gelu


def linear_gelu_for(x: Tensor, weight: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """gelu(product + bias) inside the product, for weights in bfloat16 on a GPU, without gradients."""
    if not x.is_cuda or weight.dtype != torch.bfloat16 or exporting():
        return None
    from vitrail.layers.kernels.linear_gelu import linear_gelu

    return linear_gelu


def talking_heads_for(qkv: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None:
    """Fused talking-heads attention for queries, keys and values [B, N, 3, H, D] if there is a kernel for them, else None.

    It works on half precision: single precision would leave the matrix units unused. An exported program must run elsewhere too.
    """
    if not may_run("talking_heads", qkv) or qkv.dtype == torch.float32 or not is_ampere(qkv.device.index):
        return None
    if qkv.shape[1] > LONGEST or qkv.shape[3] > MOST or qkv.shape[4] > WIDEST:
        return None
    from vitrail.layers.kernels.talking_heads import talking_heads

    return talking_heads
