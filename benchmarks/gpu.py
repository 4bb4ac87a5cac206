"""Speed on a GPU, Vitrail and timm timed in turns in one process; prints Markdown tables.

    python benchmarks/gpu.py pairs                      # throughput: ours as it trains and deploys, timm as fast as it can be
    python benchmarks/gpu.py pairs --modes eager,compiled,graph     # both in the same mode
    python benchmarks/gpu.py latency                    # inference, batch size 1
    python benchmarks/gpu.py curves --out curves        # over resolution, batch size and depth, with plots
    python benchmarks/gpu.py pairs deit_small_patch16 --modes eager --seconds 300
    python benchmarks/gpu.py pairs patchconvnet_s60 --register deit/patchconvnet_models.py     # compared with the authors' code
    python benchmarks/gpu.py pairs lvvit_s --register TokenLabeling/tlt/models/lvvit.py
    python benchmarks/gpu.py pairs deit_tiny_patch16 --device cpu --batch-size 2 --rounds 2 --modes eager --no-timm

The measurements are those of `vitrail bench`. In the mode native timm is measured with `torch.compile`, with its mode
reduce-overhead and as a captured step; speedups are those over the fastest of these. The default batch size is
256, or 128 to train a large or deep network. After `--seconds` no further group is started. Each group is saved to
`OUT/WHAT_MODEL.json` when it is finished; measurements of the same machine and settings that are already there are not repeated.
The default of `--out` is `runs/gpu`.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from arguments import positive, run_program

from vitrail.aliases import upgrade_benchmark
from vitrail.atomic_files import check_writable_folder
from vitrail.bench.candidates import import_timm, open_candidate, timm_candidates
from vitrail.bench.measurement import (
    FAILED,
    SAME,
    Group,
    Measurement,
    fastest_configurations,
    make_groups,
    measure_groups,
    speedup,
    timm_counterpart,
)
from vitrail.bench.output import describe_machine, make_document, write_json
from vitrail.bench.peak import measure_peak
from vitrail.bench.plots import draw
from vitrail.bench.settings import BATCH_SIZES, Setting, curve_depths, curve_sizes, make_settings
from vitrail.bench.timing import machine
from vitrail.devices import choose_device, use_device
from vitrail.errors import UserError

MODELS = (
    "deit_small_patch16",
    "vit_base_patch16",
    "deit3_base_patch16",
    "deit3_large_patch16",
    "cait_s24",
    "resmlp_s24",
    "vit_small_patch16_18x2",
    "vit_base_r50_s16",
    "patchconvnet_s60",
    "lvvit_s",
)
OUT = Path("runs/gpu")
BATCH_SIZE = 256
TRAIN_BATCH_SIZES = dict.fromkeys(("deit3_large_patch16", "cait_s24", "vit_small_patch16_18x2", "patchconvnet_s60"), 128)
CURVE_MODELS = ("deit_small_patch16", "deit3_base_patch16")
COLUMNS = ("model", "task, batch size", "ours, ms", "theirs, ms, fastest configuration first", "speedup (min to max)")
COLUMNS += ("memory, ours / theirs", "TFLOP/s", "lower bounds, ms: products, memory")
KEY = ("model", "project", "configuration", "task", "precision", "mode", "batch_size", "size", "depth")


def plan_settings(options: argparse.Namespace, name: str, device: torch.device) -> Iterator[tuple[Any, list[Setting]]]:
    """Titles and lists of settings to measure for a model."""
    modes, precisions, tasks = options.modes.split(","), options.precision.split(","), options.tasks.split(",")

    def batch_size_of(name: str, task: str) -> int:
        return options.batch_size or (TRAIN_BATCH_SIZES.get(name, BATCH_SIZE) if task == "train" else BATCH_SIZE)

    if options.what == "pairs":
        lists = [make_settings([task], precisions, modes, [batch_size_of(name, task)]) for task in tasks]
        yield "pairs", [setting for settings in lists for setting in settings]
    elif options.what == "latency":
        yield "latency", make_settings(["inference"], precisions, modes, [1])
    else:
        architecture, first_mode = open_candidate(name).architecture, modes[:1]
        for title, changes in (
            ("resolution", {"sizes": curve_sizes(architecture), "batch_sizes": [(options.batch_size or BATCH_SIZE) // 4 or 1]}),
            ("batch", {"batch_sizes": BATCH_SIZES[device.type]}),
            ("depth", {"depths": curve_depths(architecture), "batch_sizes": [options.batch_size or BATCH_SIZE]}),
        ):
            yield title, make_settings(tasks, precisions, first_mode, **changes)


def key(measurement: Measurement) -> tuple:
    """What identifies a measurement."""
    return tuple(getattr(measurement, name) for name in KEY)


def load_measurements(path: Path, info: dict, rounds: int) -> list[Measurement]:
    """Stored measurements of the same machine and number of rounds; failed ones are left out and so repeated."""
    try:
        document = upgrade_benchmark(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return []
    if document["machine"] != info or document["rounds"] != rounds:
        return []
    fields = Measurement.__dataclass_fields__
    stored = [{name: value for name, value in each.items() if name in fields} for each in document["measurements"]]
    measurements = [Measurement(**each) for each in stored]
    for measurement in measurements:
        measurement.size = (measurement.size[0], measurement.size[1])
    return [measurement for measurement in measurements if not measurement.error.startswith(FAILED)]


def unmeasured(groups: Sequence[Group], measurements: Sequence[Measurement]) -> list[Group]:
    done = {key(measurement) for measurement in measurements}
    return [group for group in groups if not all(key(entry.new_measurement(None)) in done for entry in group)]


def register(path: Path) -> None:
    """Run a Python file that registers models with timm; it may import files of its folder by relative imports."""
    package = ModuleType(path.resolve().parent.name)
    package.__path__ = [str(path.parent)]
    name = f"{package.__name__}.{path.stem}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UserError(f"--register {path} is not a Python file.")
    sys.modules[package.__name__] = package
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


def print_table(measurements: Sequence[Measurement], curve: bool) -> None:
    """Print a Markdown table with a row for each of our measurements."""
    print("\n| " + " | ".join(COLUMNS) + " |")
    print("| --- " * len(COLUMNS) + "|")
    for ours in (each for each in measurements if each.project == "vitrail"):
        size = [f"{ours.size[0]} pixels", f"{ours.depth} blocks"] if curve else []
        setting = ", ".join([ours.task, str(ours.batch_size), *size, *([ours.mode] if ours.mode != "native" else [])])
        other = timm_counterpart(ours, measurements)
        memory = [f"{each.memory / 1e9:.1f}" for each in (ours, other) if each is not None and each.memory]
        columns = [
            f"`{ours.model}`",
            setting,
            format_times([ours]),
            format_times(sorted(all_configurations(ours, measurements), key=lambda each: (not each.seconds, each.median))),
            format_speedup(ours, other) if other else "",
            " / ".join(memory) + " GB" if memory else "",
            f"{ours.flops / 1e12:.0f}" if ours.seconds else "",
            ", ".join(f"{1e3 * value:.2f}" for value in ours.lower_bounds.values()),
        ]
        print(f"| {' | '.join(columns)} |")


def all_configurations(ours: Measurement, measurements: Sequence[Measurement]) -> list[Measurement]:
    """timm's measurements in the setting of ours, also those that failed."""
    return [
        each
        for each in measurements
        if each.project == "timm" and all(getattr(each, name) == getattr(ours, name) for name in SAME)
    ]


def format_times(measurements: Sequence[Measurement]) -> str:
    """Milliseconds of each measurement with its configuration, or the reason why there are none."""
    times = [f"{1e3 * each.median:.4g} ±{each.spread:.1%}" if each.seconds else each.error for each in measurements]
    return "; ".join(f"{time} {each.configuration}".strip() for time, each in zip(times, measurements, strict=True))


def format_speedup(ours: Measurement, other: Measurement) -> str:
    """The ratio of the times, the median and the range over rounds."""
    ratios = [theirs / own for own, theirs in zip(ours.seconds, other.seconds, strict=False)]
    return f"{speedup(ours, other).median:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pairs", "latency", "curves"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--tasks", default="inference,train")
    parser.add_argument("--modes", default="native")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--batch-size", type=positive, default=None)
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--no-timm", action="store_true")
    parser.add_argument("--register", type=Path, action="append", default=[], help="a file that registers models with timm")
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    started = time.monotonic()
    check_writable_folder(options.out)
    device = use_device(choose_device(options.device))
    names = options.names or (CURVE_MODELS if options.what == "curves" else MODELS)
    plans = [(open_candidate(name), list(plan_settings(options, name, device))) for name in names]
    info = machine(device) | ({} if options.no_timm else {"timm": str(import_timm("pass --no-timm").__version__)})
    for path in options.register:
        register(path)
    peak = measure_peak(device, options.precision.split(","))
    print(f"{describe_machine(info)}; n = {options.rounds} interleaved rounds; median ± half the interquartile range")
    print("peak: " + ", ".join(f"{flops / 1e12:.4g} TFLOP/s {name}" for name, flops in peak.flops.items()), end=", ")
    print(f"{peak.bandwidth / 1e9:.4g} GB/s copied", flush=True)
    for candidate, plan in plans:
        others, messages = ([], []) if options.no_timm else timm_candidates([candidate])
        print(*messages, sep="\n", end="\n" if messages else "")
        for title, settings in plan:
            path = options.out / f"{title if options.what == 'curves' else options.what}_{candidate.name}.json"
            measurements = load_measurements(path, info, options.rounds)
            groups = unmeasured(make_groups([candidate], others, settings, device.type), measurements)
            while groups and time.monotonic() - started < options.seconds:
                for finished in measure_groups([groups.pop(0)], options.rounds, device, peak):
                    repeated = set(map(key, finished))
                    measurements = [each for each in measurements if key(each) not in repeated] + finished
                    write_json(path, make_document(info, peak, measurements, options.rounds, not groups))
            if not measurements:
                continue
            print_table(measurements, options.what == "curves")
            if options.what == "curves":
                path.with_suffix(".png").write_bytes(draw(fastest_configurations(measurements), title, describe_machine(info)))


if __name__ == "__main__":
    run_program(main)
