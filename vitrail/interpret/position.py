"""Similarity of position embeddings (ViT, Figs 7 and 10)."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import UserError
from vitrail.layers.layout import Layout
from vitrail.layers.pos_embed import ABSOLUTE
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.pages.charts import LIGHT, new_figure, render_png

SHOWN = 14  # tiles per side at most


@torch.no_grad()
def position_similarity(model: VisionTransformer) -> Tensor:
    """Cosine similarity of the position embeddings of all pairs of patches: [rows, columns, rows, columns]."""
    a = model.architecture
    if a.pos_embed not in ABSOLUTE:
        raise UserError(f"Tiles of position embeddings need one vector per patch; this model has pos_embed={a.pos_embed!r}.")
    layout = Layout(*model.grid, prefix=a.pos_embed_prefix_rows)
    table: Tensor = model.pos_embed[0](layout, next(model.parameters()).device)
    vectors = F.normalize(table[a.pos_embed_prefix_rows :].double(), dim=1)
    out: Tensor = (vectors @ vectors.T).float().cpu().unflatten(1, model.grid).unflatten(0, model.grid)
    return out


def draw_position_similarity(model: VisionTransformer) -> bytes:
    """A tile for each patch: the similarity of its position embedding to all others, from -1 to 1, as PNG."""
    similarity = position_similarity(model)
    rows, columns = (torch.linspace(0, side - 1, min(side, SHOWN)).round().long().tolist() for side in similarity.shape[:2])
    tall = 6 * len(rows) / len(columns)
    with new_figure(LIGHT, (7.2, tall + 0.5)) as figure:
        tiles = figure.subplots(len(rows), len(columns), squeeze=False, gridspec_kw={"wspace": 0.12, "hspace": 0.12})
        figure.subplots_adjust(0.3 / 7.2, 0.4 / (tall + 0.5), 6.3 / 7.2, 1 - 0.1 / (tall + 0.5))
        for line, row in zip(tiles, rows, strict=True):
            for axes, column in zip(line, columns, strict=True):
                shown = axes.imshow(similarity[row, column].numpy(), vmin=-1, vmax=1, cmap="viridis", interpolation="nearest")
                axes.set_axis_off()
        figure.colorbar(shown, cax=figure.add_axes((6.4 / 7.2, 0.15, 0.12 / 7.2, 0.75)), label="cosine similarity")
        place: dict[str, Any] = {"ha": "center", "va": "center", "color": LIGHT.muted}
        figure.text(3.3 / 7.2, 0.2 / (tall + 0.5), "column of the patch", **place)
        figure.text(0.15 / 7.2, 0.5, "row of the patch", rotation=90, **place)
        return render_png(figure)
