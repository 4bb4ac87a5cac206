"""What segmentation and detection share: a model with a head of its own, and how it is built and trained."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.evaluation.semantic_masks import needs_window
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes.schema import Recipe
from vitrail.tasks.masked_patches import freeze_unused
from vitrail.training.task import Task


class DenseModule(nn.Module):
    """A model with its head. A frozen trunk stays in evaluation mode: neither stochastic depth nor new BatchNorm statistics."""

    def __init__(self, model: VisionTransformer) -> None:
        super().__init__()
        assert model.task_head is not None
        self.model = model
        head = set(model.task_head.parameters())
        self.frozen = not any(parameter.requires_grad for parameter in model.parameters() if parameter not in head)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.frozen:
            self.model.eval()
            assert self.model.task_head is not None
            self.model.task_head.train(mode)
        return self


class DenseTask(Task):
    """A task whose head is part of the artifact and whose targets move with the pixels."""

    keeps_head = True
    head_cost: float  # multiply-adds of the head relative to those of the model

    @classmethod
    def resolve_recipe(cls, recipe: Recipe, explicit: frozenset[str]) -> Recipe:
        if recipe.mixes_images or recipe.augmentation.random_erasing:
            raise UserError(
                f"{cls.__name__} does not mix or erase images: set mixing.mixup=0, mixing.cutmix=0, token_labels.mixtoken=0 and "
                "augmentation.random_erasing=0."
            )
        if recipe.data.decode_scale:
            raise UserError(f"{cls.__name__} reads images at the size of their masks and boxes: set data.decode_scale=0.")
        return recipe

    def attach_head(self, model: VisionTransformer, config: Any) -> None:
        """Give the model a new head, or that of its weights if the classes and all shapes are the same."""
        before: Any = model.task_head
        torch.manual_seed(self.recipe.seed)
        model.set_task_head(config)
        head: Any = model.task_head
        if type(before) is type(head) and before.config.class_names == config.class_names:
            shapes = {name: tensor.shape for name, tensor in before.state_dict().items()}
            if shapes == {name: tensor.shape for name, tensor in head.state_dict().items()}:
                head.load_state_dict(before.state_dict())
                self.messages.append(f"the {model.task} head of the weights is trained further")
        freeze_unused(model)
        freeze_unread(model, config.blocks)

    def choose_window(self, model: VisionTransformer, window: int, title: str) -> int:
        """The side of windows, which is that of the crops for a model with weights for each patch."""
        height, width = self.recipe.augmentation.image_size
        if not needs_window(model):
            return window
        if height != width:
            raise UserError(f"{model.name} has weights for each patch: give a square image size for its {title}.")
        return height

    @property
    def relative_cost(self) -> float:
        return 1.0 + self.head_cost


def freeze_unread(model: VisionTransformer, blocks: Sequence[int]) -> None:
    """Freeze what the feature maps do not depend on: with `blocks`, what comes after the last of them; a convnet's final norm."""
    if blocks:
        end = max(blocks) + 1
        tables = model.pos_embed[end:] if model.architecture.pos_embed_place == "layers" else nn.ModuleList()
        for part in (*model.blocks[end:], *tables):
            part.requires_grad_(False)
        if model.prefix is not None and model.architecture.class_token_at >= end:
            model.prefix.requires_grad_(False)
    if blocks or not model.blocks:
        model.norm.requires_grad_(False)


def feature_shapes(model: VisionTransformer, blocks: Sequence[int]) -> tuple[list[Tensor], list[int]]:
    """Blank feature maps of an image of the model's size, and their strides."""
    a, (height, width) = model.architecture, model.grid
    if a.convnet and not model.blocks:
        strides = [a.convnet.stride >> index for index in reversed(range(len(a.convnet.widths)))]
        scales = [a.patch_size // stride for stride in strides]
        sizes = zip(a.convnet.widths, scales, strict=True)
        return [torch.zeros(1, channels, height * scale, width * scale) for channels, scale in sizes], strides
    maps = max(len(blocks), 1)
    return [torch.zeros(1, a.width, height, width) for _ in range(maps)], [a.patch_size] * maps
