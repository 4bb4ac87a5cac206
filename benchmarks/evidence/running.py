"""One training of a cell: the loop of `vitrail train` and nothing around it, on images that are decoded once for all cells."""

import json
import math
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import vitrail
from benchmarks.evidence.claims import CLAIMS, Claim
from benchmarks.evidence.records import FILES, check_alike, commit, describe_file, needs, plain_name
from vitrail.atomic_files import write_aside
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.feed import Feed
from vitrail.data.source import Splits
from vitrail.errors import UserError
from vitrail.models.flops import cost
from vitrail.recipes.data_defaults import fit
from vitrail.runs.display import Display
from vitrail.runs.prepare import build, open_weights, resolve
from vitrail.runs.run_directory import fingerprint
from vitrail.tasks.supervision import Guide, open_asked
from vitrail.training.distributed import Devices, choose_device
from vitrail.training.throughput import Speed
from vitrail.training.trainer import Options, Trainer
from vitrail.version import __version__

RESERVED = {leaf: f"--{option}" for option, leaf in FILES.items()} | {
    "seed": "--seeds",
    "schedule.length": "--epochs",
    "validation.every": "nothing, a training is judged at its end",
}


class Images:
    """A source, its decoded images kept from training to training; the fingerprint is of those learned and those judged."""

    def __init__(self, path: str, device: str | None) -> None:
        self.devices = Devices(choose_device(device))
        self.splits = open_splits(path)
        self.judged = self.splits.test or self.splits.validation
        self.name = plain_name(path)
        self.fingerprint = fingerprint(Splits(self.splits.train, self.judged, None))
        self._feeds: dict[int | None, tuple[Feed, Feed]] = {}

    def feeds(self, at_least: int | None) -> tuple[Feed, Feed]:
        if at_least not in self._feeds:
            parts = (self.splits.train, self.judged)
            self._feeds[at_least] = tuple(Feed(part, self.devices.device, at_least=at_least) for part in parts)  # type: ignore
        return self._feeds[at_least]


def train(images: Images, claim: Claim, changes: dict[str, Any], out: Path | None = None) -> dict[str, Any]:
    """Accuracy on the test images (those of validation if there are no others) after the last step, and what it took.

    The weights go to `out`, if given.
    """
    devices, start = images.devices, time.monotonic()
    device, source = devices.device, images.splits.train
    recipe = resolve(claim.recipe, None, changes, device.type)
    trained = open_weights(recipe) if recipe.init.weights else None
    recipe, _ = fit(recipe, source, trained.preprocessing if trained else None)
    model = build(recipe, source, trained)
    guide = Guide(recipe, model, source, device, open_asked(recipe, source, device))
    feeds = images.feeds(round(max(recipe.augmentation.image_size) * recipe.data.decode_scale) or None)
    options = Options(compile=device.type == "cuda", save_seconds=math.inf)
    with tempfile.TemporaryDirectory() as folder:
        training = Trainer(recipe, model, devices, *feeds, Path(folder), options, guide)
        display = Display(training.total, training.order.steps, recipe.batch_size, console=Console(quiet=True))
        with display:
            begun = time.monotonic()
            training.run(display, None, Speed(model, device, 1))
        if out is not None:
            with training.reported():
                vitrail.save(model, out)
    price = cost(model.architecture)
    return {
        "top1": training.best["top1"],
        "images": training.best["images"],
        "steps": training.total,
        "parameters": price.parameters,
        "macs": price.macs,
        "operations": 6 * price.macs * training.total * recipe.batch_size,
        "size": list(recipe.augmentation.image_size),
        "seconds": round(time.monotonic() - start, 1),
        "seconds_of_steps": round(time.monotonic() - begun, 1),
    }


def train_in_stages(images: Images, claim: Claim, changes: dict[str, Any], epochs: float) -> dict[str, Any]:
    """The whole budget at once, or a share of it for what the cell says comes `first`, and the rest from those weights on."""
    changes = dict(changes)
    first = changes.pop("first", None)
    if not first:
        return train(images, claim, changes)
    share = first["share"]
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "first.safetensors"
        early = {key: value for key, value in first.items() if key != "share"} | {"schedule.length": f"{share * epochs:g} epochs"}
        before = train(images, claim, changes | early, weights)
        rest = {"schedule.length": f"{(1 - share) * epochs:g} epochs", "init.weights": str(weights)}
        after = train(images, claim, changes | rest)
    both = {key: round(before[key] + after[key], 1) for key in ("steps", "operations", "seconds", "seconds_of_steps")}
    return after | both


class Attempt:
    """A claim's cells with the settings of a command; refused if its results would not go with those that are there already."""

    def __init__(self, name: str, images: Images, options: Any, versions: dict[str, str]) -> None:
        self.name, self.claim, self.images, self.options = name, CLAIMS[name], images, options
        self.file: Path = options.results / f"{name.replace(' ', '-')}.json"
        common = common_changes(options.set)
        facts: dict[str, Any] = {"device": device_name(images.devices.device), "versions": versions}
        facts |= {"data": images.name, "fingerprint": images.fingerprint, "set": common}
        self.facts: dict[str, dict[str, Any]] = {}  # by cell, what each of its runs says besides its result
        self.changes: dict[str, dict[str, Any]] = {}
        for cell in options.cells or self.claim.cells:
            self.changes[cell] = self._changes(cell, common)
            whole = {key: value for key, value in self.changes[cell].items() if key != "first"}
            resolve(self.claim.recipe, None, whole, images.devices.device.type)  # complains before anything is trained
            files = {option: describe_file(getattr(options, option)) for option in needs(self.claim, cell)}
            kept = {key: value for key, value in self.changes[cell].items() if key not in FILES.values()}
            self.facts[cell] = facts | {"files": files, "changes": kept}
        self.stored()

    def _changes(self, cell: str, common: dict[str, str]) -> dict[str, Any]:
        """Of the recipe, but for the seed and the length."""
        claim, options = self.claim, self.options
        if cell not in claim.cells:
            raise UserError(f"{self.name} has no cell called {cell}: there are {', '.join(claim.cells)}.")
        for option in needs(claim, cell):
            if not getattr(options, option):
                raise UserError(f"{self.name} cannot be tried without --{option}: give a file.")
        varied = next((leaf for leaf in common if any(leaf in changes for changes in claim.cells.values())), None)
        if varied:
            raise UserError(f"{varied} is what the cells of {self.name} differ in: leave it out of --set.")
        given = {leaf: getattr(options, option) for option, leaf in FILES.items() if option in needs(claim, cell)}
        return claim.base | claim.cells[cell] | given | common

    def stored(self) -> dict[str, Any]:
        """What the results' file holds, if this may be added to it."""
        content: dict[str, Any] = {"claim": self.name, "runs": []}
        if self.file.exists():
            content = json.loads(self.file.read_text())
            check_alike(self.file, self.claim, content["runs"], self.facts)
        return content

    def run(self, say: Callable[[str], None]) -> None:
        """The cells that are not in the file yet, seed by seed; each result is kept as soon as it is there."""
        epochs = self.options.epochs
        for seed in range(self.options.seeds):
            for cell, changes in self.changes.items():
                content, label = self.stored(), f"{self.name}: {cell}, seed {seed}"
                key = (cell, seed, epochs)
                there = next((run for run in content["runs"] if (run["cell"], run["seed"], run["epochs"]) == key), None)
                if there:
                    say(f"{label}: {100 * there['top1']:.2f} % is there already, with these settings.")
                    continue
                length = {"seed": seed, "schedule.length": f"{epochs:g} epochs", "validation.every": "100%"}
                found = train_in_stages(self.images, self.claim, changes | length, epochs)
                content["runs"].append({"cell": cell, "seed": seed, "epochs": epochs} | found | self.facts[cell])
                text = json.dumps(content, indent=1)
                write_aside(self.file, partial(Path.write_text, data=text))
                say(f"{label}: {100 * found['top1']:.2f} % in {found['seconds']:.0f} s")


def common_changes(pairs: list[str]) -> dict[str, str]:
    """What `--set` says, of all cells."""
    for pair in pairs:
        leaf, equals, _ = pair.partition("=")
        if not equals:
            raise UserError(f"--set {pair} has no value: give KEY=VALUE.")
        if leaf in RESERVED:
            raise UserError(f"{leaf} is not for --set here: give {RESERVED[leaf]}.")
    return dict(pair.split("=", 1) for pair in pairs)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def used_versions() -> dict[str, str]:
    return {"vitrail": __version__, "torch": torch.__version__, "commit": commit()}
