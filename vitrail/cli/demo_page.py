"""The page of `vitrail demo`: two trainings side by side, what the better one answers, and where it looks."""

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vitrail.atomic_files import write_aside
from vitrail.checkpoints import load
from vitrail.cli.evaluation_page import as_png, both, row, sheet
from vitrail.data.datasets.lookup import open_source
from vitrail.data.decode import decode
from vitrail.data.feed import Feed
from vitrail.data.source import Source, Subset
from vitrail.data.transforms.pipeline import augment
from vitrail.evaluation.accuracy import test_view
from vitrail.evaluation.confusion import Answers, collect_answers, confusion, worst_mistakes
from vitrail.interpret.rollout import attention_rollout, patch_evidence
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.runs.curves import DARK, LIGHT, Look, close, dots, dress
from vitrail.runs.page import PAGE, duration, embedded, heat_map, plain, section, share, table
from vitrail.runs.report import curves_of, read_run, thumbnail
from vitrail.training.distributed import choose_device
from vitrail.training.metrics import read_metrics
from vitrail.training.scope import apply_scope

BATCH = 64
SHOWN = 12  # right and wrong answers
LOOKED_AT = 6  # images whose attention is drawn
ENLARGED = 192  # pixels of a side


@dataclass(frozen=True)
class Attempt:
    """One of the two trainings, and its best weights' answers to the test images."""

    title: str
    folder: Path
    run: dict[str, Any]  # run.json
    model: VisionTransformer
    trained: int  # parameters that the training changes
    answers: Answers

    @property
    def names(self) -> list[str]:
        return list(self.run["data"]["classes"])

    @property
    def images(self) -> int:
        return len(self.answers.truth)

    @property
    def top1(self) -> float:
        return float((~self.answers.wrong).mean())

    @property
    def error(self) -> float:
        """The standard error of `top1`."""
        return math.sqrt(self.top1 * (1 - self.top1) / self.images)

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def seed(self) -> int:
        return int(self.run["recipe"]["seed"])

    @property
    def time(self) -> str:
        return duration(self.run["seconds"])

    def to_dict(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "folder": str(self.folder),
            "seed": self.seed,
            "top1": self.top1,
            "standard_error": self.error,
            "test_images": self.images,
            "trained_parameters": self.trained,
            "parameters": self.parameters,
            "seconds": self.run["seconds"],
        }


def look_at_test(title: str, folder: Path, device: str | None) -> Attempt:
    """A finished run's best weights, asked about the test images of its data."""
    run = read_run(folder)
    place = choose_device(device)
    model = load(folder, device=place)
    apply_scope(model, run["recipe"]["init"]["scope"])
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    feed = Feed(open_source(run["source"], "test"), place, workers=0, say=lambda sentence: None)
    try:
        answers = collect_answers(model, feed, test_view(model.preprocessing), BATCH)
    finally:
        feed.close()
    return Attempt(title, folder, run, model, trained, answers)


def write_page(path: Path, attempts: Sequence[Attempt], command: str) -> Path:
    """The page; the first attempt is the one whose answers are shown, `command` what to type next."""
    first = attempts[0]
    source = open_source(first.run["source"], "test")
    charts = both(chart(attempts, LIGHT), chart(attempts, DARK), "Loss and validation accuracy of both trainings")
    found = confusion(first.answers, first.names)
    parts = [
        headline(attempts),
        charts,
        section("Side by side", compared(attempts)),
        section("Some right answers", gallery(first, source, some_right(first.answers))),
        section("The surest mistakes", gallery(first, source, worst_mistakes(first.answers, SHOWN))),
        section("Where it looks", looked_at(first, source)),
        section("What is taken for what", heat_map(found["matrix"], found["names"])),
        section("Next: your own images", following(command)),
        section("How it was made", table(circumstances(first))),
    ]
    text = PAGE.format(title="Bundled weights, adapted to photographs of pets", body="\n".join(filter(None, parts)))
    write_aside(path, lambda side: side.write_text(text, encoding="utf-8"))
    return path


def headline(attempts: Sequence[Attempt]) -> str:
    first, second = attempts
    count, breeds = first.run["data"]["train"], len(first.names)
    words = (
        f"{first.run['model']['name']}, trained before on other images, saw {count} photographs of {breeds} breeds of cats and "
        f"dogs for {first.time} and recognizes {share(first.top1)} of {first.images} new ones. "
        f"The same network that starts from nothing takes as many steps and recognizes {share(second.top1)}."
    )
    facts = [
        ("adapted", share(first.top1)),
        ("from scratch", share(second.top1)),
        ("guessing", share(1 / len(first.names))),
        ("weights trained", f"{first.trained / 1e6:.2f} of {first.parameters / 1e6:.2f} M"),
        ("time", first.time),
    ]
    cards = "".join(f"<div><strong>{escape(value)}</strong><span>{escape(name)}</span></div>" for name, value in facts)
    return f'<p class="summary">{escape(words)}</p><div class="cards">{cards}</div>'


def compared(attempts: Sequence[Attempt]) -> str:
    head = row("th", ("training", "steps", "weights trained", "time", "test top-1", "standard error", "seed"))
    rows = [
        row(
            "td",
            (
                each.title,
                f"{each.run['steps']:,}",
                f"{each.trained:,} of {each.parameters:,}",
                each.time,
                share(each.top1),
                f"{100 * each.error:.1f} points",
                str(each.seed),
            ),
        )
        for each in attempts
    ]
    return f"<div class='wide'><table class='pairs'>{head}{''.join(rows)}</table></div>"


def chart(attempts: Sequence[Attempt], look: Look) -> bytes:
    """Training loss and validation accuracy over the epochs, a color for each training."""
    figure = sheet((11, 3.8), look)
    figure.subplots_adjust(0.07, 0.15, 0.98, 0.9, wspace=0.15)
    losses, accuracies = figure.subplots(1, 2)
    dress(losses, "Training loss", look)
    dress(accuracies, "Validation accuracy", look)
    for each, color in zip(attempts, (look.blue, look.orange), strict=True):
        curves = curves_of(each.run, read_metrics(each.folder))
        epochs, values = curves.of("train", "loss")
        losses.plot(epochs, values, color=color, alpha=0.22, linewidth=0.8)
        losses.plot(epochs, curves.smooth_losses()[1], color=color, linewidth=1.8, label=each.title)
        epochs, values = curves.of("validation", "top1")
        accuracies.plot(epochs, 100 * values, color=color, linewidth=1.8, label=each.title, **dots(values))
    accuracies.yaxis.set_major_formatter("{x:g} %")
    accuracies.set_ylim(0, 100)
    for axes in (losses, accuracies):
        axes.set_xlabel("epoch", color=look.faint)
        axes.set_xlim(left=0)
    close(losses, look, "no loss was recorded")
    return as_png(figure)


def some_right(answers: Answers) -> Answers:
    """The first image of each class that is recognized."""
    right = np.flatnonzero(~answers.wrong)
    _, first = np.unique(answers.truth[right], return_index=True)
    return Answers(*(column[right[first[:SHOWN]]] for column in answers))


def gallery(attempt: Attempt, source: Source, answers: Answers) -> str:
    shown = []
    for index, truth, guess, confidence in zip(*answers, strict=True):
        words = f"<b>{escape(attempt.names[guess])}</b> {100 * confidence:.0f} %"
        words += f"<br>is {escape(attempt.names[truth])}" if guess != truth else ""
        image = embedded(thumbnail(decode(source.encoded(int(index))), 128))
        shown.append(f'<figure><img alt="" src="{image}"><figcaption>{words}</figcaption></figure>')
    return f"<div class='images'>{''.join(shown)}</div>" if shown else ""


def looked_at(attempt: Attempt, source: Source) -> str:
    """Photograph, attention and evidence beside each other, of right answers and of one mistake."""
    right, wrong = some_right(attempt.answers), worst_mistakes(attempt.answers, 1)
    spread = np.unique(np.linspace(0, max(len(right.image) - 1, 0), LOOKED_AT - len(wrong.image)).astype(np.int64))
    spread = spread[: len(right.image)]
    chosen = Answers(*(np.concatenate([column[spread], mistake]) for column, mistake in zip(right, wrong, strict=True)))
    if not len(chosen.image):
        return ""
    images = prepared(attempt.model, source, chosen.image)
    attention = attention_rollout(attempt.model, images).cpu().numpy()
    evidence = patch_evidence(attempt.model, images, torch.from_numpy(chosen.guess).to(images.device)).clamp(min=0).cpu().numpy()
    shown = []
    for place, (index, truth, guess, confidence) in enumerate(zip(*chosen, strict=True)):
        # The network sees all of a square image, only smaller: the maps fit the whole of it.
        strip = beside(decode(source.encoded(int(index))), (attention[place], evidence[place]))
        words = f"<b>{escape(attempt.names[guess])}</b> {100 * confidence:.0f} %"
        words += f", is {escape(attempt.names[truth])}" if guess != truth else ""
        shown.append(f'<figure><img style="aspect-ratio:3" alt="" src="{strip}"><figcaption>{words}</figcaption></figure>')
    words = (
        "From left to right: the photograph; where the network's attention comes from, followed through all blocks (attention "
        "rollout, arXiv 2005.00928); which patches speak for its answer."
    )
    style = "grid-template-columns:repeat(auto-fill,minmax(17rem,1fr))"
    return f"<p>{words}</p><div class='images' style='{style}'>{''.join(shown)}</div>"


def prepared(model: VisionTransformer, source: Source, chosen: np.ndarray) -> torch.Tensor:
    """The images as the network sees them: [B, 3, H, W]."""
    view, device = test_view(model.preprocessing), next(model.parameters()).device
    feed = Feed(Subset(source, chosen), device, workers=0, say=lambda sentence: None)
    try:
        batches = feed.sweep(BATCH)
        return torch.cat([augment(each.pixels, each.sizes, torch.zeros_like(each.index), view).images for each in batches])
    finally:
        feed.close()


def beside(photograph: np.ndarray, maps: Sequence[np.ndarray]) -> str:
    """The photograph and, for each map [rows, columns], the photograph with it glowing, in one image as a data address."""
    from matplotlib import colormaps

    size = (ENLARGED, ENLARGED)
    base = np.asarray(Image.fromarray(photograph).resize(size, Image.Resampling.BICUBIC), dtype=np.float32)
    grey = base.mean(2, keepdims=True)
    strip = [base]
    for values in maps:
        # The brightest patches are what the image is about; a single one must not dim all others.
        high, low = np.percentile(values, 98), np.percentile(values, 5)
        scaled = np.clip((values - low) / max(float(high - low), 1e-12), 0, 1).astype(np.float32)
        smooth = np.clip(np.asarray(Image.fromarray(scaled).resize(size, Image.Resampling.BICUBIC)), 0, 1)
        glow = 255 * np.asarray(colormaps["inferno"](smooth), dtype=np.float32)[..., :3]
        strip.append(0.4 * grey + 0.6 * glow)
    file = io.BytesIO()
    Image.fromarray(np.concatenate(strip, 1).round().astype(np.uint8)).save(file, "JPEG", quality=88)
    return embedded(base64.b64encode(file.getvalue()).decode())


def following(command: str) -> str:
    return (
        "<p>A folder with a folder of images per class is enough:</p>"
        f"<p><code>{escape(command)}</code></p><p>Then <code>vitrail predict runs/photos-finetune cat.jpg</code> says what is in "
        "an image.</p>"
    )


def circumstances(first: Attempt) -> list[tuple[str, str]]:
    run = first.run
    rows = [
        ("Photographs", "Oxford-IIIT Pet Dataset, Parkhi, Vedaldi, Zisserman, Jawahar, CVPR 2012; CC BY-SA 4.0; 12 of 37 breeds"),
        ("Both trainings", f"{run['steps']} steps of {run['recipe']['batch']} images, {run['recipe']['schedule']['length']}"),
        ("Chosen by", f"the best accuracy on {run['data']['validation']} validation images"),
        ("Machine", plain(run["machine"])),
        *((str(name), plain(value)) for name, value in run["versions"].items()),
    ]
    return [(label, escape(value)) for label, value in rows]
