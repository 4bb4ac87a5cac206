"""The report of the evaluation of a detection: evaluation.json and one self-contained page."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.atomic_files import atomic_write
from vitrail.cli.detect import NUMBERS, list_numbers
from vitrail.formatting import percent, pluralize
from vitrail.pages import image_url, write_page
from vitrail.runs.report import OBJECT_COLUMNS, list_object_classes


def write_detection_report(folder: Path, content: dict[str, Any], images: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Write report.html and evaluation.json; `images` have a thumbnail and a location."""
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    atomic_write(folder / "evaluation.json", lambda file: file.write_text(text, encoding="utf-8"))
    numbers = [("box AP", "ap"), ("box AP50", "ap50"), ("mask AP", "mask_ap")]
    shown = [(title, percent(content[name], 2)) for title, name in numbers if content.get(name) is not None]
    page = write_page(
        folder / "report.html",
        "detection.html.j2",
        title=f"{Path(content['weights']).name} on {Path(content['source']).name or content['source']}",
        summary=f"{content['split']}, {pluralize(content['images'], 'image')}. Protocol: {content['protocol']}.",
        cards=[*shown, ("images", f"{content['images']:,}")],
        images=[{"url": image_url(each["image"]), "location": each["location"]} for each in images],
        number_columns=("", *NUMBERS),
        numbers=list_numbers(content),
        class_columns=OBJECT_COLUMNS,
        classes=list_object_classes(content),
        settings=[(name, str(content[name])) for name in ("weights", "source", "split", "protocol")],
    )
    return [page, folder / "evaluation.json"]
