"""Counts the modules of the package that a command executes, and the outward hops of the pipeline.

    python benchmarks/walks.py                # vitrail train IMAGES --from vitrail_tiny, then vitrail predict
    python benchmarks/walks.py predict --list # also print the names of the modules

A module counts if at least one of its functions ran; imports do not count. A hop is a distinct pair of modules in which
`vitrail/runs/prepare.py` or `vitrail/runs/train.py` calls a function of another module of the package. The commands run on a
few generated images on the CPU. The targets are printed beside the counts.
"""

import argparse
import contextlib
import inspect
import io
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from arguments import run_program
from PIL import Image

ROOT = Path(__file__).parents[1] / "vitrail"
PIPELINE = ("runs/prepare.py", "runs/train.py")
FEW_STEPS = ("--device", "cpu", "--workers", "0", "--set", "schedule.length=2 steps")
TARGETS = {"train": (45, 25), "predict": (28, None)}  # modules, hops


class Walk:
    """Records which modules of the package run, and the calls between them."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.calls: set[tuple[str, str]] = set()
        self.names: dict[CodeType, str | None] = {}
        self.importing = 0  # depth of module bodies that are running

    def module(self, code: CodeType) -> str | None:
        """The path of a function's module below vitrail/; None for class bodies and other packages."""
        if code not in self.names:
            path = Path(code.co_filename)
            inside = code.co_flags & inspect.CO_OPTIMIZED and path.suffix == ".py" and path.is_relative_to(ROOT)
            self.names[code] = path.relative_to(ROOT).as_posix() if inside else None
        return self.names[code]

    def record(self, frame: FrameType, event: str, argument: Any) -> None:
        """A profiling function."""
        if frame.f_code.co_name == "<module>" and event in ("call", "return"):
            self.importing += 1 if event == "call" else -1
        callee = self.module(frame.f_code) if event == "call" and not self.importing else None
        if callee is None:
            return
        self.modules.add(callee)
        caller = self.module(frame.f_back.f_code) if frame.f_back else None
        if caller not in (None, callee):
            self.calls.add((caller, callee))  # type: ignore[arg-type]

    @property
    def hops(self) -> list[tuple[str, str]]:
        return sorted(call for call in self.calls if call[0] in PIPELINE)


def make_images(folder: Path) -> None:
    """Twelve images of noise in each of two classes."""
    for index in range(24):
        path = folder / ("cat", "dog")[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((48, 48), 64).convert("RGB").save(path)


def run_command(args: list[str]) -> Walk:
    """Run a command of `vitrail` in this process, without its output."""
    from vitrail.cli import main as cli

    walk, output = Walk(), io.StringIO()
    sys.argv = ["vitrail", *args]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            threading.setprofile(walk.record)
            sys.setprofile(walk.record)
            cli.main()
    except SystemExit as stop:
        if stop.code:
            raise SystemExit(f"vitrail {args[0]} failed: {output.getvalue()}") from None
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return walk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=tuple(TARGETS), help="default: both")
    parser.add_argument("--list", action="store_true", help="print the modules and hops")
    options = parser.parse_args()
    if not options.command:  # each in its own process, without caches of the other
        for name in TARGETS:
            subprocess.run([sys.executable, __file__, name, *(["--list"] if options.list else [])], check=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_images(Path(folder) / "images")
        commands = {
            "train": ["train", f"{folder}/images", "--from", "vitrail_tiny", *FEW_STEPS, "--out", f"{folder}/run"],
            "predict": ["predict", "vitrail_tiny", f"{folder}/images/cat/0.png", "--device", "cpu"],
        }
        walk, (max_modules, max_hops) = run_command(commands[options.command]), TARGETS[options.command]
        hops = f", {len(walk.hops)} outward hops (target: at most {max_hops})" if max_hops else ""
        print(f"vitrail {options.command}: {len(walk.modules)} modules (target: at most {max_modules}){hops}", flush=True)
        if options.list:
            print("\n".join(f"  {module}" for module in sorted(walk.modules)))
            print("\n".join(f"  {caller} -> {callee}" for caller, callee in walk.hops))


if __name__ == "__main__":
    run_program(main)
