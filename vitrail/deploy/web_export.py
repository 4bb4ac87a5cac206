"""A folder that runs a model in the browser: the page, two ONNX files, and the runtime from the npm package onnxruntime-web.

The runtime is copied from a local npm package and becomes part of the folder, so that the page loads nothing from elsewhere.
"""

import json
import re
import shutil
import subprocess
import tarfile
from functools import partial
from pathlib import Path

from vitrail.atomic_files import atomic_write, describe_error
from vitrail.cache import cache_folder
from vitrail.checkpoints.export_metadata import ExportMetadata
from vitrail.errors import UserError
from vitrail.formatting import format_bytes
from vitrail.pages import write_page

PACKAGE = "onnxruntime-web"
# Files of the package for each provider; the first is the module that the page imports.
RUNTIMES = {
    "wasm": ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"),
    "webgpu": ("ort.webgpu.min.mjs", "ort-wasm-simd-threaded.asyncify.mjs", "ort-wasm-simd-threaded.asyncify.wasm"),
}
MAX_FILE = 1 << 26
NPM_TIMEOUT = 600  # seconds
SCRIPT = Path(__file__).parents[1] / "pages" / "browser.js"


def write_site(folder: Path, parts: tuple[bytes, bytes], metadata: ExportMetadata, package: Path) -> None:
    """Write the page, the model and the runtime of an npm package; any static server can serve them.

    The parts are preprocessing and network. The first runs in WebAssembly: it computes in float64, which WebGPU does not have.
    """
    available, version = open_runtime(package)
    wanted = ["wasm"] if metadata.precision == "int8" else ["webgpu", "wasm"]
    providers = [provider for provider in wanted if available.keys() >= set(RUNTIMES[provider])]
    if "wasm" not in providers:
        raise UserError(f"{package} has no dist/{RUNTIMES['wasm'][0]}: give the npm package {PACKAGE} 1.20 or later.")
    files = {f"runtime/{name}": available[name] for provider in providers for name in RUNTIMES[provider]}
    settings = {
        "class_names": metadata.class_names,
        "image_size": metadata.preprocessing.image_size,
        "runtimes": {provider: f"./runtime/{RUNTIMES[provider][0]}" for provider in providers},
    }
    files |= {"preprocessing.onnx": parts[0], "network.onnx": parts[1]}
    files |= {"model.json": json.dumps(settings).encode(), "app.js": SCRIPT.read_bytes()}
    for name, content in files.items():
        atomic_write(folder / name, partial(Path.write_bytes, data=content))
    facts = [
        ("model", metadata.name or "model"),
        ("precision", metadata.precision),
        ("size", format_bytes(sum(map(len, parts)))),
        ("comparison with Python", str(metadata.certificate)),
        ("runtime", f"{PACKAGE} {version} (MIT license)"),
    ]
    write_page(folder / "index.html", "browser.html.j2", title=metadata.name or "model", facts=facts)


def find_runtime(given: str | Path | None) -> Path:
    """The npm package: a given folder or .tgz file, the cached one, or a new one from npm."""
    if given is not None:
        path = Path(given)
        if not path.exists():
            raise UserError(f"There is no {path}: give the npm package {PACKAGE} as a folder or a .tgz file.")
        return path
    cache = cache_folder("npm")
    cached = list_packages(cache)
    return cached[-1] if cached else pack_runtime(cache)


def list_packages(folder: Path) -> list[Path]:
    """The downloaded packages, the newest version last."""
    return sorted(folder.glob(f"{PACKAGE}-*.tgz"), key=lambda path: [int(number) for number in re.findall(r"\d+", path.stem)])


def pack_runtime(cache: Path) -> Path:
    """Download the package by npm, which verifies its checksum, into the cache."""
    advice = f"run `npm pack {PACKAGE}` on a machine with npm, and give the file as --runtime"
    if shutil.which("npm") is None:
        raise UserError(f"The page needs the npm package {PACKAGE}, and npm is not installed: {advice}.")
    cache.mkdir(parents=True, exist_ok=True)
    command = ["npm", "pack", f"{PACKAGE}@1", "--ignore-scripts", "--silent", "--pack-destination", str(cache)]
    try:
        done = subprocess.run(command, cwd=cache, capture_output=True, text=True, timeout=NPM_TIMEOUT)
        problem = (done.stderr.strip().splitlines() or ["no message"])[-1] if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = type(error).__name__
    found = list_packages(cache)
    if problem or not found:
        raise UserError(f"npm could not download {PACKAGE} ({problem[:200]}): {advice}.")
    return found[-1]


def open_runtime(package: Path) -> tuple[dict[str, bytes], str]:
    """The files of the package that a page may need, by name, and its version."""
    names = {"package.json": "package.json"} | {f"dist/{name}": name for files in RUNTIMES.values() for name in files}
    try:
        if package.is_dir():
            paths = {name: package / inside for inside, name in names.items()}
            found = {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
        else:
            found = {}
            with tarfile.open(package) as archive:
                for member in archive:
                    name = names.get(member.name.removeprefix("package/"))
                    if name and member.isfile() and member.size <= MAX_FILE and (file := archive.extractfile(member)):
                        found[name] = file.read()
        description = json.loads(found.get("package.json", b"null"))
    except (OSError, tarfile.TarError, ValueError, EOFError) as error:
        raise UserError(f"{package} cannot be read ({describe_error(error)}): give the npm package {PACKAGE}.") from None
    if not isinstance(description, dict) or description.get("name") != PACKAGE:
        raise UserError(f"{package} is not the npm package {PACKAGE}.")
    return found, str(description.get("version"))
