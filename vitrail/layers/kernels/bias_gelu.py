"""gelu(x + bias), whose backward makes both gradients in one pass.

A compiler makes two passes of it: one for the gradient of `x`, and one that reads everything again for the column sums that are
the gradient of the bias. Here a program walks down a stripe of rows, writes the one and adds up the other.
"""

# mypy: disable-error-code="assignment"

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitrail.layers.kernels import multiprocessors

ROWS, COLUMNS, WARPS = 8, 128, 2  # of a tile
PROGRAMS = 14  # of a multiprocessor, at once
DEVICE = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")  # an interpreter knows no instruction of a device


@triton.jit
def tile(row, column, rows, columns):
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return row.to(tl.int64)[:, None] * columns + column[None, :], inside


@triton.jit
def power(value):
    """Of two. Numbers near the smallest are zeros, which spares every other number a comparison and two products."""
    if DEVICE:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [value], tl.float32, True, 1)
    return tl.exp2(value)


@triton.jit
def inverse(value):
    if DEVICE:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [value], tl.float32, True, 1)
    return 1.0 / value


@triton.jit
def normal(value):
    """The standard normal distribution at a value: its integral and its density, of one exponential.

    Abramowitz and Stegun, 7.1.26: at most 1e-7 off, in a third of the instructions of an exact error function, which would take
    longer than reading and writing memory does.
    """
    bell = power(-0.7213475204444817 * value * value)  # log2(e) / 2
    t = inverse(1.0 + 0.2316418882663604 * tl.abs(value))  # 0.3275911 / sqrt(2)
    tail = 0.5 * bell * t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return tl.where(value < 0, tail, 1.0 - tail), 0.3989422804014327 * bell


@triton.jit
def forward_kernel(x, bias, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place, inside = tile(row, column, rows, columns)
    value = tl.load(x + place, inside, 0.0).to(tl.float32)
    value += tl.load(bias + column, column < columns, 0.0).to(tl.float32)[None, :]
    share, _ = normal(value)
    tl.store(out + place, (value * share).to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["steps"])
def backward_kernel(
    gradient,  # [rows, columns]
    x,
    bias,
    grad,
    sums,  # [stripes, columns]
    rows,
    columns,
    steps,  # tiles of a stripe
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    shift = tl.load(bias + column, column < columns, 0.0).to(tl.float32)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(steps):
        row = (tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS)
        place, inside = tile(row, column, rows, columns)
        value = tl.load(x + place, inside, 0.0).to(tl.float32) + shift
        share, density = normal(value)
        found = tl.load(gradient + place, inside, 0.0).to(tl.float32) * (share + value * density)
        tl.store(grad + place, found.to(grad.dtype.element_ty), inside)
        total += found
    tl.store(sums + tl.program_id(0) * columns + column, tl.sum(total, 0), column < columns)


def pieces(length: int, step: int) -> int:
    """How many of `step` cover a length; Triton's own function is one for its compiler too, and slower for that."""
    return -(-length // step)


def run_forward(x: Tensor, bias: Tensor) -> Tensor:
    x = x.contiguous()
    columns = x.shape[-1]
    rows = x.numel() // columns
    out = torch.empty_like(x)
    with torch.cuda.device_of(x):
        grid = (pieces(rows, ROWS), pieces(columns, COLUMNS))
        forward_kernel[grid](x, bias, out, rows, columns, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS)
    return out


def run_backward(gradient: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    gradient, x = gradient.contiguous(), x.contiguous()
    columns = x.shape[-1]
    rows = x.numel() // columns
    across = pieces(columns, COLUMNS)
    stripes = max(1, PROGRAMS * (multiprocessors(x.device.index) if x.is_cuda else 1) // across)  # all of them run at once
    steps = pieces(rows, ROWS * stripes)
    grid = (pieces(rows, ROWS * steps) if rows else 0, across)
    grad, sums = torch.empty_like(x), x.new_empty(grid[0], columns, dtype=torch.float32)
    with torch.cuda.device_of(x):
        backward_kernel[grid](gradient, x, bias, grad, sums, rows, columns, steps, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS)
    return grad, sums.sum(0).to(bias.dtype)


@torch.library.custom_op("vitrail::bias_gelu", mutates_args=())
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """x [..., D] and bias [D]; the result has the type of x."""
    return run_forward(x, bias)


@bias_gelu.register_fake
def _(x: Tensor, bias: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("vitrail::bias_gelu_backward", mutates_args=())
def bias_gelu_backward(gradient: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return run_backward(gradient, x, bias)


@bias_gelu_backward.register_fake
def _(gradient: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(bias)


class BiasGelu(torch.autograd.Function):
    """The same for those who do not compile: an operator that compilers know costs the host more than the kernel takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, bias)
        return run_forward(x, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        # The guard against gradients of gradients costs the host as much as a kernel: set where somebody may ask for them.
        return guarded(ctx, gradient) if torch.is_grad_enabled() else run_backward(gradient, *ctx.saved_tensors)


@once_differentiable
def guarded(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return run_backward(gradient, *ctx.saved_tensors)


def keep(ctx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
    grad, grad_bias = bias_gelu_backward(gradient, *ctx.saved_tensors)
    return grad, grad_bias


bias_gelu.register_autograd(backward, setup_context=keep)
