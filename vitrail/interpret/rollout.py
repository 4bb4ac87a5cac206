"""Attention followed from the pooled vector back to the patches: attention rollout and gradient-weighted attention.

A row vector is multiplied by the matrices of the blocks, the last first, so that no product of two matrices [T, T] is computed.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import UserError
from vitrail.interpret.attention import Recording, at_least_float32, record, without_autocast
from vitrail.models.vision_transformer import VisionTransformer

Step = Callable[[int, Tensor], Tensor]  # layer and row vector [B, queries] to its product with a matrix [B, queries, keys]


def attention_rollout(model: VisionTransformer, images: Tensor, residual: bool = True) -> Tensor:
    """The share of each patch in the pooled vector: images [B, 3, H, W] to [B, rows, columns], each map summing to 1.

    Attention rollout (Abnar and Zuidema, arXiv 2005.00928): the product over the blocks of (attention + identity) / 2, with the
    attention averaged over the heads; without `residual` of attention alone. The map is the row of the class token, of the
    query of the pooling, or the mean row of the patches for mean pooling; with a distillation token, the rows of both by the
    model's `fusion`.
    """
    recording = record(model, images)
    return rollout_of(recording, recording.logits.argmax(1), residual)


@torch.no_grad()
@without_autocast()
def rollout_of(recording: Recording, classes: Tensor, residual: bool = True) -> Tensor:
    """Attention rollout of a recorded forward pass; `classes` [B] choose the queries of a model with one query per class."""
    for layer in range(recording.layers):
        if not recording.has_attention(layer):
            raise UserError(f"Layer {layer} of this model has no attention: attention rollout needs it in every block.")
    keep = 0.5 if residual else 0.0

    def step(layer: int, row: Tensor) -> Tensor:
        return (1 - keep) * multiply_mean_attention(recording, layer, row)

    patches = follow_back(recording, classes, step, keep)
    out: Tensor = (patches / patches.sum(1, keepdim=True)).unflatten(1, recording.grid)
    return out


def gradient_attention(recording: Recording, classes: Tensor) -> Tensor:
    """Relevance [B, rows, columns] by attention weighted with its gradient (Chefer et al., arXiv 2103.15679).

    The product over the blocks of identity + mean over the heads of max(attention * gradient of the logit, 0), without the term
    of the identity alone. Blocks without attention count as the identity. With a dense head the map is also followed from the
    patch with the largest logit of the class, which is added to the logit.
    """
    gradients, patches = recording.gradients(classes), dense_patches(recording, classes)

    @torch.no_grad()
    def step(layer: int, row: Tensor) -> Tensor:
        if not recording.has_attention(layer):
            return row.new_zeros(())
        heads = recording.heads(layer)
        parts = []
        for rows in recording.chunk_rows(heads):
            weighted = []
            for part in heads:
                outer = gradients.outputs[part.proj].unflatten(-1, (part.query.shape[1], -1)).transpose(1, 2)
                weighted.append(part.weights(rows) * at_least_float32(part.weight_gradient(outer[:, :, rows], part.value)))
            parts.append(torch.einsum("bq,bqk->bk", row[:, rows], torch.cat(weighted, 1).clamp(min=0).mean(1)))
        return torch.stack(parts).sum(0)

    start = follow_back(recording, classes, lambda layer, row: row.new_zeros(()), 1.0, patches)
    out: Tensor = (follow_back(recording, classes, step, 1.0, patches) - start).clamp(min=0).unflatten(1, recording.grid)
    return out


def multiply_mean_attention(recording: Recording, layer: int, row: Tensor) -> Tensor:
    """The product of a row vector [B, queries] and the attention averaged over the heads, [B, keys]."""
    parts = [torch.einsum("bq,bqk->bk", row[:, rows], weights.mean(1)) for rows, weights in recording.row_chunks(layer)]
    return torch.stack(parts).sum(0)


def follow_back(recording: Recording, classes: Tensor, step: Step, keep: float, patches: Tensor | None = None) -> Tensor:
    """The row of the pooled vector over the patches of the first block, [B, N]: row <- keep * row + step(row) for each layer.

    `patches` [B, N] are added to the row after the last block.
    """
    batch, grid = len(recording.images), recording.grid
    if patches is None:
        patches = recording.zeros(batch, grid[0] * grid[1])
    if recording.pooling:
        queries = pooled_queries(recording, classes)
        for layer in reversed(range(len(recording.blocks), recording.layers)):
            found = step(layer, queries)
            inner = recording.prefix_of(layer)
            patches = patches + (found[:, inner:] if found.ndim else 0)
            queries = keep * queries + (found[:, :inner] if inner and found.ndim else 0)
        row = F.pad(patches, (recording.prefix, 0))
    elif recording.model.architecture.pooling == "mean":
        row = F.pad(patches + 1 / patches.shape[1], (recording.prefix, 0))
    else:
        row = F.pad(patches, (recording.prefix, 0))
        row[:, : recording.prefix] = class_tokens(recording, recording.prefix)
    for layer in reversed(range(len(recording.blocks))):
        row = row[:, row.shape[1] - recording.blocks[layer][0].shape[1] :]  # blocks before `class_token_at` have no prefix
        row = keep * row + step(layer, row)
    return row[:, row.shape[1] - patches.shape[1] :]


def class_tokens(recording: Recording, count: int) -> Tensor:
    """The parts [count] of the prefix tokens, or of the queries of a pooling, in the logits.

    One for the class token; with a second head on the distillation token, by the model's `fusion`.
    """
    model, parts = recording.model, recording.zeros(count)
    fusion = "class" if model.head_distillation is None else model.architecture.fusion
    if fusion in ("class", "distillation"):
        parts[1 if fusion == "distillation" else 0] = 1
    else:
        parts[:2] = 0.5
    return parts


def pooled_queries(recording: Recording, classes: Tensor) -> Tensor:
    """The row [B, S] that chooses the query of the class, or those of the logits where the classes share them."""
    queries = recording.pooling[0][0].shape[1]
    if recording.model.architecture.pooling == "per_class":
        return recording.zeros(len(classes), queries).scatter(1, classes[:, None], 1)
    return class_tokens(recording, queries).expand(len(classes), -1)


@torch.no_grad()
def dense_patches(recording: Recording, classes: Tensor) -> Tensor:
    """The weight [B, N] of each patch in the logit by a dense head: that of the one with the largest logit of the class."""
    model, tokens = recording.model, recording.features.tokens
    weights = recording.zeros(len(tokens), recording.grid[0] * recording.grid[1])
    if model.head_dense is not None:
        logits = model.head_dense(tokens).gather(2, classes[:, None, None].expand(-1, tokens.shape[1], 1))[..., 0]
        weights.scatter_(1, logits.argmax(1, keepdim=True), model.architecture.dense_weight)
    return weights
