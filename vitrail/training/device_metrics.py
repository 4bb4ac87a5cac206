"""Metrics on the device that are copied to the CPU asynchronously, so that the training loop does not wait for them."""

from typing import NamedTuple

import torch
from torch import Tensor


class PendingTensor:
    """An asynchronous copy of a tensor to the CPU."""

    def __init__(self, tensor: Tensor) -> None:
        on_device = tensor.device.type == "cuda"
        self.values = tensor.to("cpu", non_blocking=True) if on_device else tensor.clone()
        self.event = torch.cuda.Event() if on_device else None
        if self.event:
            self.event.record()

    def ready(self) -> bool:
        return self.event is None or self.event.query()

    def read(self) -> list[float]:
        """The values; waits until they are copied."""
        if self.event:
            self.event.synchronize()
        return self.values.tolist()


class PendingMetrics(NamedTuple):
    """The content of a training line in metrics.jsonl: `sums` are over the steps since the last one, up to `step`."""

    step: int
    lr: float
    throughput: dict[str, float]
    sums: PendingTensor
