"""Losses between embeddings: neighbors in a memory (NCA), views of one image (BYOL), triplets.

The formulas are those of Grafit (arXiv 2011.12982), Equations 2.1 to 2.3. All are computed in float32 or float64.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_LOGITS = 1 << 26  # of images and memory that are in memory at a time


def neighbor_loss(
    embeddings: Tensor, memory: Tensor, labels: Tensor, index: Tensor, temperature: float, margin: float = 0.0
) -> Tensor:
    """[B]: -log of the probability that a neighbor has the class of the image, drawn with p_j ~ exp(cos(g_i, m_j) / temperature).

    `embeddings` [B, D] are those of the images `index` [B], `memory` [N, D] and `labels` [N] (-1: unknown) those of all images.
    The row of the image itself is excluded. The loss of an image without another one of its class, or without a label, is 0. The
    memory is a constant. `margin` is subtracted from the logits of the own class.
    """
    embeddings = F.normalize(embeddings.to(torch.promote_types(embeddings.dtype, torch.float32)), dim=1)
    loss: Tensor = _NeighborLoss.apply(embeddings, memory, labels, index, temperature, margin)  # type: ignore[no-untyped-call]
    return loss


class _NeighborLoss(torch.autograd.Function):
    """The gradient is computed with the loss, part of the memory after part, so that the logits [B, N] need not fit."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, memory: Tensor, labels: Tensor, index: Tensor, temperature: float, margin: float) -> Tensor:
        own, columns = labels[index], max(MAX_LOGITS // max(len(z), 1), 1)
        starts = range(0, len(memory), columns)

        def compare(start: int) -> tuple[Tensor, Tensor, Tensor]:
            """Rows of the memory, logits [B, n] with -inf for the image itself, and whether they are of the own class."""
            rows = F.normalize(memory[start : start + columns].to(z.dtype), dim=1)
            same = (labels[start : start + columns] == own[:, None]) & (own >= 0)[:, None]
            logits = z @ rows.T / temperature - margin * same
            positions = torch.arange(start, start + len(rows), device=z.device)
            return rows, logits.masked_fill(positions == index[:, None], -torch.inf), same

        with torch.autocast(z.device.type, enabled=False):
            total = z.new_full((len(z),), -torch.inf)
            inside = total.clone()
            for start in starts:
                part = compare(start)
                total = torch.logaddexp(total, part[1].logsumexp(1))
                inside = torch.logaddexp(inside, part[1].masked_fill(~part[2], -torch.inf).logsumexp(1))
            counted = inside > -torch.inf
            gradient = torch.zeros_like(z)
            for start in starts:
                rows, logits, same = part if len(starts) == 1 else compare(start)
                weight = (logits - total[:, None]).exp()
                weight -= torch.where(same & counted[:, None], (logits - inside[:, None]).exp(), 0.0)
                gradient += weight @ rows / temperature
            ctx.save_for_backward(torch.where(counted[:, None], gradient, 0.0))
            return torch.where(counted, total - inside, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad[:, None], None, None, None, None, None


def instance_loss(predictions: Tensor, targets: Tensor) -> Tensor:
    """[]: minus the mean cosine of the prediction of a view and the target of another view of the same image.

    `predictions` and `targets` [T, B, D]: all ordered pairs of different views. From -1 to 1.
    """
    views = len(predictions)
    dtype = torch.promote_types(predictions.dtype, torch.float32)
    p, z = F.normalize(predictions.to(dtype), dim=-1), F.normalize(targets.to(dtype), dim=-1)
    pairs = (p.sum(0) * z.sum(0)).sum(-1) - (p * z).sum((0, 2))
    return -pairs.mean() / (views * (views - 1))


def triplet_loss(first: Tensor, second: Tensor, margin: float, group_size: int) -> Tensor:
    """[]: max(0, |a - p|^2 - |a - n|^2 + margin) of normalized vectors, the mean over all triplets.

    Anchors `first` [B, D] with the positives `second`, and the reverse; the negatives of an image are the views of the other
    images of its group, `group_size` consecutive ones, or fewer if B is not a multiple of that.
    """
    dtype = torch.promote_types(first.dtype, torch.float32)
    size = next(size for size in range(min(group_size, len(first)), 0, -1) if len(first) % size == 0)
    views = [F.normalize(view.to(dtype), dim=1).unflatten(0, (-1, size)) for view in (first, second)]
    cosine = views[0] @ views[1].transpose(1, 2)  # [groups, size, size]: |a - b|^2 = 2 - 2 cos
    positive = cosine.diagonal(dim1=1, dim2=2)
    others = ~torch.eye(size, dtype=torch.bool, device=cosine.device)
    terms = [F.relu(2 * (each - positive[:, :, None]) + margin) * others for each in (cosine, cosine.transpose(1, 2))]
    return torch.stack(terms).sum() / (2 * len(cosine) * size * max(size - 1, 1))
