"""Figures of stored runs: the noise of seeds against numpy, crop boxes against the crops, and patches that CutMix cuts."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.images import make_folder
from tests.training.runs import make_run
from vitrail.cli.compare import compare
from vitrail.data.contact_sheet import sample_images
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.rng import sample_key
from vitrail.data.transforms.config import Augmentation
from vitrail.data.transforms.mixup import Mix
from vitrail.data.transforms.pipeline import augment
from vitrail.errors import UserError
from vitrail.interpret.attention import record
from vitrail.interpret.branch_norms import branch_norms
from vitrail.recipes import lookup
from vitrail.runs import seed_figures
from vitrail.runs.augmentation_figures import crop_boxes, crossed, draw_token_labels, draw_token_mixing, open_splits_of
from vitrail.runs.comparison import METRICS, group_results
from vitrail.runs.model_figures import draw_norms
from vitrail.runs.results import read_results
from vitrail.runs.seed_figures import (
    draw_early,
    draw_histogram,
    draw_sources,
    draw_test,
    early_correlations,
    read_evaluation,
    validation_curves,
)
from vitrail.tasks.token_labels import covered
from vitrail.teachers.annotation import AnnotationRequest, annotate
from vitrail.teachers.lookup import open_teacher


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """Five seeds whose results at step 75 correlate with the final ones, and those at step 50 do not; with test results."""
    folder = tmp_path_factory.mktemp("runs")
    model = vitrail.create("vitrail_mini", classes=10, image_size=(8, 8), width=16, depth=1, patch_size=2)
    recipe = lookup("laptop").set({"augmentation.image_size": [8, 8]})
    for seed in range(5):
        values = {"loss": 1.0, "top1": 0.8 + seed / 100, "top5": 0.99}
        facts = {"recipe": recipe.set({"seed": seed}).to_dict(), "best": values, "source": "digits", "data": {"fingerprint": "x"}}
        run = make_run(folder / f"seed-{seed}", seed, test={"top1": 0.7 + (seed % 3) / 100, "images": 100}, **facts)
        vitrail.save(model, run / "best.safetensors")
    return folder


@pytest.fixture(scope="module")
def group(seeds):
    results, _ = read_results([seeds], METRICS["top1"])
    (found,), _ = group_results(results)
    return found


def test_curves_and_correlations(group):
    epochs, values = validation_curves(group, METRICS["top1"])
    assert epochs.tolist() == [1, 2, 3, 4]
    np.testing.assert_allclose(values[:, 1], [50 / 125 + seed / 1000 for seed in range(5)])
    found = early_correlations(group, METRICS["top1"])
    assert [epoch for epoch, *_ in found] == [2, 3]  # half, five sixths and 29 of 30 parts of four epochs, before the last
    for _, correlation, early, final in found:
        assert correlation == pytest.approx(np.corrcoef(early, final)[0, 1])


def test_figures_of_seeds_need_seeds(group):
    alone = type(group)(group.name, group.results[:2])
    for draw in (draw_histogram, draw_early):
        with pytest.raises(UserError, match="needs at least 3 runs of one recipe: train with --seeds 3"):
            draw([alone], METRICS["top1"])


def test_test_against_validation_results_of_either_metric(group):
    first, second = (np.asarray(Image.open(io.BytesIO(draw_test([group], METRICS[name])))) for name in ("top1", "test"))
    assert np.array_equal(first, second)


@pytest.fixture
def axes_of(monkeypatch):
    """A function that returns the axes of a drawing instead of its PNG."""
    monkeypatch.setattr(seed_figures, "render_png", lambda figure: figure)
    return lambda draw, *arguments: draw(*arguments).axes[0]


def test_more_groups_have_more_colors(group, axes_of):
    groups = [type(group)(f"group {number}", (result,)) for number, result in enumerate(group.results)]
    *points, fit = axes_of(draw_test, groups, METRICS["top1"]).lines
    assert [each.get_label() for each in points] == [f"group {number}" for number in range(5)]
    assert len({each.get_color() for each in points}) == 5
    assert fit.get_linestyle() == ":"


def write_evaluation(run, values):
    """The evaluation.json of `vitrail evaluate RUN SOURCE... --out RUN/evaluation`."""
    content = {"evaluations": [{"source": source, "top1": value, "loss": None} for source, value in values.items()]}
    (run / "evaluation").mkdir(exist_ok=True)
    (run / "evaluation" / "evaluation.json").write_text(json.dumps(content))


def test_results_on_two_data_sets(tmp_path, axes_of):
    """Runs without an evaluation, of one data set and of others have no point."""
    points = [(0.80, 0.67), (0.81, 0.69), (0.83, 0.68)]
    runs = [make_run(tmp_path / f"seed-{seed}", seed) for seed in range(6)]
    for run, (first, second) in zip(runs, points, strict=False):
        write_evaluation(run, {"imagenet/val": first, "imagenet-v2/": second, "third": 0.1})
    write_evaluation(runs[3], {"imagenet/val": 0.9})
    write_evaluation(runs[4], {"imagenet/val": 0.9, "elsewhere": 0.9})
    results, _ = read_results([tmp_path], METRICS["top1"])
    (group,), _ = group_results(results)
    for name in ("top1", "test"):
        axes = axes_of(draw_sources, [group], METRICS[name])
        np.testing.assert_allclose(axes.lines[0].get_xydata(), 100 * np.array(points))
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("imagenet/val", "imagenet-v2/")
        r = np.corrcoef(np.array(points).T)[0, 1]
        assert axes.get_title("left") == f"top-1 of every run, r = {r:.2f}"
    with pytest.raises(UserError, match="need 3 runs that were evaluated on both: `vitrail evaluate RUN FIRST SECOND --out"):
        draw_sources([group], METRICS["loss"])  # NaN


def test_evaluations_of_a_run_are_read(run_cli, tmp_path):
    """As `vitrail evaluate` writes them."""
    model = vitrail.create("vitrail_mini", classes=2, image_size=(8, 8), width=16, depth=1, patch_size=2)
    model.class_names = ["a", "b"]
    run, first, second = make_run(tmp_path / "run"), tmp_path / "first", tmp_path / "second"
    vitrail.save(model, run / "best.safetensors")
    for folder, count in ((first, 1), (second, 2)):
        make_folder(folder, model.class_names, count)
    run_cli("evaluate", run, first, second, "--out", run / "evaluation")
    found = read_evaluation(run, METRICS["top1"])
    assert list(found) == [str(first), str(second)]
    assert (4 * found[str(second)]).is_integer()  # four images


def test_compare_draws_all_figures(seeds, tmp_path, capsys):
    compare([seeds], figures=tmp_path / "figures")
    said = capsys.readouterr().err
    for name in ("seeds-histogram", "seeds-epochs", "seeds-early", "seeds-test", "crop-boxes", "mixed-patches", "branch-norms"):
        path = tmp_path / "figures" / f"{name}.png"
        assert f"wrote {path}" in said
        assert np.asarray(Image.open(io.BytesIO(path.read_bytes())).convert("L")).std() > 5


def test_norms_of_residual_branches_of_several_groups(tmp_path, monkeypatch):
    """With LayerScale and without, of another depth, on the same images with the size of each."""
    norms, sizes = {}, {"base": 8, "no-layerscale": 8, "larger": 12, "fourth": 8}
    images = [pixels for _, pixels in sample_images(open_splits("digits").validation, 8, 0)]
    for number, (name, size) in enumerate(sizes.items()):
        torch.manual_seed(number)
        changes = {"residual": "plain"} if name == "no-layerscale" else {"layerscale_init": 1e-3}
        model = vitrail.create("cait_xxs24", 10, size, width=16, depth=2 + (name == "larger"), heads=2, patch_size=2, **changes)
        recipe = lookup("laptop").set({"architecture.width": 16 + number})
        run = make_run(tmp_path / name / "seed-0", recipe=recipe.to_dict(), source="digits", data={"fingerprint": "x"})
        vitrail.save(model, run / "best.safetensors")
        norms[name] = branch_norms(record(model.eval(), model.preprocess(images)))
    results, _ = read_results([tmp_path / name for name in sizes], METRICS["top1"])
    groups, _ = group_results(results)
    assert [group.name for group in groups] == list(sizes)
    monkeypatch.setattr("vitrail.interpret.branch_norms.render_png", lambda figure: figure)
    panels = draw_norms(groups).axes
    assert [axes.get_title("left") for axes in panels] == ["|branch| / |input|: token mixing", "|branch| / |input|: MLP"]
    for axes, kind in zip(panels, ("mix", "ffn"), strict=True):
        assert [line.get_label() for line in axes.lines] == [f"{name}: mean of 8 images" for name in list(sizes)[:3]]
        for line, name in zip(axes.lines, sizes, strict=False):
            np.testing.assert_allclose(line.get_ydata(), norms[name][kind].mean(1), rtol=1e-4)
        assert axes.get_ylim()[1] > max(float(norms[name][kind].max()) for name in list(sizes)[:3])
        assert len({line.get_color() for line in axes.lines}) == 3


def test_images_of_a_fold(tmp_path):
    """Those of the training of the first run."""
    recipe = lookup("laptop").set({"data.folds": 5, "seed": 2})
    make_run(tmp_path, recipe=recipe.to_dict(), source="digits", data={"fingerprint": "x"})
    results, _ = read_results([tmp_path], METRICS["top1"])
    found, expected = open_splits_of(group_results(results)[0]), open_splits("digits", fold=(2, 5))
    assert np.array_equal(found.train.indices, expected.train.indices)
    assert np.array_equal(found.validation.indices, expected.validation.indices)


@pytest.mark.parametrize("crop", ["random_resized", "simple"])
def test_boxes_are_the_crops_of_the_training(crop):
    """An image whose pixels are their own coordinates: the augmented image shows where its crop was."""
    height, width = 60, 80
    y, x = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    pixels = torch.from_numpy(np.stack([x * 3, y * 4, 0 * x], 0).astype(np.uint8))[None]
    augmentation = Augmentation(image_size=(32, 32), crop=crop, hflip=0.5, mean=(0.0,) * 3, std=(1.0,) * 3)
    boxes = crop_boxes((height, width), augmentation, 7, 3, 5)
    for epoch, (left, top, right, bottom) in enumerate(boxes):
        key = sample_key(7, epoch, torch.tensor([3]), torch.zeros(1, dtype=torch.int64))
        image = augment(pixels, torch.tensor([[height, width]]), key, augmentation).images[0] * 255
        inside = image[:, 8:-8, 8:-8]  # without the reflection of the padding
        centers = float(inside[0].mean() / 3), float(inside[1].mean() / 4)
        assert centers[0] == pytest.approx((left + right) / 2 - 0.5, abs=1.0)
        assert centers[1] == pytest.approx((top + bottom) / 2 - 0.5, abs=1.0)


def test_patches_that_cutmix_cuts():
    """A box of 5 x 9 pixels in patches of 4: whole patches are inside or outside of it, and those at its edges are cut."""
    cut = crossed(covered(Mix(0.6, (4, 9, 2, 11)), (4, 5), 4, torch.device("cpu"))).unflatten(0, (4, 5))
    assert cut.int().tolist() == [
        [0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 0, 0],
    ]
    assert not crossed(covered(Mix(0.8, (4, 8, 0, 12)), (4, 5), 4, torch.device("cpu"))).any()


def test_marked_patches_are_those_that_are_cut(group, monkeypatch):
    """Red squares of the panel of CutMix, at the patches where the box of the first such step ends; none with MixToken."""
    monkeypatch.setattr("vitrail.runs.augmentation_figures.render_png", lambda figure: figure)
    monkeypatch.setattr("vitrail.runs.augmentation_figures.draw_mix", lambda *arguments: Mix(0.7, (2, 7, 1, 4)))
    *_, cutmix, mixtoken = draw_token_mixing([group]).axes
    corners = {(square.get_x() + 0.5, square.get_y() + 0.5) for square in cutmix.patches}
    assert corners == {(0, 2), (0, 4), (0, 6), (2, 6)}  # of patches of 2 pixels: the left column, and the lowest row
    assert not mixtoken.patches


def test_token_labels_of_a_run(tmp_path):
    """A store that a small model annotated, drawn from a run that names it."""
    teacher = vitrail.create("vitrail_mini", classes=10, image_size=(8, 8), width=16, depth=1, patch_size=2)
    weights = vitrail.save(teacher, tmp_path / "teacher.safetensors")
    source = open_splits("digits").train
    annotate(
        open_teacher(str(weights), "cpu"), source, tmp_path / "maps", AnnotationRequest(outputs=("tokens",), top_k=2), workers=0
    )
    recipe = lookup("laptop").set({"token_labels.store": str(tmp_path / "maps"), "augmentation.image_size": [8, 8]})
    make_run(tmp_path / "run", recipe=recipe.to_dict(), source="digits", data={"fingerprint": "x"})
    results, _ = read_results([tmp_path / "run"], METRICS["top1"])
    png = draw_token_labels(group_results(results)[0])
    assert np.asarray(Image.open(io.BytesIO(png)).convert("L")).std() > 5


def test_runs_whose_data_are_gone_have_the_other_figures(seeds, tmp_path, capsys):
    run = make_run(tmp_path / "gone", source=str(tmp_path / "nowhere"))
    compare([run], figures=tmp_path / "figures")
    said = capsys.readouterr().err
    assert "crop-boxes.png is not drawn: " in said
    assert "seeds-histogram.png is not drawn: The noise of seeds needs at least 3 runs" in said
