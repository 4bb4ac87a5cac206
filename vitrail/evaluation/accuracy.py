"""Top-1, top-5 and loss over every image of a source."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.data.feed import Feed
from vitrail.data.transforms.pipeline import Augmentation, augment
from vitrail.errors import UserError
from vitrail.models.preprocessing import Preprocessing


class Accuracy(NamedTuple):
    """Shares of 1, the mean loss, over how many images; no top-5 among five classes or fewer, where it says nothing."""

    top1: float
    top5: float | None
    loss: float
    images: int


def test_view(preprocessing: Preprocessing) -> Augmentation:
    """The one view that a model is tested with."""
    return Augmentation(
        image_size=preprocessing.image_size,
        crop="squash" if preprocessing.resize == "square" else "center",
        crop_ratio=preprocessing.crop_ratio,
        interpolation=preprocessing.interpolation,
        mean=preprocessing.mean,
        std=preprocessing.std,
    )


test_view.__test__ = False  # type: ignore[attr-defined]  # not a test


@torch.no_grad()  # not inference_mode: what sharded weights are gathered into there could not be trained with afterwards
def count_hits(model: nn.Module, feed: Feed, view: Augmentation, batch: int, part: int = 0, parts: int = 1) -> Tensor:
    """[4] on the device: hits, hits among the first five, summed loss, images; of every `parts`-th image from `part` on."""
    total = torch.zeros(4, dtype=torch.float64, device=feed.device)
    rounds = math.ceil(math.ceil(len(feed.source) / parts) / batch) if parts > 1 else 0
    for raw in feed.sweep(batch, part, parts):
        assert raw.labels is not None
        known = raw.labels >= 0
        images = augment(raw.pixels, raw.sizes, torch.zeros_like(raw.index), view).images
        logits = model(images).float()
        labels = raw.labels.clamp(min=0)
        best = logits.topk(min(5, logits.shape[1]), 1).indices == labels[:, None]
        losses = F.cross_entropy(logits, labels, reduction="none")
        total += torch.stack([(column * known).sum().double() for column in (best[:, 0], best.any(1), losses, known)])
        rounds -= 1
    for _ in range(rounds):
        # Processes that share the weights compute together or not at all: one with fewer batches keeps the others company.
        model(torch.zeros(1, 3, *view.image_size, device=feed.device))
    return total


def summarize(total: Tensor, classes: int) -> Accuracy:
    top1, top5, loss, count = total.tolist()
    if not count:
        raise UserError("Not one of the images to test with could be read.")
    return Accuracy(top1 / count, top5 / count if classes > 5 else None, loss / count, int(count))
