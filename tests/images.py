"""Folders of small images; each class has its own color."""

import json

import numpy as np
from PIL import Image

COLORS = [(200, 40, 40), (40, 200, 40), (40, 40, 200), (200, 200, 40)]


def make_folder(folder, classes=("red", "green", "blue"), count=12, size=(16, 16), mode="RGB", ending="png"):
    """Write `count` images of `size` (width, height) per class: its color with noise."""
    for label, name in enumerate(classes):
        for number in range(count):
            make_image(folder / name / f"{number:03}.{ending}", label, size, mode)
    return folder


def make_image(path, label=0, size=(16, 16), mode="RGB"):
    noise = np.random.default_rng([label, sum(path.name.encode())]).integers(-30, 31, (size[1], size[0], 3))
    pixels = (np.array(COLORS[label % len(COLORS)]) + noise).clip(0, 255).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).convert(mode).save(path)
    return path


def write_invalid_image(path):
    """Write a file with the name of an image that is not an image."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"this is not an image")
    return path


def make_masked_folder(folder, count=12, size=(24, 20), classes=("ground", "red", "blue")):
    """Write images/, masks/ and classes.json: a red and a blue box of random place on a gray ground; the border is 255."""
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        rng = np.random.default_rng([7, number])
        mask = np.zeros((size[1], size[0]), dtype=np.uint8)
        for label in range(1, len(classes)):
            height, width = (int(rng.integers(side // 4, side // 2)) for side in mask.shape)
            top, left = int(rng.integers(0, size[1] - height)), int(rng.integers(0, size[0] - width))
            mask[top : top + height, left : left + width] = label
        colors = np.array([(120, 120, 120), (200, 40, 40), (40, 40, 200)][: len(classes)])
        pixels = (colors[mask] + rng.integers(-20, 21, (*mask.shape, 3))).clip(0, 255).astype(np.uint8)
        mask[:1] = 255
        Image.fromarray(pixels).save(folder / "images" / f"{number:03}.png")
        write_mask(folder / "masks" / f"{number:03}.png", mask)
    (folder / "classes.json").write_text(json.dumps(classes))
    return folder


def write_mask(path, mask, palette=True):
    """Write class ids as a PNG with a palette, or as gray values."""
    image = Image.fromarray(mask)
    if palette:
        image = Image.fromarray(mask, "P")
        image.putpalette(np.random.default_rng(0).integers(0, 256, 768, dtype=np.uint8).tobytes())
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
    return path
