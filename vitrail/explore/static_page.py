"""A static page: images, predictions, relevance maps and quantized attention of a collection in one file."""

import gzip
import io
from base64 import b64encode
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.atomic_files import atomic_write
from vitrail.explore.collection import Collection
from vitrail.explore.explored_model import ExploredModel, OpenedImage, quantize, to_jpeg
from vitrail.explore.explorer import Explorer
from vitrail.explore.page import render_page
from vitrail.pages import image_url

VIEW_SIDE, VIEW_QUALITY = 320, 80
CLASSES = 2  # for which the maps of methods that depend on the class are stored; of occlusion, which is slow, only the first
STEP = 4  # to which attention is rounded, of 255: not visible, and the page is a third smaller
ATTENTION_BYTES = 6 * 2**20  # of attention weights in one page, before compression
NO_ATTENTION = "The attention of patches is too large for this file, so pointing at one shows nothing: try fewer images."


def write_static_page(
    path: Path, title: str, explorer: Explorer, count: int, advance: Callable[[int], None] = lambda count: None
) -> int:
    """Write a page with `count` images of the collection and return its size in bytes."""
    collection = explorer.require_collection()
    rows = choose_rows(collection, count)
    content = explorer.describe()
    content["collection"]["notes"] = list(content["collection"]["notes"])
    budget = ATTENTION_BYTES // (len(rows) * len(explorer.models))
    plans = [plan_layers(model, budget) for model in explorer.models]
    for described, plan in zip(content["models"], plans, strict=True):
        content["collection"]["notes"] += describe_reduction(described, plan)
        kept = dict(plan)
        described["layers"] = [
            layer | {"heads": kept[layer["layer"]], "mean": kept[layer["layer"]] < layer["heads"]}
            for layer in described["layers"]
            if layer["layer"] in kept
        ]
        if not described["reason"] and all(layer["pooling"] for layer in described["layers"]):
            described["reason"] = NO_ATTENTION
    views: list[str] = []
    images = []
    for row in rows:
        entries = []
        for number, (model, plan) in enumerate(zip(explorer.models, plans, strict=True)):
            _, opened = explorer.open(number, f"c{row}")
            url = view_url(opened)
            if url not in views:
                views.append(url)
            entries.append({"view": views.index(url), **store(model, opened, plan)})
        images.append(entries)
        advance(1)
    content["collection"] = select(content["collection"], rows)
    text = render_page(title, content, {"views": views, "images": images})
    atomic_write(path, lambda file: file.write_text(text, encoding="utf-8", errors="backslashreplace"))
    return path.stat().st_size


def choose_rows(collection: Collection, count: int) -> list[int]:
    """At most `count` images in their order: up to half of them the most confident errors, the others at equal distances."""
    total, first = len(collection.index), collection.scans[0]
    if total <= count:
        return list(range(total))
    order = np.argsort(-first.probability, kind="stable")
    wrong = order[first.wrong[order]].tolist()[: count // 2] if first.wrong is not None else []
    others = np.setdiff1d(np.arange(total), wrong)
    spread = others[np.linspace(0, len(others) - 1, count - len(wrong)).round().astype(int)]
    return sorted([*wrong, *spread.tolist()])


def plan_layers(model: ExploredModel, budget: int) -> list[tuple[int, int]]:
    """Layers and their number of stored maps: all heads, else (1) the mean of the heads, else that of every second layer, ..."""
    patches = model.grid[0] * model.grid[1]
    sizes = {layer: patches * (1 if layer in model.pooling else patches) for layer in model.layers}
    if sum(sizes[layer] * model.heads[layer] for layer in model.layers) <= budget:
        return [(layer, model.heads[layer]) for layer in model.layers]
    step = 1
    while len(kept := model.layers[::-1][::step]) > 1 and sum(sizes[layer] for layer in kept) > budget:
        step *= 2
    return [(layer, 1) for layer in sorted(kept) if sizes[layer] <= budget]


def describe_reduction(described: dict[str, Any], plan: Sequence[tuple[int, int]]) -> list[str]:
    """What of the attention of a model is not in the page, for its reader."""
    layers, kept = described["layers"], dict(plan)
    notes = []
    if len(kept) < len(layers):
        notes.append(f"{len(kept)} of {len(layers)} blocks")
    if any(kept.get(layer["layer"], layer["heads"]) < layer["heads"] for layer in layers):
        notes.append("the mean of the heads")
    return [f"of the attention of {described['title']} this file has {' and '.join(notes)}"] if notes else []


def store(model: ExploredModel, opened: OpenedImage, plan: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Predictions, relevance maps and attention of one image; the arrays are parts of one compressed block of bytes."""
    block = io.BytesIO()
    predictions = model.predictions(opened)
    maps = []
    for method in model.methods:
        per_class = model.depends_on_class(method) and model.names
        count = 1 if method == "occlusion" else CLASSES
        for target in [index for index, _, _ in predictions[:count]] if per_class else [-1]:
            found = model.relevance(opened, method, target)
            maps.append([method, target if per_class else -1, block.tell(), found.peaks[0]])
            block.write(found.values.tobytes())
    attention = []
    for layer, heads in plan:
        rows = torch.cat([weights[0] for _, weights in opened.recording.row_chunks(layer)], 1).float()  # [H, Q, T]
        rows = stored_queries(model, layer, rows, predictions)
        prefix = model.prefix[layer]
        rows = rows if heads == model.heads[layer] else rows.mean(0, keepdim=True)
        quantized = quantize(rows[..., prefix:].transpose(0, 1).flatten(0, 1))
        start = block.tell()
        block.write(np.array(quantized.peaks, dtype="<f4").tobytes())
        block.write(rows[..., :prefix].sum(2).T.flatten().cpu().numpy().astype("<f4").tobytes())
        rounded = (quantized.values.astype(np.int64) + STEP // 2) // STEP * STEP
        block.write(rounded.clip(0, 255).astype(np.uint8).tobytes())
        attention.append([layer, start, rows.shape[1]])
    packed = b64encode(gzip.compress(block.getvalue(), 9, mtime=0)).decode()
    return {"predictions": predictions, "maps": maps, "attention": attention, "block": packed}


def stored_queries(model: ExploredModel, layer: int, rows: Tensor, predictions: Sequence[tuple[int, str, float]]) -> Tensor:
    """Weights [H, Q, T] of the prefix tokens and the patches; of a pooling with a query per class, those of one query."""
    if layer in model.pooling and not model.tokens[layer]:
        query = predictions[0][0] if predictions else 0
        return rows[:, query : query + 1]
    return rows


def view_url(opened: OpenedImage) -> str:
    pixels = np.asarray(Image.open(io.BytesIO(opened.view)))
    return image_url(b64encode(to_jpeg(pixels, VIEW_QUALITY, VIEW_SIDE)).decode())


def select(collection: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """The described collection with these images only."""

    def pick(values: Any) -> Any:
        return [values[row] for row in rows] if isinstance(values, list) else values

    columns = ("predictions", "probabilities", "wrong", "points")
    return collection | {
        "names": pick(collection["names"]),
        "labels": pick(collection["labels"]),
        "scans": [scan | {name: pick(scan[name]) for name in columns} for scan in collection["scans"]],
    }
