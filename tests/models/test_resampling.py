"""Evidence for resizing: the rules of the released code, written once more in numpy, and what a trip to another size costs."""

import numpy as np
import pytest
import torch

import vitrail
from vitrail.layers.pos_embed import RESAMPLE, interpolate, interpolate_by_products, resample


def cubic(x: np.ndarray, a: float) -> np.ndarray:
    """Keys' kernel: a = -0.75 in torch's plain bicubic, -0.5 where it filters against aliasing (as Pillow does)."""
    x = np.abs(x)
    near = (a + 2) * x**3 - (a + 3) * x**2 + 1
    far = a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def matrix(old: int, new: int, method: str) -> np.ndarray:
    """[new, old]: how much of each old cell is in each new one, along one axis."""
    found = np.zeros((new, old))
    for row in range(new):
        if method == "aligned":  # corners on corners
            place = row * (old - 1) / (new - 1) if new > 1 else 0.0
            low = min(int(place), old - 1)
            found[row, low] += 1 - (place - low)
            found[row, min(low + 1, old - 1)] += place - low
            continue
        place = (row + 0.5) * old / new - 0.5  # half-pixel centres
        if method == "bicubic_antialias":
            stretch = max(old / new, 1.0)
            cells = np.arange(old)
            weights = cubic((cells - place) / stretch, -0.5) * (np.abs(cells - place) < 2 * stretch)
            found[row] = weights / weights.sum()
            continue
        low = int(np.floor(place))
        for cell in range(low - 1, low + 3):
            weight = cubic(np.array(place - cell), -0.75) if method == "bicubic" else max(1 - abs(place - cell), 0.0)
            found[row, min(max(cell, 0), old - 1)] += weight  # the border goes on outside
    return found


GRIDS = [
    ((14, 14), (24, 24)),
    ((24, 24), (14, 14)),
    ((14, 14), (7, 7)),
    ((6, 10), (9, 4)),
    ((3, 5), (12, 2)),
    ((12, 16), (14, 14)),
]


@pytest.mark.parametrize(("old", "new"), GRIDS)
@pytest.mark.parametrize("method", ["bicubic", "bicubic_antialias", "bilinear", "aligned"])
def test_every_rule_equals_its_formula(old, new, method):
    table = np.random.default_rng(0).standard_normal((*old, 8))
    expected = np.einsum("yh,xw,hwd->yxd", matrix(old[0], new[0], method), matrix(old[1], new[1], method), table)
    found = resample(torch.from_numpy(table).float().flatten(0, 1), old, new, method)
    np.testing.assert_allclose(found.numpy(), expected.reshape(-1, 8), rtol=1e-4, atol=1e-5)


# Who resamples how: DeiT, DeiT III and CaiT bicubic without antialias, Google's ViTs linearly from corner to corner.
RULES = {"deit_tiny_patch16": "bicubic", "deit3_small_patch16": "bicubic", "cait_xxs24": "bicubic", "vit_tiny_patch16": "aligned"}


@pytest.mark.parametrize("name", RULES)
def test_positions_follow_the_rule_of_their_released_code(name):
    model = vitrail.create(name, 3, 224, depth=1)
    assert model.architecture.pos_embed_resample == RULES[name]
    before = model.pos_embed[0].table.detach().double().numpy()
    prefix = model.pos_embed[0].prefix
    model.resize(384, 256)
    grid = before[prefix:].reshape(14, 14, -1)
    expected = np.einsum("yh,xw,hwd->yxd", matrix(14, 24, RULES[name]), matrix(14, 16, RULES[name]), grid).reshape(24 * 16, -1)
    after = model.pos_embed[0].table.detach().numpy()
    np.testing.assert_array_equal(after[:prefix], before[:prefix].astype(np.float32))
    np.testing.assert_allclose(after[prefix:], expected, rtol=1e-4, atol=1e-6)


def smooth(grid: tuple[int, int], width: int) -> torch.Tensor:
    """A table [N, D] that changes as slowly over the image as trained ones do."""
    low = torch.randn(1, width, 5, 5)
    return torch.nn.functional.interpolate(low, size=grid, mode="bicubic", align_corners=True).flatten(2)[0].T


def make(name: str, size: tuple[int, int], table: str) -> vitrail.VisionTransformer:
    torch.manual_seed(0)
    model = vitrail.create(name, 50, size, depth=3).eval()
    for key, parameter in model.named_parameters():
        if key.startswith("blocks") and parameter.ndim > 1 and "scale" not in key:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)  # blocks that count
    for positions in model.pos_embed:
        rows = smooth(model.grid, model.architecture.width) if table == "smooth" else torch.randn_like(positions.table)
        with torch.no_grad():
            positions.table[-len(rows) :] = rows[-len(positions.table) :] * 0.2
    return model


TRIPS = [((224, 224), (384, 384)), ((192, 256), (256, 352))]
# How far logits may be from where they were, as a share of their norm.
BOUNDS = {("deit_tiny_patch16", "smooth"): 0.005, ("deit_tiny_patch16", "random"): 0.03, ("resmlp_s12", "none"): 0.03}


@pytest.mark.parametrize(("size", "other"), TRIPS)
@pytest.mark.parametrize(("name", "table"), BOUNDS)
def test_there_and_back_keeps_the_logits(name, table, size, other):
    """224 to 384 and back, and between rectangles: what resampling loses is small beside what the model says."""
    model = make(name, size, table)
    image = torch.randn(4, 3, *size)
    with torch.inference_mode():
        before = model(image)
        there = model.resize(*other)(torch.nn.functional.interpolate(image, size=other, mode="bicubic"))
        back = model.resize(*size)(image)
    assert there.isfinite().all()
    assert (back - before).norm() <= BOUNDS[name, table] * before.norm()
    assert not torch.equal(back, before), "nothing was resampled"


@pytest.mark.parametrize("method", RESAMPLE)
def test_products_interpolate_alike(method):
    image = torch.randn(1, 3, 7, 5, dtype=torch.float64, requires_grad=True)
    for size in ((3, 4), (9, 11)):
        found, expected = (function(image, size, method) for function in (interpolate_by_products, interpolate))
        torch.testing.assert_close(found, expected)
        weights = torch.randn_like(found)
        torch.testing.assert_close(*(torch.autograd.grad((each * weights).sum(), image)[0] for each in (found, expected)))
