"""What it costs to keep a teacher's answers and to read them again.

    python benchmarks/annotate.py annotate      # a ResNet-18 of random weights, pictures made on the spot
    python benchmarks/annotate.py annotate --teacher net.pth --data photos/ --what logits,tokens --top-k 5
    python benchmarks/annotate.py read --pictures 100000 --grid 7 --batch 512       # a store of random numbers
    python benchmarks/annotate.py read --device cuda

`annotate`: pictures per second from files to a finished store, and bytes per picture on the disk; beside it the same pictures
decoded and shown to the teacher for its logits, with nothing kept. Every round writes a new store.

`read`: milliseconds for the values and class numbers of a batch of random rows, maps of `--grid` x `--grid` cells with 5 classes
each: from memory-mapped files and, where they fit, on the device; and for a batch of dense targets.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from timing import half_spread, in_turns, machine

from vitrail.data.augment.pipeline import augment
from vitrail.data.opening import open_source
from vitrail.data.source import Source, Subset
from vitrail.evaluation.accuracy import test_view
from vitrail.evaluation.features import sweep
from vitrail.models.preprocessing import Preprocessing
from vitrail.teachers import open_teacher
from vitrail.teachers.annotating import DETAIL, Wanted, annotate
from vitrail.teachers.resnet import ResNet, ResNetPlan
from vitrail.teachers.store import Store
from vitrail.teachers.storing import Part, Shelf, write_store
from vitrail.teachers.teacher import Teacher

EIGHTEEN = ResNetPlan((2, 2, 2, 2), bottleneck=False)
KEPT = 5


def make_pictures(folder: Path, count: int, side: int = 256) -> Source:
    """JPEGs of smooth noise."""
    (folder / "noise").mkdir(parents=True)
    for number in range(count):
        coarse = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(
            folder / "noise" / f"{number}.jpg", quality=90
        )
    return open_source(str(folder))


def measure_annotating(arguments: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as place:
        source = open_source(arguments.data) if arguments.data else make_pictures(Path(place) / "pictures", arguments.pictures)
        source = Subset(source, np.arange(min(len(source), arguments.pictures)))
        if arguments.teacher:
            teacher = open_teacher(arguments.teacher, arguments.device)
        else:
            torch.manual_seed(0)
            teacher = open_teacher(ResNet(EIGHTEEN), arguments.device, preprocessing=Preprocessing())
        wanted = Wanted(tuple(arguments.what.split(",")), arguments.top_k, batch=arguments.batch)
        speeds: list[float] = []
        bare: list[float] = []
        size = 0
        for number in range(arguments.rounds):
            start = time.perf_counter()
            result = annotate(teacher, source, Path(place) / str(number), wanted)
            speeds.append(len(source) / (time.perf_counter() - start))
            bare.append(nothing_kept(teacher, source, arguments.batch))
            size = result.bytes
    return {
        "what": f"annotate {arguments.what}, top {arguments.top_k or 'all'}, {teacher.name}, {arguments.device}",
        "pictures": len(source),
        "pictures_per_second": round(statistics.median(speeds), 1),
        "half_spread": round(half_spread(speeds), 3),
        "logits_with_nothing_kept_per_second": round(statistics.median(bare), 1),
        "bytes_per_picture": round(size / result.pictures, 1),
    }


def nothing_kept(teacher: Teacher, source: Source, batch: int) -> float:
    """Pictures per second, logits alone."""
    view = test_view(teacher.preprocessing)
    device = next(teacher.network.parameters()).device
    start = time.perf_counter()
    for part in sweep(source, device, DETAIL * max(view.size), batch, None, []):
        teacher(augment(part.pixels, part.sizes, torch.zeros_like(part.index), view).images)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return len(source) / (time.perf_counter() - start)


def make_store(folder: Path, pictures: int, grid: int) -> Store:
    """Random numbers in the shape of answers."""
    rng = np.random.default_rng(0)
    shape = [1, KEPT, grid, grid]
    arrays = {
        "tokens.values": {"dtype": "float16", "shape": shape},
        "tokens.classes": {"dtype": "uint16", "shape": shape},
    }

    def make(spans: list[tuple[int, int]], advance: object) -> Iterator[Part]:
        for start, stop in spans:
            values = rng.standard_normal((stop - start, *shape), dtype=np.float32).astype(np.float16)
            first = rng.integers(0, 190, (stop - start, 1, 1, grid, grid))
            numbers = (first + np.arange(KEPT)[:, None, None]).astype(np.uint16)
            yield Part({"tokens.values": values, "tokens.classes": numbers}, [])

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
    keys = rng.integers(0, 256, (pictures, 16), dtype=np.uint8)
    write_store(folder, Shelf(open_source("digits"), keys, pictures, []), head, make)
    return Store.open(folder)


def measure_reading(arguments: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as place:
        store = make_store(Path(place) / "store", arguments.pictures, arguments.grid)
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
            "pictures": len(store),
            "megabytes": round(store.size / 1e6, 1),
            "milliseconds": {name: round(1e3 * statistics.median(each), 3) for name, each in times.items()},
            "half_spread": {name: round(half_spread(each), 3) for name, each in times.items()},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what_to_measure", choices=("annotate", "read"))
    parser.add_argument("--teacher")
    parser.add_argument("--data")
    parser.add_argument("--what", default="logits")
    parser.add_argument("--top-k", type=int, default=KEPT)
    parser.add_argument("--pictures", type=int, default=None)
    parser.add_argument("--grid", type=int, default=7)
    parser.add_argument("--batch", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    reading = arguments.what_to_measure == "read"
    arguments.pictures = arguments.pictures or (100_000 if reading else 512)
    arguments.batch = arguments.batch or (512 if reading else 64)
    result = measure_reading(arguments) if reading else measure_annotating(arguments)
    print(json.dumps(result | {"rounds": arguments.rounds, "machine": machine(arguments.device.split(":")[0])}, indent=1))


if __name__ == "__main__":
    main()
