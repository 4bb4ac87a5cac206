"""One training of a cell: the loop of `vitrail train` and nothing around it, on pictures that are decoded once for all cells."""

import json
import math
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import vitrail
from benchmarks.evidence.claims import Claim
from vitrail.data.feeding import Feed
from vitrail.data.opening import open_splits
from vitrail.models.cost import cost
from vitrail.objectives.guide import Guide, open_asked
from vitrail.recipes.fitting import fit
from vitrail.training.devices import Devices, choose_device
from vitrail.training.display import Display
from vitrail.training.loop import Options, Training
from vitrail.training.preparing import build, open_weights, resolve
from vitrail.training.speed import Speed
from vitrail.version import __version__
from vitrail.writing import write_aside

FILES = ("distillation.teacher", "tokens.labels", "start.weights")  # where things lie is of no use elsewhere


class Pictures:
    """A source, its decoded pictures kept from training to training."""

    def __init__(self, path: str, device: str | None) -> None:
        self.devices = Devices(choose_device(device))
        self.splits = open_splits(path)
        self._feeds: dict[int | None, tuple[Feed, Feed]] = {}

    def feeds(self, at_least: int | None) -> tuple[Feed, Feed]:
        if at_least not in self._feeds:
            parts = (self.splits.train, self.splits.test or self.splits.validation)
            self._feeds[at_least] = tuple(Feed(part, self.devices.device, at_least=at_least) for part in parts)  # type: ignore
        return self._feeds[at_least]


def train(pictures: Pictures, claim: Claim, changes: dict[str, Any], out: Path | None = None) -> dict[str, Any]:
    """Accuracy on the test pictures (those of validation if there are no others) after the last step, and what it took.

    The weights go to `out`, if given.
    """
    devices, start = pictures.devices, time.monotonic()
    device, source = devices.device, pictures.splits.train
    recipe = resolve(claim.recipe, None, changes, device.type)
    trained = open_weights(recipe) if recipe.start.weights else None
    recipe, _ = fit(recipe, source, trained.preprocessing if trained else None)
    model = build(recipe, source, trained)
    guide = Guide(recipe, model, source, device, open_asked(recipe, source, device))
    feeds = pictures.feeds(round(max(recipe.augmentation.size) * recipe.data.detail) or None)
    options = Options(compile=device.type == "cuda", save_seconds=math.inf)
    with tempfile.TemporaryDirectory() as folder:
        training = Training(recipe, model, devices, *feeds, Path(folder), options, guide)
        display = Display(training.total, training.order.steps, recipe.batch, console=Console(quiet=True))
        with display:
            begun = time.monotonic()
            training.run(display, None, Speed(model, device, 1))
        if out is not None:
            with training.reported():
                vitrail.save(model, out)
    price = cost(model.architecture)
    return {
        "top1": training.best["top1"],
        "pictures": training.best["pictures"],
        "steps": training.total,
        "parameters": price.parameters,
        "macs": price.macs,
        "operations": 6 * price.macs * training.total * recipe.batch,
        "size": list(recipe.augmentation.size),
        "seconds": round(time.monotonic() - start, 1),
        "seconds_of_steps": round(time.monotonic() - begun, 1),
    }


def train_in_stages(pictures: Pictures, claim: Claim, changes: dict[str, Any], epochs: float) -> dict[str, Any]:
    """The whole budget at once, or a share of it for what the cell says comes `first`, and the rest from those weights on."""
    changes = dict(changes)
    first = changes.pop("first", None)
    if not first:
        return train(pictures, claim, changes)
    share = first["share"]
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "first.safetensors"
        early = {key: value for key, value in first.items() if key != "share"} | {"schedule.length": f"{share * epochs:g} epochs"}
        before = train(pictures, claim, changes | early, weights)
        rest = {"schedule.length": f"{(1 - share) * epochs:g} epochs", "start.weights": str(weights)}
        after = train(pictures, claim, changes | rest)
    both = {key: round(before[key] + after[key], 1) for key in ("steps", "operations", "seconds", "seconds_of_steps")}
    return after | both


def attempt(name: str, claim: Claim, pictures: Pictures, options: Any, say: Callable[[str], None]) -> None:
    """The cells of a claim that are not in its file yet, seed by seed; each result is kept as soon as it is there."""
    file = options.results / f"{name.replace(' ', '-')}.json"
    given = {part: getattr(options, part) for part in ("teacher", "labels", "weights")}
    more = dict(pair.split("=", 1) for pair in options.set)
    facts = {"device": device_name(pictures.devices.device), "versions": versions(), "data": claim.data}
    for seed in range(options.seeds):
        for cell in options.cells or claim.cells:
            content = json.loads(file.read_text()) if file.exists() else {"claim": name, "runs": []}
            if any((run["cell"], run["seed"], run["epochs"]) == (cell, seed, options.epochs) for run in content["runs"]):
                continue
            changes = claim.base | claim.cells[cell] | more
            changes = {key: value.format(**given) if isinstance(value, str) else value for key, value in changes.items()}
            length = {"seed": seed, "schedule.length": f"{options.epochs:g} epochs", "testing.every": "100%"}
            found = train_in_stages(pictures, claim, changes | length, options.epochs)
            run = {"cell": cell, "seed": seed, "epochs": options.epochs} | found | facts
            content["runs"].append(run | {"changes": {key: value for key, value in changes.items() if key not in FILES}})
            options.results.mkdir(parents=True, exist_ok=True)
            text = json.dumps(content, indent=1)
            write_aside(file, lambda side, text=text: side.write_text(text))
            say(f"{name}: {cell}, seed {seed}: {100 * found['top1']:.2f} % in {found['seconds']:.0f} s")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def versions() -> dict[str, str]:
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {"vitrail": __version__, "torch": torch.__version__, "commit": asked.stdout.strip() or "unknown"}
