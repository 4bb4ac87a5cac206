"""Cost of storing teacher predictions in a label store and of reading them.

    python benchmarks/annotate.py annotate      # a ResNet-18 with random weights on generated images
    python benchmarks/annotate.py annotate --teacher net.pth --data photos/ --what logits,tokens --top-k 5
    python benchmarks/annotate.py read --images 100000 --grid 7 --batch-size 512  # a store of random values
    python benchmarks/annotate.py step --teacher net.pth --data photos/ --model deit_small_patch16 --size 224 --batch-size 256

`annotate`: bytes per image on disk, images per second and seconds from files to a finished store; for comparison, decoding
the same images and computing the teacher's logits without storing them. Every round writes a new store.

`read`: milliseconds to read the values and class indices of a batch of random rows, maps of `--grid` x `--grid` cells with 5
classes each, from memory-mapped files and, if they fit, from the device; and for a batch of dense targets.

`step`: milliseconds of a training step with a store (hard distillation and token labels): with the store in its files, on the
device, and with constant predictions that need no reading. The steps belong to one training and are timed in turns, so that
only the reading differs; for comparison, a step with labels only.
"""

import argparse
import copy
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from arguments import positive, run_program
from PIL import Image
from timing import half_range, machine, time_rounds

from vitrail.data.datasets.lookup import open_source
from vitrail.data.image_loader import ImageLoader
from vitrail.data.source import Source, Subset
from vitrail.devices import choose_device
from vitrail.evaluation.predict import read_batches
from vitrail.models.preprocessing import DECODE_SCALE, Preprocessing
from vitrail.models.registry import create
from vitrail.recipes import Recipe, lookup
from vitrail.runs.initial_model import build_initial
from vitrail.tasks.classification import Classification, resolve_teacher
from vitrail.tasks.teacher_labels import StoredPredictions
from vitrail.teachers import open_teacher
from vitrail.teachers.annotation import AnnotationRequest, annotate, default_batch_size
from vitrail.teachers.label_store import LabelStore
from vitrail.teachers.label_store_writer import PendingShard, Shard, UniqueImages, write_store
from vitrail.teachers.teacher import Teacher
from vitrail.training.distributed import Devices
from vitrail.training.trainer import Options, Trainer

TOP_K = 5
KINDS = ("noise", "static")


def make_images(folder: Path, count: int, side: int = 256) -> Source:
    """JPEGs of smooth noise in two classes."""
    for kind in KINDS:
        (folder / kind).mkdir(parents=True)
    for number in range(count):
        coarse = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(
            folder / KINDS[number % 2] / f"{number}.jpg", quality=90
        )
    return open_source(str(folder))


def open_images(arguments: argparse.Namespace, folder: str) -> Source:
    source = open_source(arguments.data) if arguments.data else make_images(Path(folder) / "images", arguments.images)
    return Subset(source, np.arange(min(len(source), arguments.images)))


def make_teacher(arguments: argparse.Namespace, classes: list[str] | None = None) -> Teacher:
    """The teacher of `--teacher`, or one with random weights for these classes."""
    if arguments.teacher:
        return open_teacher(arguments.teacher, arguments.device)
    torch.manual_seed(0)
    network = create("resnet18", classes=1000 if classes is None else len(classes))
    return open_teacher(network, arguments.device, classes, Preprocessing())


def measure_annotation(arguments: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        source, teacher = open_images(arguments, folder), make_teacher(arguments)
        request = AnnotationRequest(tuple(arguments.what.split(",")), arguments.top_k, batch_size=arguments.batch_size)
        seconds: list[float] = []
        teacher_only: list[float] = []
        size = 0
        for number in range(arguments.rounds):
            start = time.perf_counter()
            result = annotate(teacher, source, Path(folder) / str(number), request, arguments.workers)
            seconds.append(time.perf_counter() - start)
            teacher_only.append(teacher_speed(teacher, source, arguments.batch_size, arguments.workers))
            size = result.bytes
    return {
        "what": f"annotate {arguments.what}, top {arguments.top_k or 'all'}, {teacher.name}, {arguments.device}",
        "images": len(source),
        "seconds": round(statistics.median(seconds), 2),
        "images_per_second": round(len(source) / statistics.median(seconds), 1),
        "half_range": round(half_range(seconds), 3),
        "teacher_images_per_second": round(statistics.median(teacher_only), 1),
        "bytes_per_image": round(size / result.images, 1),
    }


def teacher_speed(teacher: Teacher, source: Source, batch_size: int, workers: int | None) -> float:
    """Images per second of the teacher's logits alone."""
    preprocessing = teacher.preprocessing
    device = next(teacher.network.parameters()).device
    start = time.perf_counter()
    for part in read_batches(source, device, int(DECODE_SCALE * max(preprocessing.image_size)), batch_size, workers):
        if len(part.index):
            teacher(preprocessing.apply(part.pixels, part.sizes))
    if device.type == "cuda":
        torch.cuda.synchronize()
    return len(source) / (time.perf_counter() - start)


def make_store(folder: Path, images: int, grid: int) -> LabelStore:
    """Random values in the shape of teacher predictions."""
    rng = np.random.default_rng(0)
    shape = [1, TOP_K, grid, grid]
    arrays = {
        "tokens.values": {"dtype": "float16", "shape": shape},
        "tokens.classes": {"dtype": "uint16", "shape": shape},
    }

    def make(spans: list[tuple[int, int]], advance: object) -> Generator[PendingShard, None, None]:
        for start, stop in spans:
            values = rng.standard_normal((stop - start, *shape), dtype=np.float32).astype(np.float16)
            first = rng.integers(0, 190, (stop - start, 1, 1, grid, grid))
            numbers = (first + np.arange(TOP_K)[:, None, None]).astype(np.uint16)
            yield partial(Shard, {"tokens.values": values, "tokens.classes": numbers}, [])

    head = {
        "teacher": {"name": "noise", "weights": None, "classes": 200, "class_names": None},
        "what": ["tokens"],
        "values": "",
        "top_k": TOP_K,
        "views": ["plain"],
        "size": None,
        "covers": "whole",
        "arrays": arrays,
    }
    keys = rng.integers(0, 256, (images, 16), dtype=np.uint8)
    write_store(folder, UniqueImages(open_source("digits"), keys, images, []), head, make)
    return LabelStore.open(folder)


def measure_read(arguments: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(Path(folder) / "store", arguments.images, arguments.grid)
        mapped, resident = store.to(arguments.device, 0.0), store.to(arguments.device, 0.9)
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(len(store), (arguments.batch_size,), generator=generator)
        device_rows = rows.to(arguments.device)
        runs = {"from files": lambda: mapped.tokens(rows), "dense targets from files": lambda: mapped.dense_targets(rows)}
        if resident.resident is not None:
            runs["on the device"] = lambda: resident.tokens(device_rows)
            runs["dense targets on the device"] = lambda: resident.dense_targets(device_rows)
        times = time_rounds(runs, arguments.device, arguments.rounds, 10)
        return {
            "what": f"read {arguments.batch_size} maps of {TOP_K} x {arguments.grid} x {arguments.grid}, {arguments.device}",
            "images": len(store),
            "megabytes": round(store.nbytes / 1e6, 1),
            "milliseconds": {name: round(1e3 * statistics.median(each), 3) for name, each in times.items()},
            "half_range": {name: round(half_range(each), 3) for name, each in times.items()},
        }


class ConstantPredictions:
    """The predictions for one batch, returned for any batch: a store without the cost of reading."""

    def __init__(self, stored: StoredPredictions, images: torch.Tensor, what: str) -> None:
        self.covers, self.predictions = stored.covers, getattr(stored, what)(images)

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        return self.predictions

    tokens = logits


def variants_of(task: Classification, images: torch.Tensor) -> dict[str, Classification]:
    """The same task with the store in its files, on the device, and with constant predictions."""
    assert task.stored is not None
    assert task.maps is not None
    variants = {}
    for name, share in (("from files", 0.0), ("on the device", 0.9)):
        variant = copy.copy(task)
        for part in ("stored", "maps"):
            stored = copy.copy(getattr(task, part))
            stored.store = stored.store.to(task.device, share)
            setattr(variant, part, stored)
        variants[name] = variant
    constant = copy.copy(task)
    constant.stored, constant.maps = (
        ConstantPredictions(task.stored, images, "logits"),  # type: ignore[assignment]
        ConstantPredictions(task.maps, images, "tokens"),  # type: ignore[assignment]
    )
    return {"constant": constant} | variants


def open_training(recipe: Recipe, source: Source, device: torch.device, folder: Path) -> Trainer:
    task = Classification(recipe, source, device)
    model = build_initial(recipe, task.class_names, None)
    task.attach(model)
    return Trainer(recipe, model, task, source, Devices(device), folder, Options(compile=device.type == "cuda"))


def run_step(training: Trainer, task: Classification, batches: Callable[[], object]) -> None:
    training.task = task
    training.train_step(batches)  # type: ignore[arg-type]


def measure_step(arguments: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        source = open_images(arguments, folder)
        teacher, store = make_teacher(arguments, source.classes), Path(folder) / "store"
        annotate(
            teacher,
            source,
            store,
            AnnotationRequest(("logits", "tokens"), arguments.top_k, batch_size=arguments.batch_size),
            arguments.workers,
        )
        del teacher
        plain = lookup("small").set(
            {"model": arguments.model, "batch_size": arguments.batch_size, "augmentation.image_size": arguments.size}
            | {"schedule.length": "1000000 steps", "precision": "bf16" if arguments.device == "cuda" else "fp32"}
        )
        distilled = resolve_teacher(plain.set({"distillation.teacher": str(store), "token_labels.store": str(store)}))
        device = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device(arguments.device)
        training, other = (open_training(recipe, source, device, Path(folder) / "run") for recipe in (distilled, plain))
        loader = ImageLoader(source, device, arguments.workers, round(1.5 * arguments.size), log=lambda message: None)
        stream = loader.train_loader(training.sampler, (0,), 1).iterate_steps(0, arguments.steps)
        batches = itertools.cycle(stream)  # decoded once: decoding is not measured
        first = next(batches)
        assert isinstance(training.task, Classification)
        assert isinstance(other.task, Classification)
        variants = variants_of(training.task, first.index.to(device))
        runs = {name: partial(run_step, training, task, lambda: next(batches)) for name, task in variants.items()}
        runs["labels only"] = partial(run_step, other, other.task, lambda: next(batches))
        times = time_rounds(runs, arguments.device, arguments.rounds, arguments.steps)
        size = variants["from files"].maps.store.nbytes  # type: ignore[union-attr]
        pairs = {
            name: [1e3 * (with_it - without) for with_it, without in zip(times[name], times["constant"], strict=True)]
            for name in ("from files", "on the device")
        }
    return {
        "what": f"step of {arguments.model} at {arguments.size}, batch size {arguments.batch_size}, {arguments.device}",
        "images": len(source),
        "store_megabytes": round(size / 1e6, 3),
        "milliseconds": {name: round(1e3 * statistics.median(each), 3) for name, each in times.items()},
        "half_range": {name: round(half_range(each), 3) for name, each in times.items()},
        "reading_milliseconds": {name: round(statistics.median(each), 3) for name, each in pairs.items()},
        "reading_from_to": {name: [round(min(each), 3), round(max(each), 3)] for name, each in pairs.items()},
        "steps_per_round": arguments.steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("annotate", "read", "step"))
    parser.add_argument("--teacher")
    parser.add_argument("--data")
    parser.add_argument("--what", default="logits")
    parser.add_argument("--top-k", type=int, default=TOP_K)
    parser.add_argument("--images", type=positive, default=None)
    parser.add_argument("--grid", type=positive, default=7)
    parser.add_argument("--batch-size", type=positive, default=None)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--model", default="deit_tiny_patch16", help="model of `step`")
    parser.add_argument("--size", type=positive, default=224, help="image size of `step`")
    parser.add_argument("--steps", type=positive, default=8, help="steps per round, each with other images")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    choose_device(arguments.device)
    command = arguments.command
    arguments.images = arguments.images or (100_000 if command == "read" else 512)
    arguments.batch_size = arguments.batch_size or (
        512 if command == "read" else default_batch_size(torch.device(arguments.device))
    )
    measure = {"annotate": measure_annotation, "read": measure_read, "step": measure_step}[command]
    result = measure(arguments)
    print(json.dumps(result | {"rounds": arguments.rounds, "machine": machine(arguments.device.split(":")[0])}, indent=1))


if __name__ == "__main__":
    run_program(main)
