"""How images become the model's input; recorded with the weights so that the two never come apart."""

from typing import Any, NamedTuple

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Preprocessing(NamedTuple):
    image_size: tuple[int, int] = (224, 224)
    crop_ratio: float = 0.875  # the crop's share of the resized image
    resize: str = "shorter"  # the shorter side to size / crop_ratio, then a centre crop; or "square": straight to the size
    interpolation: str = "bicubic"
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    def to_dict(self) -> dict[str, Any]:
        return self._asdict()

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Preprocessing":
        known: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items() if name in cls._fields
        }
        return cls(**known)


GOOGLE = Preprocessing(resize="square", crop_ratio=1.0, interpolation="bilinear", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
