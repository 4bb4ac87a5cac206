"""vitrail export."""

from pathlib import Path
from typing import Annotated

import typer

from vitrail.cli.console import print_json, print_text
from vitrail.cli.options import JsonOption, WeightsArgument, parse_size
from vitrail.formatting import format_bytes


def export(
    weights: WeightsArgument,
    out: Annotated[Path, typer.Option(help="The file to write: m.onnx or m.pt2; with --to web a folder.")],
    to: Annotated[str, typer.Option(help="onnx, torch-export, aoti (compiled for C++) or web (a page).")] = "onnx",
    input: Annotated[
        str,
        typer.Option(help="image: uint8 images of any size, preprocessing inside; tensor: normalized float32 images."),
    ] = "image",
    precision: Annotated[str, typer.Option(help="fp32, fp16 or int8.")] = "fp32",
    dynamic_size: Annotated[
        bool, typer.Option("--dynamic-size", help="With --input tensor: any multiple of the patch size as height and width.")
    ] = False,
    features: Annotated[bool, typer.Option("--features", help="Features instead of logits.")] = False,
    images: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Your images, to calibrate int8 and to compare with the model; default: the bundled photographs of pets.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Of torch-export and aoti: cpu or cuda.")] = "cpu",
    runtime: Annotated[
        Path | None, typer.Option(help="Of web: the npm package onnxruntime-web, a folder or .tgz file; default: from npm.")
    ] = None,
    image_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Another image size of the network: 384, or 384x512 (height x width).")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing OUT.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a model as a file that other programs run: ONNX, torch.export, AOTInductor, or a page for a browser.

    The file contains preprocessing and class names, and the result of its comparison with the model.

    Example: [bold]vitrail export runs/photos-finetune --to onnx --out photos.onnx[/bold]
    """
    from vitrail.checkpoints.bundled import announce_bundled
    from vitrail.deploy.export import export as export_model

    announce_bundled(weights)
    size = parse_size(image_size)
    result = export_model(weights, out, to, input, precision, dynamic_size, features, images, device, runtime, overwrite, size)
    if as_json:
        print_json({"path": str(result.path), "bytes": result.bytes, **vars(result.certificate)})
        return
    print_text(f"{result.path}  {format_bytes(result.bytes)}, {result.metadata.task}, {precision}")
    print_text(f"compared with the model: {result.certificate}")
    if precision == "int8" and images is None:
        print_text("int8 ranges come from the bundled photographs: give --images with your own for better ones.", "dim")
    if to == "web":
        print_text(f"open it with: python -m http.server --directory {result.path}", "dim")
