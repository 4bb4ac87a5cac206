"""Projector and predictor of Grafit (arXiv 2011.12982): small networks on the pooled vector of a backbone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor, nn

from vitrail.errors import UserError

ProjectorKind = Literal["linear", "mlp"]
MAX_WIDTH = 1 << 16


@dataclass(frozen=True)
class EmbeddingConfig:
    """A projector, which maps the pooled vector to the embedding that is searched."""

    kind: ProjectorKind = "mlp"
    outputs: int = 256
    hidden: int = 4096  # of the MLP
    blocks: tuple[int, ...] = ()  # always empty: the input is the pooled vector

    def check(self) -> None:
        """Raise UserError for values that no projector has: a file may contain anything."""
        sizes = all(type(value) is int and 1 <= value <= MAX_WIDTH for value in (self.outputs, self.hidden))
        if self.kind not in get_args(ProjectorKind) or not sizes or self.blocks:
            kinds = " or ".join(get_args(ProjectorKind))
            raise UserError(
                f"a projector is {kinds}, reads the pooled vector, and has 1 to {MAX_WIDTH} outputs and hidden channels."
            )


class EmbeddingHead(nn.Module):
    """Pooled vectors [B, D] to embeddings [B, outputs], which are compared by their cosines: they are not normalized here."""

    def __init__(self, config: EmbeddingConfig, channels: Sequence[int], strides: Sequence[int]) -> None:
        super().__init__()
        config.check()
        self.config = config
        width = channels[-1]
        self.layers = nn.Linear(width, config.outputs) if config.kind == "linear" else mlp(width, config.hidden, config.outputs)

    def forward(self, pooled: Tensor) -> Tensor:
        out: Tensor = self.layers(pooled)
        return out


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Linear, BatchNorm, ReLU, linear without bias: the projector and the predictor of BYOL (arXiv 2006.07733)."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, outputs, bias=False))
