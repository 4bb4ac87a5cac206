import torch

from vitrail.training.device_metrics import Answer


class Event:
    """One that has come when it is told so."""

    def __init__(self):
        self.come, self.waited = False, False

    def query(self):
        return self.come

    def synchronize(self):
        self.come = self.waited = True


def test_numbers_of_a_processor_are_there_at_once_and_stay():
    window = torch.tensor([1.0, 2.0])
    answer = Answer(window)
    window.zero_()
    assert answer.ready()
    assert answer.read() == [1.0, 2.0]


def test_numbers_of_a_device_are_waited_for_only_when_read():
    answer = Answer(torch.tensor([3.0]))
    answer.event = event = Event()
    assert not answer.ready()
    assert answer.read() == [3.0]
    assert event.waited
    assert answer.ready()
