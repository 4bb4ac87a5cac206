"""Preprocessing for evaluation and inference: read, resize, crop, normalize. The settings are saved with the weights."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vitrail.data.transforms.config import IMAGENET_MEAN, IMAGENET_STD, NO_ANTIALIAS
from vitrail.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image
    from torch import Tensor

    from vitrail.data.transforms.crops import View

    ImageInput = str | os.PathLike[str] | Image.Image | np.ndarray | Tensor

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", NO_ANTIALIAS)
RESIZES = ("shorter", "square")
DECODE_SCALE = 2.0  # for weights without a valid recipe
MAX_DECODE_SCALE = 1 << 16  # any image is then decoded at full size


class Preprocessing(NamedTuple):
    """Settings of the evaluation transform."""

    image_size: tuple[int, int] = (224, 224)
    crop_ratio: float = 0.875  # side of the crop / shorter side of the resized image
    resize: str = "shorter"  # the shorter side to image_size / crop_ratio, then a center crop; "square": directly to image_size
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

    def check(self) -> None:
        """Raise UserError for settings that cannot be applied."""
        if self.interpolation not in INTERPOLATIONS:
            raise UserError(f"interpolation={self.interpolation!r} is not known; choose from {', '.join(INTERPOLATIONS)}.")
        if self.resize not in RESIZES:
            raise UserError(f"resize={self.resize!r} is not known; choose from {', '.join(RESIZES)}.")
        if not are_numbers([self.crop_ratio], 1) or not 0 < self.crop_ratio <= 1:
            raise UserError(f"crop_ratio={self.crop_ratio!r} is out of range; give a number above 0 and at most 1.")
        sides = self.image_size if isinstance(self.image_size, tuple | list) else ()
        if len(sides) != 2 or not all(type(side) is int and 0 < side < 1 << 16 for side in sides):
            raise UserError(f"image_size={self.image_size!r} is not a pair (height, width).")
        if not are_numbers(self.mean, 3) or not are_numbers(self.std, 3) or min(self.std) <= 0:
            raise UserError(f"mean={self.mean!r} and std={self.std!r} are not three numbers each, those of std above 0.")

    def view(self, sizes: "Tensor") -> "View":
        """The resize and crop of images of `sizes` [B, 2]."""
        from vitrail.data.transforms.crops import center_crop, squash

        return squash(sizes, self.image_size) if self.resize == "square" else center_crop(sizes, self.image_size, self.crop_ratio)

    def apply(self, pixels: "Tensor", sizes: "Tensor") -> "Tensor":
        """Resize, crop and normalize: uint8 [B, 3, H, W] to float32 [B, 3, *image_size], without a host synchronization.

        `sizes` [B, 2] are the heights and widths of the images, each in the upper left corner of the canvas [H, W]. Resampling
        is Pillow's integer arithmetic, with the same bits on every device, or TensorFlow's with "bilinear_no_antialias".
        """
        from vitrail.data.transforms.backend import backend_for

        self.check()
        backend = backend_for(pixels)
        resized = backend.crop_resize(pixels, self.view(sizes), self.interpolation, None)
        # Without boxes the key (here `sizes`) is not read.
        out: Tensor = backend.normalize(resized, self.mean, self.std, None, sizes)
        return out


def are_numbers(values: Any, count: int) -> bool:
    """Whether `values` are `count` numbers in the range of float; JSON may contain larger integers."""
    if not isinstance(values, tuple | list) or len(values) != count:
        return False
    return all(type(value) in (int, float) and abs(value) <= sys.float_info.max for value in values)


GOOGLE = Preprocessing(resize="square", crop_ratio=1.0, interpolation=NO_ANTIALIAS, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


def min_decode_side(preprocessing: Preprocessing, notes: Mapping[str, str]) -> int | None:
    """The shorter side that JPEG files keep when they are decoded at reduced size, as in training; None: full size.

    The factor is the recipe's `data.decode_scale` if the weights were saved with a recipe. Without antialias, the size of the
    decoded image matters: it is full by default.
    """
    try:
        scale = json.loads(notes["recipe"])["data"]["decode_scale"]
    except (KeyError, TypeError, ValueError, RecursionError):
        scale = None
    if not are_numbers([scale], 1) or not 0 <= scale <= MAX_DECODE_SCALE:
        scale = 0.0 if preprocessing.interpolation == NO_ANTIALIAS else DECODE_SCALE
    return round(max(preprocessing.image_size) * scale) or None


def read_images(images: "ImageInput | Sequence[ImageInput]", min_side: int | None = None) -> "tuple[Tensor, Tensor]":
    """One image or several to uint8 [B, 3, H, W], each in the upper left corner of a common canvas, and their sizes [B, 2].

    An image is a path, a PIL image, a uint8 array [H, W, 3] or a uint8 tensor [3, H, W]; arrays and tensors may have a batch
    dimension. JPEG files are decoded at reduced size, with a shorter side of at least `min_side`.
    """
    arrays = []
    for image in list_images(images):
        name = os.fspath(image) if isinstance(image, str | os.PathLike) else f"The {type(image).__name__}"
        try:
            arrays.append(to_pixels(image, min_side))
        except (OSError, ValueError) as error:
            raise UserError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    if not arrays:
        raise UserError("There are no images: give at least one.")
    return pad_images(arrays)


def list_images(images: "ImageInput | Sequence[ImageInput]") -> "list[ImageInput]":
    """The images of a list, of an array or tensor with a batch dimension, or the single image."""
    axes = getattr(images, "ndim", 0)
    if axes in (1, 2):
        raise UserError(f"An array is an image [height, width, 3] or a batch of images, not {list(images.shape)}.")  # type: ignore[union-attr]
    single = isinstance(images, str | os.PathLike) or hasattr(images, "getexif") or axes == 3
    if not single and not hasattr(images, "__iter__"):
        raise UserError(f"An image is a path, a PIL image, an array or a tensor, not {images!r}.")
    return [images] if single else list(images)  # type: ignore[list-item,arg-type]


def pad_images(images: "Sequence[np.ndarray]") -> "tuple[Tensor, Tensor]":
    """uint8 images [H, W, 3] to uint8 [B, 3, H, W], each in the upper left corner of a common canvas, and their sizes [B, 2]."""
    import numpy as np
    import torch

    sizes = np.array([image.shape[:2] for image in images], dtype=np.int64).reshape(-1, 2)
    canvas = np.zeros((len(images), *sizes.max(axis=0, initial=0), 3), dtype=np.uint8)
    for row, image in enumerate(images):
        canvas[row, : image.shape[0], : image.shape[1]] = image
    return torch.from_numpy(canvas).permute(0, 3, 1, 2), torch.from_numpy(sizes)


def to_pixels(image: "ImageInput", min_side: int | None = None) -> "np.ndarray":
    """uint8 RGB [H, W, 3] of a path, PIL image, array [H, W, 3] or tensor [3, H, W]; OSError or ValueError if unreadable."""
    import numpy as np
    from PIL import Image

    from vitrail.data.decode import apply_orientation, decode, to_rgb

    if isinstance(image, str | os.PathLike):
        if os.path.exists(image) and not os.path.isfile(image):
            raise ValueError("it is not a regular file")
        with open(image, "rb") as file:
            return decode(file.read(), min_side)
    if isinstance(image, Image.Image):
        return np.ascontiguousarray(apply_orientation(to_rgb(image), image))
    if hasattr(image, "movedim"):
        image = image.movedim(0, -1).cpu().numpy()
    return decode(np.asarray(image))
