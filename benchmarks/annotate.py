"""What it costs to keep a teacher's answers and to read them again.

    python benchmarks/annotate.py annotate      # a ResNet-18 of random weights, images made on the spot
    python benchmarks/annotate.py annotate --teacher net.pth --data photos/ --what logits,tokens --top-k 5
    python benchmarks/annotate.py read --images 100000 --grid 7 --batch 512       # a store of random numbers
    python benchmarks/annotate.py step --teacher net.pth --data photos/ --model deit_small_patch16 --size 224 --batch 256

`annotate`: bytes per image on the disk, images per second and seconds from files to a finished store; beside it the same
images decoded and shown to the teacher for its logits, with nothing kept. Every round writes a new store.

`read`: milliseconds for the values and class numbers of a batch of random rows, maps of `--grid` x `--grid` cells with 5 classes
each: from memory-mapped files and, where they fit, on the device; and for a batch of dense targets.

`step`: milliseconds of a whole training step that learns from a store (hard distillation and labels of patches), with the store
read from its files, on the device, and not at all: the same answers at every step, already in hand. Steps of one training take
turns, so that what differs is the reading; beside it a step that learns from labels alone.
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
from asking import positive, run_program
from PIL import Image
from timing import half_spread, in_turns, machine

from vitrail.data.datasets.lookup import open_source
from vitrail.data.feed import Feed
from vitrail.data.source import Source, Subset
from vitrail.data.transforms.pipeline import augment
from vitrail.evaluation.accuracy import test_view
from vitrail.evaluation.features import sweep
from vitrail.models.convnets.resnet import ResNet, ResNetPlan
from vitrail.models.preprocessing import Preprocessing
from vitrail.recipes import Recipe, lookup
from vitrail.runs.prepare import build, with_teacher
from vitrail.tasks.supervision import Answers, Guide
from vitrail.teachers import open_teacher
from vitrail.teachers.annotation import DETAIL, Wanted, annotate, usual_batch
from vitrail.teachers.label_store import Store
from vitrail.teachers.label_store_writer import Finish, Part, Shelf, write_store
from vitrail.teachers.teacher import Teacher
from vitrail.training.distributed import Devices, choose_device
from vitrail.training.trainer import Options, Trainer

EIGHTEEN = ResNetPlan((2, 2, 2, 2), bottleneck=False)
KEPT = 5
KINDS = ("noise", "static")


def make_images(folder: Path, count: int, side: int = 256) -> Source:
    """JPEGs of smooth noise, in two classes."""
    for kind in KINDS:
        (folder / kind).mkdir(parents=True)
    for number in range(count):
        coarse = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(
            folder / KINDS[number % 2] / f"{number}.jpg", quality=90
        )
    return open_source(str(folder))


def open_images(arguments: argparse.Namespace, place: str) -> Source:
    source = open_source(arguments.data) if arguments.data else make_images(Path(place) / "images", arguments.images)
    return Subset(source, np.arange(min(len(source), arguments.images)))


def open_one(arguments: argparse.Namespace, classes: list[str] | None = None) -> Teacher:
    """The teacher that was asked for, or one of random weights, for these classes."""
    if arguments.teacher:
        return open_teacher(arguments.teacher, arguments.device)
    torch.manual_seed(0)
    plan = EIGHTEEN if classes is None else ResNetPlan((2, 2, 2, 2), bottleneck=False, classes=len(classes))
    return open_teacher(ResNet(plan), arguments.device, classes, Preprocessing())


def measure_annotating(arguments: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as place:
        source, teacher = open_images(arguments, place), open_one(arguments)
        wanted = Wanted(tuple(arguments.what.split(",")), arguments.top_k, batch=arguments.batch)
        seconds: list[float] = []
        bare: list[float] = []
        size = 0
        for number in range(arguments.rounds):
            start = time.perf_counter()
            result = annotate(teacher, source, Path(place) / str(number), wanted, arguments.workers)
            seconds.append(time.perf_counter() - start)
            bare.append(nothing_kept(teacher, source, arguments.batch, arguments.workers))
            size = result.bytes
    return {
        "what": f"annotate {arguments.what}, top {arguments.top_k or 'all'}, {teacher.name}, {arguments.device}",
        "images": len(source),
        "seconds": round(statistics.median(seconds), 2),
        "images_per_second": round(len(source) / statistics.median(seconds), 1),
        "half_spread": round(half_spread(seconds), 3),
        "logits_with_nothing_kept_per_second": round(statistics.median(bare), 1),
        "bytes_per_image": round(size / result.images, 1),
    }


def nothing_kept(teacher: Teacher, source: Source, batch: int, workers: int | None) -> float:
    """Images per second, logits alone."""
    view = test_view(teacher.preprocessing)
    device = next(teacher.network.parameters()).device
    start = time.perf_counter()
    for part in sweep(source, device, DETAIL * max(view.image_size), batch, workers, []):
        teacher(augment(part.pixels, part.sizes, torch.zeros_like(part.index), view).images)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return len(source) / (time.perf_counter() - start)


def make_store(folder: Path, images: int, grid: int) -> Store:
    """Random numbers in the shape of answers."""
    rng = np.random.default_rng(0)
    shape = [1, KEPT, grid, grid]
    arrays = {
        "tokens.values": {"dtype": "float16", "shape": shape},
        "tokens.classes": {"dtype": "uint16", "shape": shape},
    }

    def make(spans: list[tuple[int, int]], advance: object) -> Generator[Finish, None, None]:
        for start, stop in spans:
            values = rng.standard_normal((stop - start, *shape), dtype=np.float32).astype(np.float16)
            first = rng.integers(0, 190, (stop - start, 1, 1, grid, grid))
            numbers = (first + np.arange(KEPT)[:, None, None]).astype(np.uint16)
            yield partial(Part, {"tokens.values": values, "tokens.classes": numbers}, [])

    head = {
        "teacher": {"name": "noise", "weights": None, "classes": 200, "class_names": None},
        "what": ["tokens"],
        "values": "",
        "top_k": KEPT,
        "views": ["plain"],
        "size": None,
        "covers": "whole",
        "arrays": arrays,
    }
    keys = rng.integers(0, 256, (images, 16), dtype=np.uint8)
    write_store(folder, Shelf(open_source("digits"), keys, images, []), head, make)
    return Store.open(folder)


def measure_reading(arguments: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as place:
        store = make_store(Path(place) / "store", arguments.images, arguments.grid)
        mapped, resident = store.to(arguments.device, share=0.0), store.to(arguments.device, share=0.9)
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(len(store), (arguments.batch,), generator=generator)
        there = rows.to(arguments.device)
        runs = {"from files": lambda: mapped.tokens(rows), "dense targets from files": lambda: mapped.dense_targets(rows)}
        if resident.resident is not None:
            runs["on the device"] = lambda: resident.tokens(there)
            runs["dense targets on the device"] = lambda: resident.dense_targets(there)
        times = in_turns(runs, arguments.device, arguments.rounds, 10)
        return {
            "what": f"read {arguments.batch} maps of {KEPT} x {arguments.grid} x {arguments.grid}, {arguments.device}",
            "images": len(store),
            "megabytes": round(store.size / 1e6, 1),
            "milliseconds": {name: round(1e3 * statistics.median(each), 3) for name, each in times.items()},
            "half_spread": {name: round(half_spread(each), 3) for name, each in times.items()},
        }


class InHand:
    """The answers about one batch, given whatever is asked: what is left of a store without the reading."""

    def __init__(self, answers: Answers, images: torch.Tensor, what: str) -> None:
        self.covers, self.known = answers.covers, getattr(answers, what)(images)

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        return self.known

    tokens = logits


def guides(guide: Guide, images: torch.Tensor) -> dict[str, Guide]:
    """The same guide with the store in its files, on the device, and without it."""
    assert guide.answers is not None
    assert guide.maps is not None
    found = {}
    for name, share in (("from files", 0.0), ("on the device", 0.9)):
        changed = copy.copy(guide)
        for part in ("answers", "maps"):
            answers = copy.copy(getattr(guide, part))
            answers.store = answers.store.to(guide.device, share)
            setattr(changed, part, answers)
        found[name] = changed
    bare = copy.copy(guide)
    bare.answers, bare.maps = (
        InHand(guide.answers, images, "logits"),  # type: ignore[assignment]
        InHand(guide.maps, images, "tokens"),  # type: ignore[assignment]
    )
    return {"in hand": bare} | found


def open_training(recipe: Recipe, source: Source, arguments: argparse.Namespace, folder: Path) -> Trainer:
    device = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device(arguments.device)
    feed = Feed(source, device, arguments.workers, round(1.5 * arguments.size), say=lambda sentence: None)
    options = Options(compile=device.type == "cuda")
    return Trainer(recipe, build(recipe, source), Devices(device), feed, feed, folder, options)


def steps_of(training: Trainer, guide: Guide, batches: Callable[[], object]) -> None:
    training.guide = guide
    training._step(batches)  # type: ignore[arg-type]


def measure_step(arguments: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as place:
        source = open_images(arguments, place)
        teacher, store = open_one(arguments, source.classes), Path(place) / "store"
        annotate(teacher, source, store, Wanted(("logits", "tokens"), arguments.top_k, batch=arguments.batch), arguments.workers)
        del teacher
        plain = lookup("small").set(
            {"model": arguments.model, "batch": arguments.batch, "augmentation.image_size": arguments.size}
            | {"schedule.length": "1000000 steps", "precision": "bf16" if arguments.device == "cuda" else "fp32"}
        )
        taught = with_teacher(plain.set({"distillation.teacher": str(store), "token_labels.store": str(store)}))
        training, other = (open_training(recipe, source, arguments, Path(place) / "run") for recipe in (taught, plain))
        stream = training.train.stream(training.order, (0,), 1).run(0, arguments.batches)
        batches = itertools.cycle(stream)  # decoded once: what is measured is what comes after
        first = next(batches)
        assert training.guide is not None
        assert other.guide is not None
        known = guides(training.guide, first.index.to(training.devices.device))
        runs = {name: partial(steps_of, training, guide, lambda: next(batches)) for name, guide in known.items()}
        runs["labels alone"] = partial(steps_of, other, other.guide, lambda: next(batches))
        times = in_turns(runs, arguments.device, arguments.rounds, arguments.batches)
        size = known["from files"].maps.store.size  # type: ignore[union-attr]
        pairs = {
            name: [1e3 * (with_it - without) for with_it, without in zip(times[name], times["in hand"], strict=True)]
            for name in ("from files", "on the device")
        }
    return {
        "what": f"step of {arguments.model} at {arguments.size}, batch {arguments.batch}, {arguments.device}",
        "images": len(source),
        "store_megabytes": round(size / 1e6, 3),
        "milliseconds": {name: round(1e3 * statistics.median(each), 3) for name, each in times.items()},
        "half_spread": {name: round(half_spread(each), 3) for name, each in times.items()},
        "reading_milliseconds": {name: round(statistics.median(each), 3) for name, each in pairs.items()},
        "reading_from_to": {name: [round(min(each), 3), round(max(each), 3)] for name, each in pairs.items()},
        "steps_per_round": arguments.batches,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what_to_measure", choices=("annotate", "read", "step"))
    parser.add_argument("--teacher")
    parser.add_argument("--data")
    parser.add_argument("--what", default="logits")
    parser.add_argument("--top-k", type=int, default=KEPT)
    parser.add_argument("--images", type=positive, default=None)
    parser.add_argument("--grid", type=positive, default=7)
    parser.add_argument("--batch", type=positive, default=None)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--model", default="deit_tiny_patch16", help="of a step")
    parser.add_argument("--size", type=positive, default=224, help="of the images of a step")
    parser.add_argument("--batches", type=positive, default=8, help="steps in a round, each of other images")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    choose_device(arguments.device)
    kind = arguments.what_to_measure
    arguments.images = arguments.images or (100_000 if kind == "read" else 512)
    arguments.batch = arguments.batch or (512 if kind == "read" else usual_batch(torch.device(arguments.device)))
    measure = {"annotate": measure_annotating, "read": measure_reading, "step": measure_step}[kind]
    result = measure(arguments)
    print(json.dumps(result | {"rounds": arguments.rounds, "machine": machine(arguments.device.split(":")[0])}, indent=1))


if __name__ == "__main__":
    run_program(main)
