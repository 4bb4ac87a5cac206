"""Scores of relevance maps: do they point at the object, cover its mask, and name the patches that the prediction needs?"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.image_loader import ImageLoader
from vitrail.data.mask_checks import complete_classes
from vitrail.data.mask_classes import IGNORE, MaskClasses
from vitrail.data.source import Source, Subset
from vitrail.data.transforms.mask_geometry import crop_masks
from vitrail.errors import UserError
from vitrail.evaluation.model import decode_side
from vitrail.evaluation.statistics import Summary, summarize, wilson
from vitrail.interpret.attention import Recording, batch_size_for, record
from vitrail.interpret.evidence import predict_logits
from vitrail.interpret.maps import check_method, compute_map, needs_gradients, resize_map
from vitrail.models.vision_transformer import VisionTransformer

BATCH = 16  # images per forward pass
STEPS = 5  # of the deletion and insertion curves
TIE = 1e-5  # relative difference of equal values after they were resized
MEASURES = ("pointing", "iou", "deletion", "insertion")
BASELINES = ("center", "random")  # a Gaussian in the center of the image, and noise: what a useful map must exceed
TRIMAP = (1, 2, 3)  # ids of Oxford-IIIT Pet: pet, background, border


class MethodScore(NamedTuple):
    """The scores of one method on n images with a mask."""

    method: str
    n: int
    pointing: float  # share of images whose most relevant pixel is on an object; of several, their share on one
    pointing_interval: tuple[float, float]  # Wilson, 95 %
    iou: Summary  # of the pixels above the mean of the map, and the mask
    deletion: Summary  # mean probability while the most relevant patches are hidden first: low is good
    insertion: Summary  # mean probability while the most relevant patches are shown first: high is good
    to_center: dict[str, Summary]  # difference to the baseline `center` by measure, paired by image

    def exceeds_center(self, measure: str) -> bool:
        """Whether the 95 % interval of the mean difference to `center` is on the better side of 0."""
        difference = self.to_center[measure]
        if difference.low is None or difference.high is None:
            return False
        return difference.high < 0 if measure == "deletion" else difference.low > 0

    def to_dict(self) -> dict[str, Any]:
        values = self._asdict() | {"to_center": {name: each._asdict() for name, each in self.to_center.items()}}
        return values | {name: values[name]._asdict() for name in MEASURES[1:]}


def score_methods(
    model: VisionTransformer,
    source: Source,
    methods: Sequence[str],
    images: int = 300,
    seed: int = 0,
    advance: Callable[[int], Any] = lambda count: None,
) -> list[MethodScore]:
    """Scores of methods, and of two baselines, for the predicted classes of random images of a source with masks.

    Images without an object in the crop that the model sees are left out. Where the mask of an image has a class with the name of
    the predicted one, only its pixels are the object, otherwise those of all objects.
    """
    for method in methods:
        check_method(model, method)
    mask_classes = complete_classes([source])
    table = foreground_table(mask_classes, source.name)
    chosen = np.sort(np.random.default_rng(seed).permutation(len(source))[:images])
    device = next(model.parameters()).device
    objects = {name.lower(): index for index, name in enumerate(mask_classes.names) if table[index] == 1}
    object_of = torch.tensor([objects.get(name.lower(), -1) for name in model.class_names or ()], device=device)
    loader = ImageLoader(Subset(source, chosen), device, 0, decode_side(model), log=lambda message: None, masks=True)
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, list[Tensor]] = {method: [] for method in (*methods, *BASELINES)}
    try:
        for batch in loader.iterate(batch_size_for(model, BATCH)):
            assert batch.masks is not None
            indices = crop_masks(batch.masks, model.preprocessing.view(batch.sizes)).long()
            masks = torch.from_numpy(table).to(device)[indices]
            rows = (masks == 1).flatten(1).any(1)
            advance(len(masks))
            if not rows.any():
                continue
            masks, indices = masks[rows], indices[rows]
            pixels = model.preprocessing.apply(batch.pixels[rows], batch.sizes[rows])
            recording = record(model, pixels, any(map(needs_gradients, methods)))
            classes = recording.logits.argmax(1)
            if len(object_of):
                masks = keep_object(masks, indices, object_of[classes])
            for method in found:
                if method in BASELINES:
                    maps = baseline(method, len(pixels), recording.grid, generator).to(device)
                else:
                    maps = compute_map(recording, method, classes)
                found[method].append(score_maps(recording, maps, masks, classes))
    finally:
        loader.close()
    if not any(found.values()):
        raise UserError(f"None of the {len(chosen)} images of {source.name} has a mask with an object.")
    values = {method: torch.cat(parts).double().numpy() for method, parts in found.items()}
    return [describe_scores(method, each, values["center"]) for method, each in values.items()]


def keep_object(masks: Tensor, indices: Tensor, objects: Tensor) -> Tensor:
    """Masks [B, H, W] that are 1 only on pixels of the class `objects` [B], where an image has some; 0 on other objects."""
    same = indices == objects[:, None, None]
    others = same.flatten(1).any(1)[:, None, None] & ~same & (masks == 1)
    return masks.masked_fill(others, 0)


def describe_scores(method: str, values: np.ndarray, center: np.ndarray) -> MethodScore:
    """The scores of one method from values [n, 4], and their difference to those of the baseline on the same images."""
    pointing, *others = values.T
    iou, deletion, insertion = (summarize(each.tolist()) for each in others)
    share, n = float(pointing.mean()), len(values)
    to_center = {name: summarize(each.tolist()) for name, each in zip(MEASURES, (values - center).T, strict=True)}
    return MethodScore(method, n, share, wilson(share, n), iou, deletion, insertion, to_center)


def score_maps(recording: Recording, maps: Tensor, masks: Tensor, classes: Tensor) -> Tensor:
    """Pointing, IoU, deletion and insertion of each image, float32 [B, 4]; masks [B, H, W] are 1 on objects, 255 ignored."""
    valid, inside = masks != IGNORE, masks == 1
    values = resize_map(maps, recording)
    # Of equally relevant pixels, such as those of a plateau, their share on an object: the result of choosing one at random.
    largest = values.masked_fill(~valid, -torch.inf).amax((1, 2), keepdim=True)
    best = (values >= largest * (1 - TIE)) & valid
    pointing = (best & inside).sum((1, 2)) / best.sum((1, 2))
    mean = (values * valid).sum((1, 2)) / valid.sum((1, 2))
    covered = (values > mean[:, None, None]) & valid
    iou = (covered & inside).sum((1, 2)) / (covered | inside).sum((1, 2))
    curves = [probability_curve(recording, maps, classes, shown).mean(1) for shown in (False, True)]
    return torch.stack([pointing.float(), iou.float(), *curves], 1).cpu()


def probability_curve(recording: Recording, maps: Tensor, classes: Tensor, insertion: bool, steps: int = STEPS) -> Tensor:
    """The probability of a class while the patches are hidden (or shown, the others hidden), the most relevant first.

    Maps [B, rows, columns] to [B, steps + 1]; hidden pixels have the mean color. Equally relevant patches are taken in a random
    order, which is the same for all images.
    """
    images, count = recording.images.detach(), maps[0].numel()
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(maps.device)
    patches = shuffled[maps.flatten(1)[:, shuffled].argsort(dim=1, descending=True, stable=True)]  # the most relevant first
    order = patches.argsort(1)  # of each patch, 0 being the first
    whole = recording.logits.detach().float().softmax(1).gather(1, classes[:, None])[:, 0]
    points = []
    for step in range(steps + 1):
        if step == (steps if insertion else 0):
            points.append(whole)
            continue
        taken = (order < round(count * step / steps)).unflatten(1, recording.grid)
        mask = resize_map(taken, recording, "nearest")
        logits = predict_logits(recording.model, images * (mask if insertion else 1 - mask)[:, None]).float()
        points.append(logits.softmax(1).gather(1, classes[:, None])[:, 0])
    return torch.stack(points, 1)


def baseline(name: str, count: int, grid: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Maps [count, rows, columns] that do not depend on the image."""
    if name == "random":
        return torch.rand(count, *grid, generator=generator)
    y, x = (torch.linspace(-1, 1, side) if side > 1 else torch.zeros(1) for side in grid)
    return torch.exp(-2 * (y[:, None] ** 2 + x**2)).expand(count, -1, -1)


def foreground_table(classes: MaskClasses, name: str) -> np.ndarray:
    """1 for the class indices of objects, 0 for the background, `IGNORE` for the others, uint8 [256]."""
    table = np.full(256, IGNORE, dtype=np.uint8)
    numbered = classes.names == tuple(f"class {number}" for number in classes.ids)
    if numbered and classes.ids == TRIMAP:
        table[:3] = (1, 0, IGNORE)
        return table
    names = [each.lower() for each in classes.names]
    background = names.index("background") if "background" in names else 0 if numbered and classes.ids[0] == 0 else None
    if background is None:
        raise UserError(f"The masks of {name} have no class named background: name the ids in classes.json.")
    table[: len(names)] = 1
    table[background] = 0
    return table
