"""A loaded model as the server uses it: decoded images to inputs, and batches of inputs to results."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.checkpoints.artifact import fingerprint
from vitrail.data.class_matching import class_titles
from vitrail.deploy.inference_graphs import GraphCache
from vitrail.deploy.optimize import Optimized, optimize
from vitrail.devices import has_bfloat16
from vitrail.errors import UserError
from vitrail.evaluation.features import compute_features
from vitrail.evaluation.image_index import choose_kind
from vitrail.evaluation.model import Model, compute_logits, count_classes, decode_side, device_of
from vitrail.interpret.attention import batch_size_for, covered_size, record
from vitrail.interpret.explanation import class_index
from vitrail.interpret.maps import available_methods, compute_map, needs_gradients
from vitrail.models.preprocessing import pad_images
from vitrail.models.vision_transformer import VisionTransformer

SLOW_METHODS = ("occlusion",)  # up to 64 forward passes, during which other requests would wait
EXPLAINED = 4  # images of a pass whose graph is kept


class Operation(NamedTuple):
    """What is computed of an image: predict, embed, or explain by a method."""

    kind: str
    method: str = ""


class Input(NamedTuple):
    """A preprocessed image, and the index of the class to explain (-1: the predicted one)."""

    pixels: Tensor  # float32 [3, height, width]
    target: int = -1


class Explanation(NamedTuple):
    """The class that was explained, and the relevance of each patch."""

    target: int
    values: Tensor  # [rows, columns]


@dataclass(frozen=True, eq=False)
class ServedModel:
    """One version of a model. `logits` is the optimized forward pass; two versions are never part of one batch."""

    name: str
    model: Model
    logits: Callable[[Tensor], Tensor]
    version: str
    precision: str = "fp32"
    shared: bool = False  # whether its unchanged tensors are those of the base
    loaded: float = field(default_factory=time.time)

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    @property
    def classes(self) -> int:
        return count_classes(self.model)

    @property
    def class_names(self) -> list[str]:
        return class_titles(self.model.class_names, self.classes)

    def find_class(self, text: str) -> int:
        """The index of a class by its name or its number."""
        assert isinstance(self.model, VisionTransformer)  # others have no methods to explain
        return class_index(self.model, text[:80])

    @property
    def covered_size(self) -> tuple[int, int]:
        """Height and width of the part of the crop that the patches of a map cover."""
        size = self.model.preprocessing.image_size
        return covered_size(self.model, *size) if isinstance(self.model, VisionTransformer) else size

    @property
    def decode_side(self) -> int | None:
        return decode_side(self.model)

    def preprocess(self, image: np.ndarray) -> Tensor:
        """uint8 [H, W, 3] to the input of the model, by the package's one path."""
        return self.model.preprocessing.apply(*pad_images([image]))[0]

    def check(self, operation: Operation) -> None:
        """Raise UserError for what this model cannot compute."""
        if operation.kind != "embed" and not self.classes:
            raise UserError(f"The model {self.name} has no classifier: send images to /embed.")
        if operation.kind == "explain" and operation.method not in self.methods:
            known = f"choose from {', '.join(self.methods)}" if self.methods else "it has no method to explain its predictions"
            raise UserError(f"The method {operation.method[:80]!r} is not available for the model {self.name}: {known}.")

    @property
    def methods(self) -> list[str]:
        """The methods of /explain, best first."""
        if not isinstance(self.model, VisionTransformer) or not self.classes:
            return []
        return [name for name in available_methods(self.model) if name not in SLOW_METHODS]

    def compute(self, operation: Operation, inputs: Sequence[Input]) -> list[Any]:
        """One result per input: probabilities [C], features [D] or an Explanation, on the CPU."""
        images = torch.stack([each.pixels for each in inputs]).to(self.device)
        if operation.kind == "explain":
            return self.explain(images, operation.method, [each.target for each in inputs])
        with torch.no_grad():  # the mode in which models were compiled: another one would compile them again
            if operation.kind == "embed":
                return list(check_finite(compute_features(self.model, images, choose_kind(self.model))))
            return list(check_finite(self.logits(pad_batch(images))[: len(images)]).softmax(1))

    def explain(self, images: Tensor, method: str, targets: list[int]) -> list[Explanation]:
        """Maps of `targets`, or of the predicted classes where they are -1."""
        assert isinstance(self.model, VisionTransformer)
        size = batch_size_for(self.model, EXPLAINED) if needs_gradients(method) else len(images)
        parts = zip(images.split(size), torch.tensor(targets, device=images.device).split(size), strict=True)
        return [each for part, given in parts for each in explain_pass(self.model, part, method, given)]


def explain_pass(model: VisionTransformer, images: Tensor, method: str, targets: Tensor) -> list[Explanation]:
    """`ServedModel.explain` in one forward pass."""
    recording = record(model, images, needs_gradients(method))
    classes = torch.where(targets < 0, recording.logits.argmax(1), targets)
    maps = check_finite(compute_map(recording, method, classes))
    return [Explanation(*each) for each in zip(classes.tolist(), maps, strict=True)]


def check_finite(values: Tensor) -> Tensor:
    values = values.float().cpu()
    if not values.isfinite().all():
        raise FloatingPointError("The outputs of the model are NaN or Inf: its weights are damaged.")
    return values


def pad_batch(images: Tensor) -> Tensor:
    """On a GPU, the images followed by zeros up to a power of two, so that few batch sizes are compiled and captured."""
    size = 1 << (len(images) - 1).bit_length()
    if not images.is_cuda or size == len(images):
        return images
    return torch.cat([images, images.new_zeros(size - len(images), *images.shape[1:])])


def prepare_model(
    name: str,
    model: Model,
    precision: str | None,
    max_batch: int,
    run: Callable[[Callable[[], object]], object],
    log: Callable[[str], object],
) -> ServedModel:
    """The model with an optimized forward pass; the plain one if `precision` is None, or where optimizing fails.

    `precision` "auto" is bf16 on devices that multiply it, else fp32.
    On a GPU it is compiled for all batch sizes here, and then captured by the thread of `run`: a capture fails if another thread
    uses the device.
    """
    if isinstance(model, VisionTransformer) and model.task not in ("classification", "features"):
        raise UserError(f"{name}: {model.task} is not served; give weights of a classifier or a backbone.")
    served = ServedModel(name, model, lambda images: compute_logits(model, images), version_of(model))
    if precision is None or not isinstance(model, VisionTransformer) or not served.classes:
        return served
    if precision == "auto":
        precision = "bf16" if has_bfloat16(served.device) else "fp32"
    try:
        fast = optimize(model, goal="throughput", precision=precision)
        if served.device.type == "cuda":
            call_with_all_sizes(fast, max_batch)
            fast.graphs = GraphCache(fast._compute)
            run(lambda: call_with_all_sizes(fast, max_batch))
    except Exception as error:  # of compilers and kernels that this machine lacks
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        log(f"{name}: not optimized ({reason}); the plain model is served, which is slower.")
        return served
    return ServedModel(name, model, fast, served.version, precision)


def call_with_all_sizes(fast: Optimized, max_batch: int) -> None:
    """Run the model with every batch size that `pad_batch` makes."""
    for power in range((max_batch - 1).bit_length() + 1):
        fast(torch.zeros(1 << power, fast.architecture.channels, *fast.preprocessing.image_size, device=fast.device))


def version_of(model: Model) -> str:
    """The first digits of the SHA-256 of the weights."""
    return fingerprint(model.state_dict())[:12]


def limit_threads(count: int) -> None:
    """Use this many threads for torch's operations in the calling thread, whatever other threads use."""
    torch.get_num_threads()  # the first call in a thread takes the number of the thread that set it last
    torch.set_num_threads(count)


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread for torch's operations in this context.

    A thread whose operations use several keeps a team of them. With more threads in teams than there are cores, OpenMP puts the
    members of all teams to sleep after every operation, which takes half as long again as the operations of a small model.
    """
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


def default_pool_threads() -> int:
    """Threads that decode and resize: one per core, up to eight."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 8)
