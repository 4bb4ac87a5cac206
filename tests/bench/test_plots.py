import io

import numpy as np
import pytest
from PIL import Image

from vitrail.bench.measurement import Measurement
from vitrail.bench.plots import bar_name, draw, line_name


def measurement(**changes):
    plain = {
        "model": "a_$b$",
        "project": "vitrail",
        "network": "a",
        "task": "train",
        "precision": "bf16",
        "mode": "eager",
        "batch_size": 8,
        "size": (224, 224),
        "depth": 12,
        "parameters": 10,
        "macs": 10,
        "seconds": [0.1, 0.2, 0.3],
        "memory": 10**9,
    }
    return Measurement(**plain | changes)


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def test_bars_and_failures():
    measurements = [
        measurement(),
        measurement(project="timm"),
        measurement(mode="graph"),
        measurement(mode="graph", seconds=[], error="out of memory"),
    ]
    image = pixels(draw(measurements, None, "a machine"))
    assert image.shape[1] == 9 * 150
    colors = {tuple(color) for color in image.reshape(-1, 3)[::7]}
    assert (9, 105, 218) in colors  # ours
    assert (217, 115, 13) in colors  # timm's


@pytest.mark.parametrize("curve", ["resolution", "batch", "depth"])
def test_curves(curve):
    measurements = [measurement(batch_size=n, size=(n, n), depth=n, seconds=[0.01 * n]) for n in (2, 4, 1000)]
    measurements += [measurement(batch_size=n, size=(n, n), depth=n, project="timm", memory=None) for n in (2, 4)]
    assert pixels(draw(measurements, curve, "a machine")).shape[1] == round(3 * 4.4 * 150)


def test_no_panel_without_memory():
    assert pixels(draw([measurement(memory=None)], "batch", "a machine")).shape[1] == round(2 * 4.4 * 150)


def test_names_have_what_differs():
    measurements = [measurement(), measurement(project="timm"), measurement(size=(32, 64))]
    assert bar_name(measurements[1], measurements) == "a_$b$, timm, 224"
    assert bar_name(measurements[0], measurements[:1]) == "a_$b$"
    assert line_name(measurements[2], measurements, "batch") == "a_$b$, vitrail, 32x64"
    assert line_name(measurements[2], measurements, "resolution") == "a_$b$, vitrail"
