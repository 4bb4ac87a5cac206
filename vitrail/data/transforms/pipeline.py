"""The augmentation pipeline: from padded uint8 images to normalized network inputs."""

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.rng import GOLDEN, bernoulli, hash32, uniform_between
from vitrail.data.transforms import crops, policies
from vitrail.data.transforms.affine import compose, full_sizes, square
from vitrail.data.transforms.backend import backend_for
from vitrail.data.transforms.config import FIXED_CROPS
from vitrail.data.transforms.config import Augmentation as Augmentation
from vitrail.data.transforms.mixup import erasing_boxes
from vitrail.data.transforms.reference import Layer


class Augmented(NamedTuple):
    """Augmented images and the geometry of their augmentation."""

    images: Tensor  # float [B, 3, height, width], normalized
    view: crops.View  # the crop
    layers: tuple[Layer, ...]  # of the policy, in the order of application
    sizes: Tensor  # int64 [B, 2], of the source images
    crop_last: bool

    @property
    def steps(self) -> list[tuple[Tensor, Tensor]]:
        """For every operation, last to first: its output-to-input matrix [B, 3, 3] and the sizes [B, 2] of its input."""
        sizes = self.sizes if self.crop_last else full_sizes(self.images)
        warps = [(square(layer.matrix(sizes).float()), sizes) for layer in reversed(self.layers)]
        crop = [(self.view.matrix(), self.sizes)]
        return crop + warps if self.crop_last else warps + crop

    @property
    def matrix(self) -> Tensor:
        """Matrices [B, 3, 3] from output coordinates (x, y, 1) to source coordinates; pixel centers are at .5."""
        return reduce(lambda after, before: compose(before, after), (matrix for matrix, _ in self.steps))


def augment(pixels: Tensor, sizes: Tensor, key: Tensor, augmentation: Augmentation, erase: bool = True) -> Augmented:
    """Augment uint8 images [B, 3, H, W] of `sizes` [B, 2] with the random keys [B]; does not synchronize with the GPU.

    Without `erase` random erasing is left to the function `erase`.
    """
    backend = backend_for(pixels)
    view, cubic = sample_view(sizes, key, augmentation), policies.sample_cubic(key, "crop", augmentation.interpolation)
    if augmentation.crop_last:
        output = apply_policy(policies.PaddedImages(pixels, sizes, sample_flips(key, augmentation)), key, augmentation)
        cropped = backend.crop_resize(output.pixels, view, augmentation.interpolation, cubic)
    else:
        cropped = backend.crop_resize(pixels, view, augmentation.interpolation, cubic)
        output = apply_policy(policies.PaddedImages(cropped, full_sizes(cropped)), key, augmentation)
        cropped = output.pixels
    probability = augmentation.random_erasing if erase else 0.0
    boxes = erasing_boxes(key, augmentation.image_size, probability) if probability > 0 else None
    images = backend.normalize(cropped, augmentation.mean, augmentation.std, boxes, key)
    return Augmented(images, view, output.layers, sizes, augmentation.crop_last)


def erase(images: Tensor, key: Tensor, probability: float) -> Tensor:
    """Random erasing of normalized images [B, 3, height, width] with the random keys [B]."""
    if probability <= 0:
        return images
    height, width = images.shape[-2:]
    boxes = erasing_boxes(key, (height, width), probability)
    out: Tensor = backend_for(images).normalize(images, (0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255), boxes, key)
    return out


def sample_view(sizes: Tensor, key: Tensor, augmentation: Augmentation) -> crops.View:
    """Draw the crop and the flip of images of `sizes` [B, 2]."""
    match augmentation.crop:
        case "random_resized":
            view = crops.random_resized_crop(sizes, key, augmentation.image_size, augmentation.scale, augmentation.ratio)
        case "distorted_box":
            view = crops.distorted_box(sizes, key, augmentation.image_size, augmentation.scale, augmentation.ratio)
        case "simple":
            view = crops.simple_random_crop(sizes, key, augmentation.image_size, augmentation.padding)
        case "scaled":
            view = crops.scaled_crop(sizes, key, augmentation.image_size, augmentation.factors)
        case "center":
            view = crops.center_crop(sizes, augmentation.image_size, augmentation.crop_ratio)
        case _:
            view = crops.squash(sizes, augmentation.image_size)
    flip = sample_flips(key, augmentation)
    if flip is None:
        return view
    return view.after_flip(sizes[:, 1], flip) if augmentation.crop_last else crops.flip_view(view, flip)


def sample_flips(key: Tensor, augmentation: Augmentation) -> Tensor | None:
    """Draw which images are flipped horizontally [B]; None for the deterministic crops."""
    return None if augmentation.crop in FIXED_CROPS else bernoulli(key, "flip", augmentation.hflip)


def apply_policy(padded: policies.PaddedImages, key: Tensor, augmentation: Augmentation) -> policies.PolicyOutput:
    """Apply the policy and the color jitter."""
    if augmentation.policy == "none" and not any(augmentation.color_jitter):
        return policies.PolicyOutput(padded.pixels)
    if padded.pixels.is_floating_point():  # interpolated without antialias
        padded = padded._replace(pixels=padded.pixels.round().to(torch.uint8))
    match augmentation.policy:
        case "rand":
            strength = (augmentation.magnitude, augmentation.magnitude_std, augmentation.num_ops)
            return policies.rand_augment(padded, key, *strength, augmentation.interpolation)
        case "auto":
            return policies.auto_augment(padded, key, augmentation.interpolation)
        case "trivial":
            return policies.trivial_augment(padded, key, augmentation.interpolation)
        case "three":
            padded = padded._replace(pixels=policies.three_augment(padded, key))
            return policies.PolicyOutput(apply_color_jitter(padded, key, augmentation))
        case "dino":
            return policies.PolicyOutput(apply_dino(padded, key, augmentation))
    return policies.PolicyOutput(apply_color_jitter(padded, key, augmentation))


def apply_color_jitter(padded: policies.PaddedImages, key: Tensor, augmentation: Augmentation) -> Tensor:
    if not any(augmentation.color_jitter):
        return padded.pixels
    selected = bernoulli(key, "jitter", augmentation.color_jitter_prob)
    return policies.color_jitter(padded, key, augmentation.color_jitter, selected)


def apply_dino(padded: policies.PaddedImages, key: Tensor, augmentation: Augmentation) -> Tensor:
    """The augmentation of DINO: color jitter, grayscale, blur and solarize, each with its own probability."""
    padded = padded._replace(pixels=apply_color_jitter(padded, key, augmentation))
    pixels = policies.apply_masked(padded, bernoulli(key, "grey", augmentation.grayscale), "saturation", 0.0)
    sigma = torch.where(bernoulli(key, "blur", augmentation.blur), uniform_between(key, "blur.sigma", 0.1, 2.0), 0.0)
    pixels = backend_for(pixels).blur(pixels, padded.sizes, sigma)
    solarized = bernoulli(key, "solarize", augmentation.solarize)
    return policies.apply_masked(padded._replace(pixels=pixels), solarized, "solarize", 128.0)


def augment_views(pixels: Tensor, sizes: Tensor, key: Tensor, views: Sequence[tuple[Augmentation, int]]) -> list[Augmented]:
    """Several views of every image: `count` views with the settings of each pair in `views`.

    The views of a pair are one batch [count * B], one view of all images after the other: many small batches would take longer to
    launch than to compute. Every view has keys of its own.
    """
    augmented, number = [], 0
    for augmentation, count in views:
        keys = torch.cat([hash32(key + GOLDEN * (number + view + 1)) for view in range(count)])
        number += count
        repeated = pixels if count == 1 else torch.cat([pixels] * count)  # unlike `repeat`, this keeps the memory format
        augmented.append(augment(repeated, sizes.repeat(count, 1), keys, augmentation))
    return augmented


def reproject(
    maps: Tensor,
    matrix: Tensor,
    out: tuple[int, int],
    sizes: Tensor,
    image: tuple[int, int],
    filter: str = "nearest",
    fill: float = 0.0,
    steps: Sequence[tuple[Tensor, Tensor]] = (),
) -> Tensor:
    """Apply the geometry of an augmentation to label maps [B, K, h, w] of the source images.

    `sizes` [B, 2] are the sizes of the source images in pixels, `matrix` and `steps` those of `Augmented`, and `image` the size
    of the augmented images. The result has `out` cells over the same view. Cells outside of the source image get `fill`; with
    `steps`, also cells that the image lost in an earlier operation.
    """
    height, width = out
    y = (torch.arange(height, device=maps.device) + 0.5) * (image[0] / height)
    x = (torch.arange(width, device=maps.device) + 0.5) * (image[1] / width)
    rows, columns = torch.meshgrid(y, x, indexing="ij")
    start = torch.stack([columns, rows, torch.ones_like(rows)], -1).expand(len(maps), -1, -1, -1)
    known = torch.ones(len(maps), height, width, dtype=torch.bool, device=maps.device)
    points = start
    for step, size in steps:
        points = transform_points(step, points)
        known = known & inside_image(points, size)
    points = transform_points(matrix, start)
    grid = points[..., :2] / sizes.flip(1)[:, None, None].float() * 2 - 1
    sampled = F.grid_sample(maps.float() - fill, grid, mode=filter, padding_mode="border", align_corners=False) + fill
    return torch.where((known & inside_image(points, sizes))[:, None], sampled, fill).to(maps.dtype)


def transform_points(matrix: Tensor, points: Tensor) -> Tensor:
    """Apply matrices [B, 3, 3] to points [B, h, w, 3], in full float32 precision (no TF32)."""
    return (matrix[:, None, None] * points[:, :, :, None]).sum(-1)


def inside_image(points: Tensor, sizes: Tensor) -> Tensor:
    """Mask of the points (x, y, 1) [B, h, w, 3] inside of images of `sizes` [B, 2]."""
    inside = (points[..., :2] >= 0) & (points[..., :2] <= sizes.flip(1)[:, None, None])
    return inside.all(-1)
