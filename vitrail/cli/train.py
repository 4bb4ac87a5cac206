"""vitrail train, resume, plan, replay, recipes."""

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from vitrail.errors import UserError

SourceArgument = Annotated[
    str,
    typer.Argument(help="A folder of class folders, Parquet, tar, CIFAR or IDX files, a table, hf://owner/name, pets or digits."),
]
RecipeOption = Annotated[
    str | None,
    typer.Option(
        help="A recipe's name (`vitrail recipes` lists them) or a recipe.yaml of an earlier run; if not given: laptop, small on "
        "a GPU, finetune with --from."
    ),
]


ModelOption = Annotated[str | None, typer.Option(help="Another model than the recipe's (`vitrail models` lists them).")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change any leaf of the recipe; again for more.")
]
FromOption = Annotated[
    str | None,
    typer.Option(
        "--from",
        help="Start from these weights: a checkpoint of any known kind, or vitrail_tiny, which comes with the package.",
    ),
]
ScopeOption = Annotated[
    str | None, typer.Option(help="What is trained: full, attention, ffn, head, norm or last:N; short for --set init.scope=….")
]
TeacherOption = Annotated[
    str | None,
    typer.Option(help="Learn from this network, or a store of its answers; short for --set distillation.teacher=…."),
]
LabelsOption = Annotated[
    str | None, typer.Option(help="Learn labels of patches from this store; short for --set token_labels.store=….")
]
EpochsOption = Annotated[
    float | None, typer.Option(help="How many epochs in all; a recipe's cool-down is a part of them and keeps its share.")
]
SeedOption = Annotated[int | None, typer.Option(help="Short for --set seed=N.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; a GPU if there is one.")]
MicroOption = Annotated[int | None, typer.Option(min=1, help="Images computed at a time; as many as fit if not given.")]
WorkersOption = Annotated[int | None, typer.Option(min=0, help="Processes that decode images; one per core if not given.")]
CompileOption = Annotated[bool | None, typer.Option("--compile/--no-compile", help="torch.compile; on where there is a GPU.")]
OutOption = Annotated[Path | None, typer.Option(help="The run's folder; runs/<data>-<recipe> if not given.")]
SeedsOption = Annotated[
    int | None, typer.Option(min=1, help="Train so often, from --seed on, into OUT/seed-0, OUT/seed-1, …: mean and spread.")
]
ShardOption = Annotated[bool, typer.Option("--shard", help="Shard weights over the processes of torchrun (FSDP).")]
RecomputeOption = Annotated[bool, typer.Option("--recompute", help="Less memory for more time (gradient checkpointing).")]
NanOption = Annotated[str, typer.Option(help="stop, or skip: leave out steps whose loss is not a number and count them.")]
BadOption = Annotated[str, typer.Option(help="skip or fatal: what an unreadable image is.")]
StepsOption = Annotated[int, typer.Option(min=0, help="Save the state every so many steps too, not only by the clock.")]
LogOption = Annotated[int, typer.Option(min=0, help="Log every so many steps; 0: about twenty times an epoch.")]
SAVE_EVERY = "Save the state every so many minutes; 2 if not given."
KEEP = "How many of the last states stay on the disk; 2 if not given."
EveryOption = Annotated[float | None, typer.Option(min=0, metavar="MINUTES", help=SAVE_EVERY)]
KeepOption = Annotated[int | None, typer.Option(min=1, help=KEEP)]


def train(
    source: SourceArgument = "digits",
    recipe: RecipeOption = None,
    model: ModelOption = None,
    out: OutOption = None,
    changes: SetOption = None,
    weights: FromOption = None,
    scope: ScopeOption = None,
    teacher: TeacherOption = None,
    labels: LabelsOption = None,
    epochs: EpochsOption = None,
    seed: SeedOption = None,
    seeds: SeedsOption = None,
    device: DeviceOption = None,
    micro_batch_size: MicroOption = None,
    workers: WorkersOption = None,
    compile: CompileOption = None,
    shard: ShardOption = False,
    recompute: RecomputeOption = False,
    on_nan: NanOption = "stop",
    bad: BadOption = "skip",
    save_steps: StepsOption = 0,
    save_every: EveryOption = None,
    keep: KeepOption = None,
    log_steps: LogOption = 0,
) -> None:
    """Train a model on images.

    Example: [bold]vitrail train photos/ --recipe laptop --epochs 20[/bold]

    Several GPUs: [bold]torchrun --nproc-per-node 8 -m vitrail train imagenet/ --recipe deit_small[/bold]
    """
    from vitrail.runs import train

    options = options_of(device, compile, shard, recompute, on_nan, bad, save_steps, save_every, keep, log_steps)
    leaves = leaves_of(changes, weights, epochs, seed, recipe) | guided(scope, teacher, labels)
    if seeds is not None:
        from vitrail.runs.seeds import choose_home, plan_seeds

        more = {"options": options, "micro_batch_size": micro_batch_size, "workers": workers, "bad": bad}
        wanted = plan_seeds(source, open_recipe(recipe), model, leaves, seeds, device, **more)
        train_all(choose_home(out, wanted), wanted)
        return
    done = train.train(source, open_recipe(recipe), model, out, leaves, options, device, micro_batch_size, workers, bad)
    if not done.finished:
        sys.exit(130)


def options_of(
    device: str | None,
    compile: bool | None,
    shard: bool,
    recompute: bool,
    on_nan: str,
    bad: str,
    save_steps: int,
    save_every: float | None,
    keep: int | None,
    log_steps: int,
) -> Any:
    """What was typed beside the recipe, checked."""
    from vitrail.training.distributed import choose_device
    from vitrail.training.trainer import Options

    choice("--on-nan", on_nan, ("stop", "skip"))
    choice("--bad", bad, ("skip", "fatal"))
    usual = Options()
    return Options(
        sharding="full" if shard else "none",
        compile=compile if compile is not None else choose_device(device).type == "cuda",
        recompute=recompute,
        save_seconds=usual.save_seconds if save_every is None else 60 * save_every,
        save_steps=save_steps,
        keep=keep or usual.keep,
        log_steps=log_steps,
        on_nan="skip" if on_nan == "skip" else "stop",
    )


def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    device: DeviceOption = None,
    workers: WorkersOption = None,
    on_nan: Annotated[str | None, typer.Option(help="stop or skip, if other than the training was begun with.")] = None,
    save_every: EveryOption = None,
    keep: KeepOption = None,
) -> None:
    """Go on with a training that was stopped, killed or cut off.

    Example: [bold]vitrail resume runs/photos-laptop[/bold]
    """
    from vitrail.runs import train
    from vitrail.runs.seeds import is_home, resumed

    if on_nan is not None:
        choice("--on-nan", on_nan, ("stop", "skip"))
    other: dict[str, Any] = {"on_nan": on_nan, "keep": keep}
    other["save_seconds"] = None if save_every is None else 60 * save_every
    if is_home(folder):
        train_all(folder, resumed(folder, device, workers, **other))
        return
    if not train.resume(folder, device=device, workers=workers, **other).finished:
        sys.exit(130)


def train_all(folder: Path, seeds: Any) -> None:
    """Every seed that is not finished, and what they have reached together."""
    from vitrail.runs.seeds import summaries, train_seeds
    from vitrail.runs.train import to_terminal

    try:
        if not train_seeds(folder, seeds, to_terminal):
            sys.exit(130)
    finally:
        for sentence in summaries(folder):
            print(sentence)


def plan(
    source: SourceArgument = "digits",
    recipe: RecipeOption = None,
    model: ModelOption = None,
    out: OutOption = None,
    changes: SetOption = None,
    weights: FromOption = None,
    scope: ScopeOption = None,
    teacher: TeacherOption = None,
    labels: LabelsOption = None,
    epochs: EpochsOption = None,
    seed: SeedOption = None,
    seeds: SeedsOption = None,
    device: DeviceOption = None,
    micro_batch_size: MicroOption = None,
    workers: WorkersOption = None,
    compile: CompileOption = None,
    shard: ShardOption = False,
    recompute: RecomputeOption = False,
    on_nan: NanOption = "stop",
    bad: BadOption = "skip",
    save_steps: StepsOption = 0,
    save_every: EveryOption = None,
    keep: KeepOption = None,
    log_steps: LogOption = 0,
) -> None:
    """Predict memory and time of a training from a short measurement; nothing is written.

    Example: [bold]vitrail plan photos/ --recipe deit_small --recompute[/bold]

    The arguments are those of vitrail train; with --out the room on that disk is looked at, too.
    """
    from vitrail.runs.train import foresee

    options = options_of(device, compile, shard, recompute, on_nan, bad, save_steps, save_every, keep, log_steps)
    leaves = leaves_of(changes, weights, epochs, seed, recipe) | guided(scope, teacher, labels)
    given = open_recipe(recipe)
    for sentence in foresee(source, given, model, leaves, device, micro_batch_size, options, workers, out, seeds or 1):
        print(sentence)


def replay(
    bundle: Annotated[Path, typer.Argument(help="A not-finite-… folder of a run.")],
    device: DeviceOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything that was found as JSON.")] = False,
) -> None:
    """Compute again the step at which a loss or a gradient was not a number, and show where it began.

    Example: [bold]vitrail replay runs/photos-laptop/not-finite-000000123[/bold]
    """
    from vitrail.runs.nan_recorder import replay as compute

    before, now = compute(bundle, device)
    if as_json:
        print(json.dumps({"recorded": before, "replayed": now}, indent=1))
        return
    print(
        f"step {now['step']}, {len(now['micro_batches'])} unit(s), losses {', '.join(str(micro_batch['loss']) for micro_batch in now['micro_batches'])}"
    )
    print(f"norms of the gradient {', '.join(str(micro_batch['gradient_norm']) for micro_batch in now['micro_batches'])}")
    print(f"first output that is not finite: {now['first_bad_module'] or 'none'}")
    print(f"first gradient that is not finite: {now['first_bad_gradient'] or 'none'}")
    print(
        "largest weights: "
        + ", ".join(
            f"{name} {size:.3g}" if isinstance(size, float) else f"{name} {size}" for name, size in now["largest_weights"]
        )
    )
    table = Table("block", "largest output", "deviation", box=None, header_style="bold", pad_edge=False)
    for block in now["micro_batches"][0]["blocks"]:
        table.add_row(block["block"], show(block["largest"]), show(block["deviation"]))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if now["bad_weights"]:
        print(f"not finite before the step: {', '.join(now['bad_weights'])}")
    if before is not None:
        keys = ("first_bad_module", "first_bad_gradient")
        other = " and ".join(str(before[key]) for key in keys)
        same = all(before[key] == now[key] for key in keys)
        print(
            "This is what the run recorded." if same else f"The run recorded {other} instead: another machine computes otherwise."
        )


def show(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else value


class Listing(TyperGroup):
    """`vitrail recipes 'deit3*'` is short for `vitrail recipes list 'deit3*'`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = next((word for word in args if not word.startswith("-")), None)
        if first not in self.commands and "--help" not in args:
            args = ["list", *args]
        return super().parse_args(ctx, args)


recipes = typer.Typer(cls=Listing, help="List the recipes ([bold]vitrail recipes 'deit3*'[/bold]), or show one in full.")


@recipes.command("list")
def list_all(
    pattern: Annotated[str, typer.Argument(help="A part of a name, or a shell pattern such as 'deit3*384'.")] = "*",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the recipes with paper, table row and published result; `vitrail recipes show NAME` prints one in full.

    Example: [bold]vitrail recipes 'deit3*'[/bold]
    """
    from vitrail.recipes import list_recipes, lookup

    found = {name: lookup(name) for name in list_recipes(pattern)}
    if not found:
        raise UserError(f"No recipe matches {pattern!r}; `vitrail recipes` lists all.")
    if as_json:
        print(json.dumps({name: recipe.to_dict() for name, recipe in found.items()}, indent=1))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("recipe", no_wrap=True)
    table.add_column("batch", justify="right", no_wrap=True)
    table.add_column("length", no_wrap=True)
    table.add_column("published", overflow="fold")
    previous = None
    for name, recipe in found.items():
        if previous not in (None, recipe.about.paper):
            table.add_row()
        if previous != recipe.about.paper:
            table.add_row(Text(recipe.about.paper, "bold"))
        previous = recipe.about.paper
        result = ": ".join(part for part in (recipe.about.row.split(";")[0], recipe.about.expected) if part)
        origin = f"\n    from {recipe.init.pretrained_recipe}" if recipe.init.pretrained_recipe else ""
        guided = "".join(f"\n    with {who}" for who in guides(recipe))
        table.add_row(f"  {name}{origin}{guided}", str(recipe.batch_size), recipe.schedule.length, Text(result))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if any(recipe.init.pretrained_recipe for recipe in found.values()):
        print("\nA recipe that starts from weights (from NAME) takes them with --from: those that recipe NAME gives, or others.")
    for who, sentence in {who: sentence for recipe in found.values() for who, sentence in guides(recipe).items()}.items():
        print(f"\nA recipe with {who} needs {sentence}.")


@recipes.command("show")
def show_one(
    name: Annotated[str, typer.Argument(help="A recipe's name, or a recipe.yaml of an earlier run.")],
    changes: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of YAML.")] = False,
) -> None:
    """Print the full resolved tree of a recipe, every leaf of which --set reaches.

    Example: [bold]vitrail recipes show deit_small --set optimizer.lr=3e-4[/bold]
    """
    from vitrail.recipes import lookup

    found = open_recipe(name)
    recipe = (lookup(found) if isinstance(found, str) else found).set(leaves_of(changes, None, None, None))
    tree = recipe.to_dict()
    if not as_json:
        for who, sentence in guides(recipe).items():
            print(f"# A recipe with {who} needs {sentence}.")
    print(json.dumps(tree, indent=1) if as_json else yaml.safe_dump(json.loads(json.dumps(tree)), sort_keys=False), end="")


def guides(recipe: Any) -> dict[str, str]:
    """What a recipe learns by beside the labels, and how that is given."""
    found = {}
    if recipe.distillation.kind != "none":
        found["a teacher"] = "--teacher: a network of any known kind, or a store of answers made by vitrail annotate"
    if recipe.token_labels.weight > 0 or recipe.token_labels.target != "labels":
        found["labels of patches"] = "--labels: a store of maps made by vitrail annotate --what tokens"
    return found


def open_recipe(name: str | None) -> Any:
    """A name as it is; a file of an earlier run as the recipe in it."""
    if name is None or not name.endswith((".yaml", ".yml", ".json")):
        return name
    from vitrail.recipes import Recipe

    try:
        tree = yaml.safe_load(Path(name).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"The recipe {name} cannot be read: {error.strerror}.") from None
    except RecursionError:
        raise UserError(f"The recipe {name} is nested too deeply.") from None
    except yaml.MarkedYAMLError as error:
        line = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        raise UserError(f"The recipe {name} is not YAML: {error.problem}{line}.") from None
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"The recipe {name} is not YAML: {' '.join(str(error).split())}.") from None
    return Recipe.from_dict(tree)


def guided(scope: str | None, teacher: str | None, labels: str | None) -> dict[str, str]:
    """Options that are short for one leaf each."""
    given = {"init.scope": scope, "distillation.teacher": teacher, "token_labels.store": labels}
    return {leaf: value for leaf, value in given.items() if value is not None}


def leaves_of(
    changes: list[str] | None, weights: str | None, epochs: float | None, seed: int | None, recipe: str | None = None
) -> dict[str, Any]:
    """--set and its shorthands as changes of leaves of the recipe."""
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
            raise UserError(f"--epochs {epochs:g} is no length of a training: give a positive number such as 30.")
        found |= length_of(recipe, epochs, found)
    if seed is not None:
        found["seed"] = seed
    return found


def length_of(recipe: str | None, epochs: float, changes: dict[str, Any]) -> dict[str, Any]:
    from vitrail.recipes import Recipe, lookup
    from vitrail.recipes.duration import whole_length

    found = open_recipe(recipe)
    base = lookup(found) if isinstance(found, str) else found or Recipe()  # the usual recipes have no cool-down, as this has none
    return whole_length(base.set({key: value for key, value in changes.items() if key == "schedule.cooldown"}).schedule, epochs)


def choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{option} {value} is not known; choose from {', '.join(choices)}.")
