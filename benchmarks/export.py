"""Exported models beside the model in this package: differences on real images, and time on a CPU; prints Markdown tables.

    python benchmarks/export.py parity --out parity.json          # all families and formats, 200 photographs of unseen sizes
    python benchmarks/export.py parity vitrail_tiny deit_tiny_patch16 --formats onnx-fp32,onnx-int8,web --depth 4
    python benchmarks/export.py latency --out latency.json        # onnxruntime, OpenVINO (if installed) and vitrail.optimize
    python benchmarks/export.py latency vitrail_tiny --batch-sizes 1 --rounds 3

The photographs are the bundled pets, each cut to another size. Only `vitrail_tiny` has trained weights. The others have random
ones, residual scales of 0.5, and a classifier of the twelve breeds that is fitted to their features by ridge regression, so that
a top-1 prediction means something. `--depth` limits the number of blocks. The formats web and webgpu need npm (or its cached
onnxruntime-web) and Chromium with playwright; aoti needs a C++ compiler.

Times are medians over rounds in turns, with half the interquartile range, of the network alone (`--input tensor`).
"""

import argparse
import base64
import functools
import http.server
import io
import json
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from arguments import check_file, positive, run_program
from PIL import Image
from torch import Tensor

import vitrail
from vitrail.atomic_files import atomic_write
from vitrail.bench.timing import choose_repeats, machine, summarize, time_interleaved, time_run
from vitrail.data.datasets.pets import open_pets
from vitrail.data.decode import decode
from vitrail.deploy.onnx_export import split
from vitrail.deploy.web_export import find_runtime, write_site
from vitrail.errors import UserError
from vitrail.models.preprocessing import pad_images
from vitrail.models.registry import build, lookup
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.teachers.onnx import read_metadata

FAMILIES = {
    "vitrail_tiny": "bundled weights",
    "deit_tiny_patch16": "attention",
    "deit_tiny_distilled_patch16": "distilled heads",
    "cait_xxs24": "talking heads, class-attention",
    "resmlp_s12": "ResMLP",
    "patchconvnet_s60": "PatchConvNet",
    "vit_tiny_r_s16_p8": "hybrid",
    "lvvit_t": "LV-ViT, dense head",
    "resnet50": "convnet",
}
FORMATS = ("onnx-fp32", "onnx-fp16", "onnx-int8", "torch-export", "aoti", "web", "webgpu")
# The page runs the network in WebGPU, by Chromium's software adapter where there is no GPU.
WEBGPU = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan", "--use-vulkan=swiftshader")
CPU = torch.device("cpu")
Run = Callable[[np.ndarray], np.ndarray]  # uint8 [H, W, 3] to outputs [C]


def photographs(split: str, count: int) -> list[np.ndarray]:
    """Photographs, uint8 [H, W, 3], cut to many sizes."""
    source = open_pets()[split]
    pixels = []
    for index in np.linspace(0, len(source) - 1, min(count, len(source))).round().astype(int).tolist():
        photo = decode(source.encoded(index))
        pixels.append(np.ascontiguousarray(photo[: 128 - 7 * (index % 9), : 128 - 5 * (index % 11)]))
    return pixels


def to_png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def make_model(name: str, depth: int | None, size: int) -> VisionTransformer:
    """Bundled weights, or a random network with a classifier of the breeds."""
    if name == "vitrail_tiny":
        return vitrail.load(name)
    torch.manual_seed(0)
    architecture = lookup(name)[1].replace(classes=12, image_size=(size, size))
    if depth is not None:
        architecture = architecture.replace(depth=min(architecture.depth, depth))
    if architecture.residual not in ("plain", "constant"):
        architecture = architecture.replace(layerscale_init=0.5)
    model = build(architecture, name).eval()
    source = open_pets()["train"]
    labels = source.label.values  # type: ignore[union-attr]
    images = model.preprocessing.apply(*pad_images([decode(source.encoded(index)) for index in range(len(source))]))
    with torch.inference_mode():
        features = torch.cat([model.features(batch).pooled for batch in images.split(32)]).double()
    mean = features.mean(0)
    centered = features - mean
    ridge = 0.1 * centered.square().sum() / features.shape[1] * torch.eye(features.shape[1], dtype=torch.float64)
    targets = 10 * torch.nn.functional.one_hot(torch.from_numpy(labels), 12).double()
    weight = torch.linalg.solve(centered.T @ centered + ridge, centered.T @ targets).T
    with torch.no_grad():
        for head in (model.head, model.head_distillation):
            if isinstance(head, torch.nn.Linear):
                head.weight.copy_(weight)
                head.bias.copy_(-weight @ mean)
    return model


@contextmanager
def open_export(model: VisionTransformer, format: str, folder: Path, runtime: Path | None) -> Iterator[tuple[Run, int]]:
    """A function that runs the exported model, and the size of the file (of web: of the model)."""
    kind, _, precision = format.partition("-")
    if kind == "onnx":
        import onnxruntime

        images = "pets" if precision == "int8" else None  # its training split, for the calibration
        result = vitrail.export(model, folder / f"{precision}.onnx", precision=precision, images=images)
        session = onnxruntime.InferenceSession(str(result.path), providers=["CPUExecutionProvider"])
        yield lambda pixels: session.run(None, {"images": pixels[None]})[0][0], result.bytes
    elif format in ("web", "webgpu"):
        site = folder / "site"
        if (folder / "fp32.onnx").exists():  # it is the same file
            metadata = read_metadata(onnx.load(folder / "fp32.onnx"), folder)
            assert metadata is not None
            write_site(site, split((folder / "fp32.onnx").read_bytes()), metadata, find_runtime(runtime))
        else:
            vitrail.export(model, site, to="web", runtime=runtime, overwrite=True)
        with open_browser(site, webgpu=format == "webgpu") as run:
            yield run, sum(file.stat().st_size for file in site.glob("*.onnx"))
    else:
        result = vitrail.export(model, folder / f"{format}.pt2", to=format)
        path = str(result.path)
        call = torch._inductor.aoti_load_package(path) if format == "aoti" else torch.export.load(path).module()
        with torch.inference_mode():
            yield lambda pixels: call(torch.from_numpy(pixels)[None])[0].numpy(), result.bytes


@contextmanager
def open_browser(folder: Path, webgpu: bool) -> Iterator[Run]:
    """Log-probabilities computed by the page of a folder, in Chromium without a network."""
    from playwright.sync_api import sync_playwright

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None:
            pass

    script = """async (encoded) => {
        const { predict } = await import("./app.js");
        return predict(new Blob([Uint8Array.from(atob(encoded), (each) => each.charCodeAt(0))]));
    }"""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with sync_playwright() as driver:
            flags = ["--no-sandbox", *(WEBGPU if webgpu else ())]
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
            page = browser.new_page()
            page.goto(f"http://127.0.0.1:{server.server_port}/")
            page.locator("#status", has_text=re.compile("Ready|could not")).wait_for(timeout=120_000)
            status, provider = page.locator("#status").inner_text(), "webgpu" if webgpu else "wasm"
            if status != f"Ready ({provider}).":
                raise UserError(f"The page does not run in {provider}: {status}")

            def run(pixels: np.ndarray) -> np.ndarray:
                classes = page.evaluate(script, base64.b64encode(to_png(pixels)).decode())
                found = {each["index"]: each["probability"] for each in classes}
                return np.log(np.array([found[index] for index in range(len(found))]).clip(1e-30))

            yield run
            browser.close()
    finally:
        server.shutdown()
        server.server_close()


def measure_parity(
    name: str, model: VisionTransformer, format: str, pixels: list[np.ndarray], folder: Path, runtime: Path | None
) -> dict[str, Any]:
    """Differences of the outputs on all photographs; the page returns probabilities, so log-probabilities are compared there."""
    with torch.inference_mode():
        expected = torch.cat([model(model.preprocessing.apply(*pad_images([each]))) for each in pixels])
    with open_export(model, format, folder, runtime) as (run, size):
        actual = torch.from_numpy(np.stack([run(each) for each in pixels])).float()
    if format in ("web", "webgpu"):
        expected = expected.log_softmax(1)
    return {
        "model": name,
        "format": format,
        "bytes": size,
        "images": len(pixels),
        "difference": float((actual - expected).abs().max()),
        "largest": float(expected.abs().max()),
        "agreement": float((actual.argmax(1) == expected.argmax(1)).float().mean()),
    }


def parity(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    pixels = photographs("test", arguments.images)
    rows: list[dict[str, Any]] = []
    for name in arguments.models or FAMILIES:
        model = make_model(name, arguments.depth, arguments.size)
        with tempfile.TemporaryDirectory() as folder:
            for format in arguments.formats.split(","):
                try:
                    rows.append(measure_parity(name, model, format, pixels, Path(folder), arguments.runtime))
                except UserError as error:
                    rows.append({"model": name, "format": format, "error": str(error)})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                save(arguments, rows)
    print(f"\n{len(pixels)} photographs of {len({each.shape for each in pixels})} sizes; {describe_machine()}\n")
    print("| model | format | MB | largest difference | of largest output | same top-1 |\n| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        if "error" in row:
            print(f"| {row['model']} | {row['format']} | | {row['error']} | | |")
        else:
            numbers = (
                f"{row['bytes'] / 1e6:.1f} | {row['difference']:.1e} | {row['largest']:.1f} | {100 * row['agreement']:.1f} %"
            )
            print(f"| {row['model']} | {row['format']} | {numbers} |")
    return rows


def candidates(model: VisionTransformer, images: Tensor, folder: Path, threads: int) -> dict[str, Callable[[], object]]:
    """Functions that compute the logits of a batch, by name."""
    import onnxruntime

    array = images.numpy()
    example = model.preprocessing.apply(*pad_images(photographs("validation", 32)))
    runs: dict[str, Callable[[], object]] = {"torch, eager fp32": lambda: model(images)}
    for precision in ("fp32", "int8"):
        fast = vitrail.optimize(model, precision=precision, example=example if precision == "int8" else None)
        runs[f"vitrail.optimize {precision}"] = functools.partial(fast, images)
        path = folder / f"{precision}.onnx"
        if not path.exists():
            vitrail.export(model, path, input="tensor", precision=precision)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        runs[f"onnxruntime {precision}"] = functools.partial(session.run, None, {"normalized": array})
        if find_spec("openvino"):
            import openvino

            settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
            compiled = openvino.Core().compile_model(str(path), "CPU", settings)
            runs[f"OpenVINO {precision}"] = functools.partial(compiled.create_infer_request().infer, [array])
    return runs


def latency(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name in arguments.models or ["vitrail_tiny", "deit_tiny_patch16"]:
        model = make_model(name, arguments.depth, arguments.size)
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            for batch_size in map(int, arguments.batch_sizes.split(",")):
                images = torch.randn(batch_size, 3, *model.architecture.image_size)
                runs = candidates(model, images, Path(folder), torch.get_num_threads())
                functions = list(runs.values())
                repeats = [choose_repeats(min(time_run(run, CPU) for _ in range(3))) for run in functions]
                times: list[list[float]] = [[] for _ in functions]
                time_interleaved(functions, repeats, times, arguments.rounds, CPU)
                for label, seconds in zip(runs, times, strict=True):
                    summary = summarize(seconds)
                    rows.append({"model": name, "batch_size": batch_size, "candidate": label, **summary._asdict()})
                save(arguments, rows)
    print(f"\n{describe_machine()}, {torch.get_num_threads()} threads; n = {arguments.rounds} rounds in turns\n")
    print("| model | batch size | | ms | images/s |\n| --- | --- | --- | --- | --- |")
    for row in rows:
        rate = row["batch_size"] / row["median"]
        numbers = f"{1e3 * row['median']:.2f} ±{100 * row['spread']:.1f} % | {rate:,.0f}"
        print(f"| {row['model']} | {row['batch_size']} | {row['candidate']} | {numbers} |")
    return rows


def describe_machine() -> str:
    info = machine(CPU)
    versions = [f"{name} {__import__(name).__version__}" for name in ("onnxruntime", "openvino") if find_spec(name)]
    return f"{info['device']}, {info['cores']} cores, torch {info['torch']}, {', '.join(versions)}"


def save(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    if arguments.out is not None:
        content = json.dumps({"machine": machine(CPU), "rows": rows}, indent=1)
        atomic_write(arguments.out, lambda temporary: temporary.write_text(content, encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("parity", "latency"))
    parser.add_argument("models", nargs="*", help="default: one of each family, or vitrail_tiny and deit_tiny_patch16")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--images", type=positive, default=200)
    parser.add_argument("--depth", type=positive, help="largest number of blocks; default: all")
    parser.add_argument("--size", type=positive, default=128, help="image size of the models with random weights")
    parser.add_argument("--batch-sizes", default="1,8")
    parser.add_argument("--rounds", type=positive, default=10)
    parser.add_argument("--runtime", type=Path, help="of web: the npm package onnxruntime-web")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    for format in arguments.formats.split(","):
        if format not in FORMATS:
            raise UserError(f"The format {format} is not known: choose from {', '.join(FORMATS)}.")
    check_file(arguments.out)
    (parity if arguments.what == "parity" else latency)(arguments)


if __name__ == "__main__":
    run_program(main)
