"""The model card of a model: README.md with a YAML header, written from the artifact."""

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml

from vitrail.formatting import escape_control, format_significant, percent, pluralize
from vitrail.heads.task_heads import DetectionConfig, DetectionHead, SegmentationConfig, SegmentationHead
from vitrail.models.preprocessing import are_numbers
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.version import __version__

MAX_CLASSES = 100  # that are listed
HUB_TASKS = {  # by task of a model: the name on the hub
    "classification": "image-classification",
    "features": "image-feature-extraction",
    "segmentation": "image-segmentation",
    "detection": "object-detection",
}
USES = {  # by task: the function that applies the weights, and what can be done with a result
    "classification": ("predict", "print(result.classes)"),
    "segmentation": ("segment", 'result.overlay().save("overlay.png")'),
    "detection": ("detect", "print(result.objects)"),
}
# Metrics that are shown in percent.
RATIOS = ("top1", "top5", "knn", "test", "miou", "pixel_accuracy", "mean_accuracy", "ap", "ap50", "ap75", "mask_ap", "mask_ap50")
SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&$])")
LINK = re.compile(r"(\b(?:https?|ftp)(?=:)|\bwww(?=\.)|(?<!\w)@)", re.IGNORECASE)  # what becomes a link without any syntax
DATA_NAME = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)


def write_card(model: VisionTransformer, repository: str, license: str | None, transformers: bool) -> str:
    """The text of README.md; `transformers`: whether that library can read the files too."""
    data, metrics, recipe = (read_note(model, name) for name in ("data", "metrics", "recipe"))
    sections = {
        "Use": usage(model, repository, transformers),
        "Model": describe_model(model),
        "Training data": describe_data(data),
        "Training": describe_recipe(recipe, read_note(model, "made")),
        "Results": describe_metrics(metrics, data),
        "Limits": describe_limits(model, metrics, recipe, license),
    }
    header = yaml.safe_dump(describe_header(model, repository, license, data, metrics), sort_keys=False, allow_unicode=True)
    title = plain(repository.rpartition("/")[2])
    body = "\n\n".join(f"## {name}\n\n{text}" for name, text in sections.items())
    return f"---\n{header}---\n\n# {title}\n\n{body}\n"


def read_note(model: VisionTransformer, name: str) -> dict[str, Any]:
    """A note of the artifact that is a JSON object; {} for other notes."""
    try:
        value = json.loads(model.notes.get(name, "null"))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def describe_header(
    model: VisionTransformer, repository: str, license: str | None, data: Mapping[str, Any], metrics: Mapping[str, Any]
) -> dict[str, Any]:
    """The YAML header: what the hub shows and searches."""
    task = task_of(model)
    header: dict[str, Any] = {"license": license} if license else {}
    header |= {"library_name": "vitrail", "pipeline_tag": task, "tags": ["vitrail", task]}
    name = str(data.get("name", ""))
    name = name if DATA_NAME.fullmatch(name) else ""
    if name:
        header["datasets"] = [name]
    if are_numbers([metrics.get("top1")], 1):
        measured = {"type": "accuracy", "name": "top-1 accuracy", "value": round(float(metrics["top1"]), 4)}
        where = {"name": name or "validation images", "type": name or "images", "split": "validation"}
        result = {"task": {"type": task}, "dataset": where, "metrics": [measured]}
        header["metrics"] = ["accuracy"]
        header["model-index"] = [{"name": repository.rpartition("/")[2], "results": [result]}]
    return header


def task_of(model: VisionTransformer) -> str:
    """The hub's name of what the model does."""
    return HUB_TASKS[model.task]


def usage(model: VisionTransformer, repository: str, transformers: bool) -> str:
    lines = ["import vitrail", ""]
    if model.task in USES:
        function, statement = USES[model.task]
        lines += [f'for result in vitrail.{function}("hf://{repository}", ["cat.jpg"]):', f"    {statement}"]
    else:
        lines.append(f'model = vitrail.load("hf://{repository}")')
    text = "```python\n" + "\n".join(lines) + "\n```"
    if transformers and model.architecture.classes:
        text += f'\n\nThe library `transformers` reads it too: `pipeline("image-classification", "{repository}")`.'
    return text


def describe_model(model: VisionTransformer) -> str:
    p, count = model.preprocessing, sum(parameter.numel() for parameter in model.parameters())
    resize = "resized to this size" if p.resize == "square" else f"center crop of {percent(p.crop_ratio, 1)} of the shorter side"
    size, names = f"{p.image_size[0]} x {p.image_size[1]} pixels, {resize}", model.class_names
    if isinstance(head := model.task_head, SegmentationHead | DetectionHead):  # images of any size, and its own classes
        size, names = describe_size(head.config), list(head.config.class_names)
    rows = {
        "Architecture": model.name or "custom",
        "Parameters": f"{count / 1e6:.2f} million",
        "Input": f"RGB, {size}, {p.interpolation}",
        "Normalization": f"mean {list(p.mean)}, standard deviation {list(p.std)}",
    }
    text = table(rows)
    if names:
        listed = ", ".join(plain(name) for name in names[:MAX_CLASSES])
        more = f" and {len(names) - MAX_CLASSES} more" if len(names) > MAX_CLASSES else ""
        text += f"\n\n{pluralize(len(names), 'class')}: {listed}{more}."
    return text


def describe_size(config: SegmentationConfig | DetectionConfig) -> str:
    """The size of the images of a dense prediction, and whether they are cut into windows."""
    size = f"shorter side {config.short_side} pixels" if config.short_side else "images at their own size"
    view = f"windows of {config.window} with stride {config.stride}" if config.window else "whole images"
    return f"{size}, {view}"


def describe_data(data: Mapping[str, Any]) -> str:
    if not data:
        return "Not stated in the artifact."
    counts = [f"{data[split]:,} {title}" for split, title in SPLITS.items() if is_count(data.get(split))]
    return f"{plain(str(data.get('name') or 'Images'))}: {' and '.join(counts) or 'number of images not stated'}."


SPLITS = {"train": "training images", "validation": "validation images"}
# Keys of a recipe that a reader looks for first.
SHOWN = (
    "name",
    "task",
    "model",
    "schedule.length",
    "batch_size",
    "optimizer.name",
    "optimizer.lr",
    "optimizer.weight_decay",
    "init.weights",
    "init.scope",
    "precision",
    "seed",
)


def describe_recipe(recipe: Mapping[str, Any], made: Mapping[str, Any]) -> str:
    if not recipe:
        return table(made) if made else "Not stated in the artifact."
    rows = {key: look_up(recipe, key) for key in SHOWN}
    text = table({key: value for key, value in rows.items() if value not in (None, "")})
    complete = yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True).replace("```", "'''")
    return f"{text}\n\n<details><summary>Complete recipe</summary>\n\n```yaml\n{complete}```\n\n</details>"


def look_up(values: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key, None without one."""
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def describe_metrics(metrics: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    numbers = {name: float(value) for name, value in metrics.items() if are_numbers([value], 1)}
    if not numbers:
        return "Not stated in the artifact."
    images = metrics.get("images") or data.get("validation")
    rows = {name: percent(value, 2) if name in RATIOS else format_significant(value) for name, value in numbers.items()}
    text = table({name: value for name, value in rows.items() if name != "images"})
    return f"{text}\n\nMeasured on {f'{images:,}' if is_count(images) else 'the'} validation images."


def describe_limits(model: VisionTransformer, metrics: Mapping[str, Any], recipe: Mapping[str, Any], license: str | None) -> str:
    lines = []
    if model.task == "classification":
        lines.append(
            f"Every image gets one of the {model.architecture.classes} classes, also an image of something else. The "
            "probabilities are those of the softmax, which were not calibrated."
        )
    if metrics:
        lines.append("The results are those of images from the same source as the training images; others can be lower.")
    if initial := look_up(recipe, "init.weights"):
        lines.append(f"Training started from {plain(str(initial))}: the license and the biases of these weights apply too.")
    if not license:
        lines.append("No license was stated: ask the owner of the repository before you use it.")
    lines.append(f"Written by Vitrail {__version__} from the file of the weights; nothing was added by hand.")
    return "\n".join(f"* {line}" for line in lines)


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def table(rows: Mapping[str, Any]) -> str:
    lines = [f"| {plain(str(name))} | {plain(str(value))} |" for name, value in rows.items()]
    return "\n".join(["| | |", "| --- | --- |", *lines])


def plain(text: str) -> str:
    """Text without the meaning of Markdown or HTML, on one line: names in an artifact may be any text."""
    escaped = SPECIAL.sub(r"\\\1", escape_control(" ".join(text.split())))
    return LINK.sub("\\1\u200b", escaped)  # a space without width
