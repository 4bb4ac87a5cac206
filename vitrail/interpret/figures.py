"""The papers' figures for any model, by name: measured on images that are recorded pass by pass, drawn as PNG at the end."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrail.errors import UserError
from vitrail.interpret.attention import Recording
from vitrail.interpret.branch_norms import branch_norms, draw_branch_norms
from vitrail.interpret.distance import attention_distances, draw_distances
from vitrail.interpret.filters import draw_filters
from vitrail.interpret.patch_mixing import draw_mosaics, draw_sparsity
from vitrail.interpret.position import draw_position_similarity
from vitrail.interpret.token_similarity import draw_token_cosines, token_cosines

MAX_IMAGES = 128  # that a figure is the mean of, as in the paper of ViT

Measured = dict[Any, Tensor]  # values by layer or kind; the last axis is that of the images


class PaperFigure(NamedTuple):
    """A figure of a paper: `draw` takes what `measure` found in all images, or the model if nothing is measured."""

    draw: Callable[[Any], bytes]
    title: str
    origin: str
    measure: Callable[[Recording], Measured] | None = None


FIGURES = {
    "distance": PaperFigure(
        draw_distances, "Mean attention distance of every head and layer", "ViT, Figs 7 and 11", attention_distances
    ),
    "position": PaperFigure(draw_position_similarity, "Similarity of position embeddings", "ViT, Figs 7 and 10"),
    "filters": PaperFigure(draw_filters, "Principal components of the patch embedding", "ViT, Fig. 7"),
    "mosaics": PaperFigure(draw_mosaics, "Weights between patches: the rows of the central patches", "ResMLP, Fig. 4.2"),
    "sparsity": PaperFigure(draw_sparsity, "Sparsity of the linear layers", "ResMLP, Fig. 4.3"),
    "branch-norms": PaperFigure(
        lambda norms: draw_branch_norms({"": norms}), "Norm of the residual branches", "CaiT, Fig. 4", branch_norms
    ),
    "token-cosines": PaperFigure(draw_token_cosines, "Similarity of tokens by layer", "DeiT, Section 3.3", token_cosines),
}


class PaperFigures:
    """Collects what the figures need from one recording after another, of at most `MAX_IMAGES` images."""

    def __init__(self) -> None:
        self.images = 0
        self.drawn: dict[str, bytes] = {}
        self.reasons: dict[str, str] = {}  # why this model does not have a figure
        self.measured: dict[str, list[Measured]] = {}

    def add(self, recording: Recording) -> None:
        """Measure the images of a recording; the first one also draws the figures of the model."""
        if self.images >= MAX_IMAGES:
            return
        for name, figure in FIGURES.items():
            if name in self.drawn or name in self.reasons:
                continue
            try:
                if figure.measure is None:
                    self.drawn[name] = figure.draw(recording.model)
                else:
                    values = figure.measure(recording)
                    self.measured.setdefault(name, []).append(values)
            except UserError as error:
                self.reasons[name] = str(error)
        self.images += len(recording.images)

    def draw(self) -> dict[str, bytes]:
        """The figures that the model has, as PNG by name."""
        found = dict(self.drawn)
        for name, parts in self.measured.items():
            found[name] = FIGURES[name].draw({key: torch.cat([part[key] for part in parts], -1) for key in parts[0]})
        return {name: found[name] for name in FIGURES if name in found}
