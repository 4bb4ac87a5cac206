"""What recipes of stored runs do to the images: crop boxes (DeiT III, Figs 6.2 and 6.3) and mixed patches (LV-ViT, Fig. 3)."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.data.contact_sheet import augmented_image, denormalize, sample_images
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.rng import sample_key
from vitrail.data.source import Splits, Subset
from vitrail.data.transforms.mixup import draw_mix
from vitrail.data.transforms.pipeline import Augmentation, sample_view
from vitrail.errors import UserError
from vitrail.pages.charts import LIGHT, new_figure, render_png
from vitrail.recipes import Recipe
from vitrail.runs.comparison import Group
from vitrail.runs.run_json import read_run_json
from vitrail.tasks.token_labels import covered, draw_token_mix, token_mask
from vitrail.teachers.label_store import LabelStore

IMAGES, BOXES = 4, 6  # shown images, crops per image
CROSSED = "#d1242f"


def recipe_of(group: Group) -> Recipe:
    return Recipe.from_dict(read_run_json(group.results[0].folder)["recipe"])


def open_splits_of(groups: Sequence[Group]) -> Splits:
    """The splits of the first run."""
    folder = groups[0].results[0].folder
    run = read_run_json(folder)
    if "source" not in run:
        raise UserError(f"{folder / 'run.json'} does not say which images it was trained on.")
    recipe, classes = recipe_of(groups[0]), (run.get("data") or {}).get("classes")
    fraction = recipe.data.validation_fraction
    return open_splits(str(run["source"]), validation_fraction=fraction, class_order=classes, fold=recipe.fold)


def crop_boxes(size: tuple[int, int], augmentation: Augmentation, seed: int, image: int, count: int = BOXES) -> np.ndarray:
    """Left, top, right and bottom [count, 4], in pixels of the image, of the random crops in epochs 0, 1, …"""
    keys = torch.cat(
        [sample_key(seed, epoch, torch.tensor([image]), torch.zeros(1, dtype=torch.int64)) for epoch in range(count)]
    )
    view = sample_view(torch.tensor([size]).expand(count, -1), keys, augmentation)
    height, width = augmentation.image_size
    corners = torch.tensor([[0.0, 0.0, 1.0], [width, height, 1.0]]).T
    ends = (view.matrix().float() @ corners)[:, :2]  # [count, x and y, first and second corner]
    low, high = ends.amin(-1), ends.amax(-1)
    return torch.cat([low, high], 1).numpy()


def draw_crops(groups: Sequence[Group]) -> bytes:
    """The boxes that each recipe crops out of the same images in its first epochs, a line of images per group."""
    from matplotlib.patches import Rectangle

    chosen = sample_images(open_splits_of(groups).train, IMAGES, 0)
    with new_figure(LIGHT, (2.3 * len(chosen), 2.5 * len(groups))) as figure:
        lines = figure.subplots(len(groups), len(chosen), squeeze=False)
        for group, line in zip(groups, lines, strict=True):
            recipe = recipe_of(group)
            for axes, (index, pixels) in zip(line, chosen, strict=True):
                axes.imshow(pixels)
                for number, (left, top, right, bottom) in enumerate(
                    crop_boxes((pixels.shape[0], pixels.shape[1]), recipe.augmentation, recipe.seed, index)
                ):
                    box = Rectangle(
                        (left - 0.5, top - 0.5), right - left, bottom - top, fill=False, edgecolor=f"C{number}", linewidth=1.5
                    )
                    axes.add_patch(box)
                margin = 0.06 * max(pixels.shape[:2])
                axes.set_xlim(-margin, pixels.shape[1] + margin)
                axes.set_ylim(pixels.shape[0] + margin, -margin)
                axes.set_axis_off()
            title = f"{group.name}: {recipe.augmentation.crop} crops of {BOXES} epochs"
            line[0].set_title(title, loc="left", fontsize=9, color=LIGHT.foreground, parse_math=False)
        figure.subplots_adjust(0.01, 0.01, 0.99, 1 - 0.25 / (2.5 * len(groups)), 0.03, 0.14)
        return render_png(figure)


def draw_token_mixing(groups: Sequence[Group]) -> bytes:
    """CutMix beside MixToken on two images of the first run: CutMix cuts through patches (red), MixToken swaps whole ones."""
    recipe = recipe_of(groups[0])
    size, patch = recipe.augmentation.image_size, patch_size_of(groups[0])
    grid = (size[0] // patch, size[1] // patch)
    if min(grid) < 2:
        raise UserError(f"Mixed patches need at least 2 x 2 of them; this run has {grid[0]} x {grid[1]}.")
    chosen = sample_images(open_splits_of(groups).train, 2, 0)
    images = denormalize(
        torch.cat([augmented_image(pixels, index, recipe.augmentation, recipe.seed, 0) for index, pixels in chosen]),
        recipe.augmentation,
    )
    steps, cpu = range(1000), torch.device("cpu")
    cuts = (draw_mix(recipe.seed, 0, step, 0, size, 0.0, 1.0) for step in steps)
    cut = next(mix for mix in cuts if 0.3 < mix.lam < 0.8 and crossed(covered(mix, grid, patch, cpu)).any())
    tokens = (draw_token_mix(recipe.seed, 0, step, 0, grid, 1.0) for step in steps)
    token = next(mix for mix in tokens if 0.2 < mix.lam < 0.9)
    share = crossed(covered(cut, grid, patch, cpu)).unflatten(0, grid).numpy()
    swapped = token_mask([token], grid, cpu)[0].unflatten(0, grid).numpy()
    assert cut.box is not None
    top, bottom, left, right = cut.box
    pasted = images[0].copy()
    pasted[top:bottom, left:right] = images[1][top:bottom, left:right]
    mask = np.kron(swapped, np.ones((patch, patch), dtype=bool))
    mixed = images[0][: mask.shape[0], : mask.shape[1]].copy()
    mixed[mask] = images[1][: mask.shape[0], : mask.shape[1]][mask]
    panels = [("image", images[0], None), ("another image", images[1], None)]
    panels += [
        ("CutMix: red patches are cut", pasted, share),
        ("MixToken: whole patches", mixed, swapped & False),
    ]
    with new_figure(LIGHT, (9, 2.6)) as figure:
        for axes, (title, pixels, marked) in zip(figure.subplots(1, 4), panels, strict=True):
            draw_grid(axes, pixels, marked, patch)
            axes.set_title(title, fontsize=9, color=LIGHT.foreground)
        figure.subplots_adjust(0.01, 0.01, 0.99, 0.9, 0.04)
        return render_png(figure)


def draw_token_labels(groups: Sequence[Group]) -> bytes:
    """Images of a run with token labels above the teacher's most probable class of every cell, with its classes as a legend."""
    group = next((each for each in groups if recipe_of(each).token_labels.store), None)
    if group is None:
        raise UserError("Token labels need a run whose recipe has token_labels.store.")
    source, store = open_splits_of([group]).train, LabelStore.open(recipe_of(group).token_labels.store, check=False)
    if store.grid is None:
        raise UserError(f"{store.path} has no maps of the images: annotate with --outputs tokens.")
    chosen = sample_images(source, IMAGES, 0)
    rows = store.rows(Subset(source, np.array([index for index, _ in chosen])), workers=0)
    values, classes = store.tokens(rows)
    best = classes.gather(1, values.argmax(1, keepdim=True))[:, 0].numpy()
    shown, counts = np.unique(best, return_counts=True)
    shown = shown[np.argsort(-counts)][:10]  # a color for each of the most frequent classes
    names = store.class_names or [f"class {index}" for index in range(store.classes)]
    from matplotlib.lines import Line2D

    with new_figure(LIGHT, (2.3 * len(chosen), 5.4)) as figure:
        for (above, below), (_, pixels), labels in zip(
            figure.subplots(2, len(chosen), squeeze=False).T, chosen, best, strict=True
        ):
            colors = np.stack([np.where(labels == index, number, 10) for number, index in enumerate(shown)]).min(0)
            above.imshow(pixels)
            below.imshow(np.ma.masked_equal(colors, 10), cmap="tab10", vmin=0, vmax=9, interpolation="nearest")
            for axes in (above, below):
                axes.set_axis_off()
        handles = [Line2D([], [], marker="s", linestyle="", color=f"C{number}") for number in range(len(shown))]
        legend = figure.legend(handles, [names[index] for index in shown], loc="lower center", ncols=5, frameon=False, fontsize=7)
        for text in legend.get_texts():
            text.set_parse_math(False)
        figure.subplots_adjust(0.01, 0.1, 0.99, 0.99, 0.03, 0.03)
        return render_png(figure)


def crossed(share: Tensor) -> Tensor:
    """Patches of which a part is replaced."""
    return (share > 0) & (share < 1)


def draw_grid(axes: "object", pixels: np.ndarray, marked: np.ndarray | None, patch: int) -> None:
    """An image; with `marked` [rows, columns] also the lines between patches and the marked ones."""
    from matplotlib.axes import Axes
    from matplotlib.patches import Rectangle

    assert isinstance(axes, Axes)
    axes.imshow(Image.fromarray(pixels))
    axes.set_axis_off()
    if marked is None:
        return
    for position in range(0, pixels.shape[0] + 1, patch):
        axes.axhline(position - 0.5, color="white", linewidth=0.5)
    for position in range(0, pixels.shape[1] + 1, patch):
        axes.axvline(position - 0.5, color="white", linewidth=0.5)
    for row, column in np.argwhere(marked):
        corner = (column * patch - 0.5, row * patch - 0.5)
        axes.add_patch(Rectangle(corner, patch, patch, fill=False, edgecolor=CROSSED, linewidth=1.2))


def patch_size_of(group: Group) -> int:
    """The patch size of the model of a run."""
    from vitrail.checkpoints import load

    return load(group.results[0].folder / "best.safetensors").architecture.patch_size


FIGURES = {"crop-boxes": draw_crops, "mixed-patches": draw_token_mixing, "token-labels": draw_token_labels}
