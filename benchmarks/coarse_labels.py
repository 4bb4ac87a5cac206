"""Trainings on the 20 coarse labels of CIFAR-100, evaluated on its 100 fine ones, beside Tables 2.4 and 2.7 of Grafit's paper.

    python benchmarks/coarse_labels.py train cifar100 --minutes 8    # ResNet-50, baseline and Grafit, 3 seeds; again for the rest
    python benchmarks/coarse_labels.py train cifar100 --methods baseline sncaplus clusterfit grafit --seeds 1
    python benchmarks/coarse_labels.py train cifar100 --trunk vit --seeds 3 --epochs 60
    python benchmarks/coarse_labels.py train cifar100 --set augmentation.policy=none --set augmentation.random_erasing=0
    python benchmarks/coarse_labels.py table                         # of all results in --out
    python benchmarks/coarse_labels.py train cifar100 --tiny --epochs 1 --batch-size 32 --seeds 1 --images 500 --device cpu

Each training is a process, `--parallel` of them at a time on one device, in a folder of its own in `--out` with checkpoints,
log.txt and result.json (`tar czf results.tgz runs/coarse_labels/*/result.json`). A result that exists is not computed again.
In the last of `--minutes`, trainings are stopped and save a checkpoint, from which the same command continues.

Nine tenths of the training images are trained on, the others validated once, at the end; the scores are those of the test images
among all training images, with k chosen on the latter. The probability of a coarse class, for the conditional mAP, is that of the
classifier where there is one, else the k-NN mass over the memory. The methods are the recipes `grafit_resnet50_cifar100…` with
the given epochs, batch size and views; `clusterfit` has clusters of the baseline of the same seed. The recipes smooth the labels
of a cross-entropy, which the paper does not mention: `baseline_unsmoothed` is the baseline without. The ViT is `vitrail_tiny`
with patches of 4 pixels, AdamW and the learning rate 1e-3 in place of SGD. `--set KEY=VALUE` changes the recipe of all methods
and is stored with each result: a short training learns little from strong augmentation.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

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
    label_column,
    measure_retrieval,
    open_probe_data,
    run_knn,
    select_labeled,
)
from vitrail.training.trainer import Options

TRUNKS = {"resnet50": "resnet50_cifar", "resnet18": "resnet18_cifar", "vit": "vitrail_tiny"}
LEVELS = ("label", "coarse_label")
COLUMNS = {
    "fine k-NN": "knn_label",
    "coarse k-NN": "knn_coarse_label",
    "mAP": "map_cosine",
    "conditional mAP": "map_conditional",
    "oracle mAP": "map_oracle",
}


class Method(NamedTuple):
    """A recipe `grafit_resnet50_cifar100…`, what is changed in it, and the paper's results with 600 epochs."""

    suffix: str
    paper: tuple[float | None, ...]  # k-NN top-1, mAP by cosine, conditional mAP: Tables 2.4 and 2.7
    changes: dict[str, Any] = {}  # noqa: RUF012

    @property
    def has_options(self) -> bool:
        """Whether it is the task of Grafit; the baseline is a classifier."""
        return self.suffix != "_baseline"


METHODS = {
    "baseline": Method("_baseline", (71.8, 42.5, 43.1)),
    "baseline_unsmoothed": Method("_baseline", (71.8, 42.5, 43.1), {"loss.label_smoothing": 0.0}),
    "snca": Method("_snca", (70.0, 39.7, None)),
    "sncaplus": Method("_sncaplus", (72.2, 35.9, 41.4)),
    "clusterfit": Method("_clusterfit", (72.5, 23.0, None)),
    "instance": Method("_instance", (54.3, 14.3, None)),
    "ce_instance": Method("_ce_instance", (76.9, 51.0, None)),
    "grafit_fc": Method("_fc", (75.6, 53.6, 55.0)),
    "grafit": Method("", (77.7, 52.9, 55.7)),
    "grafit_fine": Method("_fine", (83.2, None, None)),
}
VIT = {"optimizer.kind": "adamw", "optimizer.lr": 1e-3, "optimizer.lr_batch_size": 0, "optimizer.weight_decay": 0.05}
VIT |= {"optimizer.weight_decay_coupled": False, "optimizer.weight_decay_on": "matrices", "optimizer.clip_grad_norm": 1.0}
VIT |= {"architecture.patch_size": 4, "architecture.drop_path": 0.1, "schedule.warmup": "10%"}
TINY = {"model": "vitrail_mini", "architecture.width": 16, "architecture.depth": 1}


def make_job(options: argparse.Namespace, method: str, seed: int) -> dict[str, Any]:
    """A training and what differs from the recipe of the paper."""
    changes: dict[str, Any] = METHODS[method].changes | {
        "model": TRUNKS[options.trunk],
        "schedule.length": f"{options.epochs:g} epochs",
        "schedule.warmup": f"{min(5.0, options.epochs / 10):g} epochs",
        "batch_size": options.batch_size,
        "seed": seed,
        "validation.every": "100%",
    }
    changes |= VIT if options.trunk == "vit" else {}
    if METHODS[method].has_options:
        changes |= {f"task_options.{name}": getattr(options, name) for name in ("views", "shared_view", "momentum")}
    if method == "clusterfit":
        weights = options.out / name_of(options.trunk, "baseline", seed) / "run" / "best.safetensors"
        changes |= {"task_options.clusters": options.clusters, "task_options.clusters_from": str(weights.resolve())}
    changes |= parse_set(options.set)
    if options.tiny:
        changes |= TINY | ({"task_options.hidden": 16} if METHODS[method].has_options else {})
    names = ("trunk", "epochs", "batch_size", "views", "shared_view", "images", "device")
    named = {name: getattr(options, name) for name in names}
    return named | {"data": locate(options.data), "method": method, "seed": seed, "changes": changes}


def name_of(trunk: str, method: str, seed: int) -> str:
    return f"{trunk}-{method}-{seed}"


def run_job(folder: Path) -> None:
    """Train and evaluate as the job in a folder says, and write the result."""
    job = json.loads((folder / "job.json").read_text())
    run_folder, device = folder / "run", job["device"]
    recipe = f"grafit_resnet50_cifar100{METHODS[job['method']].suffix}"
    options = Options(compile=choose_device(device).type == "cuda", save_seconds=120, keep=1)
    where: dict[str, Any] = {"device": device, "workers": job["workers"]}
    run = train_or_resume(
        run_folder,
        lambda: vitrail.train(job["data"], recipe, changes=job["changes"], out=run_folder, options=options, **where),
        **where,
    )
    write_result(folder, job | describe_run(run_folder) | measure(run.artifact, job))


def measure(weights: Path, job: dict[str, Any]) -> dict[str, float]:
    """k-NN at both levels, and mAP at the fine one: by cosine, conditional on the coarse class, with the true coarse class."""
    model = open_model(weights, job["device"])
    data = open_probe_data(job["data"], "train", "test", job["images"])
    memory, queries = embed_probe_data(model, data, FeatureKind(default_vector("knn", model)), 512, job["workers"])
    found: dict[str, float] = {}
    for level in LEVELS:
        details = run_knn(select_labeled(data, memory, queries, level), Settings(protocol="grafit")).details
        found |= {f"knn_{level}": details["top1"], f"k_{level}": details["k"]}
    coarse_by = model if model.class_names == label_column(data.memory, LEVELS[1]).names else "memory"
    scores = measure_retrieval(data, memory, queries, *LEVELS, coarse_by, 512, job["workers"])
    return found | {f"map_{name}": precision.mean for name, precision in scores.items()}


def train_all(options: argparse.Namespace, runner: Jobs) -> None:
    """Run the jobs whose results are missing, until the time is over; those that need a baseline after the others."""
    jobs = {
        name_of(options.trunk, method, seed): make_job(options, method, seed)
        for seed in range(options.seeds)
        for method in options.methods
    }
    bases = {
        name: options.out / name_of(options.trunk, "baseline", job["seed"]) / "result.json"
        for name, job in jobs.items()
        if job["method"] == "clusterfit"
    }
    if "baseline" not in options.methods and not all(base.exists() for base in bases.values()):
        raise UserError("clusterfit needs the baseline of the same seeds: add it to --methods.")
    runner.run({name: job for name, job in jobs.items() if name not in bases})
    runner.run({name: jobs[name] for name, base in bases.items() if base.exists()})


def show_result(result: dict[str, Any]) -> str:
    return f"k-NN of the fine labels {100 * result['knn_label']:.1f} %, mAP {100 * result['map_cosine']:.1f} %"


def print_table(folder: Path) -> None:
    """A row per trunk and method: mean and standard deviation over seeds."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*/result.json"))]
    print(f"\n| trunk | method | n | epochs | {' | '.join(COLUMNS)} | paper: k-NN, mAP, conditional mAP | minutes |")
    print(f"| --- | --- |{' ---: |' * (len(COLUMNS) + 4)}")
    for trunk in TRUNKS:
        for name, method in METHODS.items():
            rows = [row for row in results if (row["trunk"], row["method"]) == (trunk, name)]
            if not rows:
                continue
            cells = [mean_and_sd([100 * row[column] for row in rows]) for column in COLUMNS.values()]
            paper = ", ".join("–" if value is None else str(value) for value in method.paper) if trunk == "resnet50" else ""
            minutes = statistics.fmean(row["minutes"] for row in rows)
            epochs = "/".join(sorted({f"{row['epochs']:g}" for row in rows}))
            print(f"| {trunk} | {name} | {len(rows)} | {epochs} | {' | '.join(cells)} | {paper} | {minutes:.1f} |")
    print(f"\n{list_machines(results)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("train", "table", "job"))
    parser.add_argument("data", nargs="?", help="CIFAR-100, with a column coarse_label")
    parser.add_argument("--trunk", choices=TRUNKS, default="resnet50")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["baseline", "grafit"])
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--epochs", type=float, default=30.0)
    parser.add_argument("--batch-size", type=positive, default=256, help="1024 in the paper; several trainings share the device")
    parser.add_argument("--views", type=positive, default=2, help="of the instance loss; 8 in the paper")
    parser.add_argument("--shared-view", action="store_true", help="the view with labels is one of them, not a further one")
    parser.add_argument("--momentum", type=float, default=0.99, help="of the target network; 0.996 is for long trainings")
    parser.add_argument("--clusters", type=positive, default=1500)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a change of the recipe; repeatable")
    parser.add_argument("--images", type=positive, default=None, help="evaluate at most so many images of either split")
    add_options(parser, "runs/coarse_labels", parallel=6)
    parser.add_argument("--tiny", action="store_true", help="a tiny ViT, to try the program on a CPU")
    options = parser.parse_args()
    if options.command != "table" and options.data is None:
        raise UserError("Give the folder of CIFAR-100.")
    if options.command == "job":
        run_job(Path(options.data))
        return
    runner = Jobs(options, __file__, show_result)
    if options.command == "train":
        train_all(options, runner)
    print_table(options.out)
    runner.exit_if_failed()


if __name__ == "__main__":
    run_program(main)
