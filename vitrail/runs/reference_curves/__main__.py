"""Make a reference band from finished runs: `python -m vitrail.runs.reference_curves RUN RUN … [--output FILE]`."""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.atomic_files import write_aside
from vitrail.errors import UserError
from vitrail.formatting import percent
from vitrail.runs.reference_curves import FOLDER, Band, content, identity
from vitrail.runs.report import device_words, read_run
from vitrail.training.metrics import Smoothed, read_metrics

GRID = np.arange(1, 101) / 100
NEIGHBOURS = 3  # places of the grid on either side
DIGITS = 1e6  # ends are rounded outwards to this, so that the runs themselves stay inside


def make_band(folders: list[Path], copies: bool = False) -> Band:
    """The range of several seeds, from the smallest to the largest value, widened by one standard deviation on either side.

    Extremes and deviation are taken over the neighbouring places of the grid too: three curves that happen to cross are not a
    sign of certainty. With `copies` the band applies to every copy of the data.
    """
    if len(folders) < 2:
        raise UserError("A band needs at least two runs, with different seeds.")
    runs = [read_run(folder) for folder in folders]
    first = runs[0]
    for folder, run in zip(folders, runs, strict=True):
        if content(run["recipe"]) != content(first["recipe"]):
            raise UserError(f"{folder} was trained with another recipe than {folders[0]}.")
        if identity(run["data"]) != identity(first["data"]):
            raise UserError(f"{folder} was trained on other data than {folders[0]}.")
    seeds = [run["recipe"].get("seed") for run in runs]
    if len(set(seeds)) < len(seeds):
        raise UserError(f"Two of the runs have the same seed ({', '.join(map(str, seeds))}): a band needs different ones.")
    curves = [curves_of(folder, run) for folder, run in zip(folders, runs, strict=True)]
    loss_low, loss_high = widened(np.stack([loss for loss, _ in curves]), 0, np.inf)
    top1_low, top1_high = widened(np.stack([top1 for _, top1 in curves]), 0, 1)
    data = first["data"] | {"name": Path(str(first["data"].get("name") or "data")).name}  # without the path to it
    if copies:
        data.pop("fingerprint", None)
    machines = dict.fromkeys(device_words(run) or "unknown" for run in runs)
    return Band(
        recipe=first["recipe"],
        data=data,
        seeds=len(runs),
        machine=", ".join(machines),
        progress=[float(place) for place in GRID],
        loss_low=loss_low,
        loss_high=loss_high,
        top1_low=top1_low,
        top1_high=top1_high,
    )


def curves_of(folder: Path, run: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """A run's smoothed loss and top-1 on the grid, NaN before their first value."""
    lines = read_metrics(folder)
    train = [line for line in lines if line["kind"] == "train" and line.get("loss") is not None]
    tests = [line for line in lines if line["kind"] == "validation" and line.get("top1") is not None]
    total = run.get("steps") or max((line["step"] for line in lines), default=0)
    if not train or lines[-1]["step"] < total or not run.get("seconds"):
        raise UserError(f"{folder} is not a finished run.")
    if not np.isfinite([line["loss"] for line in train]).all():
        raise UserError(f"{folder} has a loss that is not finite; it cannot serve as a reference.")
    smoothed = Smoothed()
    loss = [smoothed.add(line["step"] / total, line["loss"]) for line in train]
    loss_on_grid = np.interp(GRID, [line["step"] / total for line in train], loss, left=np.nan)
    if not tests:
        return loss_on_grid, np.full(len(GRID), np.nan)
    places = [line["step"] / total for line in tests]
    return loss_on_grid, np.interp(GRID, places, [line["top1"] for line in tests], left=np.nan)


def widened(curves: np.ndarray, least: float, most: float) -> tuple[list[float | None], list[float | None]]:
    """Lower and upper end of curves [runs, grid], kept in [least, most]; None where a curve has not begun."""
    mean = curves.mean(axis=0)
    size = curves.shape[1]
    shifts = np.arange(-NEIGHBOURS, NEIGHBOURS + 1)
    places = (np.arange(size) + shifts[:, None]).clip(0, size - 1)
    around = np.nan_to_num(curves - mean)[:, places]  # [runs, neighbours, grid]
    spread = np.sqrt((around**2).sum(axis=(0, 1)) / (len(shifts) * (len(curves) - 1)))
    low = (mean + around.min(axis=(0, 1)) - spread).clip(least, most)
    high = (mean + around.max(axis=(0, 1)) + spread).clip(least, most)
    return plain(np.floor(low * DIGITS) / DIGITS), plain(np.ceil(high * DIGITS) / DIGITS)


def plain(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]


def write_band(band: Band, path: Path) -> Path:
    lines = [f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in band.to_dict().items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    write_aside(path, lambda side: side.write_text(text, encoding="utf-8"))
    return path


def default_path(band: Band) -> Path:
    words = f"{band.recipe.get('name') or 'custom'}-{band.data['name']}"
    return FOLDER / (re.sub(r"[^a-z0-9_-]+", "-", words.lower()).strip("-") + ".json")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m vitrail.runs.reference_curves", description="Make a reference band.")
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folders of finished runs that differ in their seed")
    parser.add_argument("--output", type=Path, help="the file to write; beside the package's own bands if not given")
    parser.add_argument("--copies", action="store_true", help="for every copy of the data, however encoded: counts and classes")
    options = parser.parse_args(arguments)
    try:
        band = make_band(options.runs, options.copies)
        path = write_band(band, options.output or default_path(band))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    low, high = band.top1(1.0)
    print(
        f"{path}: {band.seeds} seeds, loss {band.loss(1.0)[0]:.3f}–{band.loss(1.0)[1]:.3f}, "
        f"top-1 {percent(low, 1)}–{percent(high, 1)} at the end"
    )


if __name__ == "__main__":
    main()
