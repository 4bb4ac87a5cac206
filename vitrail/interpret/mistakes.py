"""Maps of wrong predictions for the reports of training and evaluation."""

from collections.abc import Callable

import numpy as np
import torch

from vitrail.data.image_loader import ImageLoader
from vitrail.data.loader import log_to_stderr
from vitrail.data.source import Source, Subset
from vitrail.errors import UserError
from vitrail.evaluation.confusion import thumbnail
from vitrail.evaluation.model import decode_side
from vitrail.interpret.attention import batch_size_for, record
from vitrail.interpret.explanation import BATCH, shown_images
from vitrail.interpret.heat_maps import draw_over
from vitrail.interpret.maps import available_methods, compute_map, needs_gradients
from vitrail.models.vision_transformer import VisionTransformer

SIDE = 96  # pixels


def draw_maps(
    model: VisionTransformer,
    source: Source,
    images: np.ndarray,
    classes: np.ndarray,
    log: Callable[[str], None] = log_to_stderr,
) -> list[str]:
    """What the model predicted these classes from: the first of `available_methods` over each image, as base64 text.

    `images` are indices of the source; a class of -1 stands for the predicted one. "" where an image cannot be read, the
    model has no method, or maps cannot be computed, for example for lack of memory: a report without maps is better than none.
    """
    methods = available_methods(model)
    drawn = [""] * len(images)
    if not methods or not len(images):
        return drawn
    device = next(model.parameters()).device
    loader = ImageLoader(Subset(source, images), device, 0, decode_side(model), log=lambda message: None)
    try:
        for batch in loader.iterate(batch_size_for(model, BATCH)):
            rows = batch.index.tolist()
            pixels = model.preprocessing.apply(batch.pixels, batch.sizes)
            recording = record(model, pixels, needs_gradients(methods[0]))
            wanted = torch.from_numpy(classes[rows]).to(device)
            wanted = torch.where(wanted < 0, recording.logits.argmax(1), wanted)
            maps = compute_map(recording, methods[0], wanted).float().cpu().numpy()
            for row, shown, values in zip(rows, shown_images(recording), maps, strict=True):
                drawn[row] = thumbnail(draw_over(shown, values), SIDE)
    except (UserError, RuntimeError) as error:
        log(f"The mistakes are shown without maps: {str(error).partition(chr(10))[0]}")
    finally:
        loader.close()
    return drawn
