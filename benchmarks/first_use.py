"""Test accuracy and time of `vitrail train FOLDER` without options, compared with three other methods, on folders of images.

    python benchmarks/first_use.py photos/ flowers/ --seeds 3 --out first_use.json
    python benchmarks/first_use.py photos/ --minutes 1 --methods vitrail svm      # a shorter training, fewer methods
    python benchmarks/first_use.py --merge first_use.json second.json             # the table of results in several files
    python benchmarks/first_use.py --merge benchmarks/first_use_results.json      # the table of docs/first-use.md

Each folder has train/ and test/ with one subfolder per class. Methods, all fitted to train/ and evaluated once on test/:

    vitrail  `vitrail train FOLDER/train --seed S` in its own process, then `vitrail evaluate`; also its forecast and its time
    svm      histograms of oriented gradients and of colors, classified by a linear or RBF support vector machine (scikit-learn)
    probe    `vitrail probe linear vitrail_tiny FOLDER`: a linear classifier of the features of the bundled weights
    resnet   a ResNet-18 of width 32 trained from scratch for as long as the first vitrail training took

The forecast is that of steps and validations, as it is printed; the measured time is that of the whole process. Other programs
change all times, and with them the results of resnet: run it on an idle machine.

Intervals of 95 % are Wilson's for the number of test images; several seeds of vitrail train are shown as mean ± standard
deviation. Arguments after `--` are passed to `vitrail train`.
"""

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from arguments import check_file, positive, run_program
from forecast import ESTIMATE
from PIL import Image
from timing import machine
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.atomic_files import atomic_write_text
from vitrail.data.datasets.lookup import open_sources
from vitrail.data.decode import decode
from vitrail.data.source import Source
from vitrail.errors import UserError
from vitrail.evaluation.statistics import wilson

METHODS = ("vitrail", "svm", "probe", "resnet")
TITLES = {"vitrail": "vitrail train", "svm": "HOG + color, SVM", "probe": "linear probe", "resnet": "ResNet from scratch"}
UNITS = {"s": 1, "min": 60, "h": 3600, "hour": 3600, "day": 86400}

HOG_SIZE, CELL, ANGLES = 128, 8, 9
COLOR_BINS, REGIONS = 8, 2  # bins per channel of HSV; regions per side
COSTS = (0.1, 1.0, 10.0, 100.0)  # of the support vector machine
WIDTHS = (0.5, 1.0, 2.0, 4.0)  # gamma of the RBF kernel times the median squared distance
FOLDS = 5

RESNET_SIZE, RESNET_WIDTH = 64, 32
BATCH_SIZE, LR, WARMUP, WEIGHT_DECAY = 64, 2e-3, 0.05, 0.05  # warmup: share of the time


class ImageSet(NamedTuple):
    """A folder with the splits train and test, of the same classes."""

    folder: Path
    train: Source
    test: Source


def open_set(folder: Path) -> ImageSet:
    for split in ("train", "test"):
        if not (folder / split).is_dir():
            raise UserError(f"{folder} has no folder {split}: each folder needs train/ and test/ with one subfolder per class.")
    sources = open_sources(folder)
    images = ImageSet(folder, sources["train"], sources["test"])
    different = set(images.train.classes) ^ set(images.test.classes)
    if different:
        raise UserError(f"{folder}/train and {folder}/test have different classes: {', '.join(sorted(different))}.")
    return images


def labels_of(source: Source) -> np.ndarray:
    assert source.label is not None
    return source.label.values


def read_images(source: Source) -> Iterator[Image.Image]:
    for index in range(len(source)):
        yield Image.fromarray(decode(source.encoded(index)))


# vitrail train and vitrail probe


def run_vitrail(*words: object) -> subprocess.CompletedProcess[str]:
    """Run a command of Vitrail; raises UserError with its message if it fails."""
    command = [sys.executable, "-m", "vitrail", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"vitrail {words[0]} failed: {done.stderr.strip() or 'no message'}")
    return done


def train_default(images: ImageSet, seed: int, args: list[str]) -> dict[str, Any]:
    """Test accuracy, and the seconds of the forecast, of the training and of the whole process."""
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / "run"
        start = time.perf_counter()
        done = run_vitrail("train", images.folder / "train", "--out", run, "--seed", seed, *args)
        wall = time.perf_counter() - start
        about = json.loads((run / "run.json").read_text())
        evaluation = json.loads(run_vitrail("evaluate", run, images.folder / "test", "--json").stdout)["evaluations"][0]
    match = ESTIMATE.search(done.stderr)
    if not match:
        raise UserError("vitrail train printed no forecast.")
    return {
        "seed": seed,
        "accuracy": evaluation["top1"],
        "forecast_s": parse_time_span(match[1]),
        "training_s": about["seconds"],
        "wall_s": wall,
        "image_size": about["recipe"]["augmentation"]["image_size"],
        "length": about["recipe"]["schedule"]["length"],
    }


def parse_time_span(text: str) -> float:
    """Seconds of "41 s", "12 min", "3 h 5 min" or "5 days 18 hours"."""
    return float(sum(int(number) * UNITS[unit] for number, unit in re.findall(r"(\d+) (min|hour|day|h|s)", text)))


def probe_features(images: ImageSet) -> dict[str, Any]:
    """Accuracy of a linear classifier of the frozen features of the bundled weights."""
    start = time.perf_counter()
    result = json.loads(run_vitrail("probe", "linear", "vitrail_tiny", images.folder, "--json").stdout)
    return {"accuracy": result["top1"], "weight_decay": result["weight_decay"], "seconds": time.perf_counter() - start}


# HOG and color histograms with a support vector machine


def gradient_histograms(pixels: np.ndarray) -> np.ndarray:
    """HOG of RGB values [H, W, 3]: unsigned angles in cells of CELL pixels, blocks of 2 x 2 cells normalized as L2-Hys."""
    dy, dx = np.gradient(np.sqrt(pixels / 255), axis=(0, 1))
    strongest = (dx**2 + dy**2).argmax(-1)[..., None]
    dy, dx = (np.take_along_axis(each, strongest, -1)[..., 0] for each in (dy, dx))
    position = np.arctan2(dy, dx) % np.pi / np.pi * ANGLES - 0.5  # in bins, from the center of the first
    lower, share = np.floor(position).astype(int), position % 1
    rows, columns = pixels.shape[0] // CELL, pixels.shape[1] // CELL
    y, x = np.indices(pixels.shape[:2]) // CELL
    cells = np.zeros((rows, columns, ANGLES))
    strength = np.hypot(dx, dy)
    np.add.at(cells, (y, x, lower % ANGLES), strength * (1 - share))  # a gradient is divided between two angles
    np.add.at(cells, (y, x, (lower + 1) % ANGLES), strength * share)
    blocks = np.concatenate([cells[i : rows - 1 + i, j : columns - 1 + j] for i in (0, 1) for j in (0, 1)], -1)
    blocks = np.minimum(normalize(blocks), 0.2)
    return normalize(blocks).ravel()


def color_histograms(hsv: np.ndarray) -> np.ndarray:
    """The square roots of joint histograms of HSV values uint8 [H, W, 3] in REGIONS x REGIONS regions."""
    bins = hsv.astype(int) * COLOR_BINS // 256
    codes = (bins[..., 0] * COLOR_BINS + bins[..., 1]) * COLOR_BINS + bins[..., 2]
    parts = [part for half in np.array_split(codes, REGIONS) for part in np.array_split(half, REGIONS, axis=1)]
    return np.concatenate([np.sqrt(np.bincount(part.ravel(), minlength=COLOR_BINS**3) / part.size) for part in parts])


def normalize(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.sqrt((vectors**2).sum(-1, keepdims=True) + 1e-6)


def classic_features(source: Source) -> np.ndarray:
    """HOG and color histograms [N, D], each of norm 1."""
    rows = []
    for image in read_images(source):
        small = image.resize((HOG_SIZE, HOG_SIZE), Image.Resampling.BILINEAR)
        parts = gradient_histograms(np.asarray(small, float)), color_histograms(np.asarray(small.convert("HSV")))
        rows.append(np.concatenate([normalize(part) for part in parts]).astype(np.float32))
    return np.stack(rows)


def fit_svm(images: ImageSet) -> dict[str, Any]:
    """Test accuracy of the support vector machine whose kernel and C have the highest accuracy in cross-validation."""
    try:
        from sklearn.model_selection import StratifiedKFold, cross_val_score
        from sklearn.svm import SVC
    except ImportError:
        raise UserError("The svm method needs scikit-learn: pip install scikit-learn, or choose other --methods.") from None
    start = time.perf_counter()
    train, test, labels = classic_features(images.train), classic_features(images.test), labels_of(images.train)
    inner, inner_test = train @ train.T, test @ train.T
    distances = 2 * (2 - inner)  # squared; the squared norm of the features is 2
    median = float(np.median(distances[np.triu_indices(len(train), 1)]))
    kernels = {"linear": (inner, inner_test)}
    for width in WIDTHS:
        kernels[f"rbf {width:g}"] = np.exp(-width / median * distances), np.exp(-width / median * 2 * (2 - inner_test))
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    scores = {
        (name, cost): float(cross_val_score(SVC(C=cost, kernel="precomputed"), kernel, labels, cv=folds).mean())
        for name, (kernel, _) in kernels.items()
        for cost in COSTS
    }
    name, cost = max(scores, key=lambda key: scores[key])
    model = SVC(C=cost, kernel="precomputed").fit(kernels[name][0], labels)
    accuracy = float((model.predict(kernels[name][1]) == labels_of(images.test)).mean())
    seconds = time.perf_counter() - start
    return {"accuracy": accuracy, "kernel": name, "C": cost, "cross_validation": scores[name, cost], "seconds": seconds}


# ResNet from scratch


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.convolutions(x) + self.shortcut(x))


def make_resnet(classes: int) -> nn.Sequential:
    """A ResNet-18 for small images: RESNET_WIDTH channels in its first stage, and a stem that halves the resolution."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, RESNET_WIDTH, 3, 2, 1, bias=False),
        nn.BatchNorm2d(RESNET_WIDTH),
        nn.ReLU(),
    ]
    channels = RESNET_WIDTH
    for stage in range(4):
        for block in range(2):
            out = RESNET_WIDTH * 2**stage
            layers.append(ResidualBlock(channels, out, 2 if stage and not block else 1))
            channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def load_pixels(source: Source, side: int) -> Tensor:
    """uint8 [N, 3, side, side]: the center of each image, its shorter side resized."""
    pixels = np.empty((len(source), side, side, 3), np.uint8)
    for row, image in zip(pixels, read_images(source), strict=True):
        cut = [(length - min(image.size)) / 2 for length in image.size]
        box = (cut[0], cut[1], image.width - cut[0], image.height - cut[1])
        row[:] = np.asarray(image.resize((side, side), Image.Resampling.BICUBIC, box))
    return torch.from_numpy(pixels).permute(0, 3, 1, 2)


def standardize(pixels: Tensor) -> Tensor:
    return pixels.float().sub_(118).div_(60).contiguous(memory_format=torch.channels_last)


def augment(pixels: Tensor, size: int) -> Tensor:
    """Random crops of `size` pixels, half of them mirrored."""
    crops = []
    for image, (y, x), flip in zip(
        pixels, torch.randint(pixels.shape[-1] - size + 1, (len(pixels), 2)).tolist(), torch.rand(len(pixels)) < 0.5, strict=True
    ):
        crop = image[:, y : y + size, x : x + size]
        crops.append(crop.flip(-1) if flip else crop)
    return torch.stack(crops)


def train_resnet(images: ImageSet, seconds: float, seed: int) -> dict[str, Any]:
    """Test accuracy of a ResNet trained for `seconds`, including the decoding; the learning rate is a cosine of the time."""
    start = time.perf_counter()
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size, stored = RESNET_SIZE, RESNET_SIZE * 5 // 4
    pixels, labels = load_pixels(images.train, stored), torch.from_numpy(labels_of(images.train)).long()
    model = make_resnet(len(images.train.classes)).to(device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=WEIGHT_DECAY)
    seen = 0
    order = torch.randperm(len(pixels))
    while (share := (time.perf_counter() - start) / seconds) < 1:
        if len(order) < min(BATCH_SIZE, len(pixels)):
            order = torch.cat([order, torch.randperm(len(pixels))])
        batch, order = order[:BATCH_SIZE], order[BATCH_SIZE:]
        optimizer.param_groups[0]["lr"] = LR * min(share / WARMUP, (1 + math.cos(math.pi * share)) / 2)
        logits = model(standardize(augment(pixels[batch], size).to(device)))
        F.cross_entropy(logits, labels[batch].to(device), label_smoothing=0.1).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += len(batch)
    edge = (stored - size) // 2
    test = load_pixels(images.test, stored)[..., edge : edge + size, edge : edge + size]
    model.eval()
    with torch.inference_mode():
        predictions = torch.cat([model(standardize(part.to(device))).argmax(1).cpu() for part in test.split(BATCH_SIZE)])
    accuracy = float((predictions.numpy() == labels_of(images.test)).mean())
    return {"accuracy": accuracy, "seconds": seconds, "epochs": seen / len(pixels)}


# All methods, and the table


def compare_methods(images: ImageSet, options: argparse.Namespace) -> dict[str, Any]:
    """The results of the chosen methods on one set."""
    row: dict[str, Any] = {
        "set": images.folder.name,
        "classes": len(images.train.classes),
        "train_images": len(images.train),
        "test_images": len(images.test),
    }
    seconds = 60 * options.minutes if options.minutes else math.nan
    for method in options.methods:
        print(f"{row['set']}: {TITLES[method]} ...", file=sys.stderr, flush=True)
        if method == "vitrail":
            args = [*options.args, *(["--minutes", f"{options.minutes:g}"] if options.minutes else [])]
            seeds = range(options.first_seed, options.first_seed + options.seeds)
            row[method] = [train_default(images, seed, args) for seed in seeds]
            seconds = row[method][0]["wall_s"]
        elif method == "svm":
            row[method] = fit_svm(images)
        elif method == "probe":
            row[method] = probe_features(images)
        else:
            row[method] = train_resnet(images, seconds, seed=0)
    return row


def merge_results(files: list[Path]) -> list[dict[str, Any]]:
    """The rows of all files, one for each set; seeds of vitrail train are put together, of other methods the first counts."""
    merged: dict[str, dict[str, Any]] = {}
    for file in files:
        for row in json.loads(file.read_text())["rows"]:
            known = merged.setdefault(row["set"], {})
            runs = {run["seed"]: run for run in (*row.get("vitrail", ()), *known.get("vitrail", ()))}
            merged[row["set"]] = row | known | ({"vitrail": [runs[seed] for seed in sorted(runs)]} if runs else {})
    return [merged[name] for name in sorted(merged)]


def accuracy_of(row: dict[str, Any], method: str) -> float:
    """The test accuracy of a method; of vitrail train, the mean over seeds."""
    results = row[method]
    return statistics.mean(run["accuracy"] for run in results) if method == "vitrail" else float(results["accuracy"])


def mean_time(row: dict[str, Any], key: str) -> float:
    return statistics.mean(run[key] for run in row["vitrail"])


def format_accuracy(row: dict[str, Any], method: str) -> str:
    accuracy = accuracy_of(row, method)
    low, high = wilson(accuracy, row["test_images"])
    runs = [run["accuracy"] for run in row[method]] if method == "vitrail" else []
    spread = f" ± {100 * statistics.stdev(runs):.1f}" if len(runs) > 1 else ""
    return f"{100 * accuracy:.1f}{spread} ({100 * low:.1f} to {100 * high:.1f})"


def format_table(rows: list[dict[str, Any]], methods: list[str]) -> str:
    """A Markdown table of all sets, with means where there are several."""
    times = "vitrail" in methods
    head = ["set", "classes", "train images", "test images", *(f"{TITLES[method]}, %" for method in methods)]
    lines = [[*head, *(["forecast, s", "measured, s", "measured / forecast"] if times else [])]]
    lines.append(["---", *["---:"] * (len(lines[0]) - 1)])
    for row in rows:
        cells = [row["set"], *(f"{row[key]:,}" for key in ("classes", "train_images", "test_images"))]
        cells += [format_accuracy(row, method) for method in methods]
        if times:
            forecast, wall = mean_time(row, "forecast_s"), mean_time(row, "wall_s")
            cells += [f"{forecast:.0f}", f"{wall:.0f}", f"{wall / forecast:.2f}"]
        lines.append(cells)
    if len(rows) > 1:
        cells = ["mean", "", "", "", *(f"{100 * statistics.mean(accuracy_of(row, m) for row in rows):.1f}" for m in methods)]
        if times:
            forecasts, walls = ([mean_time(row, key) for row in rows] for key in ("forecast_s", "wall_s"))
            ratio = statistics.mean(wall / forecast for wall, forecast in zip(walls, forecasts, strict=True))
            cells += [f"{statistics.mean(forecasts):.0f}", f"{statistics.mean(walls):.0f}", f"{ratio:.2f}"]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def write_results(path: Path, content: dict[str, Any]) -> None:
    atomic_write_text(path, json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="DIR", help="a folder with train/ and test/")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="print the table of results that --out wrote")
    parser.add_argument("--seeds", type=positive, default=1, help="number of trainings of vitrail on each set")
    parser.add_argument("--first-seed", type=int, default=0, help="the others follow it")
    parser.add_argument("--minutes", type=float, help="passed to vitrail train; default: no options")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--out", type=Path, help="write the results as JSON, after every set")
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:cut])
    options.args = words[cut + 1 :]
    options.methods = [method for method in METHODS if method in options.methods]
    if options.merge:
        rows = merge_results(options.merge)
        if options.out:
            write_results(options.out, {**json.loads(options.merge[0].read_text()), "rows": rows})
        print(format_table(rows, [method for method in METHODS if all(method in row for row in rows)]))
        return
    if not options.folders:
        raise UserError("Give a folder with train/ and test/, or --merge and files that --out wrote.")
    if options.minutes is not None and not options.minutes > 0:
        raise UserError("--minutes is a time: greater than 0.")
    if "resnet" in options.methods and "vitrail" not in options.methods and not options.minutes:
        raise UserError("The resnet method takes as long as vitrail train: add vitrail to --methods, or give --minutes.")
    check_file(options.out)
    sets = [open_set(folder) for folder in options.folders]
    hardware = machine("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for images in sets:
        rows.append(compare_methods(images, options))
        if options.out:
            content = {"machine": hardware, "minutes": options.minutes, "args": options.args, "rows": rows}
            write_results(options.out, content)
    print(f"{hardware}; seeds of vitrail train: {options.seeds}; accuracy on test/ with its 95 % interval\n")
    print(format_table(rows, options.methods))


if __name__ == "__main__":
    run_program(main)
