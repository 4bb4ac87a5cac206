"""The page of `vitrail demo`: two trainings compared, predictions of the first, and its attention."""

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vitrail.checkpoints import load
from vitrail.cli.evaluation_page import chart_versions
from vitrail.data.datasets.lookup import open_source
from vitrail.data.decode import decode
from vitrail.data.image_loader import ImageLoader
from vitrail.data.source import Source, Subset
from vitrail.devices import choose_device
from vitrail.evaluation.confusion import Predictions, collect_predictions, confusion, thumbnail, worst_mistakes
from vitrail.formatting import format_time_span, format_value, percent, pluralize
from vitrail.interpret.evidence import patch_evidence
from vitrail.interpret.rollout import attention_rollout
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.pages import image_url, write_page
from vitrail.pages.charts import DARK, LIGHT, Palette, add_legend, marker_style, new_figure, render_png, style_axes
from vitrail.runs.report import Rows, make_curves
from vitrail.runs.run_json import read_run_info
from vitrail.training.metrics import read_metrics
from vitrail.training.scope import apply_scope

BATCH_SIZE = 64
MAX_IMAGES = 12  # correct predictions, and as many errors
MAX_ATTENTION = 6  # images with attention maps
STRIP_SIDE = 192  # pixels


@dataclass(frozen=True)
class DemoRun:
    """One of the two trainings, and the predictions of its best weights on the test images."""

    title: str
    folder: Path
    run: dict[str, Any]  # run.json
    model: VisionTransformer
    trained_parameters: int
    predictions: Predictions

    @property
    def names(self) -> list[str]:
        return list(self.run["data"]["classes"])

    @property
    def images(self) -> int:
        return len(self.predictions.label)

    @property
    def top1(self) -> float:
        return float((~self.predictions.wrong).mean())

    @property
    def standard_error(self) -> float:
        """The standard error of `top1`."""
        return math.sqrt(self.top1 * (1 - self.top1) / self.images)

    @cached_property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def seed(self) -> int:
        return int(self.run["recipe"]["seed"])

    @property
    def time(self) -> str:
        return format_time_span(self.run["seconds"])

    def to_dict(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "folder": str(self.folder),
            "seed": self.seed,
            "top1": self.top1,
            "standard_error": self.standard_error,
            "test_images": self.images,
            "trained_parameters": self.trained_parameters,
            "parameters": self.parameters,
            "seconds": self.run["seconds"],
        }


def evaluate_run(title: str, folder: Path, device_name: str | None) -> DemoRun:
    """Evaluate the best weights of a finished run on the test images of its data."""
    run, device = read_run_info(folder), choose_device(device_name)
    model = load(folder, device=device)
    apply_scope(model, run["recipe"]["init"]["scope"])
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    loader = ImageLoader(open_source(run["source"], "test"), device, workers=0, log=lambda message: None)
    try:
        predictions = collect_predictions(model, loader, model.preprocessing, BATCH_SIZE)
    finally:
        loader.close()
    return DemoRun(title, folder, run, model, trained, predictions)


def write_demo_page(path: Path, runs: Sequence[DemoRun], command: str) -> Path:
    """Write the page; it shows predictions of the first run, and `command` as the next step."""
    first = runs[0]
    source = open_source(first.run["source"], "test")
    return write_page(
        path,
        "demo.html.j2",
        title="Bundled weights adapted to photographs of pets",
        summary=summarize(runs),
        cards=[
            ("adapted", percent(first.top1, 2)),
            ("from scratch", percent(runs[1].top1, 2)),
            ("chance", percent(1 / len(first.names), 2)),
            ("trained parameters", f"{first.trained_parameters / 1e6:.2f} of {first.parameters / 1e6:.2f} M"),
            ("time", first.time),
        ],
        chart=chart_versions(draw_chart(runs, LIGHT), draw_chart(runs, DARK)),
        trainings=[
            (
                run.title,
                f"{run.run['steps']:,}",
                f"{run.trained_parameters:,} of {run.parameters:,}",
                run.time,
                percent(run.top1, 2),
                f"{100 * run.standard_error:.1f} points",
                str(run.seed),
            )
            for run in runs
        ],
        correct=list_images(first, source, select_correct(first.predictions)),
        errors=list_images(first, source, worst_mistakes(first.predictions, MAX_IMAGES)),
        attention=list_attention(first, source),
        confusion=confusion(first.predictions, first.names),
        command=command,
        settings=list_settings(first),
    )


def summarize(runs: Sequence[DemoRun]) -> str:
    first, second = runs
    data, classes = first.run["data"], len(first.names)
    return (
        f"{first.run['model']['name']}, pretrained on other images, was fine-tuned on {data['train']} photographs of {classes} "
        f"breeds of cats and dogs for {first.time}. It classifies {percent(first.top1, 2)} of {first.images} test images "
        f"correctly. The same model trained from scratch for as many steps reaches {percent(second.top1, 2)}."
    )


def draw_chart(runs: Sequence[DemoRun], palette: Palette) -> bytes:
    """Draw training loss and validation accuracy over the epochs, one color per training."""
    with new_figure(palette, (11, 3.8)) as figure:
        figure.subplots_adjust(0.07, 0.15, 0.98, 0.9, wspace=0.15)
        losses, accuracies = figure.subplots(1, 2)
        style_axes(losses, "Training loss", palette)
        style_axes(accuracies, "Validation accuracy", palette)
        for run, color in zip(runs, (palette.blue, palette.orange), strict=True):
            curves = make_curves(run.run, read_metrics(run.folder))
            epochs, values = curves.points("train", "loss")
            losses.plot(epochs, values, color=color, alpha=0.22, linewidth=0.8)
            losses.plot(epochs, curves.smooth_losses()[1], color=color, linewidth=1.8, label=run.title)
            epochs, values = curves.points("validation", "top1")
            accuracies.plot(epochs, 100 * values, color=color, linewidth=1.8, label=run.title, **marker_style(values))
        accuracies.yaxis.set_major_formatter("{x:g} %")
        accuracies.set_ylim(0, 100)
        for axes in (losses, accuracies):
            axes.set_xlabel("epoch", color=palette.muted)
            axes.set_xlim(left=0)
        add_legend(losses, palette, "no loss recorded")
        return render_png(figure)


def select_correct(predictions: Predictions) -> Predictions:
    """Return the first correctly classified image of each class."""
    correct = np.flatnonzero(~predictions.wrong)
    _, first = np.unique(predictions.label[correct], return_index=True)
    return Predictions(*(column[correct[first[:MAX_IMAGES]]] for column in predictions))


def list_images(run: DemoRun, source: Source, predictions: Predictions) -> list[dict[str, Any]]:
    urls = [image_url(thumbnail(decode(source.encoded(int(index))), 128)) for index in predictions.image]
    return list_predictions(run, predictions, urls)


def list_predictions(run: DemoRun, predictions: Predictions, urls: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "url": url,
            "label": run.names[label],
            "prediction": run.names[prediction],
            "confidence": float(confidence),
            "location": None,
        }
        for url, (_, label, prediction, confidence) in zip(urls, zip(*predictions, strict=True), strict=True)
    ]


def list_attention(run: DemoRun, source: Source) -> list[dict[str, Any]]:
    """Return photograph, attention and patch contributions side by side, for correct predictions and one error."""
    correct, error = select_correct(run.predictions), worst_mistakes(run.predictions, 1)
    spread = np.unique(np.linspace(0, max(len(correct.image) - 1, 0), MAX_ATTENTION - len(error.image)).astype(np.int64))
    spread = spread[: len(correct.image)]
    chosen = Predictions(*(np.concatenate([column[spread], wrong]) for column, wrong in zip(correct, error, strict=True)))
    if not len(chosen.image):
        return []
    images = load_images(run.model, source, chosen.image)
    classes = torch.from_numpy(chosen.prediction).to(images.device)
    attention = attention_rollout(run.model, images).cpu().numpy()
    evidence = patch_evidence(run.model, images, classes).clamp(min=0).cpu().numpy()
    # The images are square and not cropped, so that the maps cover them completely.
    photographs = [decode(source.encoded(int(index))) for index in chosen.image]
    urls = [draw_strip(photograph, maps) for photograph, *maps in zip(photographs, attention, evidence, strict=True)]
    return list_predictions(run, chosen, urls)


def load_images(model: VisionTransformer, source: Source, chosen: np.ndarray) -> torch.Tensor:
    """Return the preprocessed images: [B, 3, H, W]."""
    device = next(model.parameters()).device
    loader = ImageLoader(Subset(source, chosen), device, workers=0, log=lambda message: None)
    try:
        return torch.cat([model.preprocessing.apply(batch.pixels, batch.sizes) for batch in loader.iterate(BATCH_SIZE)])
    finally:
        loader.close()


def draw_strip(photograph: np.ndarray, maps: Sequence[np.ndarray]) -> str:
    """Return a data URL of the photograph and, for each map [rows, columns], the photograph overlaid with it."""
    from matplotlib import colormaps

    size = (STRIP_SIDE, STRIP_SIDE)
    base = np.asarray(Image.fromarray(photograph).resize(size, Image.Resampling.BICUBIC), dtype=np.float32)
    gray = base.mean(2, keepdims=True)
    strip = [base]
    for values in maps:
        # Percentiles: a single bright patch would darken all others.
        high, low = np.percentile(values, 98), np.percentile(values, 5)
        scaled = np.clip((values - low) / max(float(high - low), 1e-12), 0, 1).astype(np.float32)
        smooth = np.clip(np.asarray(Image.fromarray(scaled).resize(size, Image.Resampling.BICUBIC)), 0, 1)
        overlay = 255 * np.asarray(colormaps["inferno"](smooth), dtype=np.float32)[..., :3]
        strip.append(0.4 * gray + 0.6 * overlay)
    file = io.BytesIO()
    Image.fromarray(np.concatenate(strip, 1).round().astype(np.uint8)).save(file, "JPEG", quality=88)
    return image_url(base64.b64encode(file.getvalue()).decode())


def list_settings(first: DemoRun) -> Rows:
    run, recipe = first.run, first.run["recipe"]
    return [
        ("Photographs", "Oxford-IIIT Pet Dataset, Parkhi, Vedaldi, Zisserman, Jawahar, CVPR 2012; CC BY-SA 4.0; 12 of 37 breeds"),
        (
            "Both trainings",
            f"{pluralize(run['steps'], 'step')} with batch size {recipe['batch_size']}, {recipe['schedule']['length']}",
        ),
        ("Best weights", f"by accuracy on {run['data']['validation']} validation images"),
        ("Machine", format_value(run["machine"])),
        *((str(name), format_value(value)) for name, value in run["versions"].items()),
    ]
