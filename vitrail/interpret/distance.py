"""Mean attention distance of every head and layer, the receptive field of attention (ViT, Figs 7 and 11)."""

import torch
from torch import Tensor

from vitrail.errors import UserError
from vitrail.interpret.attention import Recording
from vitrail.pages.charts import LIGHT, new_figure, render_png, style_axes, use_integer_ticks


@torch.no_grad()
def attention_distances(recording: Recording) -> dict[int, Tensor]:
    """Mean distance in pixels between a patch and those it attends to, by layer: [heads, B].

    Distances between the centers of patches are weighted with the attention, without prefix tokens, and averaged over patches.
    """
    layers = [layer for layer in range(len(recording.blocks)) if recording.has_attention(layer)]
    if not layers:
        raise UserError("Attention distances need blocks with attention, which this model does not have.")
    (rows, columns), (height, width) = recording.grid, recording.covered
    device = recording.images.device
    y, x = torch.meshgrid(torch.arange(rows, device=device), torch.arange(columns, device=device), indexing="ij")
    centers = torch.stack([y.flatten() * (height / rows), x.flatten() * (width / columns)], 1).float()
    found = {}
    for layer in layers:
        prefix, total = recording.prefix_of(layer), torch.zeros((), device=device)
        for index, weights in recording.row_chunks(layer):
            inside = index >= prefix
            patches = weights[:, :, inside, prefix:].float()
            patches = patches / patches.sum(-1, keepdim=True)
            distances = torch.cdist(centers[index[inside] - prefix], centers, compute_mode="donot_use_mm_for_euclid_dist")
            total = total + (patches * distances).sum((2, 3))
        found[layer] = (total / (rows * columns)).T.cpu()
    return found


def draw_distances(distances: dict[int, Tensor]) -> bytes:
    """A point per head over the layers, the mean of the images, as PNG."""
    with new_figure(LIGHT, (7, 4)) as figure:
        axes = figure.subplots()
        style_axes(axes, "Mean attention distance (pixels)", LIGHT)
        for layer, values in ((layer, each.mean(1)) for layer, each in distances.items()):
            colors = [f"C{head % 10}" for head in range(len(values))]
            axes.scatter([layer] * len(values), values.tolist(), c=colors, s=22, linewidths=0)
        axes.set_xlabel("layer; a point per head", color=LIGHT.muted)
        axes.set_ylim(0, 1.05 * max(float(values.mean(1).max()) for values in distances.values()))
        use_integer_ticks(axes)
        figure.tight_layout()
        return render_png(figure)
