"""What the kernels of talking heads share. A tile [OWN, OTHER] pairs the tokens that a program works for with those it walks over.

Tokens on one side are queries, on the other keys. The tiles of all heads are a tuple, so that each stays in registers, and mixing
heads is H x H multiplications of a tile by a number, in float32.
"""

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
    """For every head the inner products [OWN, OTHER] of two sets of vectors."""
    tiles = ()
    for head in tl.static_range(H):
        left = load(own_start + head * D, own, count, OWN_STRIDE, D, PADDED)
        right = load(other_start + head * D, other, count, OTHER_STRIDE, D, PADDED)
        tiles = tiles + (tl.dot(left, tl.trans(right), input_precision="ieee"),)  # noqa: RUF005
    return tiles


@triton.jit
def mix(weights, tiles, H: tl.constexpr, TURNED: tl.constexpr):
    """Tile g becomes the sum over h of weights[g, h] * tile h; turned, of weights[h, g]."""
    mixed = ()
    for new in tl.static_range(H):
        total = tiles[0] * tl.load(weights + (new if TURNED else new * H))
        for old in tl.static_range(1, H):
            total += tiles[old] * tl.load(weights + (old * H + new if TURNED else new * H + old))
        mixed = mixed + (total,)  # noqa: RUF005
    return mixed


@triton.jit
def load_rows(start, tokens, count, H: tl.constexpr):
    """Numbers [tokens] of every head out of [H, N]; zero beyond the last token."""
    rows = ()
    for head in tl.static_range(H):
        rows = rows + (tl.load(start + head * count + tokens, tokens < count, 0.0),)  # noqa: RUF005
    return rows


@triton.jit
def stack(tiles, H: tl.constexpr, WIDE: tl.constexpr):
    """Tiles as one matrix [OWN * OTHER, WIDE], a column for each head; WIDE is 2, 4, 8 or 16, and columns from H on are zero."""
    for _ in tl.static_range(H, WIDE):
        tiles = tiles + (tiles[0] * 0,)  # noqa: RUF005
    half: tl.constexpr = WIDE // 2
    if half >= 1:
        tiles = pairs(tiles, half)
    if half >= 2:
        tiles = pairs(tiles, half // 2)
    if half >= 4:
        tiles = pairs(tiles, half // 4)
    if half >= 8:
        tiles = pairs(tiles, half // 8)
    whole = tiles[0]
    return tl.reshape(whole, (whole.numel // WIDE, WIDE))


@triton.jit
def pairs(tiles, HALF: tl.constexpr):
    joined = ()
    for place in tl.static_range(HALF):
        joined = joined + (tl.join(tiles[place], tiles[place + HALF]),)  # noqa: RUF005
    return joined
