"""vitrail push."""

import json
from pathlib import Path
from typing import Annotated

import typer

from vitrail.cli.console import print_text
from vitrail.cli.options import WeightsArgument


def push(
    weights: WeightsArgument,
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The repository, which is created if needed.")],
    license: Annotated[
        str | None, typer.Option(help="Identifier of the license, such as apache-2.0, for the model card.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write the files to this folder and upload nothing.")] = None,
) -> None:
    """Upload a model to the Hugging Face hub, with a model card that is written from the weights.

    The token is that of `hf auth login` or HF_TOKEN. Anybody can then use hf://OWNER/NAME as the name of the weights.

    Example: [bold]vitrail push runs/photos-finetune me/photos --license apache-2.0 --out repository[/bold]
    """
    from vitrail.checkpoints import load
    from vitrail.checkpoints.hub_upload import check_names
    from vitrail.checkpoints.hub_upload import push as push_model
    from vitrail.checkpoints.model_io import find_weights
    from vitrail.runs.run_json import read_run_info

    check_names(repository, license)
    model = load(find_weights(weights))
    if "data" not in model.notes and (weights / "run.json").is_file():
        data = read_run_info(weights)["data"]
        model.notes["data"] = json.dumps({key: data[key] for key in ("name", "train", "validation") if key in data})
    address = push_model(model, repository, private, license, out)
    if out is not None:
        print_text(f"{out}: the files of {repository}; nothing was uploaded")
    else:
        print_text(f"uploaded; load it with vitrail.load({address!r}), or give {address} to any command")
