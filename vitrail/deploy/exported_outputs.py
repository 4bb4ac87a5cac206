"""The networks that are exported, by task, and what each computes of an image in this package."""

import copy

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.evaluation.features import compute_features
from vitrail.evaluation.image_index import choose_kind
from vitrail.evaluation.semantic_masks import predict_logits
from vitrail.models.preprocessing import pad_images
from vitrail.models.vision_transformer import VisionTransformer

OUTPUTS = {"classification": "logits", "features": "features", "segmentation": "logits"}  # name of the output for images


class ExportedNetwork(nn.Module):
    """float32 images [B, 3, height, width] to float32 outputs of one task, computed in the precision of the model."""

    takes_pixels = False  # whether the images are those of --input image; otherwise its preprocessing is another module

    def __init__(self, model: VisionTransformer, task: str):
        super().__init__()
        self.model, self.task, self.kind = model, task, choose_kind(model)
        self.outputs: tuple[str, ...] = (OUTPUTS.get(task, ""),)  # their names

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        images = images.to(self.dtype)
        if self.task == "features":
            return compute_features(self.model, images, self.kind).float()
        if self.task == "segmentation":
            return predict_logits(self.model, images).float()
        out: Tensor = self.model(images)
        return out.float()

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(self.model.parameters()).dtype

    def normalize(self, pixels: np.ndarray) -> Tensor:
        """The input [1, 3, height, width] of --input tensor for an image, uint8 [H, W, 3]."""
        return self.model.preprocessing.apply(*pad_images([pixels]))

    def expected(self, pixels: np.ndarray) -> list[Tensor]:
        """The outputs for an image by the preprocessing and the functions of this package."""
        out = self(self.normalize(pixels))
        return [out]


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
    if task not in (*OUTPUTS, "detection"):
        raise UserError(f"{task} cannot be exported; --features exports the backbone of these weights.")
    return task


def make_network(model: VisionTransformer, task: str, input: str, half: bool = False) -> ExportedNetwork:
    """A frozen copy of a model for one task and input, in evaluation mode, in float32 or float16."""
    from vitrail.deploy.dense_outputs import DetectionProgram, SegmentationProgram

    if model.architecture.channels != 3:
        raise UserError(f"the model takes images of {model.architecture.channels} channels; only RGB models can be exported.")
    copied = copy.deepcopy(model).eval().requires_grad_(False).cpu().float()
    copied = copied.half() if half else copied
    if task == "detection":
        return DetectionProgram(copied, input).eval()
    if task == "segmentation" and input == "image":
        return SegmentationProgram(copied).eval()
    return ExportedNetwork(copied, task).eval()
