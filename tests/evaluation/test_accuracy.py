"""Top-1, top-5 and loss, over the same images however they are shared out."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.images import make_folder, spoil
from vitrail.data.datasets.lookup import open_source
from vitrail.data.feed import Feed
from vitrail.data.source import Labels, Subset
from vitrail.errors import UserError
from vitrail.evaluation.accuracy import count_hits, summarize, test_view
from vitrail.models.preprocessing import Preprocessing

VIEW = test_view(Preprocessing((8, 8), crop_ratio=1.0, mean=(0.0,) * 3, std=(1.0,) * 3))


class Means(nn.Module):
    """Logits that an image's mean colors give, and some more classes that never win."""

    def forward(self, images):
        return F.pad(images.mean((2, 3)), (0, 4), value=-1.0)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return open_source(str(make_folder(tmp_path_factory.mktemp("colors"), ("a red", "b green", "c blue"), 7, (8, 8))))


def feed_of(source):
    return Feed(source, workers=0, say=lambda sentence: None)


def test_hits_and_losses(source):
    result = summarize(count_hits(Means(), feed_of(source), VIEW, 4), 3)
    assert (result.top1, result.top5, result.images) == (1.0, None, 21)  # top-5 of three says nothing
    wrong = Subset(source, np.arange(len(source)))
    wrong.label = Labels((source.label.values + 1) % 3, source.label.names)
    other = summarize(count_hits(Means(), feed_of(wrong), VIEW, 4), 3)
    assert (other.top1, summarize(count_hits(Means(), feed_of(wrong), VIEW, 4), 6).top5) == (0.0, 1.0)
    assert other.loss > result.loss


def test_parts_add_up(source):
    whole = count_hits(Means(), feed_of(source), VIEW, 5)
    parts = [count_hits(Means(), feed_of(source), VIEW, 2, part, 3) for part in range(3)]
    assert torch.allclose(sum(parts), whole)
    assert [int(part[3]) for part in parts] == [7, 7, 7]


def test_images_without_a_label_do_not_count(source):
    some = Subset(source, np.arange(len(source)))
    some.label = Labels(np.where(np.arange(21) % 3 == 0, -1, source.label.values), source.label.names)
    assert summarize(count_hits(Means(), feed_of(some), VIEW, 4), 3)[::3] == (1.0, 14)


def test_unreadable_images_do_not_count_and_nothing_but_them_is_an_error(tmp_path):
    make_folder(tmp_path, ["a", "b"], 2, (8, 8))
    spoil(tmp_path / "a" / "bad.png")
    mixed = open_source(str(tmp_path))
    assert summarize(count_hits(Means(), feed_of(mixed), VIEW, 4), 3).images == 4
    bad = Subset(mixed, np.array([index for index in range(len(mixed)) if "bad" in mixed.where(index)]))
    with pytest.raises(UserError, match="Not one of the images"):
        summarize(count_hits(Means(), feed_of(bad), VIEW, 4), 3)


def test_the_view_is_the_models_own():
    view = test_view(Preprocessing((24, 32), 0.9, "square", "bilinear", (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)))
    assert (view.image_size, view.crop, view.interpolation, view.mean, view.std) == (
        *((24, 32), "squash", "bilinear"),
        *((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)),
    )
    assert test_view(Preprocessing((8, 8), 0.9)).crop == "center"
