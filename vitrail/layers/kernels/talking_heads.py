"""Talking-heads attention, forward and backward, in stages that hand matrices of all pairs of tokens on through the L2 cache.

For every head: s = q k^T / sqrt(D); m = before * s; p = softmax(m); w = after * p + bias; out = w v. Every head needs the scores
of all heads, so the products and the mixing are kernels of their own, and a few pictures at a time go through all of them: their
matrices [pictures, H, N, L] fit into the cache, and no memory grows with the batch. L is N rounded up to a multiple of 16, which
lets the kernels read many numbers at once; columns beyond N meet vectors of zeros.

    forward   scores: s from q and k           mix: w over s                     gather: out from w and v
    backward  scores: s again, and dw from     mix: w over s, ds over dw, the    gather: dv from w, dq and dk from ds
              the gradient and v               gradients of the mixing weights

The mixing multiplies [16, 16] by tiles of 16 lines: all heads of one row of the scores, or of as many rows as there is room for,
with zeros between them. Sums are in float32 and always in one order; matrices and vectors have the precision of `qkv`.

The bias before the softmax moves whole rows, which the softmax does not see: it is not read, and its gradient is zero.
"""

# mypy: disable-error-code="assignment"

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.layers.kernels import shared_memory

LINES = tl.constexpr(16)  # of a tile of the mixing: the least that the matrix units multiply


class Cut(NamedTuple):
    """How the work is cut into parts and programs; `benchmarks/talking_heads.py --cut` tries others."""

    megabytes: int = 16  # most of a matrix of scores, of which the backward has two; one picture if that is more
    forward: int = 2  # tiles of 16 lines that a program mixes
    backward: int = 4
    rows: int = 64  # of a tile of a product
    columns: int = 128  # of a tile of scores
    step: int = 64  # tokens of a step of `gather`
    warps: int = 4  # of a program that multiplies
    stages: int = 2  # steps that are loaded ahead


CUT = Cut()


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
    """A tile of the inner products of one head's vectors; columns from `count` to `length` are zero."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    own, other = load(left, row, count, LEFT, D, PADDED), load(right, column, count, RIGHT, D, PADDED)
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
    place = tl.program_id(0).to(tl.int64)
    batch, head, start = place // H, place % H, place * count * length
    qkv += batch * count * 3 * WIDTH + head * D
    tile = scores + start
    pairs(qkv, 3 * WIDTH, qkv + WIDTH, 3 * WIDTH, tile, scale, count, length, D, PADDED, ROWS, COLUMNS)
    if gradient is not None:
        left, tile = gradient + batch * count * WIDTH + head * D, grad_weights + start
        pairs(left, WIDTH, qkv + 2 * WIDTH, 3 * WIDTH, tile, 1.0, count, length, D, PADDED, ROWS, COLUMNS)


@triton.jit
def load_mixing(weights, H: tl.constexpr, TURNED: tl.constexpr):
    """Weights [H, H] for each row of a tile of lines, with zeros between the rows."""
    new, old = tl.arange(0, LINES)[:, None], tl.arange(0, LINES)[None, :]
    place = old % H * H + new % H if TURNED else new % H * H + old % H
    return tl.load(weights + place, (new // H == old // H) & (new < LINES // H * H), 0.0)


@triton.jit
def mix(weights, tile):
    """Weights in float32 times a tile; half of their digits at a time, where the tile has half precision."""
    acc = tl.zeros(tile.shape, tl.float32)
    if tile.dtype == tl.float32:
        acc = multiply(weights, tile, acc)
    else:
        high = weights.to(tile.dtype)
        acc = multiply((weights - high.to(tl.float32)).to(tile.dtype), tile, acc)
        acc = multiply(high, tile, acc)
    return acc


@triton.jit
def softmax(mixed, column, count):
    mixed = tl.where((column < count)[None, :], mixed, float("-inf"))
    shares = tl.exp(mixed - tl.max(mixed, 1)[:, None])
    return shares * (1.0 / tl.sum(shares, 1))[:, None]


@triton.jit
def lines(first, column, count, length, H: tl.constexpr):
    """Places [LINES, WIDE] of the rows from `first` on in a picture's matrices, and which there are."""
    line = tl.arange(0, LINES)
    row = first + line // H
    inside = (line < LINES // H * H) & (row < count)
    return (line % H * count + row)[:, None] * length + column[None, :], inside[:, None] & (column < length)[None, :]


@triton.jit(do_not_specialize=["count"])
def mix_kernel(
    scores,  # [B, H, N, L], replaced by the weights
    before,
    after,
    bias,
    count,
    length,
    H: tl.constexpr,
    WIDE: tl.constexpr,
    TILES: tl.constexpr,
):
    TALL: tl.constexpr = LINES // H  # rows of a tile
    blocks = tl.cdiv(count, TALL * TILES)
    scores += (tl.program_id(0) // blocks).to(tl.int64) * H * count * length
    start, column = tl.program_id(0) % blocks * TALL * TILES, tl.arange(0, WIDE)
    before, after = load_mixing(before, H, False), load_mixing(after, H, False)
    shift = tl.load(bias + tl.arange(0, LINES) % H)[:, None]
    for tile in range(TILES):
        place, inside = lines(start + tile * TALL, column, count, length, H)
        score = tl.load(scores + place, inside, 0.0)
        share = softmax(mix(before, score), column, count)
        weight = mix(after, share.to(score.dtype)) + shift
        tl.store(scores + place, weight.to(score.dtype), inside)


@triton.jit(do_not_specialize=["count", "programs"])
def mix_backward_kernel(
    scores,  # [B, H, N, L], replaced by the weights
    grads,  # [B, H, N, L]: of the weights, replaced by those of the scores
    before,
    after,
    bias,
    sums,  # [2, programs, LINES, LINES]: to these the gradients of `before` and `after` are added
    count,
    length,
    programs,
    H: tl.constexpr,
    WIDE: tl.constexpr,
    TILES: tl.constexpr,
):
    TALL: tl.constexpr = LINES // H
    blocks = tl.cdiv(count, TALL * TILES)
    offset = (tl.program_id(0) // blocks).to(tl.int64) * H * count * length
    scores, grads = scores + offset, grads + offset
    start, column = tl.program_id(0) % blocks * TALL * TILES, tl.arange(0, WIDE)
    before_turned, after_turned = load_mixing(before, H, True), load_mixing(after, H, True)
    before, after = load_mixing(before, H, False), load_mixing(after, H, False)
    shift = tl.load(bias + tl.arange(0, LINES) % H)[:, None]
    before_sum = sums + tl.program_id(0) * LINES * LINES
    before_sum += tl.arange(0, LINES)[:, None] * LINES + tl.arange(0, LINES)[None, :]
    after_sum = before_sum + programs * LINES * LINES
    grad_before, grad_after = tl.load(before_sum), tl.load(after_sum)
    for tile in range(TILES):
        place, inside = lines(start + tile * TALL, column, count, length, H)
        score, grad = tl.load(scores + place, inside, 0.0), tl.load(grads + place, inside, 0.0)
        share = softmax(mix(before, score), column, count)
        rounded = share.to(score.dtype)
        weight = mix(after, rounded) + shift
        tl.store(scores + place, weight.to(score.dtype), inside)
        grad_after = multiply(grad, tl.trans(rounded), grad_after)
        grad_share = mix(after_turned, grad)
        side = tl.sum(share * grad_share, 1)
        grad_mixed = (share * (grad_share - side[:, None])).to(score.dtype)
        grad_before = multiply(grad_mixed, tl.trans(score), grad_before)
        tl.store(grads + place, mix(before_turned, grad_mixed).to(score.dtype), inside)
    tl.store(before_sum, grad_before)
    tl.store(after_sum, grad_after)


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
    TURNED: tl.constexpr,
):
    """Some rows of one head's matrix, or of the turned one, times the vectors of all tokens."""
    own = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    for first in range(0, count, STEP):
        other = first + tl.arange(0, STEP)
        if TURNED:
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
    place = tl.program_id(0).to(tl.int64)
    weights += place * count * length
    first = place // H * count * WIDTH
    value, out = qkv + 3 * first + 2 * WIDTH + place % H * D, out + first + place % H * D
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
    place = tl.program_id(0).to(tl.int64)
    weights, grad_scores = weights + place * count * length, grad_scores + place * count * length
    first, head = place // H * count * WIDTH, place % H * D
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


class Plan:
    """How tensors like `qkv` go through the stages: pictures of a part, sizes and constants of the kernels."""

    def __init__(self, qkv: Tensor):
        batch, count, _, heads, width = qkv.shape
        length = triton.cdiv(count, 16) * 16
        most = max(1, (CUT.megabytes << 20) // (heads * count * length * qkv.element_size()))
        self.pictures = triton.cdiv(batch, max(1, triton.cdiv(batch, most)))  # parts of one size, but for the last
        self.matrix, self.sizes, self.scale = (self.pictures, heads, count, length), (count, length), 1 / math.sqrt(width)
        self.rows = LINES.value // heads  # of a tile of lines
        wide = max(16, triton.next_power_of_2(count))
        padded = max(16, triton.next_power_of_2(width))
        ahead = qkv.is_cuda and shared_memory(qkv.device.index) >= 120_000
        self.product = {"H": heads, "D": width, "PADDED": padded, "ROWS": CUT.rows, "num_warps": CUT.warps}
        self.product["num_stages"] = CUT.stages if ahead else 1
        self.mixing = {"H": heads, "WIDE": wide, "num_warps": max(4, wide // 128), "num_stages": 1}

    def parts(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(each.split(self.pictures) for each in tensors), strict=True)

    def blocks(self, tiles: int) -> int:
        """Programs that mix a picture."""
        return triton.cdiv(self.sizes[0], self.rows * tiles)

    def grid(self, part: Tensor, *last: int) -> tuple[int, ...]:
        """A program for some rows of every head's matrix."""
        return len(part) * self.matrix[1], triton.cdiv(self.sizes[0], CUT.rows), *last


@torch.library.custom_op("vitrail::talking_heads", mutates_args=())
def talking_heads(qkv: Tensor, before: Tensor, shift: Tensor, after: Tensor, bias: Tensor) -> Tensor:
    """Queries, keys and values [B, N, 3, H, D] to the heads' outputs [B, N, H, D].

    `before` and `after` [H, H] with the biases `shift` and `bias` [H] mix the heads on both sides of the softmax.
    """
    qkv, plan = qkv.contiguous(), Plan(qkv)
    out, scores = torch.empty_like(qkv[:, :, 0], memory_format=torch.contiguous_format), qkv.new_empty(plan.matrix)
    mixing = [each.float().contiguous() for each in (before, after, bias)]
    columns = triton.cdiv(plan.sizes[1], CUT.columns)
    with torch.cuda.device_of(qkv):
        for part, target in plan.parts(qkv, out):
            none = (None, None)
            scores_kernel[plan.grid(part, columns)](
                part, scores, *none, plan.scale, *plan.sizes, COLUMNS=CUT.columns, **plan.product
            )
            programs = len(part) * plan.blocks(CUT.forward)
            mix_kernel[(programs,)](scores, *mixing, *plan.sizes, TILES=CUT.forward, **plan.mixing)
            gather_kernel[plan.grid(part)](scores, part, target, *plan.sizes, STEP=CUT.step, **plan.product)
    return out


@talking_heads.register_fake
def _(qkv: Tensor, before: Tensor, shift: Tensor, after: Tensor, bias: Tensor) -> Tensor:
    batch, count, _, heads, width = qkv.shape
    return qkv.new_empty(batch, count, heads, width)


@torch.library.custom_op("vitrail::talking_heads_backward", mutates_args=())
def talking_heads_backward(
    gradient: Tensor, qkv: Tensor, before: Tensor, after: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `qkv`, `before`, `after` and `bias`."""
    gradient, qkv, plan, heads = gradient.contiguous(), qkv.contiguous(), Plan(qkv), qkv.shape[3]
    grad, scores, grads = torch.empty_like(qkv), qkv.new_empty(plan.matrix), qkv.new_empty(plan.matrix)
    mixing = [each.float().contiguous() for each in (before, after, bias)]
    columns, blocks = triton.cdiv(plan.sizes[1], CUT.columns), plan.blocks(CUT.backward)
    programs = plan.pictures * blocks
    sums = qkv.new_zeros(2, programs, LINES.value, LINES.value, dtype=torch.float32)
    with torch.cuda.device_of(qkv):
        for part, given, target in plan.parts(qkv, gradient, grad):
            scores_kernel[plan.grid(part, columns)](
                part, scores, given, grads, plan.scale, *plan.sizes, COLUMNS=CUT.columns, **plan.product
            )
            mix_backward_kernel[(len(part) * blocks,)](
                scores, grads, *mixing, sums, *plan.sizes, programs, TILES=CUT.backward, **plan.mixing
            )
            gather_backward_kernel[plan.grid(part, 3)](
                scores, grads, part, given, target, plan.scale, *plan.sizes, STEP=CUT.step, **plan.product
            )
    inside = plan.rows * heads
    own = sums.sum(1)[:, :inside, :inside].unflatten(2, (-1, heads)).unflatten(1, (-1, heads))
    grad_before, grad_after = torch.einsum("xrhrg->xhg", own)  # a row with itself; the rest pairs rows of one tile
    # Every weight of a head has the same bias: its gradient is the sum of all inner products of the gradient with the values.
    grad_bias = (gradient.sum(1, dtype=torch.float32) * qkv[:, :, 2].sum(1, dtype=torch.float32)).sum((0, 2))
    return grad, grad_before.to(before.dtype, copy=True), grad_after.to(after.dtype, copy=True), grad_bias.to(bias.dtype)


@talking_heads_backward.register_fake
def _(
    gradient: Tensor, qkv: Tensor, before: Tensor, after: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(qkv, memory_format=torch.contiguous_format),
        before.new_empty(before.shape),
        after.new_empty(after.shape),
        bias.new_empty(bias.shape),
    )


def keep(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx, gradient: Tensor) -> tuple[Tensor, ...]:
    qkv, before, shift, after, bias = ctx.saved_tensors
    grad, grad_before, grad_after, grad_bias = talking_heads_backward(gradient, qkv, before, after, bias)
    return grad, grad_before, torch.zeros_like(shift), grad_after, grad_bias


talking_heads.register_autograd(backward, setup_context=keep)
