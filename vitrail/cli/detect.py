"""What predict and evaluate do with weights of a detection."""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.cli import dense_prediction as dense
from vitrail.cli.console import print_message, print_table, print_text
from vitrail.cli.options import HardwareOptions
from vitrail.errors import UserError
from vitrail.formatting import percent, pluralize

if TYPE_CHECKING:
    from vitrail.data.loader import Problem
    from vitrail.data.source import Source
    from vitrail.evaluation.detected_images import DetectedImage
    from vitrail.models.vision_transformer import VisionTransformer

MAX_BATCH = 8  # images per forward pass
NUMBERS = {
    "AP": "ap",
    "AP50": "ap50",
    "AP75": "ap75",
    "small": "ap_small",
    "medium": "ap_medium",
    "large": "ap_large",
    "recall": "ar",
}


def check_protocol(options: dense.ProtocolOptions) -> None:
    if options.multi_scale or options.flip or options.scales != "1":
        raise UserError("--scales, --multi-scale and --flip are for segmentations: remove them for a detection.")


def predict_objects(
    model: "VisionTransformer",
    source: "Source",
    problems: "Sequence[Problem]",
    options: dense.ProtocolOptions,
    threshold: float,
    out: Path | None,
    as_json: bool,
) -> None:
    """What `vitrail predict` does with weights of a detection."""
    from vitrail.atomic_files import atomic_write_text
    from vitrail.evaluation.detected_images import change_tiles, iterate_detected

    check_protocol(options)
    protocol, suffix = change_tiles(model, options.window), dense.check_out(out, len(source), as_json)
    lines = as_json or suffix in dense.JSON_SUFFIXES
    if not lines:
        print_message(f"protocol: {protocol.describe()}; shown: scores from {threshold:g} on")
    readable: list[DetectedImage] = []
    names: set[str] = set()
    results = iterate_detected(model, source, protocol, threshold)
    for result in dense.iterate_readable("detecting", source, problems, results):
        if out is not None and not suffix:
            dense.write_overlay(result, out / "overlays" / f"{dense.unique_stem(Path(result.image).stem, names)}.png")
        readable.append(result if len(source) == 1 else without_pixels(result))
    if out is not None and suffix == ".png":
        dense.write_overlay(readable[0], out)
    elif out is not None:
        text = dense.json_lines(readable) if suffix in (".jsonl", ".ndjson") else coco_results(readable)
        atomic_write_text(out if suffix else out / "detections.json", text)
    if as_json:
        sys.stdout.write(dense.json_lines(readable))
    elif not lines:
        print_objects(readable)
    if out is not None:
        print_message(f"wrote {out}")
    if len(readable) < len(source) + len(problems):
        sys.exit(1)


def without_pixels(result: "DetectedImage") -> "DetectedImage":
    """The result with a view of one pixel in place of the image, whose size is kept."""
    from dataclasses import replace

    import numpy as np

    return replace(result, pixels=np.broadcast_to(np.zeros((1, 1, 1), dtype=np.uint8), result.pixels.shape))


def coco_results(results: "Sequence[DetectedImage]") -> str:
    """COCO's list of results; images are numbered from 1 in the order of the files, whose names are in `file_name`."""
    rows = [
        {"image_id": number, "file_name": result.image} | each.to_dict()
        for number, result in enumerate(results, 1)
        for each in result.objects
    ]
    return json.dumps(rows, ensure_ascii=False) + "\n"


def print_objects(results: "Sequence[DetectedImage]") -> None:
    if len(results) == 1:
        rows = [(each.name, percent(each.score, 1), *(f"{value:.0f}" for value in each.box)) for each in results[0].objects]
        print_table(("object", "score", "left", "top", "right", "bottom"), rows, ("object",))
        if not rows:
            print_text("No objects with such a score.")
        return
    rows = []
    for result in results:
        counts = Counter(each.name for each in result.objects)
        rows.append(
            (result.image, str(len(result.objects)), ", ".join(f"{name} {count}" for name, count in counts.most_common()))
        )
    print_table(("image", "objects", "classes"), rows, ("image", "classes"))


def measure_objects(
    model: "VisionTransformer", source: "Source", path: str, options: dense.ProtocolOptions, hardware: HardwareOptions
) -> dense.Measured:
    """COCO's AP of the boxes and masks of a split, by class and size."""
    from vitrail.cli.dense_pages import write_detection_report
    from vitrail.data.image_loader import ImageLoader
    from vitrail.data.object_checks import check_objects
    from vitrail.data.progress import progress
    from vitrail.evaluation.detected_images import change_tiles
    from vitrail.evaluation.detections import detection_head
    from vitrail.evaluation.model import device_of
    from vitrail.evaluation.object_evaluation import describe_precision, draw_examples, match_object_classes, match_split

    check_protocol(options)
    config, protocol = detection_head(model).config, change_tiles(model, options.window)
    check_objects(source)
    table, missing = match_object_classes(config, source.object_classes, path)
    loader = ImageLoader(source, device_of(model), hardware.workers, log=print_message, objects=True)
    with progress("evaluating", len(source)) as advance:
        batch_size = min(hardware.batch_size, MAX_BATCH)
        matches, images = match_split(model.eval(), loader, batch_size, protocol, table=table, advance=advance)
    loader.close()
    content = {"images": images} | matches.summarize(config.classes)
    content |= describe_precision(content, config.class_names, protocol) | {"ignored_classes": missing}
    return dense.Measured(content, partial(draw_examples, model, source, protocol), write_detection_report, print_precision)


def print_precision(content: dict[str, Any]) -> None:
    """The tables of classes and sizes, then the result in one line."""
    from vitrail.runs.report import OBJECT_COLUMNS, list_object_classes

    print_table(OBJECT_COLUMNS, [[cell or "–" for cell in row] for row in list_object_classes(content)])
    print_text("")
    print_table(("", *NUMBERS), list_numbers(content))
    print_text("")
    if content["ignored_classes"]:
        print_text(f"not counted, since the weights do not have them: {', '.join(content['ignored_classes'])}")
    print_text(f"protocol: {content['protocol']}; COCO's AP")
    masks = f", mask AP {percent(content['mask_ap'], 2)}" if content.get("mask_ap") is not None else ""
    images = f"{content['split']}, {pluralize(content['images'], 'image')}"
    print_text(f"box AP {percent(content['ap'] or 0.0, 2)}, AP50 {percent(content['ap50'] or 0.0, 2)}{masks}: {images}")


def list_numbers(content: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Rows of AP by IoU and size, of boxes and masks."""
    rows = []
    for title, prefix in (("boxes", ""), ("masks", "mask_")):
        values = [content.get(f"{prefix}{name}") for name in NUMBERS.values()]
        if any(value is not None for value in values):
            rows.append((title, *("–" if value is None else percent(value, 2) for value in values)))
    return rows
