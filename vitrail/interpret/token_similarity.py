"""Cosine similarity of tokens by layer: among patches, and between the class and the distillation token (DeiT)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import UserError
from vitrail.interpret.attention import Recording, plain_forward
from vitrail.layers.pooling import QueryPooling
from vitrail.pages.charts import LIGHT, add_legend, marker_style, new_figure, render_png, style_axes, use_integer_ticks

LEARNED = "class and distillation, learned"


@torch.no_grad()
def token_cosines(recording: Recording) -> dict[str, Tensor]:
    """Mean cosine similarity at the input of each block and at the end: [layers + 1, B].

    "patches": of pairs of patches; "class and patches"; "class and distillation" (NaN in layers without these tokens); `LEARNED`
    [1, B]: of the parameters of these two tokens, to which the input of the first block adds position embeddings.
    """
    if not recording.blocks:
        raise UserError("Similarities of tokens by layer need transformer blocks, which this model does not have.")
    rows = [cosines(tokens.detach(), layout.prefix) for tokens, layout, _ in recording.blocks]
    with plain_forward(recording.model):
        rows.append(final_cosines(recording))
    names = ("patches", "class and patches", "class and distillation")
    found = {name: torch.stack(values).float().cpu() for name, values in zip(names, zip(*rows, strict=True), strict=True)}
    found = {name: values for name, values in found.items() if not values.isnan().all()}
    learned, pooling = recording.model.prefix, recording.model.pooling
    if isinstance(pooling, QueryPooling) and recording.model.architecture.pooling == "class_attention":
        learned = pooling.queries
    if learned is not None and len(learned) == 2:
        similarity = F.cosine_similarity(learned[0].double(), learned[1].double(), dim=0)
        found[LEARNED] = similarity.float().cpu().expand(1, len(recording.images))
    return found


def final_cosines(recording: Recording) -> tuple[Tensor, Tensor, Tensor]:
    """The cosines after the last block and the final norm; of a pooling, with its queries as class and distillation tokens."""
    last, layout, relative = recording.blocks[-1]
    tokens = recording.model.block(len(recording.blocks) - 1)(last.detach(), layout, relative)
    if recording.pooling and recording.model.architecture.pooling == "class_attention":
        queries = recording.features.prefix.detach()
        return cosines(torch.cat([queries, recording.model.norm(tokens)], 1), queries.shape[1])
    return cosines(tokens if recording.model.architecture.pool_norm else recording.model.norm(tokens), layout.prefix)


def cosines(tokens: Tensor, prefix: int) -> tuple[Tensor, Tensor, Tensor]:
    """The three means [B] of tokens [B, T, D]; the mean of all pairs follows from the norm of the sum of unit vectors."""
    unit = F.normalize(tokens.double(), dim=-1)
    patches, count = unit[:, prefix:], unit.shape[1] - prefix
    pairs = (patches.sum(1).square().sum(-1) - count) / max(count * (count - 1), 1)
    first = (unit[:, :1] * patches).sum(-1).mean(1) if prefix else torch.full_like(pairs, torch.nan)
    both = (unit[:, 0] * unit[:, 1]).sum(-1) if prefix > 1 else torch.full_like(pairs, torch.nan)
    return pairs, first, both


def draw_token_cosines(similar: dict[str, Tensor]) -> bytes:
    """A curve per kind of pair over the layers, the mean of the images, as PNG."""
    with new_figure(LIGHT, (7, 3.6)) as figure:
        axes = figure.subplots()
        style_axes(axes, "Cosine similarity of tokens", LIGHT)
        colors = {"patches": LIGHT.blue, "class and patches": LIGHT.orange, "class and distillation": LIGHT.green}
        for name, color in colors.items():
            if name in similar:
                values = similar[name].mean(1)
                axes.plot(values.tolist(), color=color, label=name, **marker_style(values))
        if LEARNED in similar:
            value = float(similar[LEARNED][0, 0])
            axes.plot([0], [value], "D", color=LIGHT.green, fillstyle="none", label=f"{LEARNED}: {value:.2f}")
        axes.set_xlabel("input of layer; last: after the final norm", color=LIGHT.muted)
        axes.set_ylim(top=1.05)
        add_legend(axes, LIGHT, "")
        use_integer_ticks(axes)
        figure.tight_layout()
        return render_png(figure)
