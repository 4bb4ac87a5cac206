"""The networks that are exported: from normalized images to logits, features or a class for every pixel."""

import copy

from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.evaluation.features import compute_features
from vitrail.evaluation.image_index import choose_kind
from vitrail.models.vision_transformer import VisionTransformer

OUTPUTS = {"classification": "logits", "features": "features", "segmentation": "logits"}  # name of the output


class ExportedNetwork(nn.Module):
    """float32 images [B, 3, height, width] to float32 outputs of one task, computed in the precision of the model."""

    def __init__(self, model: VisionTransformer, task: str):
        super().__init__()
        self.model, self.task, self.kind = model, task, choose_kind(model)

    def forward(self, normalized: Tensor) -> Tensor:
        images = normalized.to(next(self.model.parameters()).dtype)
        if self.task == "features":
            return compute_features(self.model, images, self.kind).float()
        if self.task == "segmentation":
            head = self.model.task_head
            assert head is not None
            out: Tensor = head(self.model.feature_maps(images, head.config.blocks))  # type: ignore[union-attr,arg-type]
            return out.float()
        out = self.model(images)
        return out.float()


class ImageProgram(nn.Module):
    """uint8 images [B, height, width, 3] of any size to the outputs of a network."""

    def __init__(self, preprocess: nn.Module, network: nn.Module):
        super().__init__()
        self.preprocess, self.network = preprocess, network

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.network(self.preprocess(images))
        return out


def task_of(model: VisionTransformer, features: bool) -> str:
    """What the exported model computes: features if asked for or if there is no head."""
    task = "features" if features else model.task
    if task not in OUTPUTS:
        raise UserError(f"{task} cannot be exported; --features exports the backbone of these weights.")
    return task


def make_network(model: VisionTransformer, task: str, half: bool = False) -> ExportedNetwork:
    """A frozen copy of a model for one task, in evaluation mode, in float32 or float16."""
    if model.architecture.channels != 3:
        raise UserError(f"the model takes images of {model.architecture.channels} channels; only RGB models can be exported.")
    copied = copy.deepcopy(model).eval().requires_grad_(False).cpu().float()
    return ExportedNetwork(copied.half() if half else copied, task).eval()
