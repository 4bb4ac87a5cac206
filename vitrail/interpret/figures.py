"""The figures of the papers for any model, by name: each is drawn from one recorded forward pass, as PNG."""

from collections.abc import Callable
from typing import NamedTuple

from vitrail.errors import UserError
from vitrail.interpret.attention import Recording
from vitrail.interpret.branch_norms import draw_branch_norms
from vitrail.interpret.distance import draw_distances
from vitrail.interpret.filters import draw_filters
from vitrail.interpret.patch_mixing import draw_mosaics, draw_sparsity
from vitrail.interpret.position import draw_position_similarity
from vitrail.interpret.token_similarity import draw_token_cosines


class PaperFigure(NamedTuple):
    """A figure of a paper."""

    draw: Callable[[Recording], bytes]
    title: str
    origin: str


FIGURES = {
    "distance": PaperFigure(draw_distances, "Mean attention distance of every head and layer", "ViT, Figs 7 and 11"),
    "position": PaperFigure(draw_position_similarity, "Similarity of position embeddings", "ViT, Figs 7 and 10"),
    "filters": PaperFigure(draw_filters, "Principal components of the patch embedding", "ViT, Fig. 7"),
    "mosaics": PaperFigure(draw_mosaics, "Weights between patches: the rows of the central patches", "ResMLP, Fig. 4.2"),
    "sparsity": PaperFigure(draw_sparsity, "Sparsity of the linear layers", "ResMLP, Fig. 4.3"),
    "branch-norms": PaperFigure(draw_branch_norms, "Norm of the residual branches", "CaiT, Fig. 4"),
    "token-cosines": PaperFigure(draw_token_cosines, "Similarity of tokens by layer", "DeiT, Section 3.3"),
}


def draw_figures(recording: Recording) -> tuple[dict[str, bytes], dict[str, str]]:
    """The figures that this model has, as PNG by name, and for the others the reason."""
    drawn, reasons = {}, {}
    for name, figure in FIGURES.items():
        try:
            drawn[name] = figure.draw(recording)
        except UserError as error:
            reasons[name] = str(error)
    return drawn, reasons
