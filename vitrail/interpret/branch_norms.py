"""The norm of each residual branch relative to its input, by layer (CaiT, Fig. 4)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from vitrail.errors import UserError
from vitrail.interpret.attention import Recording, without_autocast
from vitrail.models.evaluation_mode import evaluation_mode
from vitrail.models.vision_transformer import branch_ratios
from vitrail.pages.charts import (
    LIGHT,
    add_legend,
    marker_style,
    new_figure,
    render_png,
    series_colors,
    style_axes,
    use_integer_ticks,
)

TITLES = {"mix": "token mixing", "ffn": "MLP"}


@torch.no_grad()
@without_autocast()
def branch_norms(recording: Recording) -> dict[str, Tensor]:
    """|branches| / |input| of the residuals "mix" and "ffn" in every block: [layers, B]."""
    if not recording.blocks:
        raise UserError("Norms of residual branches need transformer blocks, which this model does not have.")
    found: dict[str, list[Tensor]] = {}
    for index, (tokens, layout, relative) in enumerate(recording.blocks):
        block = recording.model.block(index)
        with evaluation_mode(block):
            for name, ratios in branch_ratios(block, tokens.detach(), layout, relative).items():
                found.setdefault(name, []).append(ratios)
    return {name: torch.stack(values).float().cpu() for name, values in found.items()}


def draw_branch_norms(models: Mapping[str, Mapping[str, Tensor]]) -> bytes:
    """Labels of models and their norms: the mean over the images and the range, one panel per kind of branch, as PNG."""
    kinds = [kind for kind in TITLES if any(kind in norms for norms in models.values())]
    colors = series_colors(len(models))
    with new_figure(LIGHT, (7, 2.4 * len(kinds) + 0.4)) as figure:
        panels = figure.subplots(len(kinds), squeeze=False)[:, 0]
        for axes, kind in zip(panels, kinds, strict=True):
            style_axes(axes, f"|branch| / |input|: {TITLES[kind]}", LIGHT)
            for (model, norms), color in zip(models.items(), colors, strict=True):
                if kind not in norms:
                    continue
                values = norms[kind]
                layers = range(len(values))
                axes.fill_between(layers, values.amin(1).tolist(), values.amax(1).tolist(), color=color, alpha=0.2, linewidth=0)
                count = f"mean of {values.shape[1]} images" if values.shape[1] > 1 else "one image"
                label = f"{model}: {count}" if model else count
                axes.plot(layers, values.mean(1).tolist(), color=color, label=label, **marker_style(layers))
            axes.set_ylim(0, 1.05 * max(float(norms[kind].max()) for norms in models.values() if kind in norms))
            use_integer_ticks(axes)
            add_legend(axes, LIGHT, "")
        panels[-1].set_xlabel("layer", color=LIGHT.muted)
        figure.tight_layout()
        return render_png(figure)
