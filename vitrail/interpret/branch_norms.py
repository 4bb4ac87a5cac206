"""The norm of each residual branch relative to its input, by layer (CaiT, Fig. 4)."""

import torch
from torch import Tensor

from vitrail.errors import UserError
from vitrail.interpret.attention import Recording, without_autocast
from vitrail.models.evaluation_mode import evaluation_mode
from vitrail.models.vision_transformer import branch_ratios
from vitrail.pages.charts import LIGHT, add_legend, marker_style, new_figure, render_png, style_axes, use_integer_ticks

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


def draw_branch_norms(norms: dict[str, Tensor]) -> bytes:
    """The mean over the images and the range, one panel per kind of branch, as PNG."""
    with new_figure(LIGHT, (7, 2.4 * len(norms) + 0.4)) as figure:
        panels = figure.subplots(len(norms), squeeze=False)[:, 0]
        for axes, (name, values) in zip(panels, norms.items(), strict=True):
            style_axes(axes, f"|branch| / |input|: {TITLES[name]}", LIGHT)
            layers = range(len(values))
            axes.fill_between(layers, values.amin(1).tolist(), values.amax(1).tolist(), color=LIGHT.blue, alpha=0.2, linewidth=0)
            label = f"mean of {values.shape[1]} images" if values.shape[1] > 1 else "one image"
            axes.plot(layers, values.mean(1).tolist(), color=LIGHT.blue, label=label, **marker_style(layers))
            axes.set_ylim(0, 1.05 * float(values.max()))
            use_integer_ticks(axes)
            add_legend(axes, LIGHT, "")
        panels[-1].set_xlabel("layer", color=LIGHT.muted)
        figure.tight_layout()
        return render_png(figure)
