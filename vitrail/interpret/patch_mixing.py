"""The cross-patch layers of ResMLP: their rows as images (Fig. 4.2) and the sparsity of all linear layers (Fig. 4.3)."""

import torch
from torch import Tensor

from vitrail.errors import UserError
from vitrail.layers.block import Branch
from vitrail.layers.mlp import FeedForward
from vitrail.layers.token_mixers import PatchLinear
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.pages.charts import LIGHT, add_legend, marker_style, new_figure, render_png, style_axes, use_integer_ticks

CENTRAL = 6  # rows and columns of central patches that are shown
SMALL = 0.05  # of the largest weight of a matrix: smaller ones count as zero
SHOWN = 12  # layers


def cross_patch_layers(model: VisionTransformer) -> list[tuple[PatchLinear, FeedForward]]:
    """The linear layer over the patches and the MLP of every block."""
    found = []
    for index in range(len(model.blocks)):
        bodies = [
            branch.body
            for residual in model.block(index).residuals().values()
            for branch in residual.branches
            if isinstance(branch, Branch)
        ]
        mixers = [body for body in bodies if isinstance(body, PatchLinear)]
        mlps = [body for body in bodies if isinstance(body, FeedForward)]
        found += list(zip(mixers, mlps, strict=False))  # blocks of other models have no such layer
    if not found:
        raise UserError("Cross-patch mosaics need linear layers over the patches, as ResMLP has; this model has none.")
    return found


@torch.no_grad()
def patch_mosaics(model: VisionTransformer) -> list[Tensor]:
    """For each layer the weights that build the central patches from all others: [6, 6, rows, columns], fewer of a small grid."""
    mosaics = []
    for mixer, _ in cross_patch_layers(model):
        images = mixer.map.weight.detach().float().cpu().unflatten(1, mixer.grid).unflatten(0, mixer.grid)
        (top, down), (left, across) = ((max((side - CENTRAL) // 2, 0), min(side, CENTRAL)) for side in mixer.grid)
        mosaics.append(images[top : top + down, left : left + across])
    return mosaics


@torch.no_grad()
def weight_sparsity(model: VisionTransformer) -> dict[str, list[float]]:
    """The share of weights below 5 % of the largest, by layer, of A (cross-patch), B and C (the MLP)."""

    def share(weight: Tensor) -> float:
        size = weight.detach().abs()
        return float((size < SMALL * size.max()).float().mean())

    layers = cross_patch_layers(model)
    return {
        "A, cross-patch": [share(mixer.map.weight) for mixer, _ in layers],
        "B, first of the MLP": [share(mlp.fc1.weight) for _, mlp in layers],
        "C, second of the MLP": [share(mlp.fc2.weight) for _, mlp in layers],
    }


def draw_mosaics(model: VisionTransformer) -> bytes:
    """The mosaics of up to twelve layers, each on its own scale around zero, as PNG."""
    mosaics = patch_mosaics(model)
    chosen = sorted({round(index) for index in torch.linspace(0, len(mosaics) - 1, min(len(mosaics), SHOWN)).tolist()})
    columns = min(len(chosen), 4)
    rows = -(-len(chosen) // columns)
    height = 2.15 * rows + 0.1
    with new_figure(LIGHT, (2 * columns, height)) as figure:
        tiles = figure.subplots(rows, columns, squeeze=False)
        for axes in tiles.flat:
            axes.set_axis_off()
        for axes, layer in zip(tiles.flat, chosen, strict=False):
            images = torch.nn.functional.pad(mosaics[layer], (0, 1, 0, 1), value=torch.nan)  # a line between the images
            mosaic = images.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
            limit = float(mosaics[layer].abs().max())
            axes.imshow(mosaic.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
            axes.set_title(f"layer {layer}", fontsize=9, color=LIGHT.foreground)
        figure.subplots_adjust(0.01, 0.01, 0.99, 1 - 0.25 / height, 0.05, 0.15)
        return render_png(figure)


def draw_sparsity(model: VisionTransformer) -> bytes:
    """Three curves over the layers, as PNG."""
    with new_figure(LIGHT, (7, 3.6)) as figure:
        axes = figure.subplots()
        style_axes(axes, "Share of weights below 5 % of the largest", LIGHT)
        for (name, values), color in zip(weight_sparsity(model).items(), (LIGHT.blue, LIGHT.orange, LIGHT.green), strict=True):
            axes.plot(values, color=color, label=name, **marker_style(values))
        axes.set_xlabel("layer", color=LIGHT.muted)
        axes.set_ylim(0, 1)
        add_legend(axes, LIGHT, "")
        use_integer_ticks(axes)
        figure.tight_layout()
        return render_png(figure)
