"""The report of the evaluation of a segmentation: evaluation.json and one self-contained page."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.atomic_files import atomic_write
from vitrail.formatting import percent, pluralize
from vitrail.pages import image_url, write_page
from vitrail.runs.report import (
    BOUNDARY_COLUMNS,
    MAX_MATRIX_CLASSES,
    PIXEL_COLUMNS,
    confused_pairs,
    format_pairs,
    list_boundaries,
    list_pixel_classes,
)


def write_segmentation_report(folder: Path, content: Mapping[str, Any], images: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Write report.html and evaluation.json; `images` have a thumbnail, a location and their mIoU."""
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    atomic_write(folder / "evaluation.json", lambda file: file.write_text(text, encoding="utf-8"))
    matrix, names = content["confusion"]["matrix"], content["confusion"]["names"]
    numbers = [("mIoU", "miou"), ("pixel accuracy", "pixel_accuracy"), ("mean accuracy", "mean_accuracy")]
    page = write_page(
        folder / "report.html",
        "segmentation.html.j2",
        title=f"{Path(content['weights']).name} on {Path(content['source']).name or content['source']}",
        summary=f"{content['split']}, {pluralize(content['images'], 'image')}. Protocol: {content['protocol']}.",
        cards=[*((title, percent(content[name], 2)) for title, name in numbers), ("images", f"{content['images']:,}")],
        images=[{"url": image_url(each["image"]), "location": each["location"]} for each in images],
        class_columns=PIXEL_COLUMNS,
        classes=list_pixel_classes(content),
        boundary_columns=BOUNDARY_COLUMNS,
        boundaries=list_boundaries(content),
        pairs=format_pairs(confused_pairs(matrix, names)),
        matrix=matrix if len(names) <= MAX_MATRIX_CLASSES else None,
        names=names,
        settings=[(name, str(content[name])) for name in ("weights", "source", "split", "protocol")],
    )
    return [page, folder / "evaluation.json"]
