"""Attention rollout, and the contribution of each patch to the logit of a class."""

import torch
from torch import Tensor

from vitrail.errors import UserError
from vitrail.models.vision_transformer import VisionTransformer


@torch.inference_mode()
def attention_rollout(model: VisionTransformer, images: Tensor) -> Tensor:
    """The share of each patch in the pooled token: images [B, 3, H, W] to [B, rows, columns], each map summing to 1.

    Attention rollout (Abnar and Zuidema, arXiv 2005.00928): the product over the blocks of (attention + identity) / 2, with the
    attention averaged over the heads. The map is the row of the class token, or the mean row of the patches for mean pooling.
    """
    pooling = model.architecture.pooling
    if pooling not in ("mean", "class"):
        raise UserError(f"Attention rollout needs mean pooling or a class token; this model has the pooling {pooling!r}.")
    trace = model.trace(images)
    rollout = None
    for index in sorted(trace.layers):
        attention = trace.layers[index].attention
        if attention is None:
            raise UserError(f"Block {index} of this model has no attention map: attention rollout needs one in every block.")
        mixed = attention.float().mean(1)
        mixed = (mixed + torch.eye(mixed.shape[-1], device=mixed.device)) / 2
        rollout = mixed if rollout is None else mixed @ rollout
    assert rollout is not None
    row = rollout[:, trace.prefix :].mean(1) if pooling == "mean" else rollout[:, 0]
    patches = row[:, trace.prefix :]
    out: Tensor = (patches / patches.sum(1, keepdim=True)).unflatten(1, trace.grid)
    return out


@torch.inference_mode()
def patch_evidence(model: VisionTransformer, images: Tensor, classes: Tensor) -> Tensor:
    """The logit of one class per image, classes [B], for each patch, minus the mean over all classes: [B, rows, columns].

    With mean pooling the logits of an image are the mean of the logits of its patches, so the decomposition is exact.
    """
    a = model.architecture
    if a.pooling != "mean" or a.pool_norm or a.pre_logits or a.dense_head:
        raise UserError("Patch evidence needs mean pooling of normalized patches directly before the classifier.")
    features = model.features(images)
    logits = model.head(features.tokens).float()  # [B, N, C]
    own = logits.gather(2, classes[:, None, None].expand(-1, logits.shape[1], 1))[..., 0]
    out: Tensor = (own - logits.mean(2)).unflatten(1, features.grid)
    return out
