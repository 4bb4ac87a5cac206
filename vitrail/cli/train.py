"""vitrail train, plan, resume, replay."""

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import typer
import yaml

from vitrail.cli.console import print_table
from vitrail.cli.options import (
    BadImagesOption,
    DeviceOption,
    EpochsOption,
    FromOption,
    JsonOption,
    KeepOption,
    MicroBatchSizeOption,
    ModelOption,
    SaveEveryOption,
    SetOption,
    SourceArgument,
    WorkersOption,
    check_choice,
    expand_options,
    hardware_option,
    recipe_option,
    run_option,
)
from vitrail.errors import UserError

if TYPE_CHECKING:
    from vitrail.runs.request import TrainRequest
    from vitrail.runs.seeds import Seeds


class TrainOptions(NamedTuple):
    """Arguments of `vitrail train` and `vitrail plan`."""

    source: SourceArgument = "digits"
    recipe: Annotated[
        str | None,
        recipe_option(
            "--recipe",
            help="The name of a recipe (see `vitrail recipes`), or a recipe.yaml of an earlier run; default: laptop on a CPU, "
            "small on a GPU, finetune with --from.",
        ),
    ] = None
    model: ModelOption = None
    out: Annotated[Path | None, run_option(help="Run directory; default: runs/<data>-<recipe>.")] = None
    changes: SetOption = None
    weights: FromOption = None
    scope: Annotated[
        str | None,
        recipe_option(
            help="What is trained: full, attention, ffn, head, norm, last_norm or last:N; short for --set init.scope=…."
        ),
    ] = None
    teacher: Annotated[
        str | None,
        recipe_option(help="Distill from this network or label store; short for --set distillation.teacher=…."),
    ] = None
    labels: Annotated[
        str | None,
        recipe_option(help="Label store with token labels; short for --set token_labels.store=…."),
    ] = None
    epochs: EpochsOption = None
    seed: Annotated[int | None, recipe_option(help="Short for --set seed=N.")] = None
    seeds: Annotated[
        int | None,
        run_option(min=1, max=1000, help="Train this many seeds, starting at --seed, into OUT/seed-0, OUT/seed-1, …."),
    ] = None
    device: DeviceOption = None
    micro_batch_size: MicroBatchSizeOption = None
    workers: WorkersOption = None
    compile: Annotated[
        bool | None, hardware_option("--compile/--no-compile", help="Use torch.compile; default: on with a GPU.")
    ] = None
    shard: Annotated[bool, hardware_option("--shard", help="Shard weights over the processes of torchrun (FSDP).")] = False
    recompute: Annotated[bool, hardware_option("--recompute", help="Gradient checkpointing: less memory, more time.")] = False
    on_nan: Annotated[
        str,
        run_option(help="If the loss is NaN or Inf: stop, or skip the step and count it."),
    ] = "stop"
    bad: BadImagesOption = "skip"
    save_steps: Annotated[int, run_option(min=0, help="Also save a checkpoint every N steps; 0: by time only.")] = 0
    save_every: SaveEveryOption = None
    keep: KeepOption = None
    log_steps: Annotated[int, run_option(min=0, help="Log every N steps; 0: about 20 times per epoch.")] = 0

    def request(self) -> "TrainRequest":
        from vitrail.devices import choose_device
        from vitrail.runs.request import TrainRequest
        from vitrail.training.trainer import Options

        check_choice("--on-nan", self.on_nan, ("stop", "skip"))
        check_choice("--bad", self.bad, ("skip", "fatal"))
        defaults = Options()
        options = Options(
            sharding="full" if self.shard else "none",
            compile=self.compile if self.compile is not None else choose_device(self.device).type == "cuda",
            recompute=self.recompute,
            save_seconds=defaults.save_seconds if self.save_every is None else 60 * self.save_every,
            save_steps=self.save_steps,
            keep=self.keep or defaults.keep,
            log_steps=self.log_steps,
            on_nan="skip" if self.on_nan == "skip" else "stop",
        )
        leaves = parse_changes(self.changes, self.weights, self.epochs, self.seed, self.recipe)
        short = {"init.scope": self.scope, "distillation.teacher": self.teacher, "token_labels.store": self.labels}
        leaves |= {key: value for key, value in short.items() if value is not None}
        recipe, unreadable = open_recipe(self.recipe), cast(Any, self.bad)
        hardware = (self.device, self.micro_batch_size, self.workers)
        return TrainRequest(self.source, recipe, self.model, leaves, self.out, options, *hardware, unreadable)


@expand_options
def train(options: TrainOptions) -> None:
    """Train a model on images.

    Example: [bold]vitrail train photos/ --recipe laptop --epochs 20[/bold]

    Several GPUs: [bold]torchrun --nproc-per-node 8 -m vitrail train imagenet/ --recipe deit_small[/bold]
    """
    from vitrail.runs.train import run_request

    request = options.request()
    if options.seeds is not None:
        from vitrail.runs.seeds import choose_folder, plan_seeds

        seeds = plan_seeds(request, options.seeds)
        train_all(choose_folder(request.out, seeds), seeds)
    elif not run_request(request).finished:
        sys.exit(130)


@expand_options
def plan(options: TrainOptions) -> None:
    """Estimate memory and time of a training from a short measurement; nothing is written.

    Example: [bold]vitrail plan photos/ --recipe deit_small --recompute[/bold]

    The options are those of `vitrail train`; with --out the free disk space there is checked too.
    """
    from vitrail.runs.plan import plan as make_plan

    for message in make_plan(options.request(), options.seeds or 1):
        print(message)


def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    device: DeviceOption = None,
    workers: WorkersOption = None,
    on_nan: Annotated[str | None, typer.Option(help="stop or skip, if different from the start of the run.")] = None,
    save_every: SaveEveryOption = None,
    keep: KeepOption = None,
) -> None:
    """Continue a training that was stopped or killed.

    Example: [bold]vitrail resume runs/photos-laptop[/bold]
    """
    from vitrail.runs.seeds import has_seeds, resumed_seeds
    from vitrail.runs.train import resume as resume_run

    if on_nan is not None:
        check_choice("--on-nan", on_nan, ("stop", "skip"))
    changed: dict[str, Any] = {"on_nan": on_nan, "keep": keep}
    changed["save_seconds"] = None if save_every is None else 60 * save_every
    if has_seeds(folder):
        train_all(folder, resumed_seeds(folder, device, workers, **changed))
    elif not resume_run(folder, device=device, workers=workers, **changed).finished:
        sys.exit(130)


def train_all(folder: Path, seeds: "Seeds") -> None:
    """Train the unfinished seeds and print mean and spread of the finished ones."""
    from vitrail.runs.seeds import summaries, train_seeds
    from vitrail.runs.train import to_stderr

    try:
        if not train_seeds(folder, seeds, to_stderr):
            sys.exit(130)
    finally:
        for line in summaries(folder):
            print(line)


def replay(
    bundle: Annotated[Path, typer.Argument(help="A not-finite-… folder of a run.")],
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Repeat the step at which the loss or a gradient was NaN or Inf, and show where it started.

    Example: [bold]vitrail replay runs/photos-laptop/not-finite-000000123[/bold]
    """
    from vitrail.runs.nan_recorder import replay as compute

    recorded, now = compute(bundle, device)
    if as_json:
        print(json.dumps({"recorded": recorded, "replayed": now}, indent=1))
        return
    parts = now["micro_batches"]
    print(f"step {now['step']}, {len(parts)} micro-batch(es), losses {', '.join(str(part['loss']) for part in parts)}")
    print(f"gradient norms {', '.join(str(part['gradient_norm']) for part in parts)}")
    print(f"first output with NaN or Inf: {now['first_bad_module'] or 'none'}")
    print(f"first gradient with NaN or Inf: {now['first_bad_gradient'] or 'none'}")
    print(f"largest weights: {', '.join(f'{name} {show(value)}' for name, value in now['largest_weights'])}")
    rows = [(block["block"], show(block["largest"]), show(block["deviation"])) for block in parts[0]["blocks"]]
    print_table(("block", "largest output", "standard deviation"), rows)
    if now["bad_weights"]:
        print(f"NaN or Inf before the step: {', '.join(now['bad_weights'])}")
    if recorded is not None:
        keys = ("first_bad_module", "first_bad_gradient")
        if all(recorded[key] == now[key] for key in keys):
            print("The run recorded the same.")
        else:
            others = " and ".join(str(recorded[key]) for key in keys)
            print(f"The run recorded {others} instead: results differ between machines.")


def show(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else value


def open_recipe(name: str | None) -> Any:
    """The name of a recipe as it is, a file of an earlier run as the recipe in it."""
    if name is None or not name.endswith((".yaml", ".yml", ".json")):
        return name
    from vitrail.recipes import Recipe
    from vitrail.recipes.schema import load_yaml

    path = Path(name).expanduser()
    if path.exists() and not path.is_file():
        raise UserError(f"The recipe {name} cannot be read: it is not a file.")
    try:
        tree = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"The recipe {name} cannot be read: {error.strerror}.") from None
    except yaml.MarkedYAMLError as error:
        line = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        raise UserError(f"The recipe {name} is not YAML: {error.problem}{line}.") from None
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"The recipe {name} is not YAML: {' '.join(str(error).split())}.") from None
    return Recipe.from_dict(tree)


def parse_changes(
    changes: list[str] | None, weights: str | None, epochs: float | None, seed: int | None, recipe: str | None = None
) -> dict[str, Any]:
    """--set and its shorthands as changes of recipe keys."""
    found: dict[str, Any] = {}
    for change in changes or []:
        key, sign, value = change.partition("=")
        if not sign:
            raise UserError(f"--set takes KEY=VALUE, not {change!r}: for example --set optimizer.lr=3e-4.")
        found[key.strip()] = value.strip()
    if weights is not None:
        found["init.weights"] = weights
    if epochs is not None:
        if not 0 < epochs < math.inf:
            raise UserError(f"--epochs {epochs:g} is not a valid length: give a positive number such as 30.")
        found |= length_changes(recipe, epochs, found)
    if seed is not None:
        found["seed"] = seed
    return found


def length_changes(recipe: str | None, epochs: float, changes: dict[str, Any]) -> dict[str, Any]:
    from vitrail.recipes import Recipe, lookup
    from vitrail.recipes.duration import set_total_epochs

    opened = open_recipe(recipe)
    base = lookup(opened) if isinstance(opened, str) else opened or Recipe()  # the default recipes have no cooldown either
    return set_total_epochs(
        base.set({key: value for key, value in changes.items() if key == "schedule.cooldown"}).schedule, epochs
    )
