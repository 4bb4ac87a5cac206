"""Detection on PASCAL VOC: Mask R-CNN on pre-trained, frozen and untrained backbones; NMS and RoIAlign beside torchvision's.

    python benchmarks/detection.py voc DATA --from vitrail_tiny --seeds 1 --minutes 9        # again until all are finished
    python benchmarks/detection.py operators                                                # parity and time on this device
    python benchmarks/detection.py voc DATA --steps 4 --size 64 --small --limit 8 --device cpu
    python benchmarks/detection.py voc DATA --set optimizer.layer_decay=0.9 --out runs/detection-0.9

DATA contains voc2012/, Parquet files with boxes and instance masks. For each of the weights `--from` and each seed: the recipe
`detect` with the backbone trained too, with a frozen backbone, and, stated as the baseline before anything is run, the same
network from scratch, all layers of which have the same learning rate. A tenth of the training images selects the best weights; AP
is that of the validation split, which is used for nothing else, as the training itself evaluates it at its end.

Every training is a process of its own; results and checkpoints are kept in `--out`. `--set KEY=VALUE` changes the recipe of all
trainings and is stored with each result.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arguments import positive, run_program
from jobs import (
    Jobs,
    add_options,
    describe_machine,
    describe_run,
    list_machines,
    locate,
    machine_title,
    weights_title,
    write_result,
)

import vitrail
from vitrail.cli.train import parse_set
from vitrail.data.datasets.lookup import open_sources
from vitrail.data.image_loader import ImageLoader
from vitrail.data.source import Source, Subset
from vitrail.devices import choose_device
from vitrail.errors import UserError
from vitrail.evaluation.detections import DetectionProtocol, detection_head
from vitrail.evaluation.object_evaluation import match_split
from vitrail.heads.boxes import library, suppress
from vitrail.heads.regions import choose_levels, pool_regions, roi_align
from vitrail.models.registry import list_models

METHODS = ("trained", "frozen", "from scratch")
COLUMNS = {"box AP": "ap", "AP50": "ap50", "AP75": "ap75", "mask AP": "mask_ap", "mask AP50": "mask_ap50"}
STRIDES = [4.0, 8.0, 16.0, 32.0]
BASELINE: dict[str, Any] = {"optimizer.layer_decay": 1.0}  # lower rates would leave random first layers almost as they are


def evaluate(model: vitrail.VisionTransformer, source: Source, device: torch.device) -> dict[str, Any]:
    """AP on the images of a source."""
    loader = ImageLoader(source, device, objects=True)
    matches, images = match_split(model.eval(), loader, 8, DetectionProtocol.of(detection_head(model).config))
    loader.close()
    found = matches.summarize(detection_head(model).config.classes)
    found.pop("per_class")
    return found | {"images": images}


def run_job(folder: Path) -> None:
    """Train and evaluate as the job in a folder says, and write the result."""
    job = json.loads((folder / "job.json").read_text())
    device = choose_device(job["device"])
    run_folder, changes = folder / "run", dict(job["changes"])
    where: dict[str, Any] = {"device": str(device), "workers": job["workers"]}
    if (run_folder / "run.json").exists():
        run = vitrail.resume(run_folder, **where)
    elif job["method"] == "from scratch":
        name, baseline = describe_baseline(job["weights"])
        run = vitrail.train(job["source"], "detect", model=name, changes=changes | baseline, out=run_folder, **where)
    else:
        if job["method"] == "frozen":
            changes["init.scope"] = "head"
        run = vitrail.train(job["source"], "detect", from_=job["weights"], changes=changes, out=run_folder, **where)
    if not run.finished:
        raise SystemExit(1)  # stopped by the time limit: the next call continues
    model, recorded = vitrail.load(run.artifact, device=device), json.loads((run_folder / "run.json").read_text())
    result = recorded.get("test")  # the validation split
    if result is None or job["limit"]:
        result = evaluate(model, take(open_sources(job["source"])["validation"], job["limit"]), device)
    result |= {
        "parameters": sum(each.numel() for each in model.parameters()),
        "changes": job["changes"],
    } | describe_run(run_folder)
    write_result(folder, result)


def describe_baseline(weights: str) -> tuple[str, dict[str, Any]]:
    """The network of the weights by name, and the changes of the recipe for its training from scratch."""
    before = vitrail.load(weights)
    if before.name not in list_models():
        raise UserError(f"{weights} is {before.name or 'a network without a name'}, which cannot be built for the baseline.")
    mean, std = before.preprocessing.mean, before.preprocessing.std
    return before.name, BASELINE | {"augmentation.mean": list(mean), "augmentation.std": list(std)}


def take(source: Source, limit: int) -> Source:
    return Subset(source, np.linspace(0, len(source) - 1, limit).astype(np.int64)) if 0 < limit < len(source) else source


def compare_voc(options: argparse.Namespace) -> None:
    if options.data is None or not (options.data / "voc2012").is_dir():
        raise UserError(f"{options.data} has no folder voc2012: give the folder of the data sets.")
    changes: dict[str, Any] = {
        "augmentation.image_size": [options.size, options.size],
        "schedule.length": f"{options.steps} steps" if options.steps else f"{options.epochs:g} epochs",
        "validation.every": f"{options.steps} steps" if options.steps else f"{max(options.epochs / 4, 0.01):g} epochs",
        "data.validation_fraction": 0.1,
        "batch_size": options.batch_size,
    }
    if options.small:  # for a run of seconds on a CPU
        small = {"channels": 16, "hidden": 32, "candidates": 50, "proposals": 20, "anchors_sampled": 32, "boxes_sampled": 16}
        changes |= {f"task_options.{name}": value for name, value in small.items()}
    changes |= parse_set(options.set)
    jobs: dict[str, dict[str, Any]] = {}
    rows: dict[tuple[str, str], list[str]] = {}
    for weights in options.weights:
        for method in options.methods:
            for seed in range(options.seeds):
                key = f"{weights_title(weights)}-{method.replace(' ', '_')}-{seed}"
                jobs[key] = {
                    "method": method,
                    "weights": locate(weights),
                    "source": str((options.data / "voc2012").resolve()),
                    "changes": changes | {"seed": seed},
                    "device": options.device,
                    "limit": options.limit,
                }
                rows.setdefault((weights_title(weights), method), []).append(key)
    runner = Jobs(options, __file__, show_result)
    results = runner.run(jobs)
    print(f"\n| weights | backbone | {' | '.join(COLUMNS)} | n | parameters | minutes |")
    print(f"|{' --- |' * (len(COLUMNS) + 5)}")
    for row, keys in rows.items():
        found = [results[key] for key in keys if key in results]
        if found:
            cells = [spread([each.get(name) or 0.0 for each in found]) for name in COLUMNS.values()]
            minutes = statistics.mean(each["minutes"] for each in found)
            parameters = f"{found[0]['parameters'] / 1e6:.1f} M"
            print(f"| {' | '.join(row)} | {' | '.join(cells)} | {len(found)} | {parameters} | {minutes:.1f} |")
    if options.set:
        print(f"\nchanges of the recipe: {', '.join(options.set)}")
    if results:
        print(f"\n{list_machines(results.values())}; validation split, {next(iter(results.values()))['images']:,} images")
    runner.exit_if_failed()


def show_result(result: dict[str, Any]) -> str:
    return f"box AP {100 * (result.get('ap') or 0):.1f} %, AP50 {100 * (result.get('ap50') or 0):.1f} %"


def spread(values: list[float]) -> str:
    mean = f"{100 * statistics.mean(values):.1f}"
    return f"{mean} ± {100 * statistics.stdev(values):.1f} %" if len(values) > 1 else f"{mean} %"


def compare_operators(options: argparse.Namespace) -> None:
    """NMS and RoIAlign of plain torch: differences from torchvision's, and time of both."""
    device = choose_device(options.device)
    operators = library()
    generator = torch.Generator().manual_seed(0)
    images, count = (2, 200) if options.small else (16, 1000)
    start = torch.rand(images, count, 2, generator=generator) * 400
    boxes = torch.cat([start, start + 4 + torch.rand(images, count, 2, generator=generator) * 200], 2).to(device)
    scores = torch.rand(images, count, generator=generator).to(device).sort(1, descending=True).values
    rows: list[tuple[str, str, str, str]] = []
    for exact in (True, False):
        kept = suppress(boxes, 0.7, exact)
        own = clock(lambda exact=exact: suppress(boxes, 0.7, exact), device, options.repeats)
        name = f"NMS of {images} x {count} boxes" + ("" if exact else ", fixed rounds as in training")
        other, difference = "–", "torchvision is not installed"
        if operators is not None:
            wanted = torch.zeros_like(kept)
            for image in range(images):
                wanted[image, operators.nms(boxes[image], scores[image], 0.7)] = True
            difference = f"{int((kept != wanted).sum())} boxes differ"
            other = clock(lambda: [operators.nms(boxes[i], scores[i], 0.7) for i in range(images)], device, options.repeats)
        rows.append((name, own, other, difference))
    side = 128 if not options.small else 32
    maps = [
        torch.randn(images, 64, side >> level, side >> level, generator=generator).to(device).requires_grad_()
        for level in range(4)
    ]
    chosen = boxes[:, : count // 4]
    levels = choose_levels(chosen, STRIDES)

    def backward(pool: Callable[[], torch.Tensor]) -> torch.Tensor:
        pooled = pool()
        torch.autograd.grad(pooled.square().mean(), maps)
        return pooled

    found = roi_align(maps, STRIDES, chosen, levels, 7)
    own = clock(lambda: backward(lambda: roi_align(maps, STRIDES, chosen, levels, 7)), device, options.repeats)
    other, difference = "–", "torchvision is not installed"
    if operators is not None and device.type == "cuda":
        wanted = pool_regions(maps, STRIDES, chosen, 7)
        difference = f"largest difference {float((found - wanted).abs().max()):.1e}"
        other = clock(lambda: backward(lambda: pool_regions(maps, STRIDES, chosen, 7)), device, options.repeats)
    rows.append((f"RoIAlign of {images} x {count // 4} boxes, 4 levels, with backward", own, other, difference))
    print("| operator | plain torch, ms | torchvision, ms | difference |\n| --- | --- | --- | --- |")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print(f"\n{machine_title(describe_machine(device))}; n = {options.repeats}, median ± half of the range of the middle half")


def clock(work: Callable[[], Any], device: torch.device, repeats: int) -> str:
    times = []
    for repeat in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times += [1e3 * (time.perf_counter() - start)] * (repeat > 1)
    low, middle, high = np.quantile(times, (0.25, 0.5, 0.75)).tolist()
    return f"{middle:.2f} ± {(high - low) / 2:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("voc", "operators", "job"))
    parser.add_argument("data", type=Path, nargs="?", help="the folder of the data sets")
    parser.add_argument("--from", dest="weights", nargs="+", default=["vitrail_tiny"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", type=positive, default=1)
    parser.add_argument("--epochs", type=float, default=40.0)
    parser.add_argument("--steps", type=positive, help="instead of epochs")
    parser.add_argument("--size", type=positive, default=448, help="of the crops and of the shorter side in the evaluation")
    parser.add_argument("--batch-size", type=positive, default=16)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a change of the recipe; repeatable")
    parser.add_argument("--small", action="store_true", help="small heads and few boxes, for a run of seconds on a CPU")
    parser.add_argument("--limit", type=int, default=0, help="images of the evaluation, for a short run")
    add_options(parser, "runs/detection", parallel=3)
    parser.add_argument("--repeats", type=positive, default=20)
    options = parser.parse_args()
    if options.command == "job":
        run_job(options.data)
    elif options.command == "voc":
        print(f"baseline: the same network from scratch; methods: {', '.join(options.methods)}", file=sys.stderr)
        compare_voc(options)
    else:
        compare_operators(options)


if __name__ == "__main__":
    run_program(main)
