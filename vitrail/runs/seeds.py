"""One request with several seeds, one after the other: RUN/seed-0, RUN/seed-1, …, and RUN/seeds.json, from which it resumes.

With `data.folds` the seed is also the number of the fold: cross-validation.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.aliases import upgrade_run
from vitrail.devices import choose_device
from vitrail.errors import UserError
from vitrail.evaluation.statistics import summarize
from vitrail.json_files import read_json
from vitrail.recipes import Recipe
from vitrail.runs.comparison import PRIMARY
from vitrail.runs.request import Log, TrainRequest, resolve_recipe, time_budget
from vitrail.runs.results import choose_metric, is_finished, read_results
from vitrail.runs.run_directory import check_empty, next_folder, read_run, write_json
from vitrail.runs.train import Run, resume, run_request
from vitrail.training.checkpointing import lock_run_directory
from vitrail.training.trainer import Options

FILE = "seeds.json"


@dataclass(frozen=True)
class Seeds:
    """A request that is trained with every seed, as seeds.json has it."""

    request: TrainRequest  # its recipe is resolved; the recipe's seed is the first
    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UserError("--seeds is a number of trainings: at least 1.")
        if "RANK" in os.environ:
            raise UserError(
                "--seeds trains in one process: with torchrun start one training per seed, with --seed N --out RUN/seed-N."
            )

    @property
    def recipe(self) -> Recipe:
        assert isinstance(self.request.recipe, Recipe)
        return self.request.recipe

    @property
    def numbers(self) -> range:
        return range(self.recipe.seed, self.recipe.seed + self.count)

    def is_same(self, other: "Seeds") -> bool:
        """Whether both have the same trainings, regardless of how many."""
        requests = [
            (each.request.source, each.request.model, each.request.minutes, each.recipe.to_dict()) for each in (self, other)
        ]
        return json.dumps(requests[0]) == json.dumps(requests[1])


def plan_seeds(request: TrainRequest, count: int) -> Seeds:
    """The request with its recipe resolved, so that the same command on another day means the same trainings."""
    device = choose_device(request.device)
    recipe = resolve_recipe(request, device.type)
    minutes = time_budget(request, recipe, device)
    path = os.path.expanduser(request.source)
    source = os.path.abspath(path) if os.path.exists(path) else request.source
    explicit = request.explicit_keys
    request = dataclasses.replace(request, source=source, recipe=recipe, changes={}, explicit=explicit, out=None, minutes=minutes)
    return Seeds(request, count)


def choose_folder(out: str | Path | None, seeds: Seeds) -> Path:
    """The folder of all seeds: the given one, or the first under runs/ that is free or holds the same trainings."""
    if out is not None:
        folder = Path(out).expanduser()
        if (folder / FILE).exists():
            if not read_seeds(folder).is_same(seeds):
                raise UserError(f"{folder} holds the seeds of another training: give another folder with --out.")
        elif (folder / "run.json").exists():
            raise UserError(f"{folder} holds a single run: give another folder with --out.")
        else:
            check_empty(folder)
        return folder
    for path in sorted(Path("runs").glob(f"*/{FILE}")):
        with contextlib.suppress(UserError):  # unreadable: not the requested one
            if read_seeds(path.parent).is_same(seeds):
                return path.parent
    return next_folder(seeds.request.source, f"{seeds.recipe.name}-{'folds' if seeds.recipe.data.folds else 'seeds'}")


def train_seeds(folder: Path, seeds: Seeds, log: Log) -> bool:
    """Train the unfinished seeds; False if stopped. A seed that fails after its start does not stop the others."""
    data = Path(seeds.request.source)
    if data.is_dir() and Path(os.path.realpath(folder)).is_relative_to(data.resolve()):
        raise UserError(f"{folder} is inside the data, where it would become a class: give another folder with --out.")
    failed = []
    with lock_run_directory(folder), removed_if_empty(folder):
        if (folder / FILE).exists():
            seeds = dataclasses.replace(seeds, count=max(seeds.count, read_seeds(folder).count))
        write_json(folder / FILE, to_dict(seeds))
        finished = [number for number in seeds.numbers if is_finished(folder / f"seed-{number}")]
        left = seeds.count - len(finished)
        for place, number in enumerate(seeds.numbers, 1):
            run = folder / f"seed-{number}"
            if number in finished:
                log(f"seed {number} is finished")
                continue
            left -= 1
            log(f"fold {place} of {seeds.count}" if seeds.recipe.data.folds else f"seed {number} ({place} of {seeds.count})")
            try:
                if not train_or_resume(run, like_the_first(folder, seeds), number, [1.0] * left).finished:
                    log(f"`vitrail resume {folder}` continues with this seed and the remaining ones.")
                    return False
            except UserError as error:
                if not (run / "run.json").exists():
                    raise  # it has not started, and neither would the next
                log(str(error))
                failed.append(number)
    if failed:
        raise UserError(
            f"{'Seed' if len(failed) == 1 else 'Seeds'} {', '.join(map(str, failed))} of {folder} failed for the reason above: "
            f"`vitrail resume {folder}` tries again."
        )
    return True


def like_the_first(folder: Path, seeds: Seeds) -> TrainRequest:
    """The request; where it has a time budget, with what the first training chose for it, so that all trainings are alike."""
    started = [run for number in seeds.numbers if ((run := folder / f"seed-{number}") / "run.json").exists()]
    if not started or seeds.request.minutes is None:
        return seeds.request
    return dataclasses.replace(seeds.request, recipe=Recipe.from_dict(read_run(started[0])["recipe"]), minutes=None)


def train_or_resume(folder: Path, request: TrainRequest, seed: int, others: Sequence[float] = ()) -> Run:
    """Start the request's training with a seed in a run directory, or resume it there; `others` as in `run_request`."""
    if (folder / "run.json").exists():
        options = request.options or Options()
        kept = {name: getattr(options, name) for name in ("on_nan", "keep", "save_seconds")}
        return resume(folder, device=request.device, workers=request.workers, **kept)
    assert isinstance(request.recipe, Recipe)
    recipe = dataclasses.replace(request.recipe, seed=seed)
    return run_request(dataclasses.replace(request, recipe=recipe, out=folder), others)


@contextlib.contextmanager
def removed_if_empty(folder: Path) -> Iterator[None]:
    """Remove the folder if no seed has started."""
    try:
        yield
    except BaseException:
        if not any(path.is_dir() for path in folder.iterdir()):
            (folder / FILE).unlink(missing_ok=True)
            (folder / ".lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def has_seeds(folder: Path) -> bool:
    return (folder / FILE).is_file() and not (folder / "run.json").exists()


def resumed_seeds(folder: Path, device: str | None, workers: int | None, **changed: Any) -> Seeds:
    """The seeds of a folder, on another device and with changed options if given."""
    seeds = read_seeds(folder)
    request = seeds.request
    options = dataclasses.replace(
        request.options or Options(), **{name: value for name, value in changed.items() if value is not None}
    )
    workers = request.workers if workers is None else workers
    request = dataclasses.replace(request, device=device or request.device, workers=workers, options=options)
    return dataclasses.replace(seeds, request=request)


def to_dict(seeds: Seeds) -> dict[str, Any]:
    request = dataclasses.asdict(seeds.request)
    return {"count": seeds.count, **{name: value for name, value in request.items() if name not in ("changes", "out")}}


def read_seeds(folder: Path) -> Seeds:
    path = folder / FILE
    try:
        content = upgrade_run(read_json(path))
        count, recipe, options = content.pop("count"), Recipe.from_dict(content.pop("recipe")), content.pop("options")
        options = None if options is None else Options(**options)
        content["explicit"] = tuple(content.get("explicit", ()))
        return Seeds(TrainRequest(recipe=recipe, options=options, **content), count)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None


def summaries(folder: Path) -> list[str]:
    """Mean, standard deviation and n over the finished seeds, one line for each metric that all of them have."""
    lines: list[str] = []
    if not any(folder.glob("seed-*/run.json")):
        return lines
    folds = read_seeds(folder).recipe.data.folds if has_seeds(folder) else 0
    metrics = {metric.name: metric for metric in (choose_metric([folder], name) for name in (PRIMARY, "loss", "test"))}
    for metric in metrics.values():
        results, _ = read_results([folder], metric, "best")
        if not results:
            continue
        if not folds and len({result.data for result in results}) > 1:
            raise UserError(f"The seeds of {folder} were not trained on the same images: they cannot be averaged.")
        spread = summarize([result.value for result in results])
        unit = " %" if metric.percent else ""
        line = f"{metric.title} {metric.show(spread.mean)}"
        if spread.sd is not None:
            count = f"{spread.n} of {folds} folds" if folds else f"n = {spread.n}"
            interval = metric.show_interval(spread.low, spread.high)
            line += f" ± {metric.show(spread.sd)}{unit} (mean ± sd, {count}; 95 % interval of the mean {interval})"
        else:
            line += f"{unit} (n = 1)"
        lines.append(line)
    return lines
