"""Programs in files, which may be tied to one size and to one number of images, and give logits alone."""

from abc import abstractmethod

import torch
from torch import Tensor

from vitrail.teachers.network import Network, Size


class Fixed(Network):
    mixed = False  # its precision is written into it
    only_batch: int | None = None

    @abstractmethod
    def call(self, images: Tensor) -> Tensor:
        """As many images as the program takes, to their logits."""

    def logits(self, images: Tensor) -> Tensor:
        if self.only_batch is None:
            return self.call(images)
        answers = []
        for some in images.split(self.only_batch):
            missing = self.only_batch - len(some)
            filled = torch.cat([some, some[:1].expand(missing, -1, -1, -1)]) if missing else some
            answers.append(self.call(filled)[: len(some)])
        return torch.cat(answers)


def fixed_parts(shape: list[int | None]) -> tuple[int | None, Size | None]:
    """The number of images and the size that an input [B, 3, height, width] is tied to; None where it may vary."""
    if len(shape) != 4 or shape[1] not in (3, None):
        raise ValueError(f"its input is {shape}, not [B, 3, height, width]")
    batch, _, height, width = shape
    if height is None or width is None:
        if height is not width:
            raise ValueError("only one of its height and width may vary")
        return batch, None
    return batch, (height, width)


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else repr(error)
