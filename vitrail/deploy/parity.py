"""Comparison of a rewritten network with its original: fixed images, the error, and the first part that differs."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.deploy.folded_layers import FoldedModel
from vitrail.models.vision_transformer import VisionTransformer

IMAGES = 4


def make_check_images(model: VisionTransformer, size: tuple[int, int]) -> Tensor:
    """Fixed images [4, K, height, width]: two of noise, two smooth ones with the spectrum of photographs."""
    generator = torch.Generator().manual_seed(0)
    shape = (IMAGES // 2, model.architecture.channels)
    noise = torch.randn(*shape, *size, generator=generator)
    smooth = torch.zeros_like(noise)
    side, weight = 2, 1.0
    while side <= max(size):  # half the amplitude at twice the frequency, as in natural images
        octave = torch.randn(*shape, side, side, generator=generator)
        smooth += weight * F.interpolate(octave, size, mode="bilinear", align_corners=False)
        side, weight = 2 * side, weight / 2
    return torch.cat([noise, smooth])


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest absolute difference, divided by the largest expected value; NaN where either has NaN or Inf."""
    gap = (actual.double() - expected.double()).abs().max()
    return float(gap / expected.double().abs().max().clamp(min=1e-30))


@contextmanager
def disable_tf32(device: torch.device) -> Iterator[None]:
    """Compute float32 products in float32: the rounding of TF32 would hide errors of folding."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates these switches for newer ones
        with suppress(RuntimeError):  # raised where the newer ones are in use
            before = (matmul.allow_tf32, cudnn.allow_tf32) if device.type == "cuda" else None
        if before is not None:
            matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        if before is not None:
            matmul.allow_tf32, cudnn.allow_tf32 = before


def first_difference(original: VisionTransformer, folded: FoldedModel, image: Tensor, tolerance: float) -> str:
    """The name of the first part whose output for the same input differs by more than the tolerance."""
    x, layout = original.embed(image)
    if not difference(folded.backbone.stem(image), x) <= tolerance:
        return "the stem"
    start, start_layout = original._add_pos_embed(x, layout)
    if not difference(folded.backbone._add_pos_embed(x, layout)[0], start) <= tolerance:
        return "the position embedding"
    x, layout = start, start_layout
    for index in range(len(original.blocks)):
        x, layout = original._prepare_block_input(index, x, layout)
        actual = folded.backbone.block(index)(x, layout, folded.backbone._relative_pos_embed(index))
        x = original.block(index)(x, layout, original._relative_pos_embed(index))
        if (
            not difference(actual, x[:, : actual.shape[1]]) <= tolerance
        ):  # the last block may compute only the tokens that are read
            return f"block {index}"
    return "the pooling or the heads, or as a sum of small differences"
