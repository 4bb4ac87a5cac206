"""Speed on a GPU, Vitrail beside timm in one process and in turns; prints tables in Markdown.

    python benchmarks/gpu.py pairs --modes own          # throughput: each as its own project trains and ships
    python benchmarks/gpu.py pairs                      # the same in every mode
    python benchmarks/gpu.py latency                    # inference, batch 1
    python benchmarks/gpu.py curves --out curves        # over resolution, batch and depth, with images
    python benchmarks/gpu.py pairs deit_small_patch16 --modes eager --seconds 300
    python benchmarks/gpu.py pairs patchconvnet_s60 --register deit/patchconvnet_models.py    # beside the authors' code
    python benchmarks/gpu.py pairs deit_tiny_patch16 --device cpu --batch 2 --rounds 2 --modes eager --no-timm

What is measured is what `vitrail bench` measures. Without `--batch` it is 256 images, or 128 to train a large or deep network.
After `--seconds` no further heat is begun. Every heat is kept in `OUT/WHAT_MODEL.json` as soon as it is over, and what is there
already from the same machine and settings is not measured again. Without `--out` it is the folder `runs/gpu`.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from asking import positive, run_program

from vitrail.atomic_files import check_folder
from vitrail.bench.candidates import import_timm, open_contender, opponents
from vitrail.bench.measurement import FAILED, Cell, Heat, beside, make_heats, run_heats, times_as_fast
from vitrail.bench.output import content, headline, write_json
from vitrail.bench.peak import measure_ceiling
from vitrail.bench.plots import draw
from vitrail.bench.settings import BATCHES, Setting, all_settings, curve_depths, curve_sizes
from vitrail.bench.timing import machine
from vitrail.errors import UserError
from vitrail.training.distributed import begin, choose_device

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
BATCH = 256
TRAINED = dict.fromkeys(("deit3_large_patch16", "cait_s24", "vit_small_patch16_18x2", "patchconvnet_s60"), 128)
CURVED = ("deit_small_patch16", "deit3_base_patch16")
COLUMNS = ("model", "by", "task", "mode", "batch", "size", "depth", "images/s", "ms", "floors, ms", "TFLOP/s", "of ceiling")
COLUMNS += ("memory", "compiling", "times as fast as timm")
KEY = ("model", "project", "task", "precision", "mode", "batch", "size", "depth")


def wanted(options: argparse.Namespace, name: str, device: torch.device) -> Iterator[tuple[Any, list[Setting]]]:
    """What to measure of a model: a title for each list of settings."""
    modes, precisions, tasks = options.modes.split(","), options.precision.split(","), options.tasks.split(",")

    def batch_of(name: str, task: str) -> int:
        return options.batch or (TRAINED.get(name, BATCH) if task == "train" else BATCH)

    if options.what == "pairs":
        yield "pairs", [setting for task in tasks for setting in all_settings([task], precisions, modes, [batch_of(name, task)])]
    elif options.what == "latency":
        yield "latency", all_settings(["inference"], precisions, modes, [1])
    else:
        architecture, few = open_contender(name).architecture, modes[:1]
        for title, changes in (
            ("resolution", {"sizes": curve_sizes(architecture), "batches": [(options.batch or BATCH) // 4 or 1]}),
            ("batch", {"batches": BATCHES[device.type]}),
            ("depth", {"depths": curve_depths(architecture), "batches": [options.batch or BATCH]}),
        ):
            yield title, all_settings(tasks, precisions, few, **changes)


def key(cell: Cell | dict) -> str:
    found = cell if isinstance(cell, dict) else cell.to_dict()
    return json.dumps([found[name] for name in KEY])


def read_back(path: Path, facts: dict, rounds: int) -> list[Cell]:
    """Cells that the same machine has measured before, in as many rounds; what failed is tried again."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if found["machine"] != facts or found["rounds"] != rounds:
        return []
    fields = Cell.__dataclass_fields__
    cells = [Cell(**{name: value for name, value in each.items() if name in fields}) for each in found["cells"]]
    for cell in cells:
        cell.size = (cell.size[0], cell.size[1])
    return [cell for cell in cells if not cell.trouble.startswith(FAILED)]


def unmeasured(heats: Sequence[Heat], cells: Sequence[Cell]) -> list[Heat]:
    known = {key(cell) for cell in cells}
    return [heat for heat in heats if not all(key(entry.cell(None)) in known for entry in heat)]


def register(path: Path) -> None:
    """Run a file of somebody's models, which tells timm about them."""
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UserError(f"--register {path} is not a file of Python.")
    sys.modules[path.stem] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


def print_table(cells: Sequence[Cell]) -> None:
    """In Markdown, ready for a page of the documentation."""
    print("\n| " + " | ".join(COLUMNS) + " |")
    print("| --- " * len(COLUMNS) + "|")
    for cell in cells:
        start = f"| `{cell.model}` | {cell.project} | {cell.task} {cell.precision} | {cell.mode} | {cell.batch} "
        start += f"| {cell.size[0]} | {cell.depth} |"
        if not cell.seconds:
            print(f"{start} {cell.trouble} | | | | | | | |")
            continue
        other = beside(cell, cells)
        ratio = times_as_fast(cell, other) if other else None
        print(
            f"{start} {cell.rate:,.0f} ±{cell.spread:.1%} | {1e3 * cell.median:.2f} "
            f"| {', '.join(f'{name} {1e3 * value:.2f}' for name, value in cell.floors.items())} | {cell.operations / 1e12:.1f} "
            f"| {f'{cell.share:.0%}' if cell.share else ''} | {f'{cell.memory / 1e9:.2f} GB' if cell.memory else ''} "
            f"| {f'{cell.compile_seconds:.0f} s' if cell.compile_seconds is not None else ''} "
            f"| {f'{ratio.median:.3f} ±{ratio.spread:.1%}' if ratio else ''} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pairs", "latency", "curves"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--tasks", default="inference,train")
    parser.add_argument("--modes", default="eager,compiled,graph")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--batch", type=positive, default=None)
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--no-timm", action="store_true")
    parser.add_argument("--register", type=Path, action="append", default=[], help="a file that registers models with timm")
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    begun = time.monotonic()
    check_folder(options.out)
    device = begin(choose_device(options.device))
    names = options.names or (CURVED if options.what == "curves" else MODELS)
    plans = [(open_contender(name), list(wanted(options, name, device))) for name in names]
    facts = machine(device) | ({} if options.no_timm else {"timm": str(import_timm("give --no-timm").__version__)})
    for path in options.register:
        register(path)
    ceiling = measure_ceiling(device, options.precision.split(","))
    print(f"{headline(facts)}; n = {options.rounds} rounds in turns; median, ± half the interquartile range")
    print("ceiling: " + ", ".join(f"{rate / 1e12:.4g} TFLOP/s {name}" for name, rate in ceiling.operations.items()), end=", ")
    print(f"{ceiling.bandwidth / 1e9:.4g} GB/s copied", flush=True)
    for contender, plan in plans:
        others, said = ([], []) if options.no_timm else opponents([contender])
        print(*said, sep="\n", end="\n" if said else "")
        for title, settings in plan:
            path = options.out / f"{title if options.what == 'curves' else options.what}_{contender.name}.json"
            cells = read_back(path, facts, options.rounds)
            heats = unmeasured(make_heats([contender], others, settings), cells)
            while heats and time.monotonic() - begun < options.seconds:
                for found in run_heats([heats.pop(0)], options.rounds, device, ceiling):
                    cells += found
                    write_json(path, content(facts, ceiling, cells, options.rounds, not heats))
            if not cells:
                continue
            print_table(cells)
            if options.what == "curves":
                path.with_suffix(".png").write_bytes(draw(cells, title, headline(facts)))


if __name__ == "__main__":
    run_program(main)
