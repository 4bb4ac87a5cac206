"""Trainings on the 20 coarse labels of CIFAR-100, evaluated on its 100 fine ones, beside Tables 2.4 and 2.7 of Grafit's paper.

    python benchmarks/coarse_labels.py carry/cifar100 --out $OUT --minutes 9   # ResNet-50, baseline and Grafit, 3 seeds
    python benchmarks/coarse_labels.py carry/cifar100 --out $OUT --methods baseline sncaplus clusterfit grafit --seeds 1
    python benchmarks/coarse_labels.py carry/cifar100 --out $OUT --trunk vit --seeds 3 --epochs 60
    python benchmarks/coarse_labels.py carry/cifar100 --out $OUT --table         # of the results in the folder

Each training is a process, `--parallel` of them at a time on one device. A result is one JSON file in `--out`, with the command
that made it; those that exist are not computed again. After `--minutes` the trainings stop with a checkpoint in `--runs`, from
which the same command continues. Nine tenths of the training images are trained on, the others validated once, at the end; the
scores are those of the test images among all training images, with k chosen on the latter. `grafit`, `sncaplus`, `clusterfit`
(from the baseline of the same seed) and `baseline` are the recipes `grafit_resnet50_cifar100…` with the given epochs, batch size
and views; the ViT is `vitrail_tiny` with patches of 4 pixels, AdamW and the learning rate 1e-3 in place of SGD.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from arguments import positive, run_program

TRUNKS = {"resnet50": "resnet50_cifar", "resnet18": "resnet18_cifar", "vit": "vitrail_tiny"}
#          suffix of the recipe; k-NN top-1, mAP: Table 2.4; mAP without conditioning: Table 2.7
METHODS: dict[str, tuple[str, float, float]] = {
    "baseline": ("_baseline", 71.8, 42.5),
    "snca": ("_snca", 70.0, 39.7),
    "sncaplus": ("_sncaplus", 72.2, 35.9),
    "clusterfit": ("_clusterfit", 72.5, 23.0),
    "instance": ("_instance", 54.3, 14.3),
    "ce_instance": ("_ce_instance", 76.9, 51.0),
    "grafit_fc": ("_fc", 75.6, 53.6),
    "grafit": ("", 77.7, 52.9),
    "grafit_fine": ("_fine", 83.2, 0.0),
}
VIT = {"optimizer.kind": "adamw", "optimizer.lr": 1e-3, "optimizer.lr_batch_size": 0, "optimizer.weight_decay": 0.05}
VIT |= {"optimizer.weight_decay_coupled": False, "optimizer.weight_decay_on": "matrices", "optimizer.clip_grad_norm": 1.0}
VIT |= {"architecture.patch_size": 4, "architecture.drop_path": 0.1, "schedule.warmup": "10%"}
TINY = {"model": "vitrail_mini", "architecture.width": 16, "architecture.depth": 1, "task_options.hidden": 16}


class Job(NamedTuple):
    trunk: str
    method: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.trunk}-{self.method}-{self.seed}"


def recipe_changes(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """What differs from the recipe of the paper."""
    recipe_has_views = job.method not in ("baseline",)
    changes: dict[str, Any] = {
        "model": TRUNKS[job.trunk],
        "schedule.length": f"{options.epochs:g} epochs",
        "schedule.warmup": f"{min(5.0, options.epochs / 10):g} epochs",
        "batch_size": options.batch_size,
        "seed": job.seed,
        "validation.every": "100%",
    }
    changes |= VIT if job.trunk == "vit" else {}
    if recipe_has_views:
        changes |= {"task_options.views": options.views, "task_options.momentum": options.momentum}
    if job.method == "clusterfit":
        changes["task_options.clusters"] = options.clusters
        changes["task_options.clusters_from"] = str(options.runs / f"{job.trunk}-baseline-{job.seed}" / "best.safetensors")
    if options.tiny:
        changes |= {name: value for name, value in TINY.items() if recipe_has_views or not name.startswith("task_options")}
    return changes


def run_job(job: Job, options: argparse.Namespace) -> None:
    """Train, or continue, and write the result."""
    import vitrail
    from vitrail.training.trainer import Options

    folder = options.runs / job.name
    gpu = options.device is None or options.device.startswith("cuda")
    if (folder / "run.json").exists():
        run = vitrail.resume(folder, device=options.device, workers=0)
    else:
        run = vitrail.train(
            options.data,
            f"grafit_resnet50_cifar100{METHODS[job.method][0]}",
            changes=recipe_changes(job, options),
            out=folder,
            device=options.device,
            workers=0,
            options=Options(compile=gpu, save_seconds=120, keep=1),
        )
    if not run.finished:
        return
    result = measure(run.artifact, options)
    trained = json.loads((folder / "run.json").read_text())
    result |= job._asdict() | {"epochs": options.epochs, "batch_size": options.batch_size, "views": options.views}
    result |= {"seconds": trained["seconds"], "machine": trained.get("machine"), "versions": trained.get("versions")}
    result["command"] = " ".join(sys.argv)
    (options.out / f"{job.name}.json").write_text(json.dumps(result, indent=1, default=str))


def measure(weights: Path, options: argparse.Namespace) -> dict[str, Any]:
    """k-NN at both levels, and mAP at the fine one: by cosine, conditional on the coarse class, with the true coarse class."""
    from vitrail.evaluation.features import FeatureKind
    from vitrail.evaluation.model import open_model
    from vitrail.evaluation.probes.protocol import (
        Settings,
        default_vector,
        embed_probe_data,
        measure_retrieval,
        open_probe_data,
        run_knn,
        select_labeled,
    )

    model = open_model(weights, options.device)
    data = open_probe_data(options.data, "train", "test", options.images)
    memory, queries = embed_probe_data(model, data, FeatureKind(default_vector("knn", model)), 512, 0)
    found: dict[str, Any] = {}
    for level in ("label", "coarse_label"):
        details = run_knn(select_labeled(data, memory, queries, level), Settings(protocol="grafit")).details
        found[f"knn_{level}"], found[f"k_{level}"] = details["top1"], details["k"]
    scores = measure_retrieval(data, memory, queries, "label", "coarse_label")
    return found | {f"map_{name}": precision.mean for name, precision in scores.items()}


def start(job: Job, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    values = [options.data, "--out", options.out, "--runs", options.runs, "--job", job.trunk, job.method, job.seed]
    for name in ("epochs", "batch_size", "views", "momentum", "clusters", "images"):
        values += [f"--{name.replace('_', '-')}", getattr(options, name)] if getattr(options, name) is not None else []
    values += ["--device", options.device] if options.device else []
    values += ["--tiny"] if options.tiny else []
    log = (options.runs / f"{job.name}.log").open("ab")
    return subprocess.Popen([sys.executable, __file__, *map(str, values)], stdout=log, stderr=log)


def run_all(options: argparse.Namespace) -> None:
    """Run the jobs whose results are missing, some at a time, until the time is over."""
    deadline = time.monotonic() + 60 * options.minutes
    jobs = [Job(options.trunk, method, seed) for seed in range(options.seeds) for method in options.methods]
    waiting = [job for job in jobs if not (options.out / f"{job.name}.json").exists()]
    running: dict[Job, subprocess.Popen[bytes]] = {}
    while (waiting or running) and time.monotonic() < deadline:
        for job in [job for job, process in running.items() if process.poll() is not None]:
            code, finished = running.pop(job).returncode, (options.out / f"{job.name}.json").exists()
            print(f"{job.name}: {'done' if finished else f'exit code {code}, see {options.runs}/{job.name}.log'}", flush=True)
        ready = [
            job
            for job in waiting
            if job.method != "clusterfit" or (options.runs / job._replace(method="baseline").name / "report.html").exists()
        ]
        if not ready and not running:
            break
        for job in ready[: options.parallel - len(running)]:
            waiting.remove(job)
            running[job] = start(job, options)
        time.sleep(0.2)
    for process in running.values():
        process.send_signal(signal.SIGINT)  # they stop with a checkpoint
    for job, process in running.items():
        process.wait()
        print(f"{job.name}: stopped; the same command continues", flush=True)
    for job in waiting:
        print(f"{job.name}: not started", flush=True)


def print_table(folder: Path) -> None:
    """A row per trunk and method: mean and standard deviation over seeds."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    print("\n| trunk | method | n | epochs | fine k-NN | coarse k-NN | mAP | conditional | oracle | paper: k-NN, mAP | minutes |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for trunk in TRUNKS:
        for method, (_, knn, precision) in METHODS.items():
            rows = [row for row in results if (row["trunk"], row["method"]) == (trunk, method)]
            if not rows:
                continue
            names = ("knn_label", "knn_coarse_label", "map_cosine", "map_conditional", "map_oracle")
            cells = [mean_and_sd([100 * row[name] for row in rows]) for name in names]
            paper = f"{knn}, {precision}" if trunk == "resnet50" else ""
            minutes = statistics.fmean(row["seconds"] for row in rows) / 60
            epochs = "/".join(sorted({f"{row['epochs']:g}" for row in rows}))
            print(f"| {trunk} | {method} | {len(rows)} | {epochs} | {' | '.join(cells)} | {paper} | {minutes:.1f} |")


def mean_and_sd(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="CIFAR-100, with a column coarse_label")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--runs", type=Path, default=Path("runs/coarse_labels"), help="folder of the trainings")
    parser.add_argument("--trunk", choices=TRUNKS, default="resnet50")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["baseline", "grafit"])
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--epochs", type=float, default=30.0)
    parser.add_argument("--batch-size", type=positive, default=256, help="1024 in the paper; several trainings share the device")
    parser.add_argument("--views", type=positive, default=2, help="of the instance loss; 8 in the paper")
    parser.add_argument("--momentum", type=float, default=0.99, help="of the target network; 0.996 is for long trainings")
    parser.add_argument("--clusters", type=positive, default=1500)
    parser.add_argument("--images", type=positive, default=None, help="evaluate at most so many images of either split")
    parser.add_argument("--parallel", type=positive, default=6)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--device", default=None)
    parser.add_argument("--tiny", action="store_true", help="a tiny ViT, to try the program on a CPU")
    parser.add_argument("--table", action="store_true", help="print the table and do nothing else")
    parser.add_argument("--job", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.runs.mkdir(parents=True, exist_ok=True)
    if options.job:
        run_job(Job(options.job[0], options.job[1], int(options.job[2])), options)
        return
    if not options.table:
        run_all(options)
    print_table(options.out)


if __name__ == "__main__":
    run_program(main)
