"""What a network is given: images that it can answer; everything else is refused in a sentence."""

from typing import Any

from torch import Tensor

from vitrail.errors import UserError
from vitrail.layers.pos_embed import Grid
from vitrail.models.config import Architecture

TIED = ("linear", "mlp", "class_mlp")  # mixers and pooling layers with a weight for each patch


def check_given(
    image: Any, a: Architecture, stem: Any, grid: Grid, what: str = "the images", resized: str = "of the model first"
) -> None:
    """Refuses what a network with this stem and patch grid cannot answer; some of it would give an answer, and a wrong one.

    It looks at shape and type alone, never at a number, so nobody waits for a GPU. `resized` says whose `resize` is meant.
    """
    if not isinstance(image, Tensor) or image.ndim != 4 or image.shape[1] != a.channels:
        found = f"one of shape {tuple(image.shape)}" if isinstance(image, Tensor) else f"a {type(image).__name__}"
        hint = ""
        if isinstance(image, Tensor) and image.ndim == 3 and len(image) == a.channels:
            hint = "; a single image is image[None]"
        elif isinstance(image, Tensor) and image.ndim == 4 and image.shape[-1] == a.channels:
            hint = "; image.permute(0, 3, 1, 2) has the channels first"
        raise UserError(f"{what} must be a tensor [batch, {a.channels}, height, width], not {found}{hint}.")
    if not image.is_floating_point():
        raise UserError(
            f"{what} must be floating-point numbers, not {image.dtype}; divide pixels by 255 and normalize them with the model's "
            "preprocessing.mean and preprocessing.std."
        )
    height, width = image.shape[-2:]
    rows, columns = stem.grid(height, width)
    if min(rows, columns) < 1:
        raise UserError(f"images of {height} x {width} pixels have no patch of {a.patch_size}; give larger ones.")
    if (rows, columns) != grid and (a.mixer in TIED or a.pooling in TIED):
        raise UserError(
            f"images of {height} x {width} pixels have {rows} x {columns} patches, and this network mixes a fixed grid of "
            f"{grid[0]} x {grid[1]}; call resize({height}, {width}) {resized}."
        )
