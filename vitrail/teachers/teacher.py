"""A frozen network that returns logits, dense logits or features of the student's images."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.data.transforms.config import NO_ANTIALIAS
from vitrail.errors import UserError
from vitrail.models.config import as_size
from vitrail.models.preprocessing import Preprocessing
from vitrail.teachers.network import Network, Size

Normalization = Sequence[float]  # one value per channel
Output = TypeVar("Output", Tensor, dict[str, Tensor])


class Teacher(nn.Module):
    """A network in evaluation mode, without gradients; `train()` has no effect.

    Images are RGB, [B, 3, height, width], normalized with `mean` and `std`: those of the student, or the teacher's own by
    default. They are converted to the normalization and channel order of the network and, if `size` is set, resized. On CUDA
    the network runs in bfloat16 with channels last; outputs are float32.
    """

    def __init__(
        self,
        network: Network,
        preprocessing: Preprocessing,
        classes: int,
        class_names: Sequence[str] | None = None,
        channel_order: str = "rgb",
        name: str = "",
        size: int | Size | None = None,
    ):
        super().__init__()
        self.network = network.eval().requires_grad_(False)
        self.preprocessing = preprocessing  # of RGB images with values from 0 to 1, whatever the channel order of the network
        self.classes = classes
        self.class_names = list(class_names) if class_names is not None else None
        self.channel_order = channel_order  # of the network's input: rgb or bgr
        self.name = name
        self.decode_side: int | None = None  # the shorter side that JPEG files keep when they are decoded; None: full size
        # Images are resized to it; None: they keep their size.
        self.size: Size | None = as_size(size) if size is not None else network.fixed_size
        self._renormalizations: dict[tuple[Normalization, Normalization, torch.device], tuple[Tensor, Tensor]] = {}

    def forward(self, images: Tensor, mean: Normalization | None = None, std: Normalization | None = None) -> Tensor:
        """Logits [B, C]."""
        return self._run(self.network.logits, images, mean, std)

    def dense(self, images: Tensor, mean: Normalization | None = None, std: Normalization | None = None) -> Tensor:
        """Logits at every position, [B, C, h, w]: the classifier before pooling, or at every patch."""
        return self._run(self.network.dense, images, mean, std)

    def features(self, images: Tensor, mean: Normalization | None = None, std: Normalization | None = None) -> Tensor:
        """The input of the classifier, [B, D]."""
        return self._run(self.network.features, images, mean, std)

    def predict(self, images: Tensor, outputs: Sequence[str]) -> dict[str, Tensor]:
        """One or more of logits, tokens (dense logits) and features of images in the teacher's own normalization."""
        return self._run(partial(self.network.predict, outputs=outputs), images, None, None)

    @torch.no_grad()  # not inference_mode: its tensors could not be targets of a loss with gradients
    def adapt(self, images: Tensor, mean: Normalization | None = None, std: Normalization | None = None) -> Tensor:
        """The network's input from images of the student: resized, renormalized, in the network's channel order."""
        own = self.preprocessing
        if images.dim() != 4 or images.shape[1] != len(own.mean):
            raise UserError(f"The teacher takes images of shape [B, {len(own.mean)}, height, width], not {list(images.shape)}.")
        if self.size is not None and tuple(images.shape[-2:]) != self.size:
            mode = "bilinear" if own.interpolation in ("bilinear", NO_ANTIALIAS) else "bicubic"
            images = F.interpolate(images.float(), self.size, mode=mode, antialias=own.interpolation != NO_ANTIALIAS)
        mean, std = tuple(own.mean if mean is None else mean), tuple(own.std if std is None else std)
        if (mean, std) != (own.mean, own.std):
            factor, shift = self._renormalization(mean, std, images.device)
            images = torch.addcmul(shift, images, factor)
        return images.flip(1) if self.channel_order == "bgr" else images

    def _renormalization(self, mean: Normalization, std: Normalization, device: torch.device) -> tuple[Tensor, Tensor]:
        """Factor and shift [1, 3, 1, 1] to the teacher's normalization; cached, to avoid a copy to the device at each step."""
        key = (mean, std, device)
        if key not in self._renormalizations:
            own_mean, own_std, from_mean, from_std = (
                torch.tensor(values, dtype=torch.float64)
                for values in (self.preprocessing.mean, self.preprocessing.std, mean, std)
            )
            if len(from_mean) != len(own_mean) or len(from_std) != len(own_mean):
                raise UserError(f"mean and std need {len(own_mean)} values each, not {len(from_mean)} and {len(from_std)}.")
            factor, shift = from_std / own_std, (from_mean - own_mean) / own_std
            factor, shift = (value.float()[None, :, None, None].to(device) for value in (factor, shift))
            self._renormalizations[key] = factor, shift
        return self._renormalizations[key]

    @torch.no_grad()
    def _run(
        self, method: Callable[[Tensor], Output], images: Tensor, mean: Normalization | None, std: Normalization | None
    ) -> Output:
        images = self.adapt(images, mean, std)
        cuda = images.device.type == "cuda"
        if cuda:
            images = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=cuda and self.network.autocast):
            outputs = method(images)
        if isinstance(outputs, dict):
            return {name: output.float() for name, output in outputs.items()}
        return outputs.float()

    def train(self, mode: bool = True) -> "Teacher":
        """No effect: a teacher stays in evaluation mode inside a module that is trained."""
        return super().train(False)

    def extra_repr(self) -> str:
        return f"{self.name}, {self.classes} classes"
