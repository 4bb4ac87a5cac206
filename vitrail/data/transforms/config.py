"""The settings of the training and validation transforms, as plain values. Importable without torch."""

from dataclasses import dataclass

from vitrail.errors import UserError

CROPS = ("random_resized", "distorted_box", "simple", "scaled", "center", "squash")
FIXED_CROPS = ("center", "squash")  # without random numbers, and without a horizontal flip
POLICIES = ("none", "rand", "auto", "trivial", "three", "dino")
NO_ANTIALIAS = "bilinear_no_antialias"  # of the four nearest pixels at any scale, as in TensorFlow; not rounded to integers
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "random", NO_ANTIALIAS)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Augmentation:
    """Transforms of an image. The defaults are a random resized crop and a horizontal flip."""

    image_size: tuple[int, int] = (224, 224)
    crop: str = "random_resized"
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    factors: tuple[float, float] = (0.5, 2.0)  # of the scaled crop: range of its shorter side relative to that of the output
    crop_ratio: float = 0.875  # of the center crop
    padding: int = 4  # of the simple random crop
    interpolation: str = "bicubic"  # of the crop; "random" draws bilinear or bicubic for each image and each of its warps
    hflip: float = 0.5
    crop_last: bool = False  # LV-ViT's order: flip, policy on the full image, then the crop
    policy: str = "none"
    magnitude: float = 9.0
    magnitude_std: float = 0.5
    num_ops: int = 2
    color_jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)  # brightness, contrast, saturation, hue
    color_jitter_prob: float = 1.0
    grayscale: float = 0.0  # probabilities of the "dino" policy
    blur: float = 0.0
    solarize: float = 0.0
    random_erasing: float = 0.0
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    def __post_init__(self) -> None:
        for name, choices in (("crop", CROPS), ("policy", POLICIES), ("interpolation", INTERPOLATIONS)):
            if getattr(self, name) not in choices:
                raise UserError(f"{name}={getattr(self, name)!r} is not known; choose from {', '.join(choices)}.")
        if not 0 < self.crop_ratio <= 1:
            raise UserError(f"crop_ratio={self.crop_ratio} is out of range; give a number above 0 and at most 1.")
