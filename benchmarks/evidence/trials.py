"""Training of variants: the loop of `vitrail train` without a run directory, on images that are decoded once for all variants."""

import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from rich.console import Console

import vitrail
from benchmarks.evidence.claims import CLAIMS, Claim
from benchmarks.evidence.provenance import FILES, base_name, check_compatible, commit, describe_file, load_results, needs
from vitrail.atomic_files import atomic_write_text
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.image_loader import ImageLoader
from vitrail.data.source import Splits
from vitrail.devices import choose_device
from vitrail.errors import UserError
from vitrail.models.flops import cost
from vitrail.recipes.data_defaults import fit_to_data
from vitrail.runs.display import Display
from vitrail.runs.initial_model import build_initial, open_pretrained
from vitrail.runs.request import TrainRequest, resolve_recipe
from vitrail.runs.run_directory import fingerprint
from vitrail.tasks.registry import find_task
from vitrail.training.distributed import Devices
from vitrail.training.throughput import Throughput
from vitrail.training.trainer import Options, Trainer
from vitrail.version import __version__

RESERVED = {key: f"--{option}" for option, key in FILES.items()} | {
    "seed": "--seeds",
    "schedule.length": "--epochs",
    "validation.every": "nothing: a model is evaluated after the last step",
}


class Images:
    """A source whose decoded images are kept between trainings; the fingerprint covers the training and evaluation images."""

    def __init__(self, path: str, device: str | None) -> None:
        self.devices = Devices(choose_device(device))
        self.splits = open_splits(path)
        self.evaluation = self.splits.test or self.splits.validation
        self.name = base_name(path)
        self.fingerprint = fingerprint(Splits(self.splits.train, self.evaluation, None))
        self._loaders: dict[int | None, tuple[ImageLoader, ImageLoader]] = {}

    def loaders(self, min_side: int | None) -> tuple[ImageLoader, ImageLoader]:
        if min_side not in self._loaders:
            parts = (self.splits.train, self.evaluation)
            self._loaders[min_side] = tuple(ImageLoader(part, self.devices.device, min_side=min_side) for part in parts)  # type: ignore
        return self._loaders[min_side]


def train(images: Images, recipe_name: str, changes: dict[str, Any], out: Path | None = None) -> dict[str, Any]:
    """Train, and return the metric on the test (or else validation) images after the last step, and the cost.

    The metric is the top-1 accuracy, or that of a task without labels. The weights are saved to `out`, if given.
    """
    devices, start = images.devices, time.monotonic()
    device, source = devices.device, images.splits.train
    recipe = resolve_recipe(TrainRequest(recipe=recipe_name, changes=changes), device.type)
    pretrained = open_pretrained(recipe) if recipe.init.weights else None
    recipe, _ = fit_to_data(recipe, source, pretrained.preprocessing if pretrained else None)
    task = find_task(recipe.task)(recipe, source, device)
    model = build_initial(recipe, task.class_names, pretrained)
    task.attach(model)
    loaders = images.loaders(round(max(recipe.augmentation.image_size) * recipe.data.decode_scale) or None)
    options = Options(compile=device.type == "cuda", save_seconds=math.inf)
    with tempfile.TemporaryDirectory() as folder:
        training = Trainer(recipe, model, task, source, devices, Path(folder), options, validation=loaders[1])
        display = Display(training.total, training.sampler.steps, recipe.batch_size, console=Console(quiet=True))
        with display:
            steps_start = time.monotonic()
            training.run(loaders[0], display, None, Throughput(model, device, 1))
        if out is not None:
            with training.evaluated_weights():
                vitrail.save(model, out)
    model_cost = cost(model.architecture)
    return {
        task.metric.name: training.best[task.metric.name],
        "images": training.best["images"],
        "steps": training.total,
        "parameters": model_cost.parameters,
        "macs": model_cost.macs,
        "operations": 6 * model_cost.macs * training.total * recipe.batch_size * task.relative_cost,
        "size": list(recipe.augmentation.image_size),
        "seconds": round(time.monotonic() - start, 1),
        "seconds_of_steps": round(time.monotonic() - steps_start, 1),
    }


def divide_into_stages(claim: Claim, changes: dict[str, Any], epochs: float) -> list[tuple[str, dict[str, Any]]]:
    """The recipe and the changes of each stage of a variant: one stage, or two if it has a `first` stage.

    A first stage has a `share` of the epochs; or `own_epochs` and `own_recipe`, and then only the changes that are
    common to all variants of the claim, and the architecture.
    """
    late = dict(changes)
    first = late.pop("first", None)
    if not first:
        return [(claim.recipe, late)]
    own = {key: value for key, value in first.items() if key not in ("share", "own_recipe", "own_epochs")}
    share = first.get("share", 0.0)
    shared = (
        late if share else {key: late[key] for key in late if key in (*claim.base, *RESERVED) or key.startswith("architecture.")}
    )
    length = share * epochs if share else first["own_epochs"]
    early = shared | own | {"schedule.length": f"{length:g} epochs"}
    late["schedule.length"] = f"{(1 - share) * epochs:g} epochs"
    return [(first.get("own_recipe", claim.recipe), early), (claim.recipe, late)]


def train_in_stages(images: Images, claim: Claim, changes: dict[str, Any], epochs: float) -> dict[str, Any]:
    """Train in one stage, or in two of which the second starts from the weights of the first."""
    *before, (recipe, late) = divide_into_stages(claim, changes, epochs)
    if not before:
        return train(images, recipe, late)
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "first.safetensors"
        first = train(images, *before[0], weights)
        second = train(images, recipe, late | {"init.weights": str(weights)})
    both = {key: round(first[key] + second[key], 1) for key in ("steps", "operations", "seconds", "seconds_of_steps")}
    return first | second | both


class Trial:
    """The variants of a claim with the options of a command; rejected if the stored results are incompatible."""

    def __init__(self, name: str, images: Images, options: Any, versions: dict[str, str]) -> None:
        self.name, self.claim, self.images, self.options = name, CLAIMS[name], images, options
        self.file: Path = options.results / f"{name.replace(' ', '-')}.json"
        common = common_changes(options.set)
        metadata: dict[str, Any] = {"device": device_name(images.devices.device), "versions": versions}
        metadata |= {"data": images.name, "fingerprint": images.fingerprint, "set": common}
        self.metadata: dict[str, dict[str, Any]] = {}  # of the runs of each variant
        self.changes: dict[str, dict[str, Any]] = {}
        for variant in options.variants or self.claim.variants:
            self.changes[variant] = self._changes(variant, common)
            for recipe, stage in divide_into_stages(self.claim, self.changes[variant], options.epochs):
                request = TrainRequest(recipe=recipe, changes=stage)
                resolve_recipe(request, images.devices.device.type)  # raises before anything is trained
            files = {option: describe_file(getattr(options, option)) for option in needs(self.claim, variant)}
            names = {getattr(options, option): f"{{{option}}}" for option in files}
            changes = {key: value for key, value in self.changes[variant].items() if key not in FILES.values()}
            self.metadata[variant] = metadata | {"files": files, "changes": replace_values(changes, names)}
        self.load_results()

    def _changes(self, variant: str, common: dict[str, str]) -> dict[str, Any]:
        """Changes of the recipe, without seed and length."""
        claim, options = self.claim, self.options
        if variant not in claim.variants:
            raise UserError(f"{self.name} has no variant {variant}: choose from {', '.join(claim.variants)}.")
        for option in needs(claim, variant):
            if not getattr(options, option):
                raise UserError(f"{self.name} needs --{option}: pass a file.")
        varied = next((key for key in common if any(key in changes for changes in claim.variants.values())), None)
        if varied:
            raise UserError(f"{varied} differs between the variants of {self.name}: remove it from --set.")
        changes = claim.base | claim.variants[variant] | common
        used = {f"{{{option}}}": getattr(options, option) for option in needs(claim, variant)}
        return replace_values(changes, used)

    def load_results(self) -> dict[str, Any]:
        """The content of the results file, to which the runs may be added."""
        content: dict[str, Any] = {"claim": self.name, "runs": []}
        if self.file.exists():
            content = load_results(self.file)
            check_compatible(self.file, self.claim, content["runs"], self.metadata)
        return content

    def run(self, log: Callable[[str], None]) -> None:
        """Train the variants that are not in the file yet, seed by seed; each result is saved at once."""
        epochs, first = self.options.epochs, self.options.first_seed
        for seed in range(first, first + self.options.seeds):
            for variant, changes in self.changes.items():
                content, label = self.load_results(), f"{self.name}: {variant}, seed {seed}"
                key = (variant, seed, epochs)
                existing = next((run for run in content["runs"] if (run["cell"], run["seed"], run["epochs"]) == key), None)
                if existing:
                    log(f"{label}: {100 * existing['top1']:.2f} %, already stored.")
                    continue
                length = {"seed": seed, "schedule.length": f"{epochs:g} epochs", "validation.every": "100%"}
                result = train_in_stages(self.images, self.claim, changes | length, epochs)
                self.add({"cell": variant, "seed": seed, "epochs": epochs} | result | self.metadata[variant])
                log(f"{label}: {100 * result['top1']:.2f} % in {result['seconds']:.0f} s")

    def add(self, run: dict[str, Any]) -> None:
        """Add a run to the file, to which other processes may add theirs."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self.file.with_name(f".{self.file.name}.lock")):
            content = self.load_results()
            content["runs"].append(run)
            atomic_write_text(self.file, json.dumps(content, indent=1))


def replace_values(changes: dict[str, Any], new: dict[str, str]) -> dict[str, Any]:
    """Changes in which the values that are keys of `new` are replaced, also in a first stage."""
    return {
        key: replace_values(value, new) if isinstance(value, dict) else new.get(value, value) if isinstance(value, str) else value
        for key, value in changes.items()
    }


def common_changes(pairs: list[str]) -> dict[str, str]:
    """Changes of all variants by `--set`."""
    for pair in pairs:
        key, equals, _ = pair.partition("=")
        if not equals:
            raise UserError(f"--set {pair} has no value: pass KEY=VALUE.")
        if key in RESERVED:
            raise UserError(f"{key} cannot be changed by --set here: use {RESERVED[key]}.")
    return dict(pair.split("=", 1) for pair in pairs)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def used_versions() -> dict[str, str]:
    return {"vitrail": __version__, "torch": torch.__version__, "commit": commit()}
