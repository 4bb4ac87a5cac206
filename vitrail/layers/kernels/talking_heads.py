"""Talking-heads attention, forward and backward, without a matrix of N x N in the device's memory.

For every head: scores = q k^T / sqrt(D); mixed = before * scores; p = softmax(mixed); w = after * p + bias; out = w v. A program
takes a few tokens of one picture and all heads at once, because every head needs the scores of all; it walks twice over the other
tokens, first for the sums of the softmax, which `w` needs before it can mix heads. The backward recomputes scores from q and k
and keeps only the logarithm of those sums, [B, H, N].

The bias before the softmax moves whole rows, which the softmax does not see: it is not read, and its gradient is zero.
"""

# Triton adds tuples, and neither unpacks nor annotates them.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.layers.kernels import shared_memory
from vitrail.layers.kernels.tiles import gather, load_all, load_rows, mix, pair_sums, products, products_held, store

LOWEST = tl.constexpr(-1e30)  # finite, so that a place no key ever came to gives no NaN


@triton.jit(do_not_specialize=["count"])
def forward_kernel(
    qkv,  # [B, N, 3, H, D]
    before,  # [H, H], with the factor 1 / sqrt(D)
    after,
    bias,
    out,  # [B, N, H, D]
    sums,  # [B, H, N]
    count,
    H: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    OWN: tl.constexpr,
    OTHER: tl.constexpr,
):
    WIDTH: tl.constexpr = H * D
    blocks = tl.cdiv(count, OWN)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    query = qkv + batch * count * 3 * WIDTH
    key, value = query + WIDTH, query + 2 * WIDTH
    own = tl.program_id(0) % blocks * OWN + tl.arange(0, OWN)
    lane = tl.arange(0, OTHER)

    held = load_all(query, own, count, 3 * WIDTH, H, D, PADDED)

    # Each place of the tile has its own running maximum and sum; they meet once, after the loop, and not in every step.
    most, total = (), ()
    for _ in tl.static_range(H):
        most = most + (tl.full([OWN, OTHER], LOWEST, tl.float32),)
        total = total + (tl.zeros([OWN, OTHER], tl.float32),)
    for start in range(0, count, OTHER):
        other = start + lane
        scores = products_held(held, key, other, 3 * WIDTH, count, H, D, PADDED)
        mixed = mix(before, scores, H, False)
        new_most, new_total = (), ()
        for head in tl.static_range(H):
            tile = tl.where(other[None, :] < count, mixed[head], float("-inf"))
            top = tl.maximum(most[head], tile)
            new_total = new_total + (total[head] * tl.exp(most[head] - top) + tl.exp(tile - top),)
            new_most = new_most + (top,)
        most, total = new_most, new_total
    lse, acc = (), ()
    for head in tl.static_range(H):
        top = tl.max(most[head], 1)
        row = top + tl.log(tl.sum(total[head] * tl.exp(most[head] - top[:, None]), 1))
        tl.store(sums + (batch * H + head) * count + own, row, own < count)
        lse = lse + (row,)
        acc = acc + (tl.zeros([OWN, PADDED], tl.float32),)

    for start in range(0, count, OTHER):
        other = start + lane
        scores = products_held(held, key, other, 3 * WIDTH, count, H, D, PADDED)
        mixed, shares = mix(before, scores, H, False), ()
        for head in tl.static_range(H):
            share = tl.where(other[None, :] < count, tl.exp(mixed[head] - lse[head][:, None]), 0.0)
            shares = shares + (share,)
        mixed, weights = mix(after, shares, H, False), ()
        for head in tl.static_range(H):
            weights = weights + (mixed[head] + tl.load(bias + head),)
        acc = gather(weights, value, other, 3 * WIDTH, acc, count, H, D, PADDED)
    for head in tl.static_range(H):
        store(out + batch * count * WIDTH + head * D, acc[head], own, count, WIDTH, D, PADDED)


@triton.jit(do_not_specialize=["count"])
def query_kernel(
    qkv,
    before,
    after,
    sums,
    gradient,  # of `out`, [B, N, H, D]
    grad,  # of `qkv`, of which this writes the queries' part
    inner,  # [B, H, N]: for every row the sum of p times the gradient of p
    before_parts,  # [programs, WIDE, WIDE]
    after_parts,
    count,
    H: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    WIDE: tl.constexpr,
    OWN: tl.constexpr,
    OTHER: tl.constexpr,
):
    WIDTH: tl.constexpr = H * D
    blocks = tl.cdiv(count, OWN)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    query = qkv + batch * count * 3 * WIDTH
    key, value = query + WIDTH, query + 2 * WIDTH
    gradient += batch * count * WIDTH
    own = tl.program_id(0) % blocks * OWN + tl.arange(0, OWN)
    lane = tl.arange(0, OTHER)
    lse = load_rows(sums + batch * H * count, own, count, H)

    partial = ()
    for _ in tl.static_range(H):
        partial = partial + (tl.zeros([OWN, OTHER], tl.float32),)
    for start in range(0, count, OTHER):
        other = start + lane
        mixed = mix(before, products(query, own, 3 * WIDTH, key, other, 3 * WIDTH, count, H, D, PADDED), H, False)
        grad_shares = mix(after, products(gradient, own, WIDTH, value, other, 3 * WIDTH, count, H, D, PADDED), H, True)
        new_partial = ()
        for head in tl.static_range(H):
            share = tl.where(other[None, :] < count, tl.exp(mixed[head] - lse[head][:, None]), 0.0)
            new_partial = new_partial + (partial[head] + share * grad_shares[head],)
        partial = new_partial
    sides, acc = (), ()
    for head in tl.static_range(H):
        side = tl.sum(partial[head], 1)
        tl.store(inner + (batch * H + head) * count + own, side, own < count)
        sides = sides + (side,)
        acc = acc + (tl.zeros([OWN, PADDED], tl.float32),)

    before_sum, after_sum = tl.zeros([WIDE, WIDE], tl.float32), tl.zeros([WIDE, WIDE], tl.float32)
    for start in range(0, count, OTHER):
        other = start + lane
        scores = products(query, own, 3 * WIDTH, key, other, 3 * WIDTH, count, H, D, PADDED)
        mixed, shares = mix(before, scores, H, False), ()
        for head in tl.static_range(H):
            share = tl.where(other[None, :] < count, tl.exp(mixed[head] - lse[head][:, None]), 0.0)
            shares = shares + (share,)
        grad_weights = products(gradient, own, WIDTH, value, other, 3 * WIDTH, count, H, D, PADDED)
        after_sum += pair_sums(grad_weights, shares, qkv.dtype.element_ty, H, WIDE)
        grad_shares, grad_mixed = mix(after, grad_weights, H, True), ()
        for head in tl.static_range(H):
            grad_mixed = grad_mixed + (shares[head] * (grad_shares[head] - sides[head][:, None]),)
        before_sum += pair_sums(grad_mixed, scores, qkv.dtype.element_ty, H, WIDE)
        acc = gather(mix(before, grad_mixed, H, True), key, other, 3 * WIDTH, acc, count, H, D, PADDED)
    for head in tl.static_range(H):
        store(grad + batch * count * 3 * WIDTH + head * D, acc[head], own, count, 3 * WIDTH, D, PADDED)
    place = tl.program_id(0).to(tl.int64) * WIDE * WIDE
    place += tl.arange(0, WIDE)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    tl.store(before_parts + place, before_sum)
    tl.store(after_parts + place, after_sum)


@triton.jit(do_not_specialize=["count"])
def value_kernel(
    qkv,
    before,
    after,
    bias,
    sums,
    gradient,
    grad,  # the values' part
    count,
    H: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    OWN: tl.constexpr,
    OTHER: tl.constexpr,
):
    WIDTH: tl.constexpr = H * D
    blocks = tl.cdiv(count, OWN)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    query = qkv + batch * count * 3 * WIDTH
    own = tl.program_id(0) % blocks * OWN + tl.arange(0, OWN)
    lane = tl.arange(0, OTHER)
    acc = ()
    for _ in tl.static_range(H):
        acc = acc + (tl.zeros([OWN, PADDED], tl.float32),)
    for start in range(0, count, OTHER):
        other = start + lane
        scores = products(query + WIDTH, own, 3 * WIDTH, query, other, 3 * WIDTH, count, H, D, PADDED)
        lse = load_rows(sums + batch * H * count, other, count, H)
        mixed, shares = mix(before, scores, H, False), ()
        for head in tl.static_range(H):
            shares = shares + (tl.exp(mixed[head] - lse[head][None, :]),)
        mixed, weights = mix(after, shares, H, False), ()
        for head in tl.static_range(H):
            weights = weights + (mixed[head] + tl.load(bias + head),)
        acc = gather(weights, gradient + batch * count * WIDTH, other, WIDTH, acc, count, H, D, PADDED)
    for head in tl.static_range(H):
        start = grad + batch * count * 3 * WIDTH + (2 * H + head) * D
        store(start, acc[head], own, count, 3 * WIDTH, D, PADDED)


@triton.jit(do_not_specialize=["count"])
def key_kernel(
    qkv,
    before,
    after,
    sums,
    gradient,
    grad,  # the keys' part
    inner,
    count,
    H: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    OWN: tl.constexpr,
    OTHER: tl.constexpr,
):
    WIDTH: tl.constexpr = H * D
    blocks = tl.cdiv(count, OWN)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    query = qkv + batch * count * 3 * WIDTH
    key, value = query + WIDTH, query + 2 * WIDTH
    gradient += batch * count * WIDTH
    own = tl.program_id(0) % blocks * OWN + tl.arange(0, OWN)
    lane = tl.arange(0, OTHER)
    acc = ()
    for _ in tl.static_range(H):
        acc = acc + (tl.zeros([OWN, PADDED], tl.float32),)
    for start in range(0, count, OTHER):
        other = start + lane
        mixed = mix(before, products(key, own, 3 * WIDTH, query, other, 3 * WIDTH, count, H, D, PADDED), H, False)
        grad_shares = mix(after, products(value, own, 3 * WIDTH, gradient, other, WIDTH, count, H, D, PADDED), H, True)
        lse = load_rows(sums + batch * H * count, other, count, H)
        sides = load_rows(inner + batch * H * count, other, count, H)
        grad_mixed = ()
        for head in tl.static_range(H):
            share = tl.exp(mixed[head] - lse[head][None, :])
            grad_mixed = grad_mixed + (share * (grad_shares[head] - sides[head][None, :]),)
        acc = gather(mix(before, grad_mixed, H, True), query, other, 3 * WIDTH, acc, count, H, D, PADDED)
    for head in tl.static_range(H):
        start = grad + batch * count * 3 * WIDTH + (H + head) * D
        store(start, acc[head], own, count, 3 * WIDTH, D, PADDED)


class Tiling(NamedTuple):
    """How a launch is cut: tokens of a program, tokens of a step of its walk, warps, steps that are loaded ahead.

    Warps lie side by side along the walk, 8 tokens each: `own` must be smaller than `other`, and `other` at least 8 per warp.
    """

    own: int
    other: int
    warps: int
    stages: int


def tiling(qkv: Tensor) -> Tiling:
    ahead = qkv.is_cuda and shared_memory(qkv.device.index) >= 120_000
    return Tiling(16, 32, 4, 2 if ahead else 1)


def launch(kernel, cut: Tiling, qkv: Tensor, *arguments, **constants: int) -> None:
    batch, count, _, heads, width = qkv.shape
    padded = max(16, triton.next_power_of_2(width))  # the least that the matrix units multiply
    with torch.cuda.device_of(qkv):
        kernel[(batch * triton.cdiv(count, cut.own),)](
            qkv,
            *arguments,
            count,
            H=heads,
            D=width,
            PADDED=padded,
            OWN=cut.own,
            OTHER=cut.other,
            num_warps=cut.warps,
            num_stages=cut.stages,
            **constants,
        )


def scaled(before: Tensor, qkv: Tensor) -> Tensor:
    return before.float() / math.sqrt(qkv.shape[-1])


@torch.library.custom_op("vitrail::talking_heads", mutates_args=())
def talking_heads(qkv: Tensor, before: Tensor, shift: Tensor, after: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Queries, keys and values [B, N, 3, H, D] to the heads' outputs [B, N, H, D], and what the backward keeps, [B, H, N].

    `before` and `after` [H, H] with the biases `shift` and `bias` [H] mix the heads on both sides of the softmax.
    """
    qkv, (batch, count, _, heads, width) = qkv.contiguous(), qkv.shape
    out, sums = qkv.new_empty(batch, count, heads, width), qkv.new_empty(batch, heads, count, dtype=torch.float32)
    launch(forward_kernel, tiling(qkv), qkv, scaled(before, qkv), after.float().contiguous(), bias.float(), out, sums)
    return out, sums


@talking_heads.register_fake
def _(qkv: Tensor, before: Tensor, shift: Tensor, after: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    batch, count, _, heads, width = qkv.shape
    return qkv.new_empty(batch, count, heads, width), qkv.new_empty(batch, heads, count, dtype=torch.float32)


@torch.library.custom_op("vitrail::talking_heads_backward", mutates_args=())
def talking_heads_backward(
    gradient: Tensor, qkv: Tensor, before: Tensor, after: Tensor, bias: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `qkv`, `before`, `after` and `bias`."""
    gradient, qkv, (batch, count, _, heads, _) = gradient.contiguous(), qkv.contiguous(), qkv.shape
    cut, wide = tiling(qkv), max(2, triton.next_power_of_2(heads))
    scores, weights = scaled(before, qkv), after.float().contiguous()
    grad, inner = torch.empty_like(qkv), torch.empty_like(sums)
    programs = batch * triton.cdiv(count, cut.own)
    befores, afters = (qkv.new_empty(programs, wide, wide, dtype=torch.float32) for _ in range(2))
    launch(query_kernel, cut, qkv, scores, weights, sums, gradient, grad, inner, befores, afters, WIDE=wide)
    launch(value_kernel, cut, qkv, scores, weights, bias.float(), sums, gradient, grad)
    launch(key_kernel, cut, qkv, scores, weights, sums, gradient, grad, inner)
    grad_before, grad_after = (parts.sum(0)[:heads, :heads].contiguous() for parts in (befores, afters))
    # Every weight of a head has the same bias: its gradient is the sum of all inner products of the gradient with the values.
    grad_bias = (gradient.sum(1, dtype=torch.float32) * qkv[:, :, 2].sum(1, dtype=torch.float32)).sum((0, 2))
    return grad, scaled(grad_before, qkv).to(before.dtype), grad_after.to(after.dtype), grad_bias.to(bias.dtype)


@talking_heads_backward.register_fake
def _(
    gradient: Tensor, qkv: Tensor, before: Tensor, after: Tensor, bias: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(qkv, memory_format=torch.contiguous_format),
        before.new_empty(before.shape),
        after.new_empty(after.shape),
        bias.new_empty(bias.shape),
    )


def keep(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    qkv, before, shift, after, bias = inputs
    ctx.save_for_backward(qkv, before, shift, after, bias, output[1])


def backward(ctx, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, ...]:
    qkv, before, shift, after, bias, sums = ctx.saved_tensors
    grad, grad_before, grad_after, grad_bias = talking_heads_backward(gradient, qkv, before, after, bias, sums)
    return grad, grad_before, torch.zeros_like(shift), grad_after, grad_bias


talking_heads.register_autograd(backward, setup_context=keep)
