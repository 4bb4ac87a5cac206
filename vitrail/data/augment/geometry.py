"""Where the network looks: crops, flips and resizing as two small matrices per picture, one for rows, one for columns.

Cropping, resizing, flipping and blurring are linear and separable, so a picture X becomes R X C^T with R [out, height] and
C [out, width] of its own: one batched product on tensor cores, whatever the crop. The weights are Pillow's (antialiased when
shrinking). A `View` keeps what was done, so that label maps and masks can follow exactly.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vitrail.data.randomness import chance, integers, uniform

FILTERS = {"nearest": 0.5, "bilinear": 1.0, "bicubic": 2.0, "lanczos": 3.0}  # name -> support


@dataclass(frozen=True)
class Axis:
    """One direction of a view, per picture [B]: take `length` source pixels from `start`, resize them to `resized`, take `out`
    of those from `offset` on (beyond the ends: mirrored), turn round if `flip`."""

    start: Tensor
    length: Tensor
    resized: Tensor
    offset: Tensor
    flip: Tensor
    out: int


@dataclass(frozen=True)
class View:
    """What the network sees of each picture."""

    rows: Axis
    columns: Axis

    def matrix(self) -> Tensor:
        """[B, 3, 3]: a pixel centre (x, y, 1) of the output to its place in the source picture, in pixels."""
        affine = torch.zeros(len(self.rows.start), 3, 3, device=self.rows.start.device)
        affine[:, 2, 2] = 1
        for place, axis in ((0, self.columns), (1, self.rows)):
            scale = axis.length / axis.resized
            sign = 1 - 2 * axis.flip.float()
            first = torch.where(axis.flip, axis.out - 1 + axis.offset, axis.offset)
            affine[:, place, place] = sign * scale
            affine[:, place, 2] = axis.start + (first + 0.5) * scale - sign * scale * 0.5
        return affine


def _axis(start, length, out: int, flip) -> Axis:
    """A box resized to the output: nothing cut, nothing mirrored."""
    return Axis(start, length, torch.full_like(start, out), torch.zeros_like(start), flip, out)


def random_resized_crop(
    sizes: Tensor,
    key: Tensor,
    out: tuple[int, int],
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    name: str = "crop",
) -> View:
    """A box of random area (share of the picture) and aspect (log-uniform), ten tries, else the largest allowed centre box."""
    height, width = sizes[:, :1].float(), sizes[:, 1:].float()
    area = height * width * (scale[0] + (scale[1] - scale[0]) * uniform(key, f"{name}.area", 10))
    aspect = torch.exp(math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * uniform(key, f"{name}.aspect", 10))
    tries_w, tries_h = torch.sqrt(area * aspect).round(), torch.sqrt(area / aspect).round()
    valid = (tries_w > 0) & (tries_w <= width) & (tries_h > 0) & (tries_h <= height)
    first = valid.to(torch.uint8).argmax(1, keepdim=True)
    box_w, box_h = tries_w.gather(1, first)[:, 0].long(), tries_h.gather(1, first)[:, 0].long()
    place = uniform(key, f"{name}.place", 2)
    rows, columns = sizes[:, 0], sizes[:, 1]
    top = (place[:, 0] * (rows - box_h + 1)).long()
    left = (place[:, 1] * (columns - box_w + 1)).long()
    shape = columns / rows
    centre_w = torch.where(shape > ratio[1], (rows * ratio[1]).round().long(), columns)
    centre_h = torch.where(shape < ratio[0], (columns / ratio[0]).round().long(), rows)
    found = valid.any(1)
    box_h, box_w = torch.where(found, box_h, centre_h), torch.where(found, box_w, centre_w)
    top = torch.where(found, top, (rows - centre_h) // 2)
    left = torch.where(found, left, (columns - centre_w) // 2)
    still = torch.zeros_like(found)
    return View(_axis(top, box_h, out[0], still), _axis(left, box_w, out[1], still))


def simple_random_crop(sizes: Tensor, key: Tensor, out: tuple[int, int], padding: int = 4) -> View:
    """The shorter side to the output's, then a crop at a random place of the picture mirrored by `padding` pixels."""
    resized = shorter_side(sizes, out)
    offsets = [
        integers(key, f"crop.{name}", resized[:, place] + 2 * padding - out[place] + 1)[:, 0] - padding
        for place, name in enumerate(("top", "left"))
    ]
    return _cut(sizes, resized, offsets, out)


def centre_crop(sizes: Tensor, out: tuple[int, int], crop_ratio: float = 0.875) -> View:
    """The test view: the shorter side to size / crop_ratio (whole part), then the middle."""
    target = (int(out[0] / crop_ratio), int(out[1] / crop_ratio))
    resized = shorter_side(sizes, target)
    offsets = [torch.round((resized[:, place] - out[place]) / 2.0).long() for place in (0, 1)]
    return _cut(sizes, resized, offsets, out)


def squash(sizes: Tensor, out: tuple[int, int]) -> View:
    """The whole picture to the output's size, aspect not kept."""
    zeros, still = torch.zeros_like(sizes[:, 0]), torch.zeros_like(sizes[:, 0], dtype=torch.bool)
    return View(_axis(zeros, sizes[:, 0], out[0], still), _axis(zeros, sizes[:, 1], out[1], still))


def shorter_side(sizes: Tensor, out: tuple[int, int]) -> Tensor:
    """[B, 2] sizes after resizing so that the picture just covers `out`, aspect kept, the other side cut to whole pixels."""
    rows, columns = sizes[:, 0], sizes[:, 1]
    by_rows = rows * out[1] <= columns * out[0]  # the rows are the shorter ones, in terms of the output
    new_rows = torch.where(by_rows, out[0], out[1] * rows // columns.clamp(min=1))
    new_columns = torch.where(by_rows, out[0] * columns // rows.clamp(min=1), out[1])
    return torch.stack([new_rows, new_columns], 1)


def _cut(sizes: Tensor, resized: Tensor, offsets: list[Tensor], out: tuple[int, int]) -> View:
    zeros, still = torch.zeros_like(sizes[:, 0]), torch.zeros_like(sizes[:, 0], dtype=torch.bool)
    rows, columns = (Axis(zeros, sizes[:, i], resized[:, i], offsets[i], still, out[i]) for i in (0, 1))
    return View(rows, columns)


def random_flip(view: View, key: Tensor, probability: float = 0.5) -> View:
    """Left and right exchanged with the given probability."""
    return replace(view, columns=replace(view.columns, flip=view.columns.flip ^ chance(key, "flip", probability)))


def kernel(name: str, x: Tensor) -> Tensor:
    """Pillow's resampling filters."""
    x = x.abs()
    if name == "bilinear":
        return (1 - x).clamp(min=0)
    if name == "bicubic":
        near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
        return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
    return torch.where(x < 3, torch.sinc(x) * torch.sinc(x / 3), 0.0)


def axis_matrix(axis: Axis, size: int, filter: str = "bicubic") -> Tensor:
    """Weights [B, out, size] from source pixels to output pixels, float32; rows sum to one."""
    device = axis.start.device
    place = torch.arange(axis.out, device=device)[None]
    place = torch.where(axis.flip[:, None], axis.out - 1 - place, place) + axis.offset[:, None]
    resized, length, start = (value[:, None] for value in (axis.resized, axis.length, axis.start))
    # Mirror at the ends without repeating the edge pixel.
    period = (2 * (resized - 1)).clamp(min=1)
    place = place.remainder(period)
    place = torch.where(place >= resized, period - place, place)
    scale = length / resized
    centre = start + (place + 0.5) * scale
    source = torch.arange(size, device=device)
    inside = (source >= start) & (source < start + length)  # [B, size]
    if filter == "nearest":
        chosen = torch.minimum(centre.floor(), start + length - 1.0)
        return (source == chosen[..., None]).float()
    stretch = scale.clamp(min=1.0)
    weights = kernel(filter, (source + 0.5 - centre[..., None]) / stretch[..., None]) * inside[:, None]
    return weights / weights.sum(-1, keepdim=True)


def blur_matrix(sigma: Tensor, size: int) -> Tensor:
    """Gaussian blur of one axis as a matrix [B, size, size]; the edge pixel goes on beyond the end. Sigma 0 is the identity."""
    place = torch.arange(size, device=sigma.device, dtype=torch.float32)
    distance = place[:, None] - place[None, :]
    # A pixel is a box of variance 1/12; what is left of sigma squared is the Gaussian that it is folded with.
    variance = sigma.square() - 1 / 12
    sharp = variance < 1e-6
    width = torch.where(sharp, 1.0, variance).sqrt()[:, None]

    def mass(x: Tensor) -> Tensor:  # share of a Gaussian to the left of x
        return 0.5 * torch.erfc(-x / (width[..., None] * math.sqrt(2.0)))

    weights = mass(distance[None] + 0.5) - mass(distance[None] - 0.5)
    left = mass(place[None, :, None] * -1.0 - 0.5)[..., 0]
    right = mass(place[None, :, None] - (size - 1) - 0.5)[..., 0]
    first = torch.nn.functional.one_hot(torch.zeros((), dtype=torch.long, device=sigma.device), size)
    last = torch.nn.functional.one_hot(torch.full((), size - 1, device=sigma.device), size)
    weights = weights + left[..., None] * first + right[..., None] * last
    return torch.where(sharp[:, None, None], torch.eye(size, device=sigma.device), weights)


def render(pixels: Tensor, view: View, filter: str = "bicubic", sigma: Tensor | None = None) -> Tensor:
    """Pictures uint8 [B, K, height, width] as the view sees them, float [B, K, out, out] in 0..255, not yet rounded.

    `sigma` [B] blurs after the crop, at no cost: the blur is folded into the matrices.
    """
    rows, columns = axis_matrix(view.rows, pixels.shape[-2], filter), axis_matrix(view.columns, pixels.shape[-1], filter)
    if sigma is not None:
        rows, columns = blur_matrix(sigma, view.rows.out) @ rows, blur_matrix(sigma, view.columns.out) @ columns
    # Pixels are whole numbers below 2048, which half precision holds exactly; sums are kept in float32 by the tensor cores.
    dtype = torch.float16 if pixels.is_cuda else torch.float32
    rows, columns = rows.to(dtype), columns.to(dtype)
    wide = whole(pixels.to(dtype) @ columns[:, None].transpose(-1, -2))  # whole numbers in between, as Pillow has them
    return (rows[:, None] @ wide).float().clamp(0, 255)


def whole(x: Tensor) -> Tensor:
    """Round halves up and clip, as Pillow does."""
    return (x + 0.5).floor().clamp(0, 255)
