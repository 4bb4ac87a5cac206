"""vitrail tokenizer train, info."""

import os
import sys
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from vitrail.cli.console import print_json, print_problems, print_table
from vitrail.cli.options import (
    DeviceOption,
    EpochsOption,
    HardwareOptions,
    ImageSizeOption,
    JsonOption,
    MicroBatchSizeOption,
    MinutesOption,
    SetOption,
    SourceArgument,
    SplitOption,
    WorkersOption,
    everyday_option,
    expand_options,
    recipe_option,
    run_option,
)
from vitrail.cli.train import TrainOptions
from vitrail.errors import UserError
from vitrail.formatting import percent

LARGE_SIDE = 160  # pixels of the shorter side, from which images are photographs for the recipe `tokenizer`

tokenizer = typer.Typer(
    no_args_is_help=True,
    help="The tokenizer whose codes BEiT predicts: [bold]train[/bold] it on your images, [bold]info[/bold] shows its use.",
)
TokenizerArgument = Annotated[Path, typer.Argument(metavar="TOKENIZER", help="A file written by `vitrail tokenizer train`.")]


class TokenizerTrainOptions(NamedTuple):
    """Arguments of `vitrail tokenizer train`."""

    out: Annotated[Path, everyday_option(help="The tokenizer to write, a .safetensors file.")]
    source: SourceArgument = "digits"
    codes: Annotated[int | None, everyday_option(min=2, help="Number of codes; default: that of the recipe.")] = None
    epochs: EpochsOption = None
    minutes: MinutesOption = None
    image_size: ImageSizeOption = None
    recipe: Annotated[
        str | None,
        recipe_option("--recipe", help="Default: tokenizer for photographs on a GPU, otherwise tokenizer_small."),
    ] = None
    changes: SetOption = None
    run: Annotated[Path | None, run_option("--run", help="Run directory; default: runs/<data>-<recipe>.")] = None
    device: DeviceOption = None
    micro_batch_size: MicroBatchSizeOption = None
    workers: WorkersOption = None

    def choose_recipe(self) -> str:
        from vitrail.data.datasets.lookup import open_splits
        from vitrail.devices import choose_device
        from vitrail.recipes.data_defaults import median_side

        photographs = median_side(open_splits(self.source).train) > LARGE_SIDE
        return "tokenizer" if photographs and choose_device(self.device).type == "cuda" else "tokenizer_small"


@tokenizer.command()
@expand_options
def train(options: TokenizerTrainOptions) -> None:
    """Train a tokenizer on images without labels.

    Example: [bold]vitrail tokenizer train photos/ --out tok.safetensors[/bold]

    The same as `vitrail train --recipe tokenizer`, whose run directory is kept: its report shows reconstructed images.
    """
    from vitrail.atomic_files import atomic_write, check_writable
    from vitrail.runs.train import run_request

    if options.out.suffix != ".safetensors":
        raise UserError(f"--out {options.out} is the tokenizer to write: give the name of a .safetensors file.")
    check_writable(options.out)
    codes = [] if options.codes is None else [f"task_options.codes={options.codes}"]
    request = TrainOptions(
        source=options.source,
        epochs=options.epochs,
        minutes=options.minutes,
        image_size=options.image_size,
        recipe=options.recipe or options.choose_recipe(),
        changes=[*(options.changes or []), *codes],
        out=options.run,
        device=options.device,
        micro_batch_size=options.micro_batch_size,
        workers=options.workers,
    ).request()
    finished = run_request(request)
    if not finished.finished:
        sys.exit(130)
    if os.environ.get("RANK", "0") == "0":
        content = finished.artifact.read_bytes()
        atomic_write(options.out, lambda temporary: temporary.write_bytes(content))
        used, error = finished.best["codes_used"], finished.best["reconstruction"]
        print(f"{options.out}: {used:,.0f} codes are used, reconstruction error {error:.3f}")


@tokenizer.command()
@expand_options
def info(
    weights: TokenizerArgument,
    source: SourceArgument,
    split: SplitOption = None,
    *,
    hardware: HardwareOptions,
    as_json: JsonOption = False,
) -> None:
    """Print how many of the codes of a tokenizer are used on images, and how evenly.

    Exit code 1: some images could not be read; 2: none could.

    Example: [bold]vitrail tokenizer info tok.safetensors photos/[/bold]
    """
    from vitrail.data.datasets.lookup import open_source
    from vitrail.data.progress import progress
    from vitrail.devices import choose_device
    from vitrail.tasks.tokenizer import count_codes, describe_usage, open_tokenizer

    model, images = open_tokenizer(str(weights), choose_device(hardware.device)), open_source(source, split)
    with progress("tokenizing", len(images)) as advance:
        counts, problems = count_codes(model, images, hardware.batch_size, hardware.workers, advance)
    print_problems(problems)
    usage = describe_usage(counts)
    codes, patches = len(counts), int(counts.sum())
    if not patches:
        raise UserError(f"No image of {source} could be read: give other images.")
    most = counts.max().item() / patches
    height, width = model.architecture.image_size
    if as_json:
        print_json({"codes": codes, **usage, "most_frequent": most, "patches": patches, "image_size": [height, width]})
    else:
        rows = [
            ("codes", f"{codes:,}"),
            ("used", f"{usage['codes_used']:,.0f} ({percent(usage['codes_used'] / codes, 1)})"),
            ("perplexity", f"{usage['perplexity']:,.1f}"),
            ("most frequent code", f"{percent(most, 1)} of {patches:,} patches"),
            ("image size", f"{height} x {width}: {model.grid[0]} x {model.grid[1]} codes"),
        ]
        print_table(("", ""), rows)
    if problems:
        sys.exit(1)
