"""Kernels for operations that torch does not fuse, most of them in Triton, and the functions that select them.

A `select_…` function returns a kernel that can run on the given tensor, or None. Triton is imported when the first tensor on a
GPU is used; CUDA builds of torch include it. Kernels are launched on the device of the tensors.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import TypeVar

import torch
from torch import Tensor, nn

HAS_TRITON = find_spec("triton") is not None
MAX_HEADS, MAX_HEAD_WIDTH, MAX_TOKENS = 16, 64, 2048  # of the talking-heads kernel
ENABLED = frozenset(("talking_heads", "bias_gelu"))
Predicate = TypeVar("Predicate", bound=Callable[..., bool])


def constant(function: Predicate) -> Predicate:
    """`torch.compiler.assume_constant_result` without its import of the compiler, which takes seconds."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@cache
def shared_memory(device: int | None) -> int:
    """Bytes of shared memory available to one block of threads."""
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)


@cache
def multiprocessors(device: int | None) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def capability(device: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@constant
def is_ampere(device: int | None) -> bool:
    """Whether the GPU is of the Ampere generation or later, which the matrix products of the kernels need."""
    return capability(device) >= (8, 0)


@constant
def exporting() -> bool:
    """Whether torch.export is tracing; a constant, because in some versions of torch the traced call always returns True."""
    return torch.compiler.is_exporting()


def has_hooks(*modules: nn.Module) -> bool:
    """Whether a hook is registered on one of the modules, so that its call must not be skipped."""
    return any(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        for module in modules
    )


def kernel_available(name: str, x: Tensor) -> bool:
    """Whether a kernel is enabled and a linear layer of x gives half precision on a CUDA device."""
    if name not in ENABLED or not (x.is_cuda and HAS_TRITON) or torch.version.hip or exporting():
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    return dtype in (torch.bfloat16, torch.float16)


def select_bias_gelu(x: Tensor) -> Callable[[Tensor, Tensor], Tensor] | None:
    """gelu(x + bias) with both gradients in one pass; without gradients torch.compile is as fast."""
    if not torch.is_grad_enabled() or not kernel_available("bias_gelu", x):
        return None
    from vitrail.layers.kernels.bias_gelu import bias_gelu

    return bias_gelu


def select_linear_gelu(x: Tensor, weight: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """gelu(x W^T + b) as one cuBLAS call, for bfloat16 weights on a GPU, without gradients."""
    if not x.is_cuda or weight.dtype != torch.bfloat16 or exporting():
        return None
    from vitrail.layers.kernels.linear_gelu import linear_gelu

    return linear_gelu


def select_talking_heads(qkv: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None:
    """Talking-heads attention for queries, keys and values [B, N, 3, H, D] in half precision.

    In float32 the tensor cores would be unused. Exported programs contain no kernel, so that they run elsewhere.
    """
    if not kernel_available("talking_heads", qkv) or qkv.dtype == torch.float32 or not is_ampere(qkv.device.index):
        return None
    if qkv.shape[1] > MAX_TOKENS or qkv.shape[3] > MAX_HEADS or qkv.shape[4] > MAX_HEAD_WIDTH:
        return None
    from vitrail.layers.kernels.talking_heads import talking_heads

    return talking_heads
