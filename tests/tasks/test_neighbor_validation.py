"""The training images among which neighbors are searched."""

import numpy as np
import torch

from vitrail.data.datasets.lookup import open_splits
from vitrail.data.image_loader import ImageLoader
from vitrail.data.source import Labels
from vitrail.tasks.neighbor_validation import PER_QUERY, Gallery, Rows, rate_levels, rate_neighbors


def test_a_level_without_labels_is_left_out():
    labels = torch.arange(4) % 2
    unknown = torch.full_like(labels, -1)
    memory = Rows(torch.arange(4), labels, torch.eye(2)[labels], torch.stack([labels, labels, unknown], 1))
    queries = memory._replace(levels=torch.stack([labels, unknown, labels], 1))
    source, columns = open_splits("digits").train, ["all", "memory", "queries"]
    source.extra = {name: Labels(np.zeros(len(source), dtype=np.int64), ["a", "b"]) for name in columns}
    assert rate_levels(memory, queries, source, columns, k=1) == {"knn_all": 1.0}
    assert rate_neighbors(memory, queries._replace(labels=unknown), 2, k=1) == 0.0


def test_one_loader_is_kept(monkeypatch):
    """That of the timed steps is closed when validation images are searched; more queries than fit make no other one."""
    closed, close = [], ImageLoader.close
    monkeypatch.setattr(ImageLoader, "close", lambda loader: (closed.append(loader), close(loader)))
    gallery = Gallery(open_splits("digits").train, "cpu", None, max_images=50)
    first = gallery.open(3)
    assert len(first.source) == 3 * PER_QUERY
    assert gallery.open(3) is first
    second = gallery.open(10)
    assert closed == [first]
    assert gallery.open(20) is second
    assert len(second.source) == 50
    assert (gallery.open(3).source.indices == first.source.indices).all()
