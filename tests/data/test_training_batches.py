"""Training images do not depend on the number of devices, the number of workers or the starting step."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data.test_loader import epoch_batches
from vitrail.data.datasets.lookup import open_source
from vitrail.data.loader import WorkerLoader
from vitrail.data.rng import sample_key
from vitrail.data.sampler import EpochSampler
from vitrail.data.transforms.pipeline import Augmentation, augment

COUNT, BATCH = 27, 8
PIPELINES = {
    "deit": Augmentation(image_size=(24, 24), policy="rand", random_erasing=0.25),
    "lvvit": Augmentation(image_size=(24, 24), policy="rand", crop_last=True, interpolation="random", random_erasing=0.25),
    "deit3": Augmentation(image_size=(24, 24), policy="three", color_jitter=(0.3, 0.3, 0.3, 0.0)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Small JPEG and PNG files of many sizes in three class folders."""
    path = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        height, width = 28 + number % 5 * 4, 44 - number % 7 * 3
        coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        file = path / f"class {number % 3}" / f"{number}.{'png' if number % 2 else 'jpg'}"
        file.parent.mkdir(exist_ok=True)
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(file)
    return path


def collect(
    folder: Path, pipeline: str, seed: int, epoch: int, micro_batches: int, workers: int, start: int
) -> dict[str, torch.Tensor]:
    """Augmented samples of all micro-batches of an epoch from step `start` on, sorted by position."""
    source, augmentation, parts = open_source(str(folder)), PIPELINES[pipeline], []
    sampler = EpochSampler(len(source), BATCH, seed=seed, repeats=3)
    for micro_batch in range(micro_batches):
        loader = WorkerLoader(source, sampler, [micro_batch], micro_batches, workers=workers)
        for batch in epoch_batches(loader, epoch, start):
            augmented = augment(batch.pixels, batch.sizes, sample_key(seed, epoch, batch.index, batch.repeat), augmentation)
            part = {"position": batch.position, "index": batch.index, "repeat": batch.repeat, "label": batch.labels}
            part |= {"size": batch.sizes, "image": augmented.images, "flip": augmented.view.columns.flip}
            for name, axis in (("rows", augmented.view.rows), ("columns", augmented.view.columns)):
                part[name] = torch.stack([axis.start, axis.length], 1)
            for number, layer in enumerate(augmented.layers):
                part |= {f"operation {number}": layer.operation, f"strength {number}": layer.value}
            parts.append(part)
        loader.close()
    if not parts:
        return {}
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    rank = whole["position"].argsort()
    return {name: values[rank] for name, values in whole.items()}


@cache
def plain(folder: Path, pipeline: str, seed: int, epoch: int) -> dict[str, torch.Tensor]:
    """The whole epoch as one micro-batch per step, decoded in this process."""
    return collect(folder, pipeline, seed, epoch, 1, 0, 0)


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(pipeline=st.sampled_from(list(PIPELINES)), seed=st.integers(0, 2), epoch=st.integers(0, 1), start=st.integers(0, 3))
def test_samples_do_not_depend_on_the_division(folder, micro_batches, workers, pipeline, seed, epoch, start):
    expected = plain(folder, pipeline, seed, epoch)
    assert torch.equal(expected["position"], torch.arange(COUNT // BATCH * BATCH))
    found = collect(folder, pipeline, seed, epoch, micro_batches, workers, start)
    assert bool(found) == (start < COUNT // BATCH)
    for name, values in found.items():
        assert torch.equal(values, expected[name][start * BATCH :]), name


def test_epochs_and_seeds_differ(folder):
    """Without randomness the test above would pass trivially."""
    first, later, other = (plain(folder, "deit", seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0)))
    for name in ("index", "flip", "rows", "columns", "operation 0", "strength 1", "image"):
        assert not torch.equal(first[name], later[name])
        assert not torch.equal(first[name], other[name])
    assert len(first["index"].unique()) == len(first["index"]) // 3
    repeats = first["image"][:3]
    assert not torch.equal(repeats[0], repeats[1])
