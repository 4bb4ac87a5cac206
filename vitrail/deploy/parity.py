"""Is a rewritten network the same function? Images to ask both about, and where they first part."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.deploy.folded_layers import Folded
from vitrail.models.vision_transformer import VisionTransformer

IMAGES = 4


def check_images(model: VisionTransformer, size: tuple[int, int]) -> Tensor:
    """Fixed images [4, K, height, width]: two of noise, two with the smooth large shapes of photographs."""
    generator = torch.Generator().manual_seed(0)
    shape = (IMAGES // 2, model.architecture.channels)
    noise = torch.randn(*shape, *size, generator=generator)
    smooth = torch.zeros_like(noise)
    side, weight = 2, 1.0
    while side <= max(size):  # half as strong at twice the frequency, as natural images are
        octave = torch.randn(*shape, side, side, generator=generator)
        smooth += weight * F.interpolate(octave, size, mode="bilinear", align_corners=False)
        side, weight = 2 * side, weight / 2
    return torch.cat([noise, smooth])


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest expected number; not a number where either is not finite."""
    gap = (found.double() - expected.double()).abs().max()
    return float(gap / expected.double().abs().max().clamp(min=1e-30))


@contextmanager
def full_products(device: torch.device) -> Iterator[None]:
    """Products in float32 as float32: TF32 would hide in its rounding what is looked for."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces newer switches, which leave these behind
        with suppress(RuntimeError):  # where the newer ones are in use it refuses to speak of these
            before = (matmul.allow_tf32, cudnn.allow_tf32) if device.type == "cuda" else None
        if before is not None:
            matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        if before is not None:
            matmul.allow_tf32, cudnn.allow_tf32 = before


def first_difference(original: VisionTransformer, folded: Folded, image: Tensor, tolerance: float) -> str:
    """The first part whose answer to one and the same input differs by more than the tolerance."""
    x, layout = original.embed(image)
    if not difference(folded.trunk.stem(image), x) <= tolerance:
        return "the stem"
    start, begin = original._start(x, layout)
    if not difference(folded.trunk._start(x, layout)[0], start) <= tolerance:
        return "the positions"
    x, layout = start, begin
    for index in range(len(original.blocks)):
        x, layout = original._before(index, x, layout)
        found = folded.trunk.block(index)(x, layout, folded.trunk._relative(index))
        x = original.block(index)(x, layout, original._relative(index))
        if not difference(found, x[:, : found.shape[1]]) <= tolerance:  # the last block may answer for the tokens that are read
            return f"block {index}"
    return "the pooling and the heads, or the sum of small differences"
