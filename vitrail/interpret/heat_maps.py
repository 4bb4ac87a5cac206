"""Relevance maps drawn over images: overlays, CaiT's saliency, heads of a layer, thresholded heads, and classes side by side."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.data.class_matching import class_titles
from vitrail.errors import UserError
from vitrail.interpret.attention import Recording
from vitrail.interpret.explanation import shown_images
from vitrail.interpret.maps import attention_maps, class_attention, threshold_mass
from vitrail.pages.charts import LIGHT, new_figure, render_png

STRENGTH = 0.6  # of the color over the gray image
CONFIDENT = 0.1  # classes above this probability are named below a saliency image


def scale_map(values: np.ndarray) -> np.ndarray:
    """A map scaled to 0 .. 1 between its 5th and 98th percentile: a single bright patch would darken all others."""
    high, low = np.percentile(values, 98), np.percentile(values, 5)
    out: np.ndarray = np.clip((values - low) / max(float(high - low), 1e-12), 0, 1).astype(np.float32)
    return out


def enlarge(values: np.ndarray, size: tuple[int, int], resample: Image.Resampling = Image.Resampling.BICUBIC) -> np.ndarray:
    """A map [rows, columns] at (height, width), within its range."""
    image = Image.fromarray(values.astype(np.float32)).resize((size[1], size[0]), resample)
    out: np.ndarray = np.clip(np.asarray(image), values.min(), values.max())
    return out


def draw_over(pixels: np.ndarray, values: np.ndarray) -> np.ndarray:
    """A map [rows, columns] in color over the gray image uint8 [H, W, 3]; values of all maps are scaled on their own."""
    from matplotlib import colormaps

    gray = pixels.astype(np.float32).mean(2, keepdims=True)
    colors = 255 * np.asarray(colormaps["inferno"](enlarge(scale_map(values), pixels.shape[:2])), dtype=np.float32)[..., :3]
    out: np.ndarray = ((1 - STRENGTH) * gray + STRENGTH * colors).round().astype(np.uint8)
    return out


def saliency(pixels: np.ndarray, values: np.ndarray) -> np.ndarray:
    """CaiT Fig. 7: the map at the size of the image, scaled from minimum to maximum, times the gray image [H, W], 0 .. 1."""
    large = enlarge(values, pixels.shape[:2], Image.Resampling.BILINEAR)
    scaled = (large - large.min()) / max(float(large.max() - large.min()), 1e-12)
    out: np.ndarray = scaled * np.asarray(Image.fromarray(pixels).convert("L"), dtype=np.float32) / 255
    return out


def draw_saliency(recording: Recording) -> bytes:
    """CaiT Fig. 7 of a batch: images above their saliency in the colors of cividis, with their classes above 10 %, as PNG."""
    maps = class_attention(recording, recording.logits.argmax(1)).float().cpu().numpy()
    pixels = shown_images(recording)
    titles = class_titles(recording.model.class_names, recording.model.architecture.classes)
    captions = [
        "\n".join(f"{titles[index]} {100 * row[index]:.0f} %" for index in np.argsort(-row) if row[index] > CONFIDENT)
        for row in recording.logits.detach().float().softmax(1)[:, : len(titles)].cpu().numpy()  # no titles without a classifier
    ]
    with new_figure(LIGHT, (2.2 * len(pixels), 5.3)) as figure:
        tiles = figure.subplots(2, len(pixels), squeeze=False)
        for (above, below), image, values, caption in zip(tiles.T, pixels, maps, captions, strict=True):
            above.imshow(image)
            below.imshow(saliency(image, values), cmap="cividis", vmin=0, vmax=1)
            place = {"x": 0.5, "y": -0.03, "va": "top", "ha": "center", "transform": below.transAxes}
            below.text(s=caption, fontsize=7, color=LIGHT.foreground, parse_math=False, **place)
            for axes in (above, below):
                axes.set_axis_off()
        figure.subplots_adjust(0.01, 0.17, 0.99, 0.99, 0.04, 0.02)
        return render_png(figure)


def draw_heads(
    recording: Recording,
    pixels: np.ndarray,
    layers: Sequence[int],
    row: int = 0,
    masks: bool = False,
    classes: Tensor | None = None,
) -> bytes:
    """The attention of every head, one line per layer, of one image of the batch; with `masks` the patches of 60 % of its sum.

    Of the class-attention blocks it is CaiT Fig. 6, with `masks` of the last layer the figure of DINO. `classes` [B] are
    those whose queries are shown, where each class has its own; default: the predicted ones.
    """
    maps = [attention_maps(recording, layer, classes)[row].float().cpu() for layer in layers]
    heads = max(len(each) for each in maps)
    height = 1.45 * len(layers) + 0.1
    with new_figure(LIGHT, (1.3 * heads + 0.2, height)) as figure:
        tiles = figure.subplots(len(layers), heads, squeeze=False)
        for axes in tiles.flat:
            axes.set_axis_off()
        for line, layer, each in zip(tiles, layers, maps, strict=True):
            for head, values in enumerate(each):
                shown = draw_mask(pixels, threshold_mass(values[None])[0].numpy()) if masks else draw_over(pixels, values.numpy())
                line[head].imshow(shown)
                line[head].set_title(f"layer {recording.layer_index(layer)}, head {head}", fontsize=7, color=LIGHT.foreground)
        figure.subplots_adjust(0.01, 0.01, 0.99, 1 - 0.25 / height, 0.05, 0.18)
        return render_png(figure)


def draw_mask(pixels: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The chosen patches [rows, columns] of an image; the others are dark."""
    large = enlarge(chosen.astype(np.float32), pixels.shape[:2], Image.Resampling.NEAREST)[..., None]
    out: np.ndarray = (pixels * (0.2 + 0.8 * large)).round().astype(np.uint8)
    return out


def draw_class_maps(recording: Recording, pixels: np.ndarray, top: int = 3, row: int = 0) -> bytes:
    """PatchConvNet Fig. 5.6: an image and the maps of its `top` most probable classes, each from the query of its class."""
    if recording.model.architecture.pooling != "per_class":
        raise UserError("Maps by class need one query per class: convert the weights, see docs/papers/patchconvnet.md.")
    probabilities, classes = recording.logits[row].detach().float().softmax(0).topk(min(top, recording.logits.shape[1]))
    titles = class_titles(recording.model.class_names, recording.model.architecture.classes)
    count = len(recording.images)
    with new_figure(LIGHT, (2 * (len(classes) + 1), 2.3)) as figure:
        tiles = figure.subplots(1, len(classes) + 1)
        tiles[0].imshow(pixels)
        for axes, probability, index in zip(tiles[1:], probabilities.tolist(), classes.tolist(), strict=True):
            values = class_attention(recording, torch.full((count,), index, device=recording.images.device))[row]
            axes.imshow(draw_over(pixels, values.float().cpu().numpy()))
            axes.set_title(
                f"{titles[index]} {100 * probability:.0f} %",
                fontsize=8,
                color=LIGHT.foreground,
                parse_math=False,
            )
        for axes in tiles:
            axes.set_axis_off()
        figure.subplots_adjust(0.01, 0.01, 0.99, 0.88, 0.04)
        return render_png(figure)
