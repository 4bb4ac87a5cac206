"""Talking-heads attention, forward and backward, without a matrix of N x N in the device's memory.

For every head: scores = q k^T / sqrt(D); mixed = before * scores; p = softmax(mixed); w = after * p + bias; out = w v. A program
takes a few tokens of one picture and all heads at once, because every head needs the scores of all; it walks twice over the other
tokens, first for the sums of the softmax, which `w` needs before it can mix heads. The backward recomputes scores from q and k
and keeps only the logarithm of those sums, [B, H, N].

The bias before the softmax moves whole rows, which the softmax does not see: it is not read, and its gradient is zero.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.layers.kernels.tiles import load, load_rows, mix, products, stack, store

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
    batch = tl.program_id(1).to(tl.int64)
    query = qkv + batch * count * 3 * WIDTH
    key, value = query + WIDTH, query + 2 * WIDTH
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    lane = tl.arange(0, OTHER)

    # Each place of the tile has its own running maximum and sum; they meet once, after the loop, and not in every step.
    most, total = (), ()
    for _ in tl.static_range(H):
        most = most + (tl.full([OWN, OTHER], LOWEST, tl.float32),)  # noqa: RUF005
        total = total + (tl.zeros([OWN, OTHER], tl.float32),)  # noqa: RUF005
    for start in range(0, count, OTHER):
        other = start + lane
        scores = products(query, own, 3 * WIDTH, key, other, 3 * WIDTH, count, H, D, PADDED)
        mixed = mix(before, scores, H, False)
        new_most, new_total = (), ()
        for head in tl.static_range(H):
            tile = tl.where(other[None, :] < count, mixed[head], float("-inf"))
            top = tl.maximum(most[head], tile)
            new_total = new_total + (total[head] * tl.exp(most[head] - top) + tl.exp(tile - top),)  # noqa: RUF005
            new_most = new_most + (top,)  # noqa: RUF005
        most, total = new_most, new_total
    lse, acc = (), ()
    for head in tl.static_range(H):
        top = tl.max(most[head], 1)
        row = top + tl.log(tl.sum(total[head] * tl.exp(most[head] - top[:, None]), 1))
        tl.store(sums + (batch * H + head) * count + own, row, own < count)
        lse = lse + (row,)  # noqa: RUF005
        acc = acc + (tl.zeros([OWN, PADDED], tl.float32),)  # noqa: RUF005

    for start in range(0, count, OTHER):
        other = start + lane
        scores = products(query, own, 3 * WIDTH, key, other, 3 * WIDTH, count, H, D, PADDED)
        mixed, shares = mix(before, scores, H, False), ()
        for head in tl.static_range(H):
            share = tl.where(other[None, :] < count, tl.exp(mixed[head] - lse[head][:, None]), 0.0)
            shares = shares + (share,)  # noqa: RUF005
        weights, new_acc = mix(after, shares, H, False), ()
        for head in tl.static_range(H):
            right = load(value + head * D, other, count, 3 * WIDTH, D, PADDED)
            left = (weights[head] + tl.load(bias + head)).to(right.dtype)
            new_acc = new_acc + (tl.dot(left, right, acc[head], input_precision="ieee"),)  # noqa: RUF005
        acc = new_acc
    for head in tl.static_range(H):
        store(out + batch * count * WIDTH + head * D, acc[head], own, count, WIDTH, D, PADDED)
