"""vitrail segment; and what predict and evaluate do with weights of a segmentation."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli import dense_prediction as dense
from vitrail.cli.console import print_message, print_problems, print_table, print_text
from vitrail.cli.options import DeviceOption, HardwareOptions, check_choice, expand_options
from vitrail.errors import UserError
from vitrail.formatting import percent, pluralize

if TYPE_CHECKING:
    from vitrail.data.loader import Problem
    from vitrail.data.source import Source
    from vitrail.evaluation.segmented_images import SegmentedImage
    from vitrail.evaluation.semantic_masks import Protocol
    from vitrail.models.vision_transformer import VisionTransformer

MAX_BATCH = 16  # images per forward pass


@expand_options
def segment(
    photos: Annotated[Path, typer.Argument(metavar="PHOTOS", help="A folder of images.")],
    masks: Annotated[Path, typer.Option(help="A folder with masks (PNG) of some of the images, with the same names.")],
    from_: Annotated[
        str, typer.Option("--from", help="Weights whose features are used: any checkpoint; default: bundled ones.")
    ] = "vitrail_tiny",
    method: Annotated[str, typer.Option(help="ridge: a linear head in closed form; knn: the nearest labeled patches.")] = "ridge",
    classes: Annotated[
        Path | None, typer.Option(help="Class names: JSON, or one per line; default: classes.json beside the masks.")
    ] = None,
    short_side: Annotated[int, typer.Option(min=16, max=4096, help="Shorter side of the network's images, in pixels.")] = 256,
    fine_tune: Annotated[
        float | None, typer.Option(metavar="MINUTES", min=0.01, help="Then train the network and the linear head this long.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for masks/, overlays/, a JSON file and the weights.")] = Path("segmented"),
    device: DeviceOption = None,
) -> None:
    """Segment a folder of images from a few masks, in seconds: a frozen network and a closed-form head.

    Example: [bold]vitrail segment photos/ --masks some_masks/[/bold]
    """
    from vitrail.atomic_files import check_writable_folder
    from vitrail.checkpoints import save
    from vitrail.data.progress import progress
    from vitrail.evaluation.dense_probe import attach_ridge, cross_validate, iterate_by_neighbors, probe_config, read_labeled
    from vitrail.evaluation.model import open_model
    from vitrail.evaluation.predict import open_images
    from vitrail.models.vision_transformer import VisionTransformer

    check_choice("--method", method, ("ridge", "knn"))
    if fine_tune is not None and method == "knn":
        raise UserError("--fine-tune trains the linear head: give it with --method ridge.")
    check_writable_folder(out)
    labeled = open_pairs(photos, masks, classes)
    model = open_model(from_, device)
    if not isinstance(model, VisionTransformer):
        raise UserError(f"{from_} is not a vision transformer: give other weights.")
    assert labeled.mask_classes is not None
    config = probe_config(model, labeled.mask_classes, short_side)
    with progress("labeled images", len(labeled)) as advance:
        images, problems = read_labeled(model, labeled, config, advance)
    print_problems(problems)
    estimate = cross_validate(images, config.class_names, method)
    print_estimate(estimate, len(images))
    source, unreadable = open_images([photos])
    if method == "ridge":
        attach_ridge(model, config, images)
        model.notes.pop("recipe", None)
        weights = out / "segmenter.safetensors"
        out.mkdir(parents=True, exist_ok=True)
        save(without_classifier(model), weights)
        if fine_tune is not None:
            weights = train_further(labeled, weights, fine_tune, out, device, short_side)
            model = open_model(weights, device)
            assert isinstance(model, VisionTransformer)
        from vitrail.evaluation.segmented_images import iterate_segmented
        from vitrail.evaluation.semantic_masks import Protocol, segmentation_head

        results = iterate_segmented(model, source, Protocol.of(segmentation_head(model).config))
    else:
        results = iterate_by_neighbors(model, config, images, source)
    print_text(describe_folder(out, write_folder(out, dense.iterate_readable("segmenting", source, unreadable, results))))
    if method == "ridge":
        print_text(f"weights {weights}: `vitrail predict {weights} IMAGE --out overlay.png`")


def open_pairs(photos: Path, masks: Path, classes: Path | None) -> "Source":
    """The images that have a mask."""
    from vitrail.data.datasets.folder import Paths
    from vitrail.data.datasets.mask_folder import MaskFolderSource, match_files, no_match
    from vitrail.data.mask_checks import complete_classes, require_classes
    from vitrail.data.mask_classes import find_classes, read_class_file

    for folder in (photos, masks):
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder: give a folder of images and --masks with the masks of some of them.")
    matched, unmatched = match_files(str(photos), str(masks))
    if not matched:
        raise no_match(unmatched, masks, photos)
    known = read_class_file(str(classes)) if classes else find_classes(str(masks), str(masks.parent), str(photos))
    images, files = (Paths(os.path.abspath(path) for path in part) for part in zip(*matched, strict=True))
    source = MaskFolderSource(str(photos), images, files, known, unmatched.images)
    complete_classes([source])
    require_classes(source)
    return source


def without_classifier(model: "VisionTransformer") -> "VisionTransformer":
    """The model without its classifier, whose class names are not those of the pixels."""
    from torch import nn

    model.architecture = model.architecture.replace(classes=0, dense_head=False)
    model.head, model.head_distillation, model.head_dense = nn.Identity(), None, None
    model.class_names = None
    return model


def train_further(labeled: "Source", weights: Path, minutes: float, out: Path, device: str | None, short_side: int) -> Path:
    """Train the network and the head on the labeled images; returns the best weights."""
    from vitrail.checkpoints import load
    from vitrail.data.mask_classes import write_json
    from vitrail.evaluation.semantic_masks import segmentation_head
    from vitrail.runs.request import TrainRequest
    from vitrail.runs.train import run_request

    data = out / "data"
    for name in ("images", "masks"):
        (data / name).mkdir(parents=True, exist_ok=True)
    for index in range(len(labeled)):
        encoded, mask = labeled.encoded(index), labeled.mask(index)
        assert isinstance(encoded, bytes)
        assert mask is not None
        (data / "images" / f"{index:06}{Path(labeled.location(index)).suffix}").write_bytes(encoded)
        (data / "masks" / f"{index:06}.png").write_bytes(mask)
    assert labeled.mask_classes is not None
    (data / "classes.json").write_text(write_json(labeled.mask_classes), encoding="utf-8")
    blocks = list(segmentation_head(load(weights)).config.blocks)
    changes = {
        "init.weights": str(weights),
        "task_options.head": "linear",
        "task_options.channels": 1,
        "task_options.auxiliary": 0,
        "task_options.blocks": blocks,
        "augmentation.image_size": [short_side, short_side],
        "optimizer.lr": 2e-4,
        "validation.every": "2 epochs",
        "validation.at_start": True,
    }
    run = run_request(TrainRequest(str(data), "segment", None, changes, out / "run", device=device, minutes=minutes))
    if not run.finished:
        sys.exit(130)
    return run.artifact


def write_folder(out: Path, results: Iterator[Any]) -> list[dict[str, Any]]:
    """Write masks, overlays and segmentation.json; returns its rows, one per image."""
    from vitrail.atomic_files import atomic_write_text

    lines: list[dict[str, Any]] = []
    names: set[str] = set()
    for result in results:
        stem = dense.unique_stem(Path(result.image).stem, names)
        files = {name: Path(name, f"{stem}.png") for name in ("masks", "overlays")}
        write_images(result, out / files["overlays"], out / files["masks"])
        lines.append(result.to_dict() | {"mask": str(files["masks"]), "overlay": str(files["overlays"])})
    atomic_write_text(out / "segmentation.json", json.dumps(lines, indent=1, ensure_ascii=False) + "\n")
    return lines


def describe_folder(out: Path, rows: Sequence[Any]) -> str:
    return f"{pluralize(len(rows), 'image')}: {out / 'masks'}, {out / 'overlays'}, {out / 'segmentation.json'}"


def write_images(result: "SegmentedImage", overlay: Path, mask: Path) -> None:
    from vitrail.atomic_files import atomic_write

    dense.write_overlay(result, overlay)
    atomic_write(mask, lambda file: file.write_bytes(result.mask_png()))


def print_estimate(estimate: "dict[str, Any] | None", images: int) -> None:
    if estimate is None:
        print_message("One image with a mask: label another one to see how good the masks are.")
        return
    print_classes(estimate)
    folds = f"{estimate['folds']}-fold cross-validation of {pluralize(images, 'labeled image')}"
    accuracy = percent(estimate["pixel_accuracy"], 1)
    print_text(f"mIoU {percent(estimate['miou'], 1)}, pixel accuracy {accuracy} ({folds})")


def make_protocol(options: dense.ProtocolOptions, model: "VisionTransformer") -> "Protocol":
    from vitrail.evaluation.segmented_images import change_protocol
    from vitrail.evaluation.semantic_masks import MULTI_SCALE

    try:
        scales: Sequence[float] = MULTI_SCALE if options.multi_scale else [float(part) for part in options.scales.split(",")]
    except ValueError:
        raise UserError(f"{options.scales!r} is not a list of scales: write 0.5,1,1.5.") from None
    return change_protocol(model, scales, options.flip or options.multi_scale, options.window)


def predict_masks(
    model: "VisionTransformer",
    source: "Source",
    problems: "Sequence[Problem]",
    options: dense.ProtocolOptions,
    out: Path | None,
    as_json: bool,
) -> None:
    """What `vitrail predict` does with weights of a segmentation."""
    from vitrail.evaluation.segmented_images import iterate_segmented

    protocol, suffix = make_protocol(options, model), dense.check_out(out, len(source), as_json)
    if not as_json and suffix not in dense.JSON_SUFFIXES:
        print_message(f"protocol: {protocol.describe()}")
    results = dense.iterate_readable("segmenting", source, problems, iterate_segmented(model, source, protocol))
    if out is not None and not suffix:
        rows = write_folder(out, results)
        written = len(rows)
        if as_json:
            sys.stdout.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        else:
            print_text(describe_folder(out, rows))
    else:
        readable = list(results)
        written = len(readable)
        write_readable(readable, out, as_json)
    if written < len(source) + len(problems):
        sys.exit(1)


def write_readable(results: "Sequence[SegmentedImage]", out: Path | None, as_json: bool) -> None:
    """Write an overlay with its mask, or a JSON file; print JSON if requested, else a table unless there is a JSON file."""
    from vitrail.atomic_files import atomic_write_text

    overlay = out if out is not None and out.suffix.lower() == ".png" else None
    if overlay is not None:
        mask = overlay.with_name(f"{overlay.stem}-mask.png")
        write_images(results[0], overlay, mask)
    elif out is not None:
        atomic_write_text(out, dense.json_lines(results))
    if as_json:
        sys.stdout.write(dense.json_lines(results))
    elif out is None or overlay is not None:
        rows = [
            (result.image if number == 0 else "", share.name, percent(share.share, 1), f"{share.pixels:,}")
            for result in results
            for number, share in enumerate(result.shares)
        ]
        print_table(("image", "class", "share", "pixels"), rows, ("image", "class"))
    if overlay is not None:
        print_message(f"wrote {overlay} and {mask}")


def measure_masks(
    model: "VisionTransformer", source: "Source", path: str, options: dense.ProtocolOptions, hardware: HardwareOptions
) -> dense.Measured:
    """mIoU of a split, per class and near boundaries, and the pixels that are confused."""
    from vitrail.cli.dense_pages import write_segmentation_report
    from vitrail.data.image_loader import ImageLoader
    from vitrail.data.mask_checks import check_masks, complete_classes
    from vitrail.data.progress import progress
    from vitrail.evaluation.mean_iou import summarize_pixels
    from vitrail.evaluation.model import device_of
    from vitrail.evaluation.pixel_evaluation import count_split, describe_counts, draw_examples, match_mask_classes
    from vitrail.evaluation.semantic_masks import segmentation_head

    config, protocol = segmentation_head(model).config, make_protocol(options, model)
    classes = complete_classes([source])
    check_masks(source)
    table, missing = match_mask_classes(config, classes, path)
    loader = ImageLoader(source, device_of(model), hardware.workers, masks=True, log=print_message)
    with progress("evaluating", len(source)) as advance:
        counts, images = count_split(
            model, loader, min(hardware.batch_size, MAX_BATCH), protocol, boundaries=True, table=table, advance=advance
        )
    loader.close()
    content = summarize_pixels(counts.matrix.cpu()) | {"images": images}
    content |= describe_counts(counts, config.class_names, protocol) | {"ignored_classes": missing}
    examples = partial(draw_examples, model, source, protocol, table=table)
    return dense.Measured(content, examples, write_segmentation_report, print_evaluation)


def print_evaluation(content: dict[str, Any]) -> None:
    """The tables of classes, boundaries and confusions, then the result in one line."""
    from vitrail.runs.report import BOUNDARY_COLUMNS, confused_pairs, list_boundaries

    print_classes(content)
    print_text("")
    print_table(BOUNDARY_COLUMNS, list_boundaries(content))
    print_text("")
    pairs = confused_pairs(content["confusion"]["matrix"], content["confusion"]["names"], 5)
    rows = [(pair["label"], pair["prediction"], percent(pair["count"] / max(pair["of"], 1), 1)) for pair in pairs]
    print_table(("most confused: label", "prediction", "of the label's pixels"), rows, ("most confused: label", "prediction"))
    print_text("")
    if content["ignored_classes"]:
        print_text(f"ignored, since the weights do not have them: {', '.join(content['ignored_classes'])}")
    print_text(f"protocol: {content['protocol']}")
    numbers = f"mIoU {percent(content['miou'], 2)}, pixel accuracy {percent(content['pixel_accuracy'], 2)}"
    images = f"{content['split']}, {pluralize(content['images'], 'image')}"
    print_text(f"{numbers}, mean accuracy {percent(content['mean_accuracy'], 2)}: {images}")


def print_classes(content: dict[str, Any]) -> None:
    from vitrail.runs.report import PIXEL_COLUMNS, list_pixel_classes

    print_table(PIXEL_COLUMNS, [[cell or "–" for cell in row] for row in list_pixel_classes(content)])
