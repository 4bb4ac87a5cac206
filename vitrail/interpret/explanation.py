"""`explain`: predictions of images with maps of what they depend on."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vitrail.data.class_matching import class_titles
from vitrail.errors import UserError
from vitrail.evaluation.model import Model, decode_side, device_of, open_model
from vitrail.evaluation.predict import ClassProbability, Prediction, open_inputs, read_batches
from vitrail.heads.task_heads import CALLS
from vitrail.interpret.attention import Recording, batch_size_for, record
from vitrail.interpret.maps import check_method, compute_map, default_methods, needs_gradients
from vitrail.models.preprocessing import Preprocessing
from vitrail.models.vision_transformer import VisionTransformer

if TYPE_CHECKING:
    from vitrail.evaluation.predict import ImagesInput

    Class = int | str

BATCH = 8  # images per forward pass


@dataclass(frozen=True)
class Explanation:
    """The prediction of one image, and maps of what it depends on; without a classifier, maps of attention alone."""

    prediction: Prediction  # without a classifier no classes
    target: ClassProbability | None  # the class that the maps explain; None without a classifier
    maps: dict[str, np.ndarray]  # method -> float32 [rows, columns], not negative
    image: np.ndarray  # uint8 [height, width, 3]: the part of the resized and cropped image that the patches, and the maps, cover


def explain(
    model: "str | Path | Model",
    images: "ImagesInput",
    methods: Sequence[str] | None = None,
    classes: "Class | Sequence[Class] | None" = None,
    top: int = 5,
    batch_size: int | None = None,
) -> list[Explanation]:
    """The `top` most probable classes of each image, and a map for each of `methods`.

    `model` and `images` are those of `vitrail.predict`. The default method is the first of `available_methods(model)`.
    `classes` are names or indices of the classes to explain: one for all images, or one per image; by default the predicted ones.
    Of weights without a classifier only methods that use attention alone are available, and there are no classes.
    The default `batch_size` is 8, less for large images.
    """
    opened = open_model(model) if isinstance(model, str | Path) else model
    vision = check_model(opened)
    chosen = list(methods) if methods is not None else default_methods(vision)[:1]
    for method in chosen:
        check_method(vision, method)
    source, problems = open_inputs(images)
    targets = None if classes is None else class_indices(vision, classes, len(source))
    found: list[Explanation] = []
    for batch in read_batches(source, device_of(vision), decode_side(vision), batch_size or batch_size_for(vision, BATCH)):
        problems += batch.problems.values()
        if problems:
            break
        pixels = vision.preprocessing.apply(batch.pixels, batch.sizes)
        wanted = None if targets is None else torch.tensor([targets[index] for index in batch.index.tolist()])
        names = [source.location(index) for index in batch.index.tolist()]
        found += explain_batch(vision, pixels, names, chosen, wanted, top)
    if problems:
        raise UserError(f"{problems[0].location} cannot be read: {problems[0].reason}.")
    return found


def explain_batch(
    model: VisionTransformer, images: Tensor, names: Sequence[str], methods: Sequence[str], classes: Tensor | None, top: int
) -> list[Explanation]:
    """`explain` of preprocessed images [B, 3, height, width]: one forward pass, one backward pass if a method needs it."""
    return explain_recording(record(model, images, any(map(needs_gradients, methods))), names, methods, classes, top)


def explain_recording(
    recording: Recording, names: Sequence[str], methods: Sequence[str], classes: Tensor | None, top: int
) -> list[Explanation]:
    """`explain` of a recorded forward pass."""
    model = recording.model
    logits = recording.logits.detach().float()
    if not logits.isfinite().all():
        raise UserError("The model's outputs are NaN or Inf: its weights are damaged.")
    targets = logits.argmax(1) if classes is None else classes.to(logits.device)
    maps = {method: compute_map(recording, method, targets).float().cpu().numpy() for method in methods}
    probabilities = logits.softmax(1)
    titles = class_titles(model.class_names, model.architecture.classes)  # none without a classifier
    best = probabilities.topk(min(top, len(titles)), 1).indices.tolist()
    shown = shown_images(recording)

    def probability(row: int, index: int) -> ClassProbability:
        return ClassProbability(index, titles[index], probabilities[row, index].item())

    return [
        Explanation(
            Prediction(name, [probability(row, index) for index in best[row]], None),
            probability(row, int(targets[row])) if titles else None,
            {method: values[row] for method, values in maps.items()},
            shown[row],
        )
        for row, name in enumerate(names)
    ]


def check_model(model: Model) -> VisionTransformer:
    """The model, if it is one of Vitrail that predicts classes or features."""
    if not isinstance(model, VisionTransformer):
        raise UserError("Only models that Vitrail builds can be explained, not other networks such as ONNX files.")
    if call := CALLS.get(model.task):
        raise UserError(f"Only classes can be explained, and these weights {call}.")
    return model


def check_classifier(model: VisionTransformer) -> VisionTransformer:
    """The model, if it has a classifier."""
    if not model.architecture.classes:
        raise UserError("This model has no classifier, so there is no class to explain: train one with `vitrail train --from`.")
    return model


def class_indices(model: VisionTransformer, classes: "Class | Sequence[Class]", images: int) -> list[int]:
    """The index of one class per image, from names or indices, one or as many as images."""
    given = [classes] if isinstance(classes, int | str) else list(classes)
    if len(given) not in (1, images):
        raise UserError(f"{len(given)} classes for {images} images: give one class, or one per image.")
    indices = [class_index(model, item) for item in given]
    return indices * images if len(indices) == 1 else indices


def class_index(model: VisionTransformer, item: "Class") -> int:
    """The index of a class by its number or its name: an exact one, or else one with other upper and lower case."""
    count = check_classifier(model).architecture.classes
    titles = class_titles(model.class_names, count)
    if item in titles:
        return titles.index(item)
    names = [name.lower() for name in titles]
    if isinstance(item, str) and item.lower() in names:
        return names.index(item.lower())
    try:
        index = int(item)
    except ValueError:
        near = difflib.get_close_matches(str(item).lower(), names, 1) or names[:1]
        hint = f", such as {near[0]!r}" if near else ""
        raise UserError(f"The model has no class {item!r}: give the name of one of its classes{hint}, or a number.") from None
    if not 0 <= index < count:
        raise UserError(f"The model has no class {index}: it has {count} classes, 0 being the first.")
    return index


def shown_images(recording: Recording) -> np.ndarray:
    """The part of the images that the patches cover, uint8 [B, height, width, 3]: what maps are drawn over."""
    height, width = recording.covered
    return to_uint8(recording.images[..., :height, :width], recording.model.preprocessing)


def to_uint8(images: Tensor, preprocessing: Preprocessing) -> np.ndarray:
    """Normalized images [B, 3, height, width] as uint8 [B, height, width, 3]."""
    mean, std = (torch.tensor(values, device=images.device)[:, None, None] for values in (preprocessing.mean, preprocessing.std))
    pixels = ((images.detach().float() * std + mean) * 255).round().clamp(0, 255)
    return pixels.to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
