"""vitrail train, plan, resume, replay."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import typer

from vitrail.cli.console import print_table
from vitrail.cli.options import (
    DeviceOption,
    EpochsOption,
    FromOption,
    ImageSizeOption,
    JsonOption,
    KeepOption,
    MicroBatchSizeOption,
    MinutesOption,
    ModelOption,
    SaveEveryOption,
    SetOption,
    SourceArgument,
    WorkersOption,
    check_choice,
    everyday_option,
    expand_options,
    hardware_option,
    parse_size,
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
    from_: FromOption = None
    epochs: EpochsOption = None
    minutes: MinutesOption = None
    lr: Annotated[float | None, everyday_option(help="Learning rate, at the batch size that the recipe states it for.")] = None
    batch_size: Annotated[int | None, everyday_option(help="Images per optimizer step, over all devices.")] = None
    image_size: ImageSizeOption = None
    weight_decay: Annotated[float | None, everyday_option(help="Weight decay of the optimizer.")] = None
    patience: Annotated[
        int | None, everyday_option(help="Stop after N validations without better weights; 0: never (default).")
    ] = None
    scope: Annotated[
        str | None, everyday_option(help="What is trained: full, attention, ffn, head, norm, last_norm or last:N.")
    ] = None
    teacher: Annotated[str | None, everyday_option(help="Distill from this network or label store.")] = None
    labels: Annotated[str | None, everyday_option(help="Label store with token labels.")] = None
    label: Annotated[
        str | None, everyday_option(help="Column of the labels, such as coarse_label; none: one class for all images.")
    ] = None
    map: Annotated[str | None, everyday_option(help="CSV or JSON file with a coarser class for every class.")] = None
    tokenizer: Annotated[
        str | None, everyday_option(help="Tokenizer whose codes BEiT predicts, made by `vitrail tokenizer train`.")
    ] = None
    seed: Annotated[int | None, everyday_option(help="Seed of all random numbers.")] = None
    recipe: Annotated[
        str | None,
        recipe_option(
            "--recipe",
            help="The name of a recipe (see `vitrail recipes`), or a recipe.yaml of an earlier run; default: finetune with "
            "--from and for photographs, otherwise laptop on a CPU and small on a GPU.",
        ),
    ] = None
    model: ModelOption = None
    changes: SetOption = None
    out: Annotated[Path | None, run_option(help="Run directory; default: runs/<data>-<recipe>.")] = None
    seeds: Annotated[
        int | None,
        run_option(min=1, max=1000, help="Train this many seeds, starting at --seed, into OUT/seed-0, OUT/seed-1, …."),
    ] = None
    folds: Annotated[
        int | None,
        run_option(
            min=2,
            max=1000,
            help="Cross-validation: train this many times, each time validating on another part of the images, into OUT/seed-0, "
            "OUT/seed-1, ….",
        ),
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
    unreadable: Annotated[
        str, run_option("--unreadable", "--bad", help="Unreadable images: skip them, or fatal (stop with an error).")
    ] = "skip"
    save_steps: Annotated[int, run_option(min=0, help="Also save a checkpoint every N steps; 0: by time only.")] = 0
    save_every: SaveEveryOption = None
    keep: KeepOption = None
    log_steps: Annotated[int, run_option(min=0, help="Log every N steps; 0: about 20 times per epoch.")] = 0

    def request(self) -> "TrainRequest":
        from vitrail.devices import choose_device
        from vitrail.recipes.arguments import RECIPE_KEYS, open_recipe, recipe_changes
        from vitrail.runs.request import TrainRequest
        from vitrail.training.trainer import Options

        check_choice("--on-nan", self.on_nan, ("stop", "skip"))
        check_choice("--unreadable", self.unreadable, ("skip", "fatal"))
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
        if self.folds is not None and self.seeds is not None:
            raise UserError("--folds trains once per part of the images, --seeds once per seed: give one of them.")
        recipe = open_recipe(self.recipe)
        changes = parse_set(self.changes) | ({"data.folds": self.folds} if self.folds else {})
        everyday = {name: getattr(self, name) for name in RECIPE_KEYS} | {"image_size": parse_size(self.image_size)}
        return TrainRequest(
            self.source,
            recipe,
            self.model,
            recipe_changes(recipe, changes, everyday),
            self.out,
            options,
            self.device,
            self.micro_batch_size,
            self.workers,
            cast(Any, self.unreadable),
            minutes=self.minutes,
        )


@expand_options
def train(options: TrainOptions) -> None:
    """Train a model on images.

    Example: [bold]vitrail train photos/ --minutes 10[/bold]

    Several GPUs: [bold]torchrun --nproc-per-node 8 -m vitrail train imagenet/ --recipe deit_small[/bold]
    """
    from vitrail.runs.train import run_request

    request = options.request()
    trainings = options.folds or options.seeds
    if trainings is not None:
        from vitrail.runs.seeds import choose_folder, plan_seeds

        seeds = plan_seeds(request, trainings)
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

    for message in make_plan(options.request(), options.folds or options.seeds or 1):
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

    Example: [bold]vitrail resume runs/photos-finetune[/bold]
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

    Example: [bold]vitrail replay runs/photos-finetune/not-finite-000000123[/bold]
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


def parse_set(changes: list[str] | None) -> dict[str, str]:
    """The values of --set by key."""
    parsed: dict[str, str] = {}
    for change in changes or []:
        key, sign, value = change.partition("=")
        if not sign:
            raise UserError(f"--set takes KEY=VALUE, not {change!r}: for example --set optimizer.lr=3e-4.")
        parsed[key.strip()] = value.strip()
    return parsed
