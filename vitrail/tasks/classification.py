"""Learning from labels, from a teacher, from labels of patches."""

from torch import Tensor, nn

from vitrail.models.vision_transformer import VisionTransformer, mix_tokens
from vitrail.recipes.schema import Recipe
from vitrail.tasks.distillation import distillation_loss
from vitrail.tasks.losses import classification_loss
from vitrail.tasks.targets import Targets
from vitrail.tasks.token_labels import token_loss


class Supervised(nn.Module):
    """A model and its loss as one module: what is compiled, replicated and sharded is this."""

    def __init__(self, model: VisionTransformer, recipe: Recipe) -> None:
        super().__init__()
        self.model, self.recipe = model, recipe

    def forward(self, images: Tensor, targets: Targets) -> Tensor:
        """Images [B, 3, height, width] to the loss."""
        recipe, out = self.recipe, self.model.outputs(images, targets.mixed)
        loss = classification_loss(out.main, targets.classes, recipe.loss)
        if targets.teacher is not None:
            weight, student = recipe.distillation.weight, out.main if out.distillation is None else out.distillation
            loss = (1 - weight) * loss + weight * distillation_loss(student, targets.teacher, recipe.distillation)
        elif out.distillation is not None:  # nobody teaches: two class tokens
            loss = (loss + classification_loss(out.distillation, targets.classes, recipe.loss)) / 2
        if targets.tokens is not None:
            assert out.dense is not None
            dense = out.dense
            if targets.mixed is not None and recipe.token_labels.mixtoken_on == "predictions":
                dense = mix_tokens(dense, targets.mixed)
            loss = loss + recipe.token_labels.weight * token_loss(dense, targets.tokens)
        return loss
