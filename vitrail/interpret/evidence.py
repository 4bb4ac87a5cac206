"""The contribution of each patch to the logit of a class, by the classifier, by gradients, and by hiding parts of the image."""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import UserError
from vitrail.interpret.attention import Recording, at_least_float32, plain_forward, record, without_autocast
from vitrail.models.config import Architecture
from vitrail.models.vision_transformer import VisionTransformer

CELLS = 8  # parts of each side of an image that are hidden one after the other
BATCH = 32  # images with a hidden part per forward pass


def has_patch_logits(a: Architecture) -> bool:
    """Whether the classifier, or a second one (`dense_head`), gives logits of each patch."""
    return a.classes > 0 and (a.dense_head or (a.pooling == "mean" and not a.pool_norm and not a.pre_logits))


def patch_evidence(model: VisionTransformer, images: Tensor, classes: Tensor) -> Tensor:
    """The logit of one class per image, classes [B], for each patch, minus the mean over all classes: [B, rows, columns].

    With mean pooling the logits of an image are the mean of the logits of its patches, so the decomposition is exact; of
    a convnet it is the class activation map. With a dense head they are its logits.
    """
    return evidence_of(record(model, images), classes)


@torch.no_grad()
@without_autocast()
def evidence_of(recording: Recording, classes: Tensor) -> Tensor:
    model, tokens = recording.model, recording.features.tokens
    if not has_patch_logits(model.architecture):
        raise UserError(
            "Patch evidence needs mean pooling of normalized patches directly before the classifier, or a dense head."
        )
    logits = (model.head if model.head_dense is None else model.head_dense)(tokens).float()  # [B, N, C]
    own = logits.gather(2, classes[:, None, None].expand(-1, logits.shape[1], 1))[..., 0]
    out: Tensor = (own - logits.mean(2)).unflatten(1, recording.grid)
    return out


def input_gradient(recording: Recording, classes: Tensor) -> Tensor:
    """|input x gradient| of the logit of a class, summed over the channels and averaged over the pixels of each patch."""
    product = at_least_float32(recording.images.detach()) * recording.gradients(classes).images
    height, width = recording.covered
    return F.adaptive_avg_pool2d(product.sum(1).abs()[:, :height, :width], recording.grid)


@torch.no_grad()
def occlusion(recording: Recording, classes: Tensor) -> Tensor:
    """How much the log-probability of a class falls where a part of the image is replaced by the mean color: [B, rows, columns].

    At most 8 x 8 parts are hidden, each of whole patches, so that the cost does not grow with the image.
    """
    model, images = recording.model, recording.images.detach()
    (rows, columns), (height, width) = recording.grid, recording.covered
    before = log_probability(recording.logits, classes)
    down, across = -(-rows // CELLS), -(-columns // CELLS)
    corners = [(top, left) for top in range(0, rows, down) for left in range(0, columns, across)]
    found = before.new_zeros(len(images), rows, columns)
    for start in range(0, len(corners), max(BATCH // len(images), 1)):
        chosen = corners[start : start + max(BATCH // len(images), 1)]
        hidden = images.repeat(len(chosen), 1, 1, 1).unflatten(0, (len(chosen), len(images)))
        for part, (top, left) in zip(hidden, chosen, strict=True):
            bottom, right = min(top + down, rows), min(left + across, columns)
            part[..., top * height // rows : bottom * height // rows, left * width // columns : right * width // columns] = 0
        after = log_probability(predict_logits(model, hidden.flatten(0, 1)), classes.repeat(len(chosen)))
        drops = before - after.unflatten(0, (len(chosen), len(images)))
        for drop, (top, left) in zip(drops, chosen, strict=True):
            found[:, top : top + down, left : left + across] = drop[:, None, None]
    return found.clamp(min=0)


def log_probability(logits: Tensor, classes: Tensor) -> Tensor:
    return logits.float().log_softmax(1).gather(1, classes[:, None])[:, 0]


@torch.no_grad()
def predict_logits(model: VisionTransformer, images: Tensor) -> Tensor:
    """Logits in evaluation mode."""
    with plain_forward(model):
        out: Tensor = model(images)
    return out
