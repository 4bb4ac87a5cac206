"""gelu(x + bias) with a backward pass that computes both gradients at once.

torch.compile makes two passes: one for the gradient of `x`, and one that reads everything again for the column sums, which are
the gradient of the bias. Here each program processes a stripe of rows, writes the gradient of `x` and accumulates the sums.
"""

# mypy: disable-error-code="assignment"

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.layers.kernels import multiprocessors

ROWS, COLUMNS, WARPS = 8, 128, 2  # per tile
PROGRAMS = 14  # per multiprocessor
DEVICE = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")  # Triton's interpreter has no inline assembly


@triton.jit
def tile(row, column, rows, columns):
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return row.to(tl.int64)[:, None] * columns + column[None, :], inside


@triton.jit
def power(value):
    """2 ** value. Denormal results are flushed to zero, which saves a comparison and two products."""
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
    """Cumulative distribution and density of the standard normal distribution, by one exponential.

    Abramowitz and Stegun, 7.1.26: an error of at most 1e-7 with a third of the instructions of an exact error function, which
    would take longer than the memory accesses.
    """
    bell = power(-0.7213475204444817 * value * value)  # log2(e) / 2
    t = inverse(1.0 + 0.2316418882663604 * tl.abs(value))  # 0.3275911 / sqrt(2)
    tail = 0.5 * bell * t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return tl.where(value < 0, tail, 1.0 - tail), 0.3989422804014327 * bell


@triton.jit
def forward_kernel(x, bias, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    offset, inside = tile(row, column, rows, columns)
    value = tl.load(x + offset, inside, 0.0).to(tl.float32)
    value += tl.load(bias + column, column < columns, 0.0).to(tl.float32)[None, :]
    cdf, _ = normal(value)
    tl.store(out + offset, (value * cdf).to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["steps"])
def backward_kernel(
    gradient,  # [rows, columns]
    x,
    bias,
    grad,
    sums,  # [stripes, columns]
    rows,
    columns,
    steps,  # tiles per stripe
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    shift = tl.load(bias + column, column < columns, 0.0).to(tl.float32)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(steps):
        row = (tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS)
        offset, inside = tile(row, column, rows, columns)
        value = tl.load(x + offset, inside, 0.0).to(tl.float32) + shift
        cdf, density = normal(value)
        result = tl.load(gradient + offset, inside, 0.0).to(tl.float32) * (cdf + value * density)
        tl.store(grad + offset, result.to(grad.dtype.element_ty), inside)
        total += result
    tl.store(sums + tl.program_id(0) * columns + column, tl.sum(total, 0), column < columns)


def ceil_div(length: int, step: int) -> int:
    """length / step rounded up; Triton's own function is slower on the host."""
    return -(-length // step)


def run_forward(x: Tensor, bias: Tensor) -> Tensor:
    x = x.contiguous()
    columns = x.shape[-1]
    rows = x.numel() // columns
    out = torch.empty_like(x)
    with torch.cuda.device_of(x):
        grid = (ceil_div(rows, ROWS), ceil_div(columns, COLUMNS))
        forward_kernel[grid](x, bias, out, rows, columns, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS)
    return out


def run_backward(gradient: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    gradient, x = gradient.contiguous(), x.contiguous()
    columns = x.shape[-1]
    rows = x.numel() // columns
    across = ceil_div(columns, COLUMNS)
    stripes = max(1, PROGRAMS * (multiprocessors(x.device.index) if x.is_cuda else 1) // across)  # all run concurrently
    steps = ceil_div(rows, ROWS * stripes)
    grid = (ceil_div(rows, ROWS * steps) if rows else 0, across)
    grad, sums = torch.empty_like(x), x.new_empty(grid[0], columns, dtype=torch.float32)
    with torch.cuda.device_of(x):
        backward_kernel[grid](gradient, x, bias, grad, sums, rows, columns, steps, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS)
    return grad, sums.sum(0).to(bias.dtype)


@torch.library.custom_op("vitrail::bias_gelu", mutates_args=())
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(x + bias) for x [..., D] and bias [D], in the dtype of x."""
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


def save_inputs(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    grad, grad_bias = bias_gelu_backward(gradient, *ctx.saved_tensors)
    return grad, grad_bias


bias_gelu.register_autograd(backward, setup_context=save_inputs)
