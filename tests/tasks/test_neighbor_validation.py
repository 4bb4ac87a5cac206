"""The training images among which neighbors are searched."""

from vitrail.data.datasets.lookup import open_splits
from vitrail.data.image_loader import ImageLoader
from vitrail.tasks.neighbor_validation import PER_QUERY, Gallery


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
