"""The MLP of a transformer block."""

from torch import Tensor, nn

from vitrail.layers.layout import Layout
from vitrail.layers.norm import activation


class FeedForward(nn.Module):
    """Two linear layers on each token with an activation between them."""

    def __init__(self, width: int, hidden: int, act: str = "gelu", dropout: float = 0.0, linear: type[nn.Linear] = nn.Linear):
        super().__init__()
        self.fc1 = linear(width, hidden)
        self.activation = activation(act)
        self.fc2 = linear(hidden, width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor, layout: Layout | None = None, relative: nn.Module | None = None) -> Tensor:
        x = self.dropout(self.activation(self.fc1(x)))
        out: Tensor = self.dropout(self.fc2(x))
        return out
