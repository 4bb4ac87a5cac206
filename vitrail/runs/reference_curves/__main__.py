"""Make a reference band from finished runs: `python -m vitrail.runs.reference_curves RUN RUN … [--output FILE]`."""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.atomic_files import atomic_write_text
from vitrail.errors import UserError
from vitrail.formatting import percent
from vitrail.runs.reference_curves import FOLDER, ReferenceBand, data_key, recipe_key
from vitrail.runs.report import format_device
from vitrail.runs.run_json import read_run_info
from vitrail.training.metrics import SmoothedValue, read_metrics

GRID = np.arange(1, 101) / 100
NEIGHBORS = 3  # grid points on either side
PRECISION = 1e6  # limits are rounded outwards to multiples of 1 / PRECISION, so that the runs themselves stay inside


def make_reference_band(folders: list[Path], copies: bool = False) -> ReferenceBand:
    """The range of several seeds from the minimum to the maximum, widened by one standard deviation on either side.

    Extremes and standard deviation include neighboring grid points, so that the band does not narrow where a few curves cross by
    chance. With `copies` the band applies to every copy of the data.
    """
    if len(folders) < 2:
        raise UserError("A reference band needs at least two runs with different seeds.")
    runs = [read_run_info(folder) for folder in folders]
    first = runs[0]
    for folder, run in zip(folders, runs, strict=True):
        if recipe_key(run["recipe"]) != recipe_key(first["recipe"]):
            raise UserError(f"{folder} was trained with another recipe than {folders[0]}.")
        if data_key(run["data"]) != data_key(first["data"]):
            raise UserError(f"{folder} was trained on other data than {folders[0]}.")
    seeds = [run["recipe"].get("seed") for run in runs]
    if len(set(seeds)) < len(seeds):
        raise UserError(f"Two of the runs have the same seed ({', '.join(map(str, seeds))}): give runs with different seeds.")
    curves = [curves_of(folder, run) for folder, run in zip(folders, runs, strict=True)]
    loss_low, loss_high = widened(np.stack([loss for loss, _ in curves]), 0, np.inf)
    top1_low, top1_high = widened(np.stack([top1 for _, top1 in curves]), 0, 1)
    data = first["data"] | {"name": Path(str(first["data"].get("name") or "data")).name}  # without its path
    if copies:
        data.pop("fingerprint", None)
    machines = dict.fromkeys(format_device(run) or "unknown" for run in runs)
    return ReferenceBand(
        recipe=first["recipe"],
        data=data,
        seeds=len(runs),
        machine=", ".join(machines),
        progress=GRID.tolist(),
        loss_low=loss_low,
        loss_high=loss_high,
        top1_low=top1_low,
        top1_high=top1_high,
    )


def curves_of(folder: Path, run: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Smoothed loss and top-1 of a run on the grid, NaN before their first value."""
    lines = read_metrics(folder)
    train = [line for line in lines if line["kind"] == "train" and line.get("loss") is not None]
    validations = [line for line in lines if line["kind"] == "validation" and line.get("top1") is not None]
    total = run.get("steps") or max((line["step"] for line in lines), default=0)
    if not train or lines[-1]["step"] < total or not run.get("seconds"):
        raise UserError(f"{folder} is not a finished run.")
    if not np.isfinite([line["loss"] for line in train]).all():
        raise UserError(f"{folder} has a NaN or Inf loss and cannot serve as a reference.")
    smoothed = SmoothedValue()
    loss = [smoothed.add(line["step"] / total, line["loss"]) for line in train]
    loss_on_grid = np.interp(GRID, [line["step"] / total for line in train], loss, left=np.nan)
    if not validations:
        return loss_on_grid, np.full(len(GRID), np.nan)
    progress = [line["step"] / total for line in validations]
    return loss_on_grid, np.interp(GRID, progress, [line["top1"] for line in validations], left=np.nan)


def widened(curves: np.ndarray, minimum: float, maximum: float) -> tuple[list[float | None], list[float | None]]:
    """Lower and upper limits of curves [runs, grid], clipped to [minimum, maximum]; None before the first value of a curve."""
    mean = curves.mean(axis=0)
    size = curves.shape[1]
    shifts = np.arange(-NEIGHBORS, NEIGHBORS + 1)
    indices = (np.arange(size) + shifts[:, None]).clip(0, size - 1)
    deviations = np.nan_to_num(curves - mean)[:, indices]  # [runs, neighbors, grid]
    sd = np.sqrt((deviations**2).sum(axis=(0, 1)) / (len(shifts) * (len(curves) - 1)))
    low = (mean + deviations.min(axis=(0, 1)) - sd).clip(minimum, maximum)
    high = (mean + deviations.max(axis=(0, 1)) + sd).clip(minimum, maximum)
    return nan_to_none(np.floor(low * PRECISION) / PRECISION), nan_to_none(np.ceil(high * PRECISION) / PRECISION)


def nan_to_none(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]


def write_reference_band(band: ReferenceBand, path: Path) -> Path:
    lines = [f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in band.to_dict().items()]
    atomic_write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")
    return path


def default_path(band: ReferenceBand) -> Path:
    name = f"{band.recipe.get('name') or 'custom'}-{band.data['name']}"
    return FOLDER / (re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-") + ".json")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m vitrail.runs.reference_curves", description="Make a reference band.")
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="directories of finished runs with different seeds")
    parser.add_argument("--output", type=Path, help="the file to write; by default in the package, next to its own bands")
    parser.add_argument("--copies", action="store_true", help="apply to every copy of the data: compare counts and classes only")
    options = parser.parse_args(arguments)
    try:
        band = make_reference_band(options.runs, options.copies)
        path = write_reference_band(band, options.output or default_path(band))
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
