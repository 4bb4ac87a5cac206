"""Top-1 and top-5 accuracy and loss on a source."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.data.image_loader import ImageLoader
from vitrail.errors import UserError
from vitrail.models.preprocessing import Preprocessing

TOP5_CLASSES = 10  # with fewer classes a top-5 accuracy is close to 1 for any model


class Accuracy(NamedTuple):
    """Accuracies in [0, 1] and the mean loss; `top5` is None for fewer than 10 classes."""

    top1: float
    top5: float | None
    loss: float
    images: int


@torch.no_grad()  # not inference_mode: sharded weights gathered in it could not be trained afterwards
def count_hits(
    model: nn.Module, loader: ImageLoader, preprocessing: Preprocessing, batch_size: int, rank: int = 0, world_size: int = 1
) -> Tensor:
    """[4] float64 on the device: top-1 hits, top-5 hits, summed loss and number of images, of every `world_size`-th image."""
    total = torch.zeros(4, dtype=torch.float64, device=loader.device)
    missing = math.ceil(math.ceil(len(loader.source) / world_size) / batch_size) if world_size > 1 else 0
    for batch in loader.iterate(batch_size, rank, world_size):
        assert batch.labels is not None
        labeled = batch.labels >= 0
        logits = model(preprocessing.apply(batch.pixels, batch.sizes)).float()
        labels = batch.labels.clamp(min=0)
        hits = logits.topk(min(5, logits.shape[1]), 1).indices == labels[:, None]
        losses = F.cross_entropy(logits, labels, reduction="none")
        total += torch.stack([(column * labeled).sum().double() for column in (hits[:, 0], hits.any(1), losses, labeled)])
        missing -= 1
    for _ in range(missing):
        # Every process must run the same number of forward passes: sharded weights are gathered by collectives.
        model(torch.zeros(1, 3, *preprocessing.image_size, device=loader.device))
    return total


def summarize(total: Tensor, classes: int) -> Accuracy:
    """The accuracy of the counts of `count_hits`, summed over all processes."""
    top1, top5, loss, count = total.tolist()
    if not count:
        raise UserError("None of the validation images could be read.")
    return Accuracy(top1 / count, top5 / count if classes >= TOP5_CLASSES else None, loss / count, int(count))
