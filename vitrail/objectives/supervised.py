"""Learning from labels."""

from torch import Tensor, nn

from vitrail.models.model import Model
from vitrail.objectives.classification import classification_loss
from vitrail.recipes.recipe import Objective


class Supervised(nn.Module):
    """A model and its loss as one module: what is compiled, replicated and sharded is this."""

    def __init__(self, model: Model, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        """Images [B, 3, height, width] and targets [B, C] to the loss."""
        return classification_loss(self.model(images), targets, self.objective)
