"""The whole way of a batch from stored bytes to what the network sees."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.rng import GOLDEN, between, chance, scramble
from vitrail.data.transforms import color, crops, policies
from vitrail.data.transforms.affine import compose, square, whole_canvas
from vitrail.data.transforms.backend import passes_for
from vitrail.data.transforms.mixup import erasing_boxes
from vitrail.data.transforms.reference import Layer
from vitrail.data.transforms.resize import FILTERS
from vitrail.errors import UserError

CROPS = ("random_resized", "simple", "center", "squash")
POLICIES = ("none", "rand", "auto", "trivial", "three", "dino")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Augmentation:
    """What is done to an image, as plain values. The defaults are a plain random resized crop and a flip."""

    image_size: tuple[int, int] = (224, 224)
    crop: str = "random_resized"
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    crop_ratio: float = 0.875  # of the centre crop
    padding: int = 4  # of the simple random crop
    interpolation: str = "bicubic"  # of the crop; "random" draws bilinear or bicubic for each image, and for each of its warps
    hflip: float = 0.5
    crop_last: bool = False  # LV-ViT's order: flip, policy on the whole image, then the crop
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
        for name, value, choices in (
            ("crop", self.crop, CROPS),
            ("policy", self.policy, POLICIES),
            ("filter", self.interpolation, FILTERS),
        ):
            if value not in choices:
                raise UserError(f"{name}={value!r} is not known; choose from {', '.join(choices)}.")
        if not 0 < self.crop_ratio <= 1:
            raise UserError(f"crop_ratio={self.crop_ratio} is not a share of the image; give a number above 0, at most 1.")


class Augmented(NamedTuple):
    images: Tensor  # float [B, 3, height, width], normalized
    view: crops.View  # the crop
    layers: tuple[Layer, ...]  # of the policy, first to last
    sizes: Tensor  # int64 [B, 2], of the source images
    crop_last: bool

    @property
    def steps(self) -> list[tuple[Tensor, Tensor]]:
        """From the output back to the source: the matrix [B, 3, 3] of each operation and the sizes [B, 2] of what it reads."""
        sizes = self.sizes if self.crop_last else whole_canvas(self.images)
        warps = [(square(layer.matrix(sizes)), sizes) for layer in reversed(self.layers)]
        crop = [(self.view.matrix(), self.sizes)]
        return crop + warps if self.crop_last else warps + crop

    @property
    def matrix(self) -> Tensor:
        """[B, 3, 3]: a place in the output (x, y, 1) to its place in the source image, pixel centres at .5."""
        return reduce(lambda after, before: compose(before, after), (matrix for matrix, _ in self.steps))


def augment(pixels: Tensor, sizes: Tensor, key: Tensor, how: Augmentation) -> Augmented:
    """uint8 [B, 3, H, W] with sizes [B, 2] and keys [B] to what the network sees; the host never waits for a GPU."""
    passes = passes_for(pixels)
    view, cubic = look(sizes, key, how), policies.random_cubic(key, "crop", how.interpolation)
    if how.crop_last:
        changed = change(policies.Canvas(pixels, sizes, flips(key, how)), key, how)
        seen = passes.render(changed.pixels, view, how.interpolation, cubic)
    else:
        seen = passes.render(pixels, view, how.interpolation, cubic)
        changed = change(policies.Canvas(seen, whole_canvas(seen)), key, how)
        seen = changed.pixels
    boxes = erasing_boxes(key, how.image_size, how.random_erasing) if how.random_erasing > 0 else None
    images = passes.finish(seen, how.mean, how.std, boxes, key)
    return Augmented(images, view, changed.layers, sizes, how.crop_last)


def look(sizes: Tensor, key: Tensor, how: Augmentation) -> crops.View:
    """What is seen of images of `sizes` [B, 2], turned round or not."""
    match how.crop:
        case "random_resized":
            view = crops.random_resized_crop(sizes, key, how.image_size, how.scale, how.ratio)
        case "simple":
            view = crops.simple_random_crop(sizes, key, how.image_size, how.padding)
        case "center":
            view = crops.centre_crop(sizes, how.image_size, how.crop_ratio)
        case _:
            view = crops.squash(sizes, how.image_size)
    flip = flips(key, how)
    if flip is None:
        return view
    return view.mirrored(sizes[:, 1], flip) if how.crop_last else crops.turned(view, flip)


def flips(key: Tensor, how: Augmentation) -> Tensor | None:
    """Which images are turned round left to right [B]; test views never are."""
    return chance(key, "flip", how.hflip) if how.crop in ("random_resized", "simple") else None


def change(canvas: policies.Canvas, key: Tensor, how: Augmentation) -> policies.Changed:
    """The policy."""
    match how.policy:
        case "rand":
            return policies.rand_augment(canvas, key, how.magnitude, how.magnitude_std, how.num_ops, how.interpolation)
        case "auto":
            return policies.auto_augment(canvas, key, how.interpolation)
        case "trivial":
            return policies.trivial_augment(canvas, key, how.interpolation)
        case "three":
            canvas = canvas._replace(pixels=policies.three_augment(canvas, key))
            return policies.Changed(jittered(canvas, key, how))
        case "dino":
            return policies.Changed(dino(canvas, key, how))
    return policies.Changed(jittered(canvas, key, how))


def jittered(canvas: policies.Canvas, key: Tensor, how: Augmentation) -> Tensor:
    *strengths, turn = how.color_jitter
    if not any(strengths):
        return canvas.pixels
    some = chance(key, "jitter", how.color_jitter_prob)
    pixels = policies.color_jitter(canvas, key, *strengths, some=some)
    if turn:
        turned = color.hue(pixels, between(key, "jitter.hue", -turn, turn))
        pixels = torch.where(some[:, None, None, None], turned, pixels)
    return pixels


def dino(canvas: policies.Canvas, key: Tensor, how: Augmentation) -> Tensor:
    """Jitter, grey, blur, solarize, each with its probability."""
    canvas = canvas._replace(pixels=jittered(canvas, key, how))
    pixels = policies.apply_some(canvas, chance(key, "grey", how.grayscale), "saturation", 0.0)
    sigma = torch.where(chance(key, "blur", how.blur), between(key, "blur.sigma", 0.1, 2.0), 0.0)
    pixels = passes_for(pixels).blur(pixels, canvas.sizes, sigma)
    return policies.apply_some(canvas._replace(pixels=pixels), chance(key, "solarize", how.solarize), "solarize", 128.0)


def augment_views(pixels: Tensor, sizes: Tensor, key: Tensor, views: list[Augmentation]) -> list[Augmented]:
    """Several views of every image (two for an instance loss, two large and many small for DINO), each with keys of its own."""
    return [augment(pixels, sizes, scramble(key + GOLDEN * (number + 1)), how) for number, how in enumerate(views)]


def follow(
    maps: Tensor,
    matrix: Tensor,
    out: tuple[int, int],
    sizes: Tensor,
    image: tuple[int, int],
    filter: str = "nearest",
    fill: float = 0.0,
    steps: Sequence[tuple[Tensor, Tensor]] = (),
) -> Tensor:
    """Re-project maps that lie over the source images to where `augment` put their pixels.

    maps [B, K, h, w] cover the source images, which have `sizes` [B, 2] in pixels; `matrix` is what `augment` returned for
    outputs of `image` pixels; the result has `out` cells over the same view. Outside the source: `fill`. With the `steps` that
    `augment` returned, `fill` is also where the image was filled because an earlier operation had lost what would be there.
    """
    height, width = out
    y = (torch.arange(height, device=maps.device) + 0.5) * (image[0] / height)
    x = (torch.arange(width, device=maps.device) + 0.5) * (image[1] / width)
    rows, columns = torch.meshgrid(y, x, indexing="ij")
    start = torch.stack([columns, rows, torch.ones_like(rows)], -1).expand(len(maps), -1, -1, -1)
    known = torch.ones(len(maps), height, width, dtype=torch.bool, device=maps.device)
    places = start
    for step, size in steps:
        places = transform(step, places)
        known = known & within(places, size)
    places = transform(matrix, start)
    normal = places[..., :2] / sizes.flip(1)[:, None, None].float() * 2 - 1
    found = F.grid_sample(maps.float() - fill, normal, mode=filter, padding_mode="border", align_corners=False) + fill
    return torch.where((known & within(places, sizes))[:, None], found, fill).to(maps.dtype)


def transform(matrix: Tensor, places: Tensor) -> Tensor:
    """Places [B, h, w, 3] through matrices [B, 3, 3]; no product of matrices, which a device may be set to round."""
    return (matrix[:, None, None] * places[:, :, :, None]).sum(-1)


def within(places: Tensor, sizes: Tensor) -> Tensor:
    """Which places (x, y, 1) [B, h, w, 3] lie in images of `sizes` [B, 2]."""
    inside = (places[..., :2] >= 0) & (places[..., :2] <= sizes.flip(1)[:, None, None])
    return inside.all(-1)
