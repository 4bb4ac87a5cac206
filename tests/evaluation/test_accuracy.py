"""Top-1, top-5 and loss, independent of batch size and number of processes."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.images import make_folder, write_invalid_image
from vitrail.data.datasets.lookup import open_source
from vitrail.data.image_loader import ImageLoader
from vitrail.data.source import Labels, Subset
from vitrail.errors import UserError
from vitrail.evaluation.accuracy import count_hits, summarize
from vitrail.models.preprocessing import Preprocessing

PREPROCESSING = Preprocessing((8, 8), crop_ratio=1.0, mean=(0.0,) * 3, std=(1.0,) * 3)


class Means(nn.Module):
    """Logits that an image's mean colors give, and some more classes that never win."""

    def forward(self, images):
        return F.pad(images.mean((2, 3)), (0, 4), value=-1.0)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return open_source(str(make_folder(tmp_path_factory.mktemp("colors"), ("a red", "b green", "c blue"), 7, (8, 8))))


def open_loader(source):
    return ImageLoader(source, workers=0, log=lambda sentence: None)


def test_hits_and_losses(source):
    result = summarize(count_hits(Means(), open_loader(source), PREPROCESSING, 4), 3)
    assert (result.top1, result.top5, result.images) == (1.0, None, 21)  # top-5 of three says nothing
    wrong = Subset(source, np.arange(len(source)))
    wrong.label = Labels((source.label.values + 1) % 3, source.label.names)
    other = summarize(count_hits(Means(), open_loader(wrong), PREPROCESSING, 4), 3)
    assert other.top1 == 0.0
    hits = count_hits(Means(), open_loader(wrong), PREPROCESSING, 4)
    assert [summarize(hits, classes).top5 for classes in (6, 9, 10)] == [None, None, 1.0]  # of nine classes says little
    assert other.loss > result.loss


def test_parts_add_up(source):
    whole = count_hits(Means(), open_loader(source), PREPROCESSING, 5)
    parts = [count_hits(Means(), open_loader(source), PREPROCESSING, 2, part, 3) for part in range(3)]
    assert torch.allclose(sum(parts), whole)
    assert [int(part[3]) for part in parts] == [7, 7, 7]


def test_images_without_a_label_are_not_counted(source):
    some = Subset(source, np.arange(len(source)))
    some.label = Labels(np.where(np.arange(21) % 3 == 0, -1, source.label.values), source.label.names)
    assert summarize(count_hits(Means(), open_loader(some), PREPROCESSING, 4), 3)[::3] == (1.0, 14)


def test_unreadable_images_are_not_counted(tmp_path):
    make_folder(tmp_path, ["a", "b"], 2, (8, 8))
    write_invalid_image(tmp_path / "a" / "bad.png")
    mixed = open_source(str(tmp_path))
    assert summarize(count_hits(Means(), open_loader(mixed), PREPROCESSING, 4), 3).images == 4
    bad = Subset(mixed, np.array([index for index in range(len(mixed)) if "bad" in mixed.location(index)]))
    with pytest.raises(UserError, match="None of the validation images"):
        summarize(count_hits(Means(), open_loader(bad), PREPROCESSING, 4), 3)
