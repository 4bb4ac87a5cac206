"""Folders of small images; each class has its own color."""

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
