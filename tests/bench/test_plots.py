import io

import numpy as np
import pytest
from PIL import Image

from vitrail.bench.measurement import Cell
from vitrail.bench.plots import bar_name, draw, line_name


def cell(**changes):
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
    return Cell(**plain | changes)


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def test_bars_and_those_that_failed():
    cells = [cell(), cell(project="timm"), cell(mode="graph"), cell(mode="graph", seconds=[], trouble="does not fit")]
    image = pixels(draw(cells, None, "a machine"))
    assert image.shape[1] == 9 * 150
    colors = {tuple(color) for color in image.reshape(-1, 3)[::7]}
    assert (9, 105, 218) in colors  # ours
    assert (217, 115, 13) in colors  # timm's


@pytest.mark.parametrize("curve", ["resolution", "batch", "depth"])
def test_curves(curve):
    cells = [cell(batch=n, size=(n, n), depth=n, seconds=[0.01 * n]) for n in (2, 4, 1000)]
    cells += [cell(batch=n, size=(n, n), depth=n, project="timm", memory=None) for n in (2, 4)]
    assert pixels(draw(cells, curve, "a machine")).shape[1] == round(3 * 4.4 * 150)


def test_without_a_memory_a_panel_less():
    assert pixels(draw([cell(memory=None)], "batch", "a machine")).shape[1] == round(2 * 4.4 * 150)


def test_names_tell_apart_and_no_more():
    cells = [cell(), cell(project="timm"), cell(size=(32, 64))]
    assert bar_name(cells[1], cells) == "a_$b$, timm, 224"
    assert bar_name(cells[0], cells[:1]) == "a_$b$"
    assert line_name(cells[2], cells, "batch") == "a_$b$, vitrail, 32x64"
    assert line_name(cells[2], cells, "resolution") == "a_$b$, vitrail"
