"""A model of the explorer: predictions, attention rows and relevance maps of the images that were opened last."""

import io
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.data.class_matching import class_titles
from vitrail.errors import UserError
from vitrail.evaluation.model import decode_side, device_of
from vitrail.interpret.attention import Recording, record
from vitrail.interpret.explanation import to_uint8
from vitrail.interpret.maps import METHODS, available_methods, compute_map
from vitrail.models.preprocessing import pad_images
from vitrail.models.vision_transformer import VisionTransformer

MAX_RECORDINGS = 32
RECORDED_BYTES = 2**29  # of all recordings of a model; the last is always kept
MAX_MAPS = 64  # relevance maps of one image
VIEW_SIDE = 448  # of the image that is shown; at least the model's own size
TOP = 5
TOKENS = ("class token", "distillation token")
CLASS_INDEPENDENT = ("attention", "rollout", "thresholded_heads")  # unless every class has a query
TITLES = {
    "class_attention": "Class attention",
    "gradient_attention": "Gradient × attention",
    "evidence": "Patch evidence",
    "thresholded_heads": "Heads at 60%",
    "input_gradient": "Input × gradient",
}


class Quantized(NamedTuple):
    """Maps as uint8 [K, rows * columns], each divided by its largest value."""

    values: np.ndarray
    peaks: list[float]  # the largest values


@dataclass
class OpenedImage:
    """The recording of an image that was opened, and the maps computed from it."""

    recording: Recording
    view: bytes  # JPEG of the part of the resized and cropped image that the patches cover
    maps: OrderedDict[tuple[str, int], Quantized] = field(default_factory=OrderedDict)

    def count_bytes(self) -> int:
        kept = self.recording
        parts = [kept.images, *kept.features, *(part for step in (*kept.blocks, *kept.pooling) for part in step)]
        maps = sum(found.values.nbytes for found in self.maps.values())
        return sum(part.nbytes for part in parts if isinstance(part, Tensor)) + maps + len(self.view)


class ExploredModel:
    """A model with a bounded number of recordings, so that the attention of a patch needs no forward pass.

    One computation runs at a time.
    """

    def __init__(self, model: VisionTransformer, title: str) -> None:
        self.model, self.title = model.eval(), title
        self.device, self.min_side = device_of(model), decode_side(model)
        self.names = class_titles(model.class_names, model.architecture.classes)
        self.methods = available_methods(model)
        self.lock = threading.RLock()
        self.opened: OrderedDict[str, OpenedImage] = OrderedDict()
        height, width = model.preprocessing.image_size
        first = self.record(np.zeros((height, width, 3), dtype=np.uint8)).recording  # also warms up
        self.layers = [layer for layer in range(first.layers) if first.has_attention(layer)]
        self.heads = {layer: sum(part.query.shape[1] for part in first.heads(layer)) for layer in self.layers}
        self.pooling = {layer for layer in self.layers if first.is_pooling(layer)}
        self.prefix = {layer: first.prefix_of(layer) for layer in self.layers}
        self.tokens = {layer: self.count_tokens(layer, first) for layer in self.layers}
        self.grid, self.covered = first.grid, first.covered

    def describe(self) -> dict[str, Any]:
        """What the page shows before an image is opened."""
        blocks = len(self.model.blocks)
        size = " x ".join(map(str, self.model.preprocessing.image_size))
        return {
            "title": self.title,
            "subtitle": f"{self.model.name or 'model'}, {size} pixels, {self.grid[0]} x {self.grid[1]} patches",
            "grid": self.grid,
            "aspect": self.covered[1] / self.covered[0],
            "layers": [
                {
                    "layer": layer,
                    "title": f"class {layer - blocks + 1}" if layer in self.pooling else str(layer + 1),
                    "heads": self.heads[layer],
                    "pooling": layer in self.pooling,
                    "prefix": self.prefix[layer],
                    "tokens": TOKENS[: self.tokens[layer]],
                }
                for layer in self.layers
            ],
            "reason": self.missing_attention(),
            "methods": [
                {
                    "name": name,
                    "title": TITLES.get(name, name.replace("_", " ").capitalize()),
                    "description": METHODS[name].description,
                    "per_class": self.depends_on_class(name),
                }
                for name in self.methods
            ],
        }

    def count_tokens(self, layer: int, recording: Recording) -> int:
        """How many tokens that are no patch a layer can be asked for; a pooling with a query per class is asked for classes."""
        if layer not in self.pooling:
            return self.prefix[layer]
        return 0 if self.model.architecture.pooling == "per_class" else recording.pooling[0][0].shape[1]

    def missing_attention(self) -> str:
        """Why patches have no attention to show; "" if they have."""
        if any(layer not in self.pooling for layer in self.layers):
            return ""
        a = self.model.architecture
        mixer = "convolutions" if not a.depth or a.convnet or "conv" in a.mixer else "linear layers over the patches"
        only = "only its class query attends to patches" if self.layers else "it has no attention"
        return f"This model mixes patches by {mixer}: {only}, so that pointing at a patch shows nothing."

    def depends_on_class(self, method: str) -> bool:
        return method not in CLASS_INDEPENDENT or self.model.architecture.pooling == "per_class"

    def open(self, key: str, read: Callable[[], np.ndarray]) -> OpenedImage:
        """The recording of an image; `read` returns its pixels uint8 [height, width, 3] if it is not kept."""
        with self.lock:
            if key not in self.opened:
                self.opened[key] = self.record(read())
                while len(self.opened) > MAX_RECORDINGS or (len(self.opened) > 1 and self.kept_bytes() > RECORDED_BYTES):
                    self.opened.popitem(last=False)
            self.opened.move_to_end(key)
            return self.opened[key]

    def kept_bytes(self) -> int:
        return sum(opened.count_bytes() for opened in self.opened.values())

    def record(self, pixels: np.ndarray) -> OpenedImage:
        """One forward pass."""
        with self.lock:
            canvas, sizes = (x.to(self.device) for x in pad_images([pixels]))
            preprocessing = self.model.preprocessing
            recording = record(self.model, preprocessing.apply(canvas, sizes))
            if not recording.logits.isfinite().all():
                raise UserError("The model's logits are NaN or Inf: its weights are damaged.")
            scale = max(VIEW_SIDE / max(preprocessing.image_size), 1.0)
            height, width = preprocessing.image_size
            larger = preprocessing._replace(image_size=(round(height * scale), round(width * scale)))
            view = to_uint8(larger.apply(canvas, sizes), larger)[0]
            height, width = (round(side * scale) for side in recording.covered)
            return OpenedImage(recording, to_jpeg(view[:height, :width]))

    def predictions(self, opened: OpenedImage) -> list[tuple[int, str, float]]:
        """Index, name and probability of the most probable classes."""
        if not self.names:
            return []
        probabilities, classes = opened.recording.logits[0].float().softmax(0).topk(min(TOP, len(self.names)))
        pairs = zip(classes.tolist(), probabilities.tolist(), strict=True)
        return [(index, self.names[index], probability) for index, probability in pairs]

    def attention(self, opened: OpenedImage, layer: int, query: int) -> tuple[Quantized, list[float]]:
        """Attention of one patch to all patches, for each head, and to the prefix tokens together.

        -1 is the class token, -2 the distillation token. In the pooling `query` is a class if each has its own query.
        """
        if layer not in self.layers:
            raise UserError(f"Layer {layer} has no attention: choose one of {self.layers}.")
        prefix, patches, tokens = self.prefix[layer], self.grid[0] * self.grid[1], self.tokens[layer]
        if layer in self.pooling and query >= 0:
            token = query if not tokens and query < len(self.names) else 0
        elif not -max(tokens, int(layer in self.pooling)) <= query < patches:
            raise UserError(f"There is no patch {query}: this layer has {patches}, 0 being the first.")
        else:
            token = -1 - query if query < 0 else prefix + query
        with self.lock:
            rows = opened.recording.attention_rows(layer, [token])[0, :, 0].float()
        return quantize(rows[:, prefix:]), rows[:, :prefix].sum(1).tolist()

    def relevance(self, opened: OpenedImage, method: str, target: int) -> Quantized:
        """One relevance map; -1 is the predicted class."""
        if method not in self.methods or not -1 <= target < max(len(self.names), 1):
            raise UserError("This model does not have this method or class.")
        with self.lock:
            if target < 0:
                target = int(opened.recording.logits[0].argmax())
            key = (method, target if self.depends_on_class(method) else -1)
            if key not in opened.maps:
                recording = opened.recording
                if METHODS[method].gradients:
                    recording = record(self.model, recording.images, gradients=True)
                found = compute_map(recording, method, torch.tensor([target]))
                opened.maps[key] = quantize(found.float().flatten(1))
                while len(opened.maps) > MAX_MAPS:
                    opened.maps.popitem(last=False)
            return opened.maps[key]


def quantize(maps: Tensor) -> Quantized:
    """Maps [K, N], not negative, to uint8."""
    peaks = maps.amax(1)
    values = (maps / peaks.clamp(min=1e-12)[:, None] * 255).round().to(torch.uint8)
    return Quantized(values.cpu().numpy(), peaks.tolist())


def to_jpeg(pixels: np.ndarray, quality: int = 85, side: int | None = None) -> bytes:
    """A JPEG of an image uint8 [height, width, 3], whose longer side is at most `side`."""
    image = Image.fromarray(pixels)
    if side is not None:
        image.thumbnail((side, side), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()
