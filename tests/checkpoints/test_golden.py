"""Released checkpoints, read from a file on disk, give the logits of the authors' own code."""

import numpy as np
import pytest
import torch

import vitrail
from tests.golden import fill
from vitrail.checkpoints import conversion
from vitrail.checkpoints.assembly import assemble
from vitrail.checkpoints.readers import Checkpoint

LOGITS = np.load(fill.FOLDER / "logits.npz")
SMALL = [name for name in sorted(LOGITS.files) if fill.MODELS[name]["params"] < 60e6 and fill.MODELS[name]["size"][0] <= 224]
SMALL += ["gvit_ViT-B_16", "gvit_R50_ViT-B_16", "gvit_ViT-B_16_rep768_100"]
LARGE = [name for name in sorted(LOGITS.files) if name not in SMALL]


def write(name, path):
    """The released layout: `{"model": ...}`, a bare dictionary for LV-ViT, an archive for Google's."""
    tensors = fill.checkpoint(name)
    if name.startswith("gvit"):
        with path.open("wb") as file:
            np.savez(file, **tensors)
    else:
        state = {key: torch.from_numpy(np.asarray(value)) for key, value in tensors.items()}
        torch.save(state if name.startswith("lvvit") else {"model": state}, path)


def check(name, path):
    write(name, path)
    model = vitrail.load(path)
    expected = LOGITS[name]
    with torch.inference_mode():
        logits = model(torch.from_numpy(fill.image(len(expected), *fill.MODELS[name]["size"]))).numpy()
    assert sum(parameter.numel() for parameter in model.parameters()) == fill.MODELS[name]["params"]
    # The bound to meet is 1e-4; float32 noise is 1e-6, and a wrong epsilon shows at 3e-5.
    assert np.abs(logits - expected).max() <= 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", SMALL)
def test_logits(name, tmp_path):
    check(name, tmp_path / "checkpoint")


@pytest.mark.large
@pytest.mark.parametrize("name", LARGE)
def test_logits_of_large_models(name, tmp_path):
    check(name, tmp_path / "checkpoint")


@pytest.mark.parametrize("name", sorted(fill.MODELS))
def test_every_released_key_has_its_place(name):
    """Strict both ways: no tensor too many, none missing, all shapes right; on the meta device."""
    shapes = fill.MODELS[name]["keys"]
    tensors = {key: torch.empty(shape, device="meta", dtype=None if shape else torch.int64) for key, shape in shapes.items()}
    kind, tensors = conversion.recognize(Checkpoint(tensors))
    architecture = conversion.infer(kind, conversion.shapes_of(tensors))
    model = assemble(architecture, tensors, name, conversion.TO_PAIR[kind])
    assert sum(parameter.numel() for parameter in model.parameters()) == fill.MODELS[name]["params"]
    assert model.name, "the architecture is one of the catalogue's"
    grid = model.stem.grid(*fill.MODELS[name]["size"])
    assert grid == model.grid or model.architecture.pos_embed == "none"
