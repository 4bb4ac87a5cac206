"""vitrail predict."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitrail.errors import UserError

if TYPE_CHECKING:
    from vitrail.evaluation.predicting import Prediction


def predict(
    weights: Annotated[Path, typer.Argument(metavar="WEIGHTS", help="A checkpoint of any known kind, or the folder of a run.")],
    images: Annotated[
        list[str],
        typer.Argument(metavar="IMAGES", help="Picture files and folders of them; digits for some of the built-in ones."),
    ],
    top: Annotated[int, typer.Option(min=1, help="How many classes to name.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON per picture instead of a table.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; a GPU if there is one.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Pictures computed at a time.")] = 32,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes that decode pictures; as useful if not given.")] = None,
) -> None:
    """Say what is in pictures: the likeliest classes of each. Exit code 1: some could not be read; 2: none could.

    Example: [bold]vitrail predict runs/photos-laptop cat.jpg holidays/[/bold]
    """
    from vitrail.data.loader import Problem
    from vitrail.data.progress import progress
    from vitrail.evaluation.predicting import open_pictures
    from vitrail.evaluation.predicting import predict as answers
    from vitrail.training.devices import choose_device
    from vitrail.weights import load

    file = weights / "best.safetensors" if (weights / "run.json").is_file() else weights
    model = load(file, device=choose_device(device))
    source, problems = open_pictures(images)
    for problem in problems:
        complain(problem)
    read, bad = [], len(problems)
    with progress("predicting", len(source)) as advance:
        for answer in answers(model, source, top, batch, workers):
            advance(1)
            if isinstance(answer, Problem):
                complain(answer)
                bad += 1
                continue
            read.append(answer)
            if as_json:
                classes = [guess._asdict() for guess in answer.guesses]
                known = {"truth": answer.truth} if answer.truth is not None else {}
                print(json.dumps({"picture": answer.where, "classes": classes} | known, ensure_ascii=False), flush=True)
    if not read:
        raise UserError("No picture could be read.")
    if not as_json:
        show(read)
    if bad:
        sys.exit(1)


def show(predictions: "list[Prediction]") -> None:
    known = any(each.truth is not None for each in predictions)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("picture", "looks like", "", "or", *(["is"] if known else [])):
        table.add_column(column, justify="left" if column else "right", overflow="fold")
    for each in predictions:
        first, *others = each.guesses
        rest = ", ".join(f"{guess.name} {guess.probability:.1%}" for guess in others)
        cells = (each.where, first.name, f"{first.probability:.1%}", rest, *([each.truth or ""] if known else []))
        table.add_row(*map(Text, cells))  # as text: brackets in names are not markup
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def complain(problem: tuple[str, str]) -> None:
    print("{}: {}".format(*problem), file=sys.stderr)
