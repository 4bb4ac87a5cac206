"""DINO without labels on Imagenette at 128 pixels: k-NN accuracy of a ViT-S with several stems, beside lightly's table.

    vitrail data pack imagenette/ imagenette144/ --resize 144 --format webp --quality 50     # once: 35 MiB
    python benchmarks/imagenette.py train imagenette144 --stems linear hmlp conv basic hybrid --epochs 60 --minutes 8
    python benchmarks/imagenette.py train imagenette144 --stems basic --minutes 8            # 800 epochs; again for the rest
    python benchmarks/imagenette.py table
    python benchmarks/imagenette.py train pets --tiny --epochs 1 --device cpu                # to try it

Each training is a process, `--parallel` of them at a time on one device, in a folder of its own in `--out` with checkpoints,
log.txt and result.json. A result that exists is not computed again. In the last of `--minutes`, trainings are stopped and save a
checkpoint, from which the same command continues.

Trainings are those of `vitrail train imagenette144 --recipe dino_small` with the changes below. Scores are those of all
validation images among all training images with the weights of the last step (those of the EMA teacher): with lightly's k = 200
and temperature 0.1 (`imagenette_benchmark.py` in lightly-ai/lightly), and with k = 20 and 0.07 as in DINO's paper. `hybrid` is
`vitrail_small`, 7 blocks after the first stages of a small ResNet; the others have the 12 blocks of a ViT-S.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from arguments import positive, run_program
from jobs import Jobs, add_options, describe_run, list_machines, locate, mean_and_sd, train_or_resume, write_result

import vitrail
from vitrail.cli.train import parse_set
from vitrail.devices import choose_device
from vitrail.errors import UserError
from vitrail.evaluation.features import FeatureKind
from vitrail.evaluation.model import open_model
from vitrail.evaluation.probes.protocol import (
    Settings,
    default_vector,
    embed_probe_data,
    open_probe_data,
    run_knn,
    select_labeled,
)
from vitrail.training.trainer import Options

LIGHTLY = "MSN, ViT-S: 82.8, DINO, ResNet-18: 88.8 after 800 epochs, 516 and 312 minutes of an A6000"
SIZE = 128
VIT = {"architecture.pooling": "mean", "architecture.residual": "layerscale", "architecture.layerscale_init": 0.1}
STEMS: dict[str, dict[str, Any]] = {
    "linear": VIT,
    "linear, class token": VIT | {"architecture.pooling": "class"},
    "hmlp": VIT | {"architecture.stem": "hmlp", "architecture.stem_norm": "layer"},
    "conv": VIT | {"architecture.stem": "conv", "architecture.stem_norm": "layer"},
    "basic": VIT | {"architecture.stem": "basic", "architecture.stem_width": 32, "architecture.stem_layers": [1, 1, 1]},
    "hybrid": {"model": "vitrail_small", "architecture.patch_size": 16},
}
# The schedules of the paper, which are for this number of steps; crops of its ablation, of lightly's sizes.
CHANGES: dict[str, Any] = {
    "augmentation.image_size": [SIZE, SIZE],
    "augmentation.scale": [0.32, 1.0],
    "task_options.local_scale": [0.05, 0.32],
    "task_options.local_size": SIZE // 2,
    "task_options.momentum": 0.996,
    "task_options.hidden": 2048,
    "schedule.warmup": "10 epochs",
    "validation.every": "20%",
}
TINY = {"architecture.width": 48, "architecture.depth": 1, "architecture.heads": 1, "augmentation.image_size": [32, 32]}
TINY |= {"task_options.local_size": 16, "task_options.hidden": 16, "task_options.outputs": 32, "schedule.warmup": "5%"}
PROTOCOLS = {"lightly": Settings(k=200, temperature=0.1), "dino": Settings(k=20, temperature=0.07)}


def make_job(options: argparse.Namespace, stem: str, seed: int) -> dict[str, Any]:
    """A training and what differs from `dino_small`."""
    changes = {"model": "vit_small_patch16_12x1"} | CHANGES | STEMS[stem] | (TINY if options.tiny else {})
    changes |= {"schedule.length": f"{options.epochs:g} epochs", "seed": seed} | parse_set(options.set)
    named = {name: getattr(options, name) for name in ("device", "epochs")}
    return named | {"data": locate(options.data), "stem": stem, "seed": seed, "changes": changes}


def run_job(folder: Path) -> None:
    """Train and evaluate as the job in a folder says, and write the result."""
    job = json.loads((folder / "job.json").read_text())
    run_folder, device = folder / "run", job["device"]
    # A checkpoint has 350 MB, which the GPU waits for.
    options = Options(compile=choose_device(device).type == "cuda", save_seconds=600, keep=1)
    where: dict[str, Any] = {"device": device, "workers": job["workers"]}
    train_or_resume(
        run_folder,
        lambda: vitrail.train(job["data"], "dino_small", changes=job["changes"], out=run_folder, options=options, **where),
        **where,
    )
    weights = run_folder / "last.safetensors"
    write_result(folder, job | describe_run(run_folder) | measure(weights, job))


def measure(weights: Path, job: dict[str, Any]) -> dict[str, float]:
    """Top-1 by the nearest training images, with the settings of both protocols."""
    model = open_model(weights, job["device"])
    data = open_probe_data(job["data"], "train", None, None)
    memory, queries = embed_probe_data(model, data, FeatureKind(default_vector("knn", model)), 512, job["workers"])
    labeled = select_labeled(data, memory, queries, "label")
    found = {name: float(run_knn(labeled, settings).details["top1"]) for name, settings in PROTOCOLS.items()}
    return found | {"memory": len(labeled.memory), "queries": len(labeled.queries)}


def show_result(result: dict[str, Any]) -> str:
    return f"k-NN {100 * result['lightly']:.1f} % (k = 200), {100 * result['dino']:.1f} % (k = 20)"


def print_table(folder: Path) -> None:
    """A row per stem and length: mean and standard deviation over seeds."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*/result.json"))]
    print(f"\nlightly's table: {LIGHTLY}\n")
    print("| stem | epochs | n | k-NN, k = 200 | k-NN, k = 20 | minutes |\n| --- | ---: | ---: | ---: | ---: | ---: |")
    for stem, epochs in sorted({(row["stem"], row["epochs"]) for row in results}):
        rows = [row for row in results if (row["stem"], row["epochs"]) == (stem, epochs)]
        cells = [mean_and_sd([100 * row[name] for row in rows]) for name in PROTOCOLS]
        minutes = statistics.fmean(row["minutes"] for row in rows)
        print(f"| {stem} | {epochs:g} | {len(rows)} | {' | '.join(cells)} | {minutes:.1f} |")
    print(f"\n{list_machines(results)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("train", "table", "job"))
    parser.add_argument("data", nargs="?", help="Imagenette")
    parser.add_argument("--stems", nargs="+", choices=STEMS, default=["basic"])
    parser.add_argument("--seeds", type=positive, default=1)
    parser.add_argument("--epochs", type=float, default=800.0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a change of all trainings")
    add_options(parser, "runs/imagenette", parallel=5)
    parser.add_argument("--tiny", action="store_true", help="a tiny ViT, to try the program on a CPU")
    options = parser.parse_args()
    if options.command != "table" and options.data is None:
        raise UserError("Give the folder of Imagenette.")
    if options.command == "job":
        run_job(Path(options.data))
        return
    runner = Jobs(options, __file__, show_result)
    if options.command == "train":
        jobs = {
            f"{stem.replace(', ', '-').replace(' ', '-')}-{options.epochs:g}-{seed}": make_job(options, stem, seed)
            for seed in range(options.seeds)
            for stem in options.stems
        }
        runner.run(jobs)
    print_table(options.out)
    runner.exit_if_failed()


if __name__ == "__main__":
    run_program(main)
