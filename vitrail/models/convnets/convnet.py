"""The common interface of the convolutional networks."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

Shapes = dict[str, tuple[int, ...]]  # of a state dict, by name


class ConvNet(nn.Module, ABC):
    """Convolutional features, global average pooling, a linear classifier."""

    @abstractmethod
    def forward_features(self, images: Tensor) -> Tensor:
        """Feature maps [B, D, h, w]."""

    @abstractmethod
    def get_classifier(self) -> nn.Linear:
        """The classifier of the pooled features."""

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, C]."""
        out: Tensor = self.get_classifier()(self.forward_features(images).mean((2, 3)))
        return out
