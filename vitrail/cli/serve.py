"""vitrail serve."""

import os
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from vitrail.cli.console import print_message, print_text
from vitrail.cli.options import DeviceOption, WeightsArgument, check_choice, hardware_option
from vitrail.errors import UserError

KEY_VARIABLE = "VITRAIL_API_KEY"
MIN_KEY, MAX_KEY = 16, 1024  # characters
PRECISIONS = ("auto", "fp32", "bf16", "none")


def serve(
    weights: WeightsArgument,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free one.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to bind to; 0.0.0.0 accepts requests of other machines.")] = "127.0.0.1",
    model: Annotated[
        list[str] | None, typer.Option("--model", metavar="NAME=WEIGHTS", help="Another model, as ?model=NAME; repeatable.")
    ] = None,
    delta: Annotated[
        list[str] | None,
        typer.Option("--delta", metavar="NAME=FILE", help="A delta on WEIGHTS, whose tensors it shares in memory; repeatable."),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help=f"A file with a key that requests must send; or set {KEY_VARIABLE}. Default: no key."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="Another host name to accept in requests, such as that of a proxy; repeatable.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch/--no-watch", help="Replace models when their files change.")] = True,
    max_batch: Annotated[int, typer.Option(min=1, max=1024, help="Images per batch.")] = 32,
    max_wait: Annotated[float, typer.Option(min=0, max=1000, help="Milliseconds that a batch waits for more images.")] = 5.0,
    max_queue: Annotated[int, typer.Option(min=1, max=100_000, help="Images that wait; more are answered with 503.")] = 256,
    max_connections: Annotated[int, typer.Option(min=1, max=100_000, help="Connections at a time.")] = 512,
    max_megabytes: Annotated[int, typer.Option(min=1, max=1024, help="Maximum size of a request in MiB.")] = 32,
    max_images: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of images per request.")] = 16,
    timeout: Annotated[float, typer.Option(min=0.1, max=3600, help="Time limit of a request in seconds.")] = 30.0,
    device: DeviceOption = None,
    precision: Annotated[
        str, hardware_option(help="fp32 or bf16, optimized; auto: bf16 if the hardware supports it; none: the plain model.")
    ] = "auto",
) -> None:
    """Answer HTTP requests: /predict, /embed and /explain, a page to try them at /, their description at /docs.

    SIGHUP loads all models again. SIGTERM and Ctrl-C finish what was accepted.

    Example: [bold]vitrail serve runs/photos-finetune --port 8000[/bold]
    """
    from vitrail.deploy.model_set import DEFAULT, ModelFile, ModelSet
    from vitrail.deploy.prediction_app import Service, Settings, make_prediction_app
    from vitrail.devices import default_threads
    from vitrail.web.server import bind, is_loopback
    from vitrail.web.server import serve as serve_app
    from vitrail.web.uploads import Limits

    check_choice("--precision", precision, PRECISIONS)
    key = read_api_key(api_key_file)
    files = [ModelFile(DEFAULT, str(weights))]
    files += [ModelFile(*parse_pair("--model", text)) for text in model or []]
    files += [ModelFile(name, str(weights), path) for name, path in (parse_pair("--delta", text) for text in delta or [])]
    limits = Limits(body_bytes=max_megabytes * 2**20, files=max_images, seconds=timeout)
    settings = Settings(max_batch, max_wait / 1000, max_queue, timeout, limits=limits)
    if max_images > max_queue:
        raise UserError(f"--max-images {max_images} is larger than --max-queue {max_queue}: choose a larger queue.")
    listener = bind(host, port)
    models = ModelSet(files, device, None if precision == "none" else precision, max_batch, print_message)
    service = Service(models, settings, default_threads())
    if key is None and not is_loopback(host):
        print_message(f"Every machine that reaches {host} can send requests: set {KEY_VARIABLE} to require a key.")
    if precision == "auto" and models.find(None).precision == "bf16":
        print_message("Computing in bfloat16; --precision fp32 is slower and differs less from `vitrail predict`.")
    requested = threading.Event()
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, lambda number, frame: requested.set())
    watcher = threading.Thread(target=models.watch, args=(requested, watch), name="vitrail-watch", daemon=True)
    watcher.start()
    app = make_prediction_app(service, host, allowed_host or (), key)
    try:
        serve_app(app, listener, lambda address: print_text(f"Serving on {address}"), max_connections, timeout)
    finally:
        models.stopped.set()
        requested.set()
        watcher.join()


def parse_pair(option: str, text: str) -> tuple[str, str]:
    """The name and the path of "NAME=PATH"."""
    name, equals, path = text.partition("=")
    if not (equals and path and name.replace("-", "").replace("_", "").isalnum() and len(name) <= 64):
        raise UserError(f"{option} {text} is not NAME=PATH, with a name of letters, digits, - and _.")
    return name, path


def read_api_key(file: Path | None) -> str | None:
    """The key of a file or of the environment variable, which is removed from the environment; None without one."""
    variable = os.environ.pop(KEY_VARIABLE, None)
    if file is None and variable is None:
        return None
    origin = str(file) if file is not None else KEY_VARIABLE
    try:
        key = (file.read_text(encoding="utf-8") if file is not None else variable or "").strip()
    except (OSError, UnicodeDecodeError):
        raise UserError(f"{origin} cannot be read: give a file with one line, the key.") from None
    if not (MIN_KEY <= len(key) <= MAX_KEY and key.isascii() and key.isprintable() and " " not in key):
        raise UserError(f"The key in {origin} must have {MIN_KEY} to {MAX_KEY} letters, digits or signs, without spaces.")
    return key
