"""What the kernels of talking heads share. A tile [OWN, OTHER] pairs a program's tokens with those it walks over.

Tokens on one side are queries, on the other keys. The tiles of all heads are a tuple, so that each stays in registers, and mixing
heads is H x H multiplications of a tile by a number, in float32.
"""

# Triton adds tuples, and neither unpacks nor annotates them.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

import triton
import triton.language as tl


@triton.jit
def load(start, tokens, count, STRIDE: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr):
    """Vectors [tokens, PADDED] of one head, zero beyond the last token and channel."""
    channel = tl.arange(0, PADDED)
    mask = (tokens[:, None] < count) & (channel[None, :] < D)
    return tl.load(start + tokens[:, None] * STRIDE + channel[None, :], mask, 0.0)


@triton.jit
def store(start, value, tokens, count, STRIDE: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr):
    channel = tl.arange(0, PADDED)
    mask = (tokens[:, None] < count) & (channel[None, :] < D)
    tl.store(start + tokens[:, None] * STRIDE + channel[None, :], value.to(start.dtype.element_ty), mask)


@triton.jit
def load_all(start, tokens, count, STRIDE: tl.constexpr, H: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr):
    """The vectors of every head."""
    vectors = ()
    for head in tl.static_range(H):
        vectors = vectors + (load(start + head * D, tokens, count, STRIDE, D, PADDED),)
    return vectors


@triton.jit
def products(
    own_start,
    own,
    OWN_STRIDE: tl.constexpr,
    other_start,
    other,
    OTHER_STRIDE: tl.constexpr,
    count,
    H: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
):
    """For every head the inner products [OWN, OTHER] of two sets of vectors, both read head by head: few registers."""
    tiles = ()
    for head in tl.static_range(H):
        left = load(own_start + head * D, own, count, OWN_STRIDE, D, PADDED)
        right = load(other_start + head * D, other, count, OTHER_STRIDE, D, PADDED)
        tiles = tiles + (tl.dot(left, tl.trans(right), input_precision="ieee"),)
    return tiles


@triton.jit
def products_held(held, start, other, STRIDE: tl.constexpr, count, H: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr):
    """The same with vectors on one side that stay in registers, where there is room for them."""
    tiles = ()
    for head in tl.static_range(H):
        right = load(start + head * D, other, count, STRIDE, D, PADDED)
        tiles = tiles + (tl.dot(held[head], tl.trans(right), input_precision="ieee"),)
    return tiles


@triton.jit
def mix(weights, tiles, H: tl.constexpr, TURNED: tl.constexpr):
    """Tile g becomes the sum over h of weights[g, h] * tile h; turned, of weights[h, g]."""
    mixed = ()
    for new in tl.static_range(H):
        total = tiles[0] * tl.load(weights + (new if TURNED else new * H))
        for old in tl.static_range(1, H):
            total += tiles[old] * tl.load(weights + (old * H + new if TURNED else new * H + old))
        mixed = mixed + (total,)
    return mixed


@triton.jit
def gather(tiles, start, other, STRIDE: tl.constexpr, acc, count, H: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr):
    """Adds to the sums [OWN, PADDED] of every head the other tokens' vectors, weighted by a tile."""
    sums = ()
    for head in tl.static_range(H):
        right = load(start + head * D, other, count, STRIDE, D, PADDED)
        sums = sums + (tl.dot(tiles[head].to(right.dtype), right, acc[head], input_precision="ieee"),)
    return sums


@triton.jit
def load_rows(start, tokens, count, H: tl.constexpr):
    """Numbers [tokens] of every head out of [H, N]; zero beyond the last token."""
    rows = ()
    for head in tl.static_range(H):
        rows = rows + (tl.load(start + head * count + tokens, tokens < count, 0.0),)
    return rows


@triton.jit
def stack(tiles, H: tl.constexpr, WIDE: tl.constexpr):
    """Tiles as one matrix [OWN * OTHER, WIDE], a column for each head; WIDE is 2, 4 or 8, and columns from H on are zero."""
    for _ in tl.static_range(H, WIDE):
        tiles = tiles + (tl.zeros_like(tiles[0]),)
    half: tl.constexpr = WIDE // 2
    if half >= 1:
        tiles = pairs(tiles, half)
    if half >= 2:
        tiles = pairs(tiles, half // 2)
    if half >= 4:
        tiles = pairs(tiles, half // 4)
    whole = tiles[0]
    return tl.reshape(whole, (whole.numel // WIDE, WIDE))


@triton.jit
def pairs(tiles, HALF: tl.constexpr):
    joined = ()
    for place in tl.static_range(HALF):
        joined = joined + (tl.join(tiles[place], tiles[place + HALF]),)
    return joined


@triton.jit
def pair_sums(left, right, DTYPE: tl.constexpr, H: tl.constexpr, WIDE: tl.constexpr):
    """Sums [WIDE, WIDE] over the whole tile of left tile g times right tile h."""
    return tl.dot(tl.trans(stack(left, H, WIDE).to(DTYPE)), stack(right, H, WIDE).to(DTYPE), input_precision="ieee")
