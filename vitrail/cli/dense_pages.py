"""The reports of evaluations of segmentations and detections: evaluation.json and one self-contained page."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.atomic_files import atomic_write_text
from vitrail.cli.detect import NUMBERS, list_numbers
from vitrail.formatting import percent, pluralize
from vitrail.pages import image_url, write_page
from vitrail.runs.report import (
    BOUNDARY_COLUMNS,
    MAX_MATRIX_CLASSES,
    OBJECT_COLUMNS,
    PIXEL_COLUMNS,
    confused_pairs,
    format_pairs,
    list_boundaries,
    list_object_classes,
    list_pixel_classes,
)


def write_segmentation_report(folder: Path, content: Mapping[str, Any], images: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Write report.html and evaluation.json; `images` have a thumbnail, a location and their mIoU."""
    matrix, names = content["confusion"]["matrix"], content["confusion"]["names"]
    return write_report(
        folder,
        "segmentation.html.j2",
        content,
        images,
        {"mIoU": "miou", "pixel accuracy": "pixel_accuracy", "mean accuracy": "mean_accuracy"},
        class_columns=PIXEL_COLUMNS,
        classes=list_pixel_classes(content),
        boundary_columns=BOUNDARY_COLUMNS,
        boundaries=list_boundaries(content),
        pairs=format_pairs(confused_pairs(matrix, names)),
        matrix=matrix if len(names) <= MAX_MATRIX_CLASSES else None,
        names=names,
    )


def write_detection_report(folder: Path, content: Mapping[str, Any], images: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Write report.html and evaluation.json; `images` have a thumbnail and a location."""
    return write_report(
        folder,
        "detection.html.j2",
        content,
        images,
        {"box AP": "ap", "box AP50": "ap50", "mask AP": "mask_ap"},
        class_columns=OBJECT_COLUMNS,
        classes=list_object_classes(content),
        number_columns=("", *NUMBERS),
        numbers=list_numbers(content),
    )


def write_report(
    folder: Path,
    template: str,
    content: Mapping[str, Any],
    images: Sequence[Mapping[str, Any]],
    cards: Mapping[str, str],
    **tables: Any,
) -> list[Path]:
    """Write what both kinds of reports have, with cards of the content's numbers by title, and the tables of one kind."""
    shown = [(title, percent(content[name], 2)) for title, name in cards.items() if content.get(name) is not None]
    atomic_write_text(folder / "evaluation.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    page = write_page(
        folder / "report.html",
        template,
        title=f"{Path(content['weights']).name} on {Path(content['source']).name or content['source']}",
        summary=f"{content['split']}, {pluralize(content['images'], 'image')}. Protocol: {content['protocol']}.",
        cards=[*shown, ("images", f"{content['images']:,}")],
        images=[{"url": image_url(each["image"]), "location": each["location"]} for each in images],
        settings=[(name, str(content[name])) for name in ("weights", "source", "split", "protocol")],
        **tables,
    )
    return [page, folder / "evaluation.json"]
