"""Maps, rows and figures in float32, on the CPU and on a GPU, against float64; what uses them on a GPU against the CPU."""

import copy

import numpy as np
import pytest
import torch

import vitrail
from tests.images import make_masked_folder
from tests.models.test_every_model import randomize
from tests.small import structures
from vitrail.data.datasets.lookup import open_source, open_sources
from vitrail.deploy.parity import disable_tf32
from vitrail.explore.explored_model import ExploredModel
from vitrail.interpret.attention import Recording, record
from vitrail.interpret.branch_norms import branch_norms
from vitrail.interpret.distance import attention_distances
from vitrail.interpret.figures import FIGURES, PaperFigures
from vitrail.interpret.maps import available_methods, compute_map
from vitrail.interpret.mistakes import draw_maps
from vitrail.interpret.scores import score_methods
from vitrail.interpret.token_similarity import token_cosines
from vitrail.models.registry import build

ON_GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")])
KINDS = ["deit_tiny_distilled_patch16", "vitrail_tiny", "cait_xxs24", "patchconvnet_s20_multi", "lvvit_t", "resmlp_s12"]


@pytest.fixture(autouse=True)
def no_tf32(device):
    with disable_tf32(torch.device(device)):
        yield


def measure(recording: Recording) -> dict[str, torch.Tensor]:
    """Everything that is computed from a recording, by name, in float64 on the CPU."""
    found = {"logits": recording.logits.detach()}
    for method in available_methods(recording.model):
        if method != "thresholded_heads":  # a patch at the threshold is in or out by rounding
            found[method] = compute_map(recording, method, torch.tensor([1, 2]))
    layers = [layer for layer in range(recording.layers) if recording.has_attention(layer)]
    found |= {f"rows of layer {layer}": recording.attention_rows(layer) for layer in layers}
    if any(layer < len(recording.blocks) for layer in layers):
        found |= {f"distances of layer {layer}": values for layer, values in attention_distances(recording).items()}
    for figure in (branch_norms, token_cosines):
        found |= {f"{figure.__name__} of {name}": values.nan_to_num(2.0) for name, values in figure(recording).items()}
    return {name: values.double().cpu() for name, values in found.items()}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_maps_rows_and_figures_equal_those_in_float64(device, name, autocast):
    model = randomize(build(structures()[name])).eval()
    images = torch.randn(2, 3, *model.architecture.image_size, generator=torch.Generator().manual_seed(0))
    expected = measure(record(copy.deepcopy(model).double(), images.double(), gradients=True))
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        found = measure(record(model.to(device), images.to(device), gradients=True))
    assert list(found) == list(expected)
    for part, values in expected.items():
        assert (found[part] - values).abs().max() <= 1e-3 * values.abs().max(), part


@pytest.mark.parametrize("device", [ON_GPU])
def test_scores_mistakes_figures_and_the_explorer_equal_those_of_the_cpu(device, tmp_path):
    model = vitrail.load("vitrail_tiny")
    other = copy.deepcopy(model).to(device)
    source = open_sources(str(make_masked_folder(tmp_path, 6, (48, 32), ("background", "red", "blue"))))["train"]
    methods = ["gradient_attention", "rollout", "occlusion"]
    for ours, theirs in zip(score_methods(other, source, methods, 6), score_methods(model, source, methods, 6), strict=True):
        assert (ours.method, ours.n) == (theirs.method, theirs.n)
        pairs = [(ours.pointing, theirs.pointing)]
        pairs += [(getattr(ours, part).mean, getattr(theirs, part).mean) for part in ("iou", "deletion", "insertion")]
        assert all(found == pytest.approx(expected, abs=0.02) for found, expected in pairs), ours.method

    pets, messages = open_source("pets", "test"), []
    maps = draw_maps(other, pets, np.array([5, 40]), np.array([3, -1]), messages.append)
    assert (len(maps), messages) == (2, [])
    assert all(maps)

    image = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    ours, theirs = ExploredModel(other, "ours"), ExploredModel(model, "theirs")
    opened, expected = (each.open("c0", lambda: image) for each in (ours, theirs))
    for layer in ours.layers:
        (found, rest), (wanted, other_rest) = ours.attention(opened, layer, 9), theirs.attention(expected, layer, 9)
        np.testing.assert_allclose(found.peaks, wanted.peaks, rtol=0.01)
        np.testing.assert_allclose(rest, other_rest, atol=0.01)
    for method in methods:
        found, wanted = ours.relevance(opened, method, 7), theirs.relevance(expected, method, 7)
        assert np.abs(found.values.astype(int) - wanted.values).max() <= 5, method

    figures = PaperFigures()
    figures.add(opened.recording)
    assert set(figures.draw()) | set(figures.reasons) == set(FIGURES)
