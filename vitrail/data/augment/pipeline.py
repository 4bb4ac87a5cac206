"""The whole way of a batch from stored bytes to what the network sees."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.augment import colour, geometry, policies
from vitrail.data.augment.mixing import random_erasing
from vitrail.data.randomness import GOLDEN, between, chance, integers, scramble
from vitrail.errors import UserError

CROPS = ("random_resized", "simple", "centre", "squash")
POLICIES = ("none", "rand", "auto", "trivial", "three", "dino")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Augmentation:
    """What is done to a picture, as plain values. The defaults are a plain random resized crop and a flip."""

    size: tuple[int, int] = (224, 224)
    crop: str = "random_resized"
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    crop_ratio: float = 0.875  # of the centre crop
    padding: int = 4  # of the simple random crop
    filter: str = "bicubic"
    flip: float = 0.5
    policy: str = "none"
    magnitude: float = 9.0
    deviation: float = 0.5
    layers: int = 2
    jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)  # brightness, contrast, saturation, hue
    jitter_chance: float = 1.0
    grey: float = 0.0  # probabilities of the "dino" policy
    blur: float = 0.0
    solarise: float = 0.0
    erasing: float = 0.0
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("crop", self.crop, CROPS),
            ("policy", self.policy, POLICIES),
            ("filter", self.filter, tuple(geometry.FILTERS)),
        ):
            if value not in choices:
                raise UserError(f"{name}={value!r} is not known; choose from {', '.join(choices)}.")


class Augmented(NamedTuple):
    images: Tensor  # float [B, 3, height, width], normalised
    matrix: Tensor  # [B, 3, 3]: a place in the output (x, y, 1) to its place in the source picture, pixel centres at .5


def augment(pixels: Tensor, sizes: Tensor, key: Tensor, how: Augmentation) -> Augmented:
    """uint8 [B, 3, H, W] with sizes [B, 2] and keys [B] to what the network sees; the host never waits for the device."""
    view = look(sizes, key, how)
    sigma = which = None
    if how.policy == "three":
        which = integers(key, "three", 3)[:, 0]
        sigma = torch.where(which == 2, between(key, "three.blur", 0.1, 2.0), 0.0)
    seen = geometry.whole(geometry.render(pixels, view, how.filter, sigma)).to(torch.uint8)
    matrix = view.matrix()
    match how.policy:
        case "rand":
            seen, moved = policies.rand_augment(seen, key, how.magnitude, how.deviation, how.layers)
            matrix = matrix @ moved
        case "auto":
            seen, moved = policies.auto_augment(seen, key)
            matrix = matrix @ moved
        case "trivial":
            seen, moved = policies.trivial_augment(seen, key)
            matrix = matrix @ moved
        case "three":
            assert which is not None
            seen = jittered(policies.three_augment(seen, which), key, how)
        case "dino":
            seen = dino(seen, key, how)
        case "none":
            seen = jittered(seen, key, how)
    images = normalise(seen, how)
    if how.erasing > 0:
        images = random_erasing(images, key, how.erasing)
    return Augmented(images, matrix)


def look(sizes: Tensor, key: Tensor, how: Augmentation) -> geometry.View:
    match how.crop:
        case "random_resized":
            view = geometry.random_resized_crop(sizes, key, how.size, how.scale, how.ratio)
        case "simple":
            view = geometry.simple_random_crop(sizes, key, how.size, how.padding)
        case "centre":
            return geometry.centre_crop(sizes, how.size, how.crop_ratio)
        case _:
            return geometry.squash(sizes, how.size)
    return geometry.random_flip(view, key, how.flip)


def jittered(pixels: Tensor, key: Tensor, how: Augmentation) -> Tensor:
    *strengths, turn = how.jitter
    if any(strengths):
        changed = policies.colour_jitter(pixels, key, *strengths)
        if turn:
            changed = colour.hue(changed, between(key, "jitter.hue", -turn, turn))
        if how.jitter_chance < 1:
            changed = torch.where(chance(key, "jitter", how.jitter_chance)[:, None, None, None], changed, pixels)
        pixels = changed
    return pixels


def dino(pixels: Tensor, key: Tensor, how: Augmentation) -> Tensor:
    """Jitter, grey, blur, solarise, each with its probability."""
    pixels = jittered(pixels, key, how)
    pixels = torch.where(chance(key, "grey", how.grey)[:, None, None, None], colour.grey(pixels), pixels)
    if how.blur > 0:
        sigma = torch.where(chance(key, "blur", how.blur), between(key, "blur.sigma", 0.1, 2.0), 0.0)
        rows, columns = geometry.blur_matrix(sigma, pixels.shape[-2]), geometry.blur_matrix(sigma, pixels.shape[-1])
        pixels = geometry.whole(rows[:, None] @ pixels.float() @ columns[:, None].transpose(-1, -2)).to(torch.uint8)
    solarised = torch.where(pixels < 128, pixels, 255 - pixels)
    return torch.where(chance(key, "solarise", how.solarise)[:, None, None, None], solarised, pixels)


def normalise(pixels: Tensor, how: Augmentation) -> Tensor:
    mean = torch.tensor(how.mean, device=pixels.device)[:, None, None] * 255
    std = torch.tensor(how.std, device=pixels.device)[:, None, None] * 255
    return (pixels.float() - mean) / std


def augment_views(pixels: Tensor, sizes: Tensor, key: Tensor, views: list[Augmentation]) -> list[Augmented]:
    """Several views of every picture (two for an instance loss, two large and many small for DINO), each with keys of its own."""
    return [augment(pixels, sizes, scramble(key + GOLDEN * (number + 1)), how) for number, how in enumerate(views)]


def follow(
    maps: Tensor,
    matrix: Tensor,
    out: tuple[int, int],
    sizes: Tensor,
    picture: tuple[int, int],
    filter: str = "nearest",
    fill: float = 0.0,
) -> Tensor:
    """Re-project maps that lie over the source pictures to where `augment` put their pixels.

    maps [B, K, h, w] cover the source pictures, which have `sizes` [B, 2] in pixels; `matrix` is what `augment` returned for
    outputs of `picture` pixels; the result has `out` cells over the same view. Outside the source: `fill`.
    """
    height, width = out
    y = (torch.arange(height, device=maps.device) + 0.5) * (picture[0] / height)
    x = (torch.arange(width, device=maps.device) + 0.5) * (picture[1] / width)
    rows, columns = torch.meshgrid(y, x, indexing="ij")
    places = torch.einsum("bij,hwj->bhwi", matrix, torch.stack([columns, rows, torch.ones_like(rows)], -1))[..., :2]
    normal = places / sizes.flip(1)[:, None, None].float() * 2 - 1
    found = F.grid_sample(maps.float() - fill, normal, mode=filter, padding_mode="border", align_corners=False) + fill
    inside = ((normal >= -1) & (normal <= 1)).all(-1)[:, None]
    return torch.where(inside, found, fill).to(maps.dtype)
