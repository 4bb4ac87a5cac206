"""Networks in exported files, which may have a fixed image size and batch size and return only logits."""

from abc import abstractmethod

import torch
from torch import Tensor

from vitrail.teachers.network import Network, Size

MAX_BATCH = 4096  # of a fixed batch size


class FixedShapeNetwork(Network):
    autocast = False  # the precision is part of the file
    fixed_batch_size: int | None = None

    @abstractmethod
    def run(self, images: Tensor) -> Tensor:
        """Logits of a batch of the fixed size."""

    def logits(self, images: Tensor) -> Tensor:
        if self.fixed_batch_size is None:
            return self.run(images)
        logits = []
        for batch in images.split(self.fixed_batch_size):
            missing = self.fixed_batch_size - len(batch)
            padded = torch.cat([batch, batch[:1].expand(missing, -1, -1, -1)]) if missing else batch
            logits.append(self.run(padded)[: len(batch)])
        return torch.cat(logits)


def fixed_dimensions(shape: list[int | None]) -> tuple[int | None, Size | None]:
    """The fixed batch size and image size of an input [B, 3, height, width]; None for dynamic dimensions."""
    if len(shape) != 4 or shape[1] not in (3, None):
        raise ValueError(f"its input is {shape}, not [B, 3, height, width]")
    batch_size, _, height, width = shape
    if batch_size is not None and batch_size > MAX_BATCH:
        raise ValueError(f"its batch size is {batch_size}, more than {MAX_BATCH}")
    if height is None or width is None:
        if height is not width:
            raise ValueError("only one of height and width is dynamic")
        return batch_size, None
    return batch_size, (height, width)


def first_line(error: BaseException) -> str:
    """The first line of an exception's message."""
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else repr(error)
