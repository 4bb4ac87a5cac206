"""Principal components of the filters that embed the patches (ViT, Fig. 7 left)."""

import torch
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.pages.charts import LIGHT, new_figure, render_png

COMPONENTS = 28


@torch.no_grad()
def filter_components(model: VisionTransformer, count: int = COMPONENTS) -> tuple[Tensor, Tensor]:
    """The first principal components of the filters of the stem [count, P, P, 3], and their share of the variance [count].

    The filters are the rows of the linear patch embedding, or those of the first convolution of another stem.
    """
    weight = next((module.weight for module in model.stem.modules() if isinstance(module, nn.Conv2d | nn.Linear)), None)
    if weight is not None and weight.ndim == 2:  # a linear layer over the pixels of a patch
        side = round((weight.shape[1] / model.architecture.channels) ** 0.5)
        weight = weight.unflatten(1, (model.architecture.channels, side, side))
    if weight is None or weight.shape[1] != 3:
        raise UserError("Principal components of filters are drawn in color: this model has no filters of three channels.")
    flat = weight.detach().double().cpu().flatten(1)
    if min(flat.shape) <= count:  # the components would be another basis of all filters
        raise UserError(
            f"{count} principal components of filters need more than {count} filters of more than {count} values: this model has "
            f"{len(flat)} of {' x '.join(map(str, weight.shape[1:]))}."
        )
    _, singular, components = torch.linalg.svd(flat - flat.mean(0), full_matrices=False)
    share = singular**2 / (singular**2).sum()
    out = components[:count].unflatten(1, weight.shape[1:]).permute(0, 2, 3, 1)
    return out.float(), share[:count].float()


def draw_filters(model: VisionTransformer) -> bytes:
    """The components as color images, seven in a row, each scaled to its own range, as PNG."""
    components, share = filter_components(model)
    rows = -(-len(components) // 7)
    with new_figure(LIGHT, (7, rows + 0.5)) as figure:
        figure.suptitle(
            f"{len(components)} principal components of the filters, {100 * float(share.sum()):.0f} % of their variance",
            fontsize=10,
        )
        tiles = figure.subplots(rows, 7, squeeze=False)
        for axes in tiles.flat:
            axes.set_axis_off()
        for axes, image in zip(tiles.flat, components, strict=False):
            low, high = image.min(), image.max()
            axes.imshow(((image - low) / (high - low).clamp(min=1e-12)).numpy(), interpolation="nearest")
        figure.subplots_adjust(0.01, 0.01, 0.99, 1 - 0.4 / (rows + 0.5), 0.06, 0.06)
        return render_png(figure)
