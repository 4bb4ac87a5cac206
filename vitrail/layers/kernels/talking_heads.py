"""Talking-heads attention, forward and backward, in stages that exchange matrices of all pairs of tokens.

For every head: s = q k^T / sqrt(D); m = before * s; p = softmax(m); w = after * p + bias; out = w v. Every head needs the scores
of all heads, so the products and the mixing of heads are separate kernels. The batch is processed in parts of some images: memory
is bounded by the matrices [images, H, N, L] of one part. L is N rounded up to a multiple of 16 for vectorized loads;
columns beyond N are multiplied by zeros.

    forward   scores: s from q and k           mix: w over s                     gather: out from w and v
    backward  scores: s again, and dw from     mix: w over s, ds over dw, the    gather: dv from w, dq and dk from ds
              the gradient and v               gradients of the mixing weights

The mixing multiplies tiles of 16 lines by [16, 16]: all heads of one row of the scores, or of as many rows as fit, with zeros
between rows. Sums are in float32 and in a fixed order; matrices, vectors and mixing weights have the precision of `qkv`.

The bias before the softmax is constant along rows, to which the softmax is invariant: it is not read, and its gradient is zero.
"""

# mypy: disable-error-code="assignment"

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.layers.kernels import multiprocessors, shared_memory

LINES = tl.constexpr(16)  # per tile of the mixing: the smallest size of the tensor cores
REGISTERS = 2048  # per multiprocessor and thread of a warp


class Tiling(NamedTuple):
    """Sizes of parts, tiles and programs: powers of two, except for bytes, registers and stages.

    `benchmarks/talking_heads.py --tiling` measures others.
    """

    part_bytes: int = 256 << 20  # of the matrices [images, H, N, L] of a part, which has at least one image
    forward_columns: int = 256  # per tile of lines that a warp mixes
    backward_columns: int = 64
    backward_registers: int = 168  # maximum per thread, so that three programs fit on a multiprocessor
    rows: int = 256  # per tile of scores
    columns: int = 64
    warps: int = 8  # per program that computes scores
    stages: int = 3  # pipeline stages; 1 on devices with little shared memory, as for all stages below
    gather_rows: int = 128  # per tile of vectors
    gather_step: int = 64  # tokens per step
    gather_warps: int = 8
    gather_stages: int = 2
    mix_stages: int = 2


TILING = Tiling()


@triton.jit
def load(start, token, count, STRIDE: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr):
    """Vectors [tokens, PADDED] of one head, zero beyond the last token and channel."""
    channel = tl.arange(0, PADDED)
    inside = (token < count)[:, None] & (channel < D)[None, :]
    return tl.load(start + token[:, None] * STRIDE + channel[None, :], inside, 0.0)


@triton.jit
def multiply(left, right, acc):
    return tl.dot(left, right, acc, input_precision="ieee")


@triton.jit
def pairs(
    left,
    LEFT: tl.constexpr,
    right,
    RIGHT: tl.constexpr,
    matrix,
    scale,
    count,
    length,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some rows of the inner products of one head's vectors; columns from `count` to `length` are zero."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    own = load(left, row, count, LEFT, D, PADDED)
    for first in range(0, length, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        other = load(right, column, count, RIGHT, D, PADDED)
        product = scale * multiply(own, tl.trans(other), tl.zeros([ROWS, COLUMNS], tl.float32))
        inside = (row < count)[:, None] & (column < length)[None, :]
        tl.store(matrix + row[:, None] * length + column[None, :], product.to(matrix.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["count"])
def scores_kernel(
    qkv,  # [B, N, 3, H, D]
    scores,  # [B, H, N, L]
    gradient,  # of the output, [B, N, H, D], or None
    grad_weights,  # [B, H, N, L], or None
    scale,
    count,
    length,
    H: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    WIDTH: tl.constexpr = H * D
    index = tl.program_id(0).to(tl.int64)
    batch, head, start = index // H, index % H, index * count * length
    qkv += batch * count * 3 * WIDTH + head * D
    tile = scores + start
    pairs(qkv, 3 * WIDTH, qkv + WIDTH, 3 * WIDTH, tile, scale, count, length, D, PADDED, ROWS, COLUMNS)
    if gradient is not None:
        left, tile = gradient + batch * count * WIDTH + head * D, grad_weights + start
        pairs(left, WIDTH, qkv + 2 * WIDTH, 3 * WIDTH, tile, 1.0, count, length, D, PADDED, ROWS, COLUMNS)


@triton.jit
def load_mixing(weights, H: tl.constexpr, BACK: tl.constexpr):
    """Weights [H, H] repeated for every row in a tile of lines, with zeros between rows: [input LINES, output LINES]."""
    source, target = tl.arange(0, LINES)[:, None], tl.arange(0, LINES)[None, :]
    offset = source % H * H + target % H if BACK else target % H * H + source % H
    return tl.load(weights + offset, (target // H == source // H) & (target < LINES // H * H), 0.0)


@triton.jit
def mix(tile, weights):
    return multiply(tile, weights.to(tile.dtype), tl.zeros(tile.shape, tl.float32))


@triton.jit
def softmax(mixed, column, count):
    mixed = tl.where((column < count)[:, None], mixed, float("-inf"))
    shares = tl.exp(mixed - tl.max(mixed, 0)[None, :])
    return shares * (1.0 / tl.sum(shares, 0))[None, :]


@triton.jit
def lines(tile, column, count, length, H: tl.constexpr):
    """Offsets [WIDE, LINES] of the rows of a tile, of all heads, in matrices [B, H, N, L], and a mask of the valid ones."""
    TALL: tl.constexpr = LINES // H  # rows per tile
    line, rows = tl.arange(0, LINES), tl.cdiv(count, TALL)
    row = tile % rows * TALL + line // H
    inside = (line < TALL * H) & (row < count)
    offset = (line % H * count + row)[None, :] * length + column[:, None]
    return (tile // rows).to(tl.int64) * H * count * length + offset, inside[None, :] & (column < length)[:, None]


@triton.jit
def line_products(left, right, acc, SLICES: tl.constexpr):
    """Adds to acc [SLICES, LINES, LINES] the inner products of two tiles' lines; a warp multiplies a slice of the columns."""
    shape: tl.constexpr = (SLICES, left.shape[0] // SLICES, LINES)
    return multiply(tl.permute(tl.reshape(left, shape), (0, 2, 1)), tl.reshape(right, shape), acc)


@triton.jit(do_not_specialize=["tiles", "count"])
def mix_kernel(
    scores,  # [B, H, N, L], replaced by the weights
    before,  # [H, H]
    after,
    bias,  # [H]
    tiles,
    count,
    length,
    H: tl.constexpr,
    WIDE: tl.constexpr,
):
    before, after = load_mixing(before, H, False), load_mixing(after, H, False)
    shift, column = tl.load(bias + tl.arange(0, LINES) % H).to(tl.float32)[None, :], tl.arange(0, WIDE)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        offset, inside = lines(tile, column, count, length, H)
        score = tl.load(scores + offset, inside, 0.0)
        share = softmax(mix(score, before), column, count)
        weight = mix(share.to(score.dtype), after) + shift
        tl.store(scores + offset, weight.to(score.dtype), inside)


@triton.jit(do_not_specialize=["initialized", "tiles", "count"])
def mix_backward_kernel(
    scores,  # [B, H, N, L], replaced by the weights
    grads,  # [B, H, N, L]: of the weights, replaced by those of the scores
    before,
    after,
    bias,
    sums,  # [2, programs, LINES, LINES]: accumulates the gradients of `before` and `after`
    initialized,  # whether `sums` holds values of a previous part
    tiles,
    count,
    length,
    H: tl.constexpr,
    WIDE: tl.constexpr,
    SLICES: tl.constexpr,
):
    before_back, after_back = load_mixing(before, H, True), load_mixing(after, H, True)
    before, after = load_mixing(before, H, False), load_mixing(after, H, False)
    shift, column = tl.load(bias + tl.arange(0, LINES) % H).to(tl.float32)[None, :], tl.arange(0, WIDE)
    grad_before = tl.zeros([SLICES, LINES, LINES], tl.float32)
    grad_after = tl.zeros([SLICES, LINES, LINES], tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        offset, inside = lines(tile, column, count, length, H)
        score, grad = tl.load(scores + offset, inside, 0.0), tl.load(grads + offset, inside, 0.0)
        share = softmax(mix(score, before), column, count)
        rounded = share.to(score.dtype)
        weight = mix(rounded, after) + shift
        tl.store(scores + offset, weight.to(score.dtype), inside)
        grad_after = line_products(grad, rounded, grad_after, SLICES)
        grad_share = mix(grad, after_back)
        side = tl.sum(share * grad_share, 0)
        grad_mixed = (share * (grad_share - side[None, :])).to(score.dtype)
        grad_before = line_products(grad_mixed, score, grad_before, SLICES)
        tl.store(grads + offset, mix(grad_mixed, before_back).to(score.dtype), inside)
    line, own = tl.arange(0, LINES), sums + tl.program_id(0).to(tl.int64) * LINES * LINES
    own += line[:, None] * LINES + line[None, :]
    valid = (line[:, None] >= 0) & (line[None, :] >= 0) & (initialized > 0)
    tl.store(own, tl.load(own, valid, 0.0) + tl.sum(grad_before, 0))
    own += tl.num_programs(0).to(tl.int64) * LINES * LINES
    tl.store(own, tl.load(own, valid, 0.0) + tl.sum(grad_after, 0))


@triton.jit
def gather(
    matrix,
    start,
    STRIDE: tl.constexpr,
    out,
    OUT: tl.constexpr,
    scale,
    count,
    length,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Some rows of the matrix of one head, or of its transpose, times the vectors of all tokens."""
    own = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    for first in range(0, count, STEP):
        other = first + tl.arange(0, STEP)
        if TRANSPOSED:
            inside = (other < count)[:, None] & (own < length)[None, :]
            tile = tl.trans(tl.load(matrix + other[:, None] * length + own[None, :], inside, 0.0))
        else:
            inside = (own < count)[:, None] & (other < length)[None, :]
            tile = tl.load(matrix + own[:, None] * length + other[None, :], inside, 0.0)
        acc = multiply(tile, load(start, other, count, STRIDE, D, PADDED), acc)
    channel = tl.arange(0, PADDED)
    inside = (own < count)[:, None] & (channel < D)[None, :]
    tl.store(out + own[:, None] * OUT + channel[None, :], (scale * acc).to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["count"])
def gather_kernel(
    weights,  # [B, H, N, L]
    qkv,
    out,  # [B, N, H, D]
    count,
    length,
    H: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    WIDTH: tl.constexpr = H * D
    index = tl.program_id(0).to(tl.int64)
    weights += index * count * length
    first = index // H * count * WIDTH
    value, out = qkv + 3 * first + 2 * WIDTH + index % H * D, out + first + index % H * D
    gather(weights, value, 3 * WIDTH, out, WIDTH, 1.0, count, length, D, PADDED, ROWS, STEP, False)


@triton.jit(do_not_specialize=["count"])
def gather_backward_kernel(
    weights,
    grad_scores,
    qkv,
    gradient,  # [B, N, H, D]
    grad,  # of `qkv`
    scale,
    count,
    length,
    H: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Programs of the last axis write the gradients of queries, keys and values."""
    WIDTH: tl.constexpr = H * D
    index = tl.program_id(0).to(tl.int64)
    weights, grad_scores = weights + index * count * length, grad_scores + index * count * length
    first, head = index // H * count * WIDTH, index % H * D
    query, grad, gradient = qkv + 3 * first + head, grad + 3 * first + head, gradient + first + head
    if tl.program_id(2) == 0:
        key = query + WIDTH
        gather(grad_scores, key, 3 * WIDTH, grad, 3 * WIDTH, scale, count, length, D, PADDED, ROWS, STEP, False)
    elif tl.program_id(2) == 1:
        out = grad + WIDTH
        gather(grad_scores, query, 3 * WIDTH, out, 3 * WIDTH, scale, count, length, D, PADDED, ROWS, STEP, True)
    else:
        out = grad + 2 * WIDTH
        gather(weights, gradient, WIDTH, out, 3 * WIDTH, 1.0, count, length, D, PADDED, ROWS, STEP, True)


@triton.jit(do_not_specialize=["count"])
def bias_kernel(
    qkv,
    gradient,  # [B, N, H, D]
    grad_bias,  # [B, H]
    count,
    H: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    STEP: tl.constexpr,
):
    """The gradient of the bias for each image.

    All weights of a head share a bias: its gradient is the sum of all inner products of output gradients and values.
    """
    WIDTH: tl.constexpr = H * D
    index = tl.program_id(0).to(tl.int64)
    start = index // H * count * WIDTH
    value, gradient = qkv + 3 * start + 2 * WIDTH + index % H * D, gradient + start + index % H * D
    grads, values = tl.zeros([STEP, PADDED], tl.float32), tl.zeros([STEP, PADDED], tl.float32)
    for first in range(0, count, STEP):
        token = first + tl.arange(0, STEP)
        grads += load(gradient, token, count, WIDTH, D, PADDED).to(tl.float32)
        values += load(value, token, count, 3 * WIDTH, D, PADDED).to(tl.float32)
    tl.store(grad_bias + index, tl.sum(tl.sum(grads, 0) * tl.sum(values, 0), 0))


@triton.jit(do_not_specialize=["programs", "images"])
def total_kernel(
    sums,  # [2, programs, LINES, LINES]
    grad_bias,  # [B, H]
    totals,  # of `before` [H, H], `after` [H, H] and `bias` [H]
    programs,
    images,
    H: tl.constexpr,
    STEP: tl.constexpr,
):
    """Sums products of lines of the same row; products of different rows in a tile are not needed."""
    index, acc = tl.program_id(0), tl.zeros([STEP], tl.float32)
    if index < 2 * H * H:
        sums += index // (H * H) * programs * LINES * LINES + index // H % H * LINES + index % H
        for first in range(0, programs, STEP):
            program = first + tl.arange(0, STEP)
            for row in tl.static_range(LINES // H):
                start = sums + row * H * (LINES + 1)
                acc += tl.load(start + program * LINES * LINES, program < programs, 0.0)
    else:
        for first in range(0, images, STEP):
            image = first + tl.arange(0, STEP)
            acc += tl.load(grad_bias + image * H + index - 2 * H * H, image < images, 0.0)
    tl.store(totals + index, tl.sum(acc, 0))


class Plan:
    """Parts, sizes and kernel constants for tensors like `qkv`."""

    def __init__(self, qkv: Tensor, matrices: int):
        batch, count, _, heads, width = qkv.shape
        length = triton.cdiv(count, 16) * 16
        limit = max(1, TILING.part_bytes // (matrices * heads * count * length * qkv.element_size()))
        self.images = triton.cdiv(batch, max(1, triton.cdiv(batch, limit)))  # per part; the last one may have fewer
        self.matrices = qkv.new_empty(matrices, self.images, heads, count, length).unbind()
        self.sizes, self.scale, self.heads, self.rows = (count, length), 1 / math.sqrt(width), heads, LINES.value // heads
        self.wide, padded = (max(16, triton.next_power_of_2(each)) for each in (count, width))
        self.multiprocessors = multiprocessors(qkv.device.index) if qkv.is_cuda else 1
        large_memory = qkv.is_cuda and shared_memory(qkv.device.index) >= 120_000
        self.mix_stages = TILING.mix_stages if large_memory and self.wide <= 1024 else 1
        self.shape = {"H": heads, "D": width, "PADDED": padded}
        self.scoring = self.shape | {"ROWS": TILING.rows, "COLUMNS": TILING.columns}
        self.scoring |= {"num_warps": TILING.warps, "num_stages": TILING.stages if large_memory else 1}
        self.gathering = self.shape | {"ROWS": TILING.gather_rows, "STEP": TILING.gather_step}
        self.gathering |= {"num_warps": TILING.gather_warps, "num_stages": TILING.gather_stages if large_memory else 1}

    def parts(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(each.split(self.images) for each in tensors), strict=True)

    def grid(self, part: Tensor, rows: int, last: int = 1) -> tuple[int, int, int]:
        """Launch grid of a kernel that multiplies: one program for every head and so many rows."""
        return len(part) * self.heads, triton.cdiv(self.sizes[0], rows), last

    def score(self, qkv: Tensor, gradient: Tensor | None = None) -> None:
        scores, grads = self.matrices if gradient is not None else (*self.matrices, None)
        grid = self.grid(qkv, TILING.rows)
        scores_kernel[grid](qkv, scores, gradient, grads, self.scale, *self.sizes, **self.scoring)

    def mixing(self, columns: int, registers: int = 255) -> dict[str, int]:
        """Constants of a mixing kernel with so many columns per warp, or twice as many for long rows."""
        warps = max(1, min(8, self.wide // columns), self.wide // (2 * columns))
        limit = registers if warps * columns >= self.wide else 255
        constants = {"H": self.heads, "WIDE": self.wide, "num_warps": warps, "num_stages": self.mix_stages}
        return constants | {"maxnreg": min(limit, REGISTERS // warps)}

    def tiles(self, images: int) -> int:
        """The number of tiles of lines of so many images."""
        tiles: int = images * triton.cdiv(self.sizes[0], self.rows)
        return tiles

    def programs(self, constants: dict[str, int]) -> int:
        """Programs of a mixing kernel: as many as run concurrently, each processes several tiles."""
        share = REGISTERS // (constants["num_warps"] * constants["maxnreg"])
        return min(self.tiles(self.images), share * self.multiprocessors)


@torch.library.custom_op("vitrail::talking_heads", mutates_args=())
def talking_heads(qkv: Tensor, before: Tensor, shift: Tensor, after: Tensor, bias: Tensor) -> Tensor:
    """Queries, keys and values [B, N, 3, H, D] to the heads' outputs [B, N, H, D].

    `before` and `after` [H, H] with the biases `shift` and `bias` [H] mix the heads on both sides of the softmax.
    """
    qkv, plan, (batch, count, _, heads, width) = qkv.contiguous(), Plan(qkv, 1), qkv.shape
    out, (scores,) = qkv.new_empty(batch, count, heads, width), plan.matrices
    weights = [each.contiguous() for each in (before, after, bias)]
    constants = plan.mixing(TILING.forward_columns)
    grid = (plan.programs(constants),)
    with torch.cuda.device_of(qkv):
        for part, target in plan.parts(qkv, out):
            plan.score(part)
            mix_kernel[grid](scores, *weights, plan.tiles(len(part)), *plan.sizes, **constants)
            gather_kernel[plan.grid(part, TILING.gather_rows)](scores, part, target, *plan.sizes, **plan.gathering)
    return out


@talking_heads.register_fake
def _(qkv: Tensor, before: Tensor, shift: Tensor, after: Tensor, bias: Tensor) -> Tensor:
    batch, count, _, heads, width = qkv.shape
    return qkv.new_empty(batch, count, heads, width)


@torch.library.custom_op("vitrail::talking_heads_backward", mutates_args=())
def talking_heads_backward(gradient: Tensor, qkv: Tensor, before: Tensor, after: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `qkv`, and those of `before`, `after` and `bias`, concatenated, in float32."""
    gradient, qkv, plan, heads = gradient.contiguous(), qkv.contiguous(), Plan(qkv, 2), qkv.shape[3]
    grad, (scores, grads) = torch.empty_like(qkv), plan.matrices
    weights = [each.contiguous() for each in (before, after, bias)]
    constants = plan.mixing(TILING.backward_columns, TILING.backward_registers)
    grid = (plan.programs(constants),)
    constants["SLICES"] = min(constants["num_warps"], plan.wide // 16)
    sums = qkv.new_empty(2, *grid, LINES.value, LINES.value, dtype=torch.float32)
    biases, totals = (qkv.new_empty(shape, dtype=torch.float32) for shape in ((len(qkv), heads), count_mixing(heads)))
    with torch.cuda.device_of(qkv):
        for index, (part, part_gradient, target) in enumerate(plan.parts(qkv, gradient, grad)):
            plan.score(part, part_gradient)
            mix_backward_kernel[grid](scores, grads, *weights, sums, index, plan.tiles(len(part)), *plan.sizes, **constants)
            gather_backward_kernel[plan.grid(part, TILING.gather_rows, 3)](
                scores, grads, part, part_gradient, target, plan.scale, *plan.sizes, **plan.gathering
            )
        bias_kernel[(biases.numel(),)](qkv, gradient, biases, plan.sizes[0], **plan.shape, STEP=32)
        total_kernel[(len(totals),)](sums, biases, totals, *grid, len(qkv), H=heads, STEP=256)
    return grad, totals


def count_mixing(heads: int) -> int:
    """The number of mixing weights that have gradients."""
    return 2 * heads * heads + heads


@talking_heads_backward.register_fake
def _(gradient: Tensor, qkv: Tensor, before: Tensor, after: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    totals = qkv.new_empty(count_mixing(qkv.shape[3]), dtype=torch.float32)
    return torch.empty_like(qkv, memory_format=torch.contiguous_format), totals


def save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
    qkv, before, shift, after, bias = ctx.saved_tensors
    grad, totals = talking_heads_backward(gradient, qkv, before, after, bias)
    parts = totals.split([before.numel(), after.numel(), bias.numel()])
    grads = [part.view_as(like).to(like.dtype) for part, like in zip(parts, (before, after, bias), strict=True)]
    return grad, grads[0], torch.zeros_like(shift), *grads[1:]


talking_heads.register_autograd(backward, setup_context=save_inputs)
