"""vitrail explain: maps of what predictions depend on, the papers' figures, and scores of maps against masks."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from vitrail.cli.console import print_json, print_message, print_problems, print_table, print_text
from vitrail.cli.options import DeviceOption, JsonOption, SeedOption, SplitOption, WeightsArgument, check_choice, expand_options
from vitrail.errors import UserError
from vitrail.formatting import percent, pluralize

if TYPE_CHECKING:
    from vitrail.evaluation.statistics import Summary
    from vitrail.models.vision_transformer import VisionTransformer

COLUMNS = ("weights", "method", "n", "pointing game", "IoU", "deletion", "insertion")


class MapOptions(NamedTuple):
    """Which maps are drawn."""

    method: Annotated[
        list[str] | None,
        typer.Option(
            help="A method such as rollout, gradient_attention, occlusion, or all; repeatable; default: the first three."
        ),
    ] = None
    layer: Annotated[int | None, typer.Option(help="Draw the attention of this layer, 0 being the first and -1 the last.")] = None
    head: Annotated[int | None, typer.Option(help="Draw this head of --layer only.")] = None
    classes: Annotated[
        list[str] | None,
        typer.Option(
            "--class", help="Explain this class, by name or number, instead of the predicted one; one per image if repeated."
        ),
    ] = None

    def methods(self, model: "VisionTransformer", default: Callable[["VisionTransformer"], list[str]]) -> list[str]:
        """The chosen methods, or those that `default` returns; UserError for one that the model does not have."""
        from vitrail.interpret.maps import available_methods, check_method

        chosen = list(available_methods(model) if self.method == ["all"] else self.method or [])
        if self.layer is not None:
            chosen.append(f"attention:{self.layer}" + (f":{self.head}" if self.head is not None else ""))
        elif self.head is not None:
            raise UserError("--head chooses a head of a layer: give --layer too.")
        for method in chosen:
            check_method(model, method)
        return chosen or default(model)


@expand_options
def explain(
    weights: WeightsArgument,
    images: Annotated[
        list[str] | None,
        typer.Argument(metavar="IMAGES", help="Image files, folders or patterns; with --score other weights to compare."),
    ] = None,
    *,
    maps: MapOptions,
    top: Annotated[int, typer.Option(min=1, help="Number of classes per image.")] = 5,
    out: Annotated[Path, typer.Option(help="Folder for index.html and the images as PNG files.")] = Path("report"),
    save_maps: Annotated[
        str | None, typer.Option("--maps", metavar="npy|json", help="Also write the values of every map, as .npy or .json.")
    ] = None,
    figures: Annotated[bool, typer.Option("--figures/--no-figures", help="Also draw the papers' figures of the model.")] = True,
    score: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="Print a table of scores against the masks of this data set instead of a report."),
    ] = None,
    limit: Annotated[int, typer.Option("--images", min=2, help="Images that --score draws at random.")] = 300,
    split: SplitOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    device: DeviceOption = None,
) -> None:
    """Show what predictions depend on: relevance maps of images and the papers' figures on one page.

    Example: [bold]vitrail explain runs/photos-finetune cat.jpg dog.jpg --out report[/bold]

    Which map is right? [bold]vitrail explain runs/photos-finetune --score masks/[/bold] compares all methods with masks.
    """
    if score is not None:
        score_weights([str(weights), *(images or [])], score, split, maps, limit, seed, as_json, device)
        return
    if not images:
        raise UserError("There are no images: give files, folders or patterns, or --score with a data set that has masks.")
    if save_maps is not None:
        check_choice("--maps", save_maps, ("npy", "json"))
    write_report(weights, images, maps, top, out, save_maps, figures, device)


def write_report(
    weights: Path,
    images: Sequence[str],
    options: MapOptions,
    top: int,
    out: Path,
    save_maps: str | None,
    figures: bool,
    device: str | None,
) -> None:
    """Explain images batch by batch, and write the page."""
    import torch

    from vitrail.atomic_files import check_writable_folder
    from vitrail.cli.explanation_page import ReportWriter
    from vitrail.data.progress import progress
    from vitrail.evaluation.model import decode_side, device_of, open_model
    from vitrail.evaluation.predict import open_images, read_batches
    from vitrail.interpret.attention import batch_size_for, record
    from vitrail.interpret.explanation import BATCH, check_model, class_indices, explain_recording
    from vitrail.interpret.figures import PaperFigures
    from vitrail.interpret.maps import default_methods, needs_gradients

    check_writable_folder(out)
    source, problems = open_images(images)
    print_problems(problems)
    if not len(source):
        raise UserError("No image could be read.")
    model = check_model(open_model(weights, device))
    methods = options.methods(model, default_methods)
    targets = class_indices(model, options.classes, len(source)) if options.classes else None
    paper_figures = PaperFigures() if figures else None
    report, explained = ReportWriter(out, weights, save_maps, map(source.location, range(len(source)))), 0
    with progress("explaining", len(source)) as advance:
        for batch in read_batches(source, device_of(model), decode_side(model), batch_size_for(model, BATCH)):
            print_problems(list(batch.problems.values()))
            index = batch.index.tolist()
            if not index:
                continue
            pixels = model.preprocessing.apply(batch.pixels, batch.sizes)
            recording = record(model, pixels, any(map(needs_gradients, methods)))
            chosen = None if targets is None else torch.tensor([targets[number] for number in index])
            names = [source.location(number) for number in index]
            explanations = explain_recording(recording, names, methods, chosen, top)
            if paper_figures:
                if not explained:
                    report.add_saliency(recording)
                paper_figures.add(recording)
            for row, explanation in enumerate(explanations):
                report.add_image(explanation, recording, row, top)
                explained += 1
                advance(1)
    if not explained:
        raise UserError("No image could be read.")
    if paper_figures:
        report.add_figures(paper_figures)
    page = report.write([("weights", str(weights)), ("model", model.name or "of no known name"), ("methods", ", ".join(methods))])
    print_text(f"{pluralize(explained, 'image')}, {', '.join(methods)}: {page}")


def score_weights(
    weights: Sequence[str],
    path: str,
    split: str | None,
    options: MapOptions,
    images: int,
    seed: int,
    as_json: bool,
    device: str | None,
) -> None:
    """Print the scores of every method of every checkpoint on the same images."""
    from vitrail.data.datasets.lookup import open_source, open_sources
    from vitrail.data.progress import progress
    from vitrail.evaluation.model import open_model
    from vitrail.interpret.explanation import check_classifier, check_model
    from vitrail.interpret.maps import available_methods
    from vitrail.interpret.scores import score_methods

    if options.classes:
        raise UserError("--score explains the predicted classes: remove --class.")
    sources = open_sources(path)
    name = split or next((each for each in ("test", "validation") if each in sources), next(iter(sources)))
    source = open_source(path, name)
    models = {each: check_classifier(check_model(open_model(each, device))) for each in weights}
    rows: list[Sequence[str]] = []
    content: list[dict[str, Any]] = []
    with progress("scoring", len(models) * min(images, len(source))) as advance:
        for each, model in models.items():
            methods = options.methods(model, available_methods)
            for found in score_methods(model, source, methods, images, seed, advance=advance):
                low, high = found.pointing_interval
                shown = {"pointing": f"{percent(found.pointing, 1)} ({100 * low:.1f} to {100 * high:.1f})"}
                shown |= {"iou": show(found.iou), "deletion": show(found.deletion), "insertion": show(found.insertion)}
                cells = [f"{text} *" if found.exceeds_center(measure) else text for measure, text in shown.items()]
                rows.append((each, found.method, str(found.n), *cells))
                content.append({"weights": each, "source": path, "split": name} | found.to_dict())
    if as_json:
        print_json(content)
        return
    print_table(COLUMNS, rows, ("weights", "method"))
    print_message(
        f"{path}, {name}: in percent with 95 % intervals. Pointing game: the most relevant pixel is on an object; IoU: pixels "
        "above the mean of the map and the mask; deletion (low is good) and insertion (high is good): mean probability of the "
        "predicted class while patches are hidden or shown, the most relevant first; center and random are baselines. * better "
        "than center on the same images: the 95 % interval of the mean difference excludes 0."
    )


def show(summary: "Summary") -> str:
    margin = (summary.high or summary.mean) - summary.mean
    return f"{100 * summary.mean:.1f} ± {100 * margin:.1f}"
