"""The report of `vitrail explain`: a folder with one self-contained page, the images as PNG files and, if requested, the maps."""

import base64
import io
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from vitrail.atomic_files import atomic_write, atomic_write_text
from vitrail.cli.dense_prediction import unique_stem
from vitrail.errors import UserError
from vitrail.evaluation.embeddings import save_array
from vitrail.formatting import percent, pluralize
from vitrail.interpret.explanation import Explanation
from vitrail.interpret.figures import FIGURES, PaperFigures
from vitrail.interpret.heat_maps import draw_class_maps, draw_heads, draw_over, draw_saliency
from vitrail.interpret.maps import METHODS, parse_method
from vitrail.pages import image_url, png_url, write_page

if TYPE_CHECKING:
    from vitrail.interpret.attention import Recording

SIDE = 256  # pixels of a map on the page
MAX_HEADS = 16  # heads of one drawing
MAX_STEM = 150  # bytes of the name of an image in names of files, which have at most 255


class ReportWriter:
    """Writes the files of a report while images are explained, then its page.

    Files are named {stem of the image}-{what they show}, such as cat-image.png and cat-rollout.png, and figure-{name}.png.
    They never replace one of `inputs`.
    """

    def __init__(self, folder: Path, weights: Path, maps: str | None, inputs: Iterable[str]) -> None:
        self.folder, self.weights, self.maps = folder, weights, maps
        self.inputs = {identify_file(path) for path in map(Path, inputs) if path.exists()}
        self.images: list[dict[str, Any]] = []
        self.figures: list[dict[str, str]] = []
        self.missing: list[str] = []
        self.stems: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)

    def add_image(self, explanation: Explanation, recording: "Recording", row: int, top: int) -> None:
        """One section: the image, its maps, and drawings of its heads and classes. `row` is its place in the recording."""
        prediction, target = explanation.prediction, explanation.target
        stem = unique_stem(shorten(Path(prediction.image).stem), self.stems)
        tiles = [{"caption": "image", "url": self.save_image(f"{stem}-image.png", explanation.image)}]
        for method, values in explanation.maps.items():
            name = method.replace(":", "-")
            url = self.save_image(f"{stem}-{name}.png", draw_over(explanation.image, values))
            tiles.append({"caption": describe_method(method), "url": url})
            self.save_map(f"{stem}-{name}", values)
        others = ", ".join(f"{each.name} {percent(each.probability, 1)}" for each in prediction.classes)
        self.images.append(
            {
                "title": Path(prediction.image).name,
                "target": f"{target.name} {percent(target.probability, 1)}" if target else "",
                "others": f"top {len(prediction.classes)}: {others}",
                "tiles": tiles,
                "details": self.draw_details(stem, explanation, recording, row, top),
            }
        )

    def draw_details(
        self, stem: str, explanation: Explanation, recording: "Recording", row: int, top: int
    ) -> list[dict[str, str]]:
        a, pixels, found = recording.model.architecture, explanation.image, []
        target, device = explanation.target, recording.images.device
        classes = torch.full((len(recording.images),), target.index, device=device) if target else None
        pooling = list(range(len(recording.blocks), recording.layers))
        if a.pooling == "class_attention":
            found.append(("heads", "heads of the class-attention blocks", draw_heads(recording, pixels, pooling, row)))
        if a.pooling == "per_class":
            maps = draw_class_maps(recording, pixels, min(top, 6), row)
            found.append(("classes", "the most probable classes, each by its own query", maps))
        last = recording.layers - 1
        if last >= 0 and recording.has_attention(last) and recording.heads(last)[0].query.shape[1] <= MAX_HEADS:
            if a.pooling not in ("class_attention", "per_class"):
                found.append(("heads", "heads of the last layer", draw_heads(recording, pixels, [last], row)))
            masks = draw_heads(recording, pixels, [last], row, masks=True, classes=classes)
            found.append(("thresholded", "heads of the last layer, patches with 60 % of their attention", masks))
        return [{"caption": caption, "url": self.save_png(f"{stem}-{name}.png", png)} for name, caption, png in found]

    def add_saliency(self, recording: "Recording") -> None:
        """CaiT's saliency of the images of a recording, if the model has class attention."""
        if recording.model.architecture.pooling == "class_attention":
            self.add_figure("saliency", "Saliency of the first class-attention block", "CaiT, Fig. 7", draw_saliency(recording))

    def add_figures(self, figures: PaperFigures) -> None:
        """The other figures of the papers, and why some are missing."""
        for name, png in figures.draw().items():
            title, images = FIGURES[name].title, pluralize(figures.images, "image")
            self.add_figure(name, f"{title}, {images}" if FIGURES[name].measure else title, FIGURES[name].origin, png)
        self.missing = list(dict.fromkeys(figures.reasons.values()))

    def add_figure(self, name: str, title: str, origin: str, png: bytes) -> None:
        self.figures.append({"title": title, "origin": origin, "url": self.save_png(f"figure-{name}.png", png)})

    def write(self, settings: Sequence[tuple[str, str]]) -> Path:
        """index.html, with all images inside."""
        return write_page(
            self.choose_path("index.html"),
            "explanation.html.j2",
            title=f"Relevance maps of {self.weights.name}",
            summary=f"{pluralize(len(self.images), 'image')}. Bright patches matter most; every map has its own scale.",
            images=self.images,
            figures=self.figures,
            missing=self.missing,
            settings=settings,
        )

    def choose_path(self, name: str) -> Path:
        """The path of a file of the report; UserError if it is one of the inputs."""
        path = self.folder / name
        if path.exists() and identify_file(path) in self.inputs:
            raise UserError(f"{path} is an input and would be overwritten: give another folder as --out.")
        return path

    def save_map(self, name: str, values: np.ndarray) -> None:
        if self.maps == "npy":
            atomic_write(self.choose_path(f"{name}.npy"), lambda file: save_array(file, values))
        elif self.maps == "json":
            text = json.dumps([[round(float(each), 7) for each in row] for row in values])
            atomic_write_text(self.choose_path(f"{name}.json"), text)

    def save_png(self, name: str, png: bytes) -> str:
        atomic_write(self.choose_path(name), lambda file: file.write_bytes(png))
        return png_url(png)

    def save_image(self, name: str, pixels: np.ndarray) -> str:
        """Write an image as PNG; returns the URL of a JPEG for the page."""
        image = Image.fromarray(pixels)
        atomic_write(self.choose_path(name), lambda file: image.save(file, "PNG"))
        if max(image.size) < SIDE:
            image = image.resize((image.width * SIDE // max(image.size), image.height * SIDE // max(image.size)))
        encoded = io.BytesIO()
        image.save(encoded, "JPEG", quality=88)
        return image_url(base64.b64encode(encoded.getvalue()).decode())


def identify_file(path: Path) -> tuple[int, int]:
    """Two paths of one file have the same value."""
    status = path.stat()
    return status.st_dev, status.st_ino


def shorten(stem: str) -> str:
    """A stem of at most `MAX_STEM` bytes, so that what is appended fits into the name of a file."""
    encoded = os.fsencode(stem)
    return (stem if len(encoded) <= MAX_STEM else encoded[:MAX_STEM].decode(errors="ignore")) or "image"


def describe_method(method: str) -> str:
    """The name of a method and what it shows."""
    name, layer, head = parse_method(method)
    if layer is None:
        return f"{name}: {METHODS[name].description}"
    return f"attention of layer {layer}" + (f", head {head}" if head is not None else ", mean of the heads")
