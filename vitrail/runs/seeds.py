"""One recipe with several seeds, one after the other: RUN/seed-0, RUN/seed-1, …, and RUN/seeds.json, by which it goes on."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitrail.errors import UserError
from vitrail.evaluation.statistics import summarize
from vitrail.recipes import Recipe
from vitrail.runs import train
from vitrail.runs.comparison import MEASURES
from vitrail.runs.prepare import resolve
from vitrail.runs.results import At, is_finished, read_results
from vitrail.runs.run_directory import check_place, next_folder, write_json
from vitrail.training.checkpointing import alone
from vitrail.training.distributed import choose_device
from vitrail.training.trainer import Options

PLAN = "seeds.json"


@dataclass(frozen=True)
class Seeds:
    """What is trained with every seed, as seeds.json has it."""

    source: str
    recipe: Recipe  # its own seed is the first
    count: int
    model: str | None = None
    options: Options = field(default_factory=Options)
    device: str | None = None
    micro_batch_size: int | None = None
    workers: int | None = None
    bad: str = "skip"

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UserError("--seeds is a number of trainings: at least 1.")
        if "RANK" in os.environ:
            raise UserError(
                "--seeds trains in one process: with torchrun start one training for each seed, with --seed N --out RUN/seed-N."
            )

    @property
    def numbers(self) -> range:
        return range(self.recipe.seed, self.recipe.seed + self.count)

    def is_same(self, other: "Seeds") -> bool:
        """Whether another one has the same trainings, be they more or fewer."""
        ours, theirs = (json.dumps([each.source, each.model, each.recipe.to_dict()]) for each in (self, other))
        return ours == theirs


def plan_seeds(
    source: str,
    recipe: str | Recipe | None,
    model: str | None,
    changes: dict[str, Any],
    count: int,
    device: str | None,
    **more: Any,
) -> Seeds:
    """What was asked for, complete: another day, the same command stands for the same trainings."""
    resolved = resolve(recipe, model, changes, choose_device(device).type)
    place = os.path.expanduser(source)
    source = os.path.abspath(place) if os.path.exists(place) else source
    return Seeds(source, resolved, count, model, device=device, **more)


def choose_home(out: Path | None, seeds: Seeds) -> Path:
    """The folder of all the seeds: the one given, or the first under runs/ that is free or holds the same trainings."""
    if out is not None:
        folder = out.expanduser()
        if (folder / PLAN).exists():
            if not read_seeds(folder).is_same(seeds):
                raise UserError(f"{folder} holds the seeds of another training: give another folder with --out.")
        elif (folder / "run.json").exists():
            raise UserError(f"{folder} holds a single run: give another folder with --out.")
        else:
            check_place(folder)
        return folder
    for path in sorted(Path("runs").glob(f"*/{PLAN}")):
        with contextlib.suppress(UserError):  # somebody else's, or damaged: not what was asked for
            if read_seeds(path.parent).is_same(seeds):
                return path.parent
    return next_folder(seeds.source, f"{seeds.recipe.name}-seeds")


def train_seeds(folder: Path, seeds: Seeds, say: Callable[[str], None]) -> bool:
    """Train what is unfinished; False if it was stopped. A seed that fails under way leaves the others alone."""
    data = Path(seeds.source)
    if data.is_dir() and Path(os.path.realpath(folder)).is_relative_to(data.resolve()):
        raise UserError(f"{folder} lies inside the data, where it would become a class of its own: give another with --out.")
    failed = []
    with alone(folder), tidy_home(folder):
        if (folder / PLAN).exists():
            seeds = dataclasses.replace(seeds, count=max(seeds.count, read_seeds(folder).count))
        write_json(folder / PLAN, to_dict(seeds))
        for number in seeds.numbers:
            place = folder / f"seed-{number}"
            if is_finished(place):
                say(f"seed {number} is finished")
                continue
            say(f"seed {number}, of {seeds.numbers[0]} to {seeds.numbers[-1]}")
            try:
                if not train_one(place, seeds, number).finished:
                    say(f"`vitrail resume {folder}` goes on with this seed and those after it.")
                    return False
            except UserError as error:
                if not (place / "run.json").exists():
                    raise  # it has not even begun, and the next would not either
                say(str(error))
                failed.append(number)
    if failed:
        raise UserError(
            f"{'Seed' if len(failed) == 1 else 'Seeds'} {', '.join(map(str, failed))} of {folder} did not come to an end, "
            f"for the reason said above: `vitrail resume {folder}` tries again."
        )
    return True


def train_one(place: Path, seeds: Seeds, number: int) -> train.Run:
    if (place / "run.json").exists():
        options = {name: getattr(seeds.options, name) for name in ("on_nan", "keep", "save_seconds")}
        return train.resume(place, device=seeds.device, workers=seeds.workers, **options)
    recipe = dataclasses.replace(seeds.recipe, seed=number)
    return train.train(
        seeds.source,
        recipe,
        seeds.model,
        place,
        {},
        seeds.options,
        seeds.device,
        seeds.micro_batch_size,
        seeds.workers,
        seeds.bad,
    )


@contextlib.contextmanager
def tidy_home(folder: Path) -> Iterator[None]:
    """Nothing stays of what has not begun."""
    try:
        yield
    except BaseException:
        if not any(path.is_dir() for path in folder.iterdir()):
            (folder / PLAN).unlink(missing_ok=True)
            (folder / ".lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def is_home(folder: Path) -> bool:
    return (folder / PLAN).is_file() and not (folder / "run.json").exists()


def resumed(folder: Path, device: str | None, workers: int | None, **other: Any) -> Seeds:
    """What a folder holds, to go on with; on another device and with `other` options if that is wanted."""
    seeds = read_seeds(folder)
    options = dataclasses.replace(seeds.options, **{name: value for name, value in other.items() if value is not None})
    workers = seeds.workers if workers is None else workers
    return dataclasses.replace(seeds, device=device or seeds.device, workers=workers, options=options)


def to_dict(seeds: Seeds) -> dict[str, Any]:
    return dataclasses.asdict(seeds)


def read_seeds(folder: Path) -> Seeds:
    path = folder / PLAN
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        return Seeds(**plan | {"recipe": Recipe.from_dict(plan["recipe"]), "options": Options(**plan["options"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None


def summaries(folder: Path, at: At = "best") -> list[str]:
    """Mean, sd and n of what the finished seeds have reached, a sentence for each measure that they all have."""
    found: list[str] = []
    if not any(folder.glob("seed-*/run.json")):
        return found
    for metric, measure in MEASURES.items():
        results, _ = read_results([folder], metric, at)
        if not results or metric == "top5":
            continue
        if len({result.data for result in results}) > 1:
            raise UserError(f"The seeds of {folder} were not trained on the same images: they cannot be summed up.")
        spread = summarize([result.value for result in results])
        micro_batch = " %" if measure.percent else ""
        line = f"{measure.title} {measure.show(spread.mean)}"
        if spread.sd is not None:
            line += f" ± {measure.show(spread.sd)}{micro_batch} (mean ± sd, n = {spread.n}; 95 % interval of the mean "
            line += f"{measure.show(spread.low)} to {measure.show(spread.high)})"
        else:
            line += f"{micro_batch} (n = 1)"
        found.append(line)
    return found
