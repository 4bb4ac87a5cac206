"""Folders of small images, each class with a color of its own."""

import numpy as np
from PIL import Image

COLOURS = [(200, 40, 40), (40, 200, 40), (40, 40, 200), (200, 200, 40)]


def make_folder(folder, classes=("red", "green", "blue"), count=12, size=(16, 16), mode="RGB", ending="png"):
    """count images of width x height per class: its color and some noise."""
    for place, name in enumerate(classes):
        for number in range(count):
            make_image(folder / name / f"{number:03}.{ending}", place, size, mode)
    return folder


def make_image(path, place=0, size=(16, 16), mode="RGB"):
    noise = np.random.default_rng([place, sum(path.name.encode())]).integers(-30, 31, (size[1], size[0], 3))
    pixels = (np.array(COLOURS[place % len(COLOURS)]) + noise).clip(0, 255).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).convert(mode).save(path)
    return path


def spoil(path):
    """A file by the name of an image that is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"this is not an image")
    return path
