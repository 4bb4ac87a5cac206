import torch

from vitrail.training.device_metrics import PendingTensor


class Event:
    """A CUDA event that is completed by hand."""

    def __init__(self):
        self.done, self.waited = False, False

    def query(self):
        return self.done

    def synchronize(self):
        self.done = self.waited = True


def test_cpu_values_are_copied_at_once():
    window = torch.tensor([1.0, 2.0])
    pending = PendingTensor(window)
    window.zero_()
    assert pending.ready()
    assert pending.read() == [1.0, 2.0]


def test_device_values_are_awaited_only_when_read():
    pending = PendingTensor(torch.tensor([3.0]))
    pending.event = event = Event()
    assert not pending.ready()
    assert pending.read() == [3.0]
    assert event.waited
    assert pending.ready()
