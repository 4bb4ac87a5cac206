"""The figures of the papers, from trained models: their numbers against independent computations, and that they are drawn."""

import copy
import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

import vitrail
from tests.interpret.test_recording import recorded
from tests.interpret.trained import MODELS, digits, photographs, trained
from tests.models.test_trace import TINY
from tests.small import structures
from vitrail.data.datasets.lookup import open_source
from vitrail.errors import UserError
from vitrail.interpret.attention import record
from vitrail.interpret.branch_norms import branch_norms
from vitrail.interpret.distance import attention_distances, draw_distances
from vitrail.interpret.explanation import to_uint8
from vitrail.interpret.figures import FIGURES, MAX_IMAGES, PaperFigures
from vitrail.interpret.filters import draw_filters, filter_components
from vitrail.interpret.heat_maps import draw_class_maps, draw_heads, draw_over, draw_saliency, saliency
from vitrail.interpret.maps import available_methods, compute_map
from vitrail.interpret.patch_mixing import draw_mosaics, patch_mosaics, weight_sparsity
from vitrail.interpret.position import position_similarity
from vitrail.interpret.token_similarity import LEARNED, draw_token_cosines, token_cosines
from vitrail.models.registry import build


def draw_figures(*recordings):
    figures = PaperFigures()
    for recording in recordings:
        figures.add(recording)
    return figures.draw(), figures.reasons


def is_drawing(png):
    """Something is drawn, and nothing is cut off at the edges."""
    gray = np.asarray(Image.open(io.BytesIO(png)).convert("L"))
    return gray.std() > 5 and min(gray[0].min(), gray[-1].min(), gray[:, 0].min(), gray[:, -1].min()) > 240


@pytest.fixture(scope="module")
def bundled():
    """The bundled weights after a forward pass on three photographs."""
    source, model = open_source("pets", "test"), vitrail.load("vitrail_tiny")
    images = [Image.open(io.BytesIO(source.encoded(index))).convert("RGB") for index in (0, 40, 120)]
    return record(model, model.preprocess(images))


def test_distances_are_those_of_a_loop(bundled):
    found = attention_distances(bundled)
    assert list(found) == list(range(11))
    rows, columns = bundled.grid
    weights = bundled.attention_rows(3).double().numpy()  # mean pooling: no prefix tokens
    total = np.zeros(weights.shape[1])
    for query in range(rows * columns):
        for key in range(rows * columns):
            down, across = query // columns - key // columns, query % columns - key % columns
            total += weights[:, :, query, key].mean(0) * 16 * np.hypot(down, across)
    np.testing.assert_allclose(found[3].mean(1).numpy(), total / (rows * columns), rtol=1e-4)


@pytest.mark.parametrize(("size", "patch", "expected"), [(224, 16, 116.49), (224, 32, 115.50), (44, 16, 13.66)])
def test_distances_of_uniform_attention(size, patch, expected):
    """The class token is left out, and the rest of each row sums to one."""
    model = build(TINY.replace(depth=1, patch_size=patch, image_size=(size, size))).eval()
    with torch.no_grad():
        model.block(0).mix.branches[0].body.qkv.weight.zero_()
    distances = attention_distances(record(model, torch.randn(1, 3, size, size)))
    assert distances[0].squeeze(1).tolist() == pytest.approx([expected] * 4, abs=0.01)


def test_distances_on_a_grid_that_is_not_square():
    """Of 2 x 3 patches and a class token, by hand: rows and columns are not exchanged, and the class token is left out."""
    recording, _, _ = recorded(TINY)
    weights = recording.attention_rows(1).double().numpy()[:, :, 1:, 1:]
    weights = weights / weights.sum(-1, keepdims=True)
    centers = np.array([[8, 8], [8, 24], [8, 40], [24, 8], [24, 24], [24, 40]])
    distances = np.hypot(*(centers[:, None] - centers).T)
    np.testing.assert_allclose(attention_distances(recording)[1].T, (weights * distances).sum(-1).mean(-1), rtol=1e-5)


def test_position_similarity(bundled):
    model = bundled.model
    found = position_similarity(model)
    table = model.pos_embed[0].table.detach().double()
    assert found.shape == (8, 8, 8, 8)
    assert float(found[2, 5, 7, 1]) == pytest.approx(
        float(F.cosine_similarity(table[2 * 8 + 5], table[7 * 8 + 1], dim=0)), abs=1e-5
    )
    neighbors = torch.stack([found[row, 3, row + 1, 3] for row in range(7)]).mean()
    assert neighbors > found[0, :, 7, :].mean()  # near patches are more similar, as in the paper


def test_filters_are_principal_components():
    """Against the eigenvectors of the covariance of the filters, up to the sign."""
    model = trained("distilled")
    components, share = filter_components(model, 5)
    weight = model.stem.proj.weight.detach().double().reshape(32, -1).numpy()
    values, vectors = np.linalg.eigh(np.cov(weight.T))
    np.testing.assert_allclose(share, (values[::-1] / values.sum())[:5], rtol=1e-4)
    flat = components.permute(0, 3, 1, 2).flatten(1).numpy()
    np.testing.assert_allclose(np.abs(np.sum(flat * vectors.T[::-1][:5], 1)), np.ones(5), rtol=1e-3)


def test_filters_of_patches_of_16_pixels():
    """The 28 components of the paper; those of trained filters are smooth, and other ones are noise."""
    model = trained("photographs")
    components, share = filter_components(model)
    assert components.shape == (28, 16, 16, 3)
    assert 0.5 < share.sum() < 0.99
    flat = components.flatten(1)
    torch.testing.assert_close(flat @ flat.T, torch.eye(28), rtol=0, atol=1e-5)

    def roughness(components):
        """The mean square of the difference of neighboring pixels, 2 for noise."""
        return (components[:, 1:] - components[:, :-1]).square().mean((1, 2, 3)) / components.var((1, 2, 3))

    untrained, _ = filter_components(build(model.architecture))
    assert roughness(components)[:4].max() < 1
    assert roughness(untrained)[:4].min() > 1.8
    assert is_drawing(draw_filters(model))


def test_components_of_few_filters_are_not_drawn():
    """28 components of 3 x 3 filters, or of 16 filters, would be all that there are."""
    with pytest.raises(UserError, match="filters of more than 28 values: this model has 32 of 3 x 3 x 3"):
        filter_components(vitrail.load("vitrail_tiny"))
    with pytest.raises(UserError, match="filters of more than 28 values: this model has 16 of 3 x 16 x 16"):
        filter_components(build(TINY.replace(width=16)))


def test_mosaics_are_rows_of_the_cross_patch_layers():
    model = trained("resmlp")  # a grid of 6 x 6: all patches are central
    mosaics = patch_mosaics(model)
    weight = model.block(1).mix.branches[0].body.map.weight
    assert len(mosaics) == 3
    torch.testing.assert_close(mosaics[1][2, 3], weight[2 * 6 + 3].detach().reshape(6, 6))
    large = build(structures()["resmlp_s12"].replace(image_size=(40, 56))).eval()
    (first, *_), mixer = patch_mosaics(large), large.block(0).mix.branches[0].body
    assert first.shape == (6, 6, 10, 14)
    torch.testing.assert_close(first[0, 0], mixer.map.weight[2 * 14 + 4].detach().reshape(10, 14))  # rows 2-7, columns 4-9


def test_gray_text_beside_colored_images_stays_gray():
    pixels = np.asarray(Image.open(io.BytesIO(draw_mosaics(trained("resmlp")))).convert("RGB")).astype(int)
    title = pixels[: int(0.2 * 150)]  # inches above the images
    assert (title.max(2) - title.min(2)).max() < 40


def test_points_of_equal_heads_are_inside_of_the_figure():
    """All heads of a layer have the same distance: the points are as large as others."""
    sizes = []
    for top in (10.0, 10.0 + 1e-4):
        png = draw_distances({0: torch.full((3, 1), 10.0), 1: torch.full((3, 1), top)})
        pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)
        sizes.append(int((pixels.max(2) - pixels.min(2) > 100).sum()))
    whole = np.pi * 22 / 4 * (150 / 72) ** 2  # of a point of 22 square points
    assert min(sizes) > 2 * 0.75 * whole


def test_sparsity_is_the_share_of_small_weights():
    model = trained("resmlp")
    found = weight_sparsity(model)
    weight = np.abs(model.block(2).ffn.branches[0].body.fc2.weight.detach().numpy())
    assert found["C, second of the MLP"][2] == pytest.approx((weight < 0.05 * weight.max()).mean(), abs=1e-6)
    assert [len(values) for values in found.values()] == [3, 3, 3]


def test_branch_norms_are_those_of_the_trace(bundled):
    found, trace = branch_norms(bundled), bundled.model.trace(bundled.images)
    for layer, expected in trace.layers.items():
        for name, ratios in expected.ratios.items():
            np.testing.assert_allclose(found[name][layer], ratios.detach().numpy(), rtol=1e-4)


def test_token_cosines_are_means_of_pairs():
    model, (images, _) = trained("distilled"), digits()
    recording = record(model, images[:4])
    found = token_cosines(recording)
    assert list(found) == ["patches", "class and patches", "class and distillation", LEARNED]
    tokens = recording.blocks[2][0]
    similar = F.cosine_similarity(tokens[:, :, None], tokens[:, None], dim=-1)
    pairs = similar[:, 2:, 2:].sum((1, 2)) - 36
    assert float(found["patches"][2].mean()) == pytest.approx(float(pairs.mean()) / (36 * 35), abs=1e-5)
    assert float(found["class and distillation"][2].mean()) == pytest.approx(float(similar[:, 0, 1].mean()), abs=1e-5)
    last = model.features(images[:4]).prefix
    expected = F.cosine_similarity(last[:, 0], last[:, 1], dim=-1).mean().detach()
    assert float(found["class and distillation"][-1].mean()) == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize(("kind", "changes"), [("deit_tiny_distilled_patch16", {}), ("cait_xxs24", {"distillation": True})])
def test_the_cosine_of_learned_tokens_is_without_position_embeddings(kind, changes, monkeypatch):
    model = vitrail.create(kind, 10, 32, width=32, depth=2, heads=4, **changes).eval()
    tokens = model.prefix if model.prefix is not None else model.pooling.queries
    with torch.no_grad():
        tokens[:, :2] = torch.tensor([[3.0, 4.0], [4.0, -3.0]])
        tokens[:, 2:] = torch.tensor([[1.0], [0.5]])
    expected = 15 / (55**0.5 * 32.5**0.5)
    found = token_cosines(record(model, torch.randn(3, 3, 32, 32)))
    assert found[LEARNED].tolist() == [pytest.approx([expected] * 3)]
    monkeypatch.setattr("vitrail.interpret.token_similarity.render_png", lambda figure: figure)
    (axes,) = draw_token_cosines(found).axes
    point = axes.lines[-1]
    assert point.get_xydata().tolist() == [[0, pytest.approx(expected)]]
    assert point.get_label() == f"class and distillation, learned: {expected:.2f}"
    assert LEARNED not in token_cosines(record(trained("cait"), digits()[0][:1]))


def test_figures_are_means_of_all_images(monkeypatch):
    """Also where they come in several passes, up to a largest number."""
    model, (images, _) = trained("distilled"), digits()
    together = draw_figures(record(model, images[:6]))[0]
    assert draw_figures(record(model, images[:4]), record(model, images[4:6]))[0] == together
    assert draw_figures(record(model, images[:4]))[0]["distance"] != together["distance"]
    assert MAX_IMAGES == 128
    monkeypatch.setattr("vitrail.interpret.figures.MAX_IMAGES", 4)
    assert draw_figures(record(model, images[:4]), record(model, images[4:6]))[0] == draw_figures(record(model, images[:4]))[0]


@pytest.mark.parametrize("kind", MODELS)
def test_the_figures_of_a_model_are_drawn(kind):
    images, _ = photographs() if kind == "photographs" else digits()
    recording = record(trained(kind), images[:3])
    drawn, reasons = draw_figures(recording)
    assert set(drawn) | set(reasons) == set(FIGURES)
    assert all(is_drawing(png) for png in drawn.values())
    assert ("mosaics" in drawn) == (kind == "resmlp")
    assert ("distance" in drawn) == (kind in ("cait", "distilled", "photographs"))
    assert "filters" in drawn
    assert all(reason.endswith(".") for reason in reasons.values())


@pytest.mark.parametrize("norm_place", ["pre", "post"])
def test_figures_and_maps_of_a_model_that_is_trained(norm_place):
    """They are those of evaluation mode, and change neither the model nor the modes of its parts, of which one is frozen."""
    changes = {"norm": "batch", "norm_place": norm_place, "drop_path": 0.5, "dropout": 0.5, "attention_dropout": 0.5}
    model = build(TINY.replace(**changes)).train()
    model.block(1).eval()
    images, classes = torch.randn(4, 3, 32, 48), torch.tensor([0, 1, 2, 3])
    modes = [module.training for module in model.modules()]
    before = copy.deepcopy(model.state_dict())
    found = []
    for recompute in (False, True):
        model.recompute = recompute
        recording = record(model, images, gradients=True)
        maps = {method: compute_map(recording, method, classes) for method in available_methods(model)}
        found.append([maps, draw_figures(recording)[0], token_cosines(recording), branch_norms(recording)])
        assert [module.training for module in model.modules()] == modes
    model.eval()
    recording = record(model, images, gradients=True)
    for maps, drawn, cosines, norms in found:
        for method, values in maps.items():
            torch.testing.assert_close(values, compute_map(recording, method, classes), msg=method)
        assert drawn == draw_figures(recording)[0]
        torch.testing.assert_close(cosines, token_cosines(recording))
        np.testing.assert_allclose(norms["mix"], branch_norms(recording)["mix"])
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_saliency_follows_the_description_of_cait():
    """Mean of the heads of CA1 at the size of the image, scaled to 0 .. 1, times the gray image."""
    recording = record(trained("cait"), digits()[0][:2])
    rows = recording.attention_rows(3, [0])[0, :, 0, 1:].mean(0).reshape(6, 6).numpy()
    pixels = to_uint8(recording.images, recording.model.preprocessing)[0]
    large = np.asarray(Image.fromarray(rows).resize((24, 24), Image.Resampling.BILINEAR))
    scaled = (large - large.min()) / (large.max() - large.min())
    gray = pixels.astype(np.float64) @ (0.299, 0.587, 0.114) / 255
    np.testing.assert_allclose(saliency(pixels, rows), scaled * gray, atol=0.005)
    assert is_drawing(draw_saliency(recording))
    assert is_drawing(draw_heads(recording, pixels, [3, 4]))
    assert is_drawing(draw_heads(recording, pixels, [-1], masks=True))


def test_maps_of_classes_differ():
    model, (images, _) = trained("patchconvnet"), digits()
    recording = record(model, images[:1])
    rows = recording.attention_rows(-1)[0, 0]
    assert (rows[0] - rows[1]).abs().max() > 1e-4  # every class has its own query
    assert is_drawing(draw_class_maps(recording, to_uint8(images[:1], model.preprocessing)[0], 3))
    with pytest.raises(UserError, match="Maps by class need one query per class"):
        draw_class_maps(record(trained("cait"), images[:1]), np.zeros((24, 24, 3), dtype=np.uint8))


def test_overlays_keep_the_image_where_the_map_is_low():
    image, values = np.full((16, 16, 3), 200, dtype=np.uint8), np.zeros((4, 4))
    values[:2, :2] = 1
    drawn = draw_over(image, values)
    assert drawn.shape == image.shape
    assert drawn[2, 2].astype(int).sum() > drawn[14, 14].astype(int).sum() + 100
