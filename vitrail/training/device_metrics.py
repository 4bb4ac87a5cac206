"""Numbers that the device hands out while it goes on: a loop that waited for them would leave it without work for a while."""

from typing import NamedTuple

import torch
from torch import Tensor


class Answer:
    """A tensor on its way from the device."""

    def __init__(self, tensor: Tensor) -> None:
        away = tensor.device.type == "cuda"
        self.values = tensor.to("cpu", non_blocking=True) if away else tensor.clone()
        self.event = torch.cuda.Event() if away else None
        if self.event:
            self.event.record()

    def ready(self) -> bool:
        return self.event is None or self.event.query()

    def read(self) -> list[float]:
        if self.event:
            self.event.synchronize()
        return self.values.tolist()


class Note(NamedTuple):
    """What a line of the metrics needs, of the steps up to `step`."""

    step: int
    rate: float
    speed: dict[str, float]
    sums: Answer
