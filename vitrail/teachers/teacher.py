"""A frozen network that is asked for its opinion of the student's images: logits, maps of logits, features."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.errors import UserError
from vitrail.models.config import as_size
from vitrail.models.preprocessing import Preprocessing
from vitrail.teachers.network import Network, Size

Colors = Sequence[float]


class Teacher(nn.Module):
    """Always in evaluation mode, never trained, without gradients.

    Images are RGB, [B, 3, height, width], normalized by `mean` and `std`: the student's, or the teacher's own by default.
    The teacher makes of them what its network was trained with: its own mean and deviation, order of colors and, where `size`
    says so, size. On CUDA it computes in bfloat16 with channels last; what it returns is float32.
    """

    def __init__(
        self,
        network: Network,
        preprocessing: Preprocessing,
        classes: int,
        class_names: Sequence[str] | None = None,
        order: str = "rgb",
        name: str = "",
        size: int | Size | None = None,
    ):
        super().__init__()
        self.network = network.eval().requires_grad_(False)
        self.preprocessing = preprocessing  # of red first, values 0 to 1, whatever the network itself wants
        self.classes = classes
        self.class_names = list(class_names) if class_names is not None else None
        self.order = order  # of colors, as the network wants them: rgb or bgr
        self.name = name
        # Every image is brought to it; None: as they come, if the network takes any size.
        self.size: Size | None = as_size(size) if size is not None else network.only_size
        self._changes: dict[tuple, tuple[Tensor, Tensor]] = {}

    def forward(self, images: Tensor, mean: Colors | None = None, std: Colors | None = None) -> Tensor:
        """Logits [B, C]."""
        return self._ask(self.network.logits, images, mean, std)

    def dense(self, images: Tensor, mean: Colors | None = None, std: Colors | None = None) -> Tensor:
        """Logits at every position, [B, C, h, w]: the classifier applied before the pooling, or to every patch."""
        return self._ask(self.network.dense, images, mean, std)

    def features(self, images: Tensor, mean: Colors | None = None, std: Colors | None = None) -> Tensor:
        """What the classifier reads, [B, D]."""
        return self._ask(self.network.features, images, mean, std)

    def answers(self, images: Tensor, what: Sequence[str]) -> dict[str, Tensor]:
        """Several of logits, tokens and features of images in the teacher's own colors, in one pass where that is possible."""
        return self._ask(partial(self.network.answers, what=what), images, None, None)

    @torch.no_grad()  # not inference_mode: its tensors could not be targets of a loss that is differentiated
    def see(self, images: Tensor, mean: Colors | None = None, std: Colors | None = None) -> Tensor:
        """The student's view as the network wants it: resized where it must be, renormalized, colors in its order."""
        own = self.preprocessing
        if images.dim() != 4 or images.shape[1] != len(own.mean):
            raise UserError(f"The teacher sees [B, {len(own.mean)}, height, width] images, not {list(images.shape)}.")
        if self.size is not None and tuple(images.shape[-2:]) != self.size:
            mode = own.interpolation if own.interpolation in ("bilinear", "bicubic") else "bicubic"
            images = F.interpolate(images.float(), self.size, mode=mode, antialias=True)
        mean, std = tuple(own.mean if mean is None else mean), tuple(own.std if std is None else std)
        if (mean, std) != (own.mean, own.std):
            factor, shift = self._change(mean, std, images.device)
            images = torch.addcmul(shift, images, factor)
        return images.flip(1) if self.order == "bgr" else images

    def _change(self, mean: Colors, std: Colors, device: torch.device) -> tuple[Tensor, Tensor]:
        """Factor and shift [1, 3, 1, 1] between two normalizations; kept, so that no step waits for their way to the device."""
        key = (mean, std, device)
        if key not in self._changes:
            own_mean, own_std, theirs, spread = (
                torch.tensor(values, dtype=torch.float64)
                for values in (self.preprocessing.mean, self.preprocessing.std, mean, std)
            )
            if len(theirs) != len(own_mean) or len(spread) != len(own_mean):
                raise UserError(f"mean and std need {len(own_mean)} numbers each, not {len(theirs)} and {len(spread)}.")
            factor, shift = spread / own_std, (theirs - own_mean) / own_std
            factor, shift = (value.float()[None, :, None, None].to(device) for value in (factor, shift))
            self._changes[key] = factor, shift
        return self._changes[key]

    @torch.no_grad()
    def _ask(self, question, images: Tensor, mean: Colors | None, std: Colors | None) -> Any:
        images = self.see(images, mean, std)
        cuda = images.device.type == "cuda"
        if cuda:
            images = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=cuda and self.network.mixed):
            found = question(images)
        if isinstance(found, dict):
            return {name: answer.float() for name, answer in found.items()}
        return found.float()

    def train(self, mode: bool = True) -> "Teacher":
        """Nothing: a teacher stays as it is when the student around it is put into training mode."""
        return super().train(False)

    def extra_repr(self) -> str:
        return f"{self.name}, {self.classes} classes"
