"""Where in an image a model's answer comes from: attention followed through all blocks, and what each patch says for a class."""

import torch
from torch import Tensor

from vitrail.errors import UserError
from vitrail.models.vision_transformer import VisionTransformer


@torch.inference_mode()
def attention_rollout(model: VisionTransformer, images: Tensor) -> Tensor:
    """How much of each patch reaches the pooling: images [B, 3, H, W] to [B, rows, columns], each summing to one.

    Attention rollout (Abnar and Zuidema, arXiv 2005.00928): the attention of a block, averaged over its heads and half-and-half
    with what passes it by, multiplied over the blocks. A mean pooling asks from all patches alike, a class token from its own.
    """
    pooling = model.architecture.pooling
    if pooling not in ("mean", "class"):
        raise UserError(f"Attention can be followed to a mean or a class token, not to the pooling {pooling!r}.")
    trace = model.trace(images)
    flow = None
    for index in sorted(trace.layers):
        maps = trace.layers[index].attention
        if maps is None:
            raise UserError(f"Block {index} of this model has no attention to follow; take a model whose every block has.")
        mixed = maps.float().mean(1)
        mixed = (mixed + torch.eye(mixed.shape[-1], device=mixed.device)) / 2
        flow = mixed if flow is None else mixed @ flow
    assert flow is not None
    reached = flow[:, trace.prefix :].mean(1) if pooling == "mean" else flow[:, 0]
    patches = reached[:, trace.prefix :]
    return (patches / patches.sum(1, keepdim=True)).unflatten(1, trace.grid)


@torch.inference_mode()
def patch_evidence(model: VisionTransformer, images: Tensor, classes: Tensor) -> Tensor:
    """What each patch says for one class per image, classes [B], against the mean of all: [B, rows, columns].

    A mean pooling's score is the mean of its patches' scores, so that these parts add up to it exactly.
    """
    a = model.architecture
    if a.pooling != "mean" or a.pool_norm or a.pre_logits or a.dense_head:
        raise UserError("Only a mean of normed patches right before the classifier can be split into what each patch says.")
    features = model.features(images)
    scores = model.head(features.tokens).float()  # [B, N, C]
    own = scores.gather(2, classes[:, None, None].expand(-1, scores.shape[1], 1))[..., 0]
    return (own - scores.mean(2)).unflatten(1, features.grid)
