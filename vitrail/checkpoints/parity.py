"""Do two models say the same?"""

import torch

from vitrail.models.vision_transformer import VisionTransformer


def logit_difference(first: VisionTransformer, second: VisionTransformer) -> tuple[float, float]:
    """(largest absolute difference, largest absolute logit) on two fixed inputs at the first model's size."""
    size = first.architecture.image_size
    image = torch.randn(2, first.architecture.channels, *size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        one, two = first.eval()(image), second.eval()(image)
    if one.shape != two.shape:
        return float("inf"), one.abs().max().item()
    return (one - two).abs().max().item(), one.abs().max().item()
