"""Short trainings on the bundled data and their expected results: `python -m tests.training.guard` measures them again.

`digits` trains from scratch with every part of the default recipes: random crops, Mixup, CutMix, random erasing, label smoothing,
warmup and cosine schedule, gradient clipping, weight decay, stochastic depth, and an EMA that is evaluated. `pets` fine-tunes the
attention of the bundled weights: photos, horizontal flips, a new classifier, layer-wise learning rate decay.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import vitrail
from vitrail.atomic_files import atomic_write
from vitrail.cli.demo import ADAPTED, SHARED
from vitrail.runs.run_directory import read_run

FILE = Path(__file__).with_suffix(".json")
SEEDS = 6
WIDTH = 4.0  # standard deviations on either side of the mean


class Training(NamedTuple):
    source: str
    recipe: str
    changes: dict[str, Any]


TRAININGS = {
    "digits": Training(
        "digits",
        "laptop",
        {
            "precision": "fp32",  # the same on every machine
            "schedule.length": "14 epochs",
            "validation.every": "14 epochs",
            "mixing.mixup": 0.2,
            "mixing.cutmix": 0.5,
            "ema.decay": 0.95,
            "ema.evaluate": True,
            "ema.warmup": True,
            "augmentation.random_erasing": 0.1,
            "architecture.drop_path": 0.05,
        },
    ),
    "pets": Training(
        "pets",
        "finetune",
        SHARED
        | ADAPTED
        # Without the probe, so that the result is that of the training.
        | {"init.probe_head": False, "validation.at_start": False}
        | {"schedule.length": "1 epochs", "validation.every": "1 epochs", "mixing.mixup": 0.1},
    ),
}


class Result(NamedTuple):
    """Test top-1 and validation loss of the last weights."""

    top1: float
    loss: float


def train_once(name: str, seed: int, folder: Path) -> Result:
    training = TRAININGS[name]
    changes = training.changes | {"seed": seed}
    run = vitrail.train(training.source, training.recipe, changes=changes, out=folder, device="cpu", workers=0)
    return Result(read_run(run.folder)["test"]["top1"], run.best["loss"])


def measure(name: str, seeds: int) -> dict[str, Any]:
    """Mean and standard deviation over seeds 0, 1, …"""
    results = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            results.append(train_once(name, seed, Path(folder) / "run"))
        print(f"{name}, seed {seed}: test top-1 {results[-1].top1:.4f}, validation loss {results[-1].loss:.4f}", flush=True)
    columns = np.array(results)
    mean, deviation = columns.mean(0), columns.std(0, ddof=1)
    print(f"{name}: top-1 {mean[0]:.4f} ± {deviation[0]:.4f}, loss {mean[1]:.4f} ± {deviation[1]:.4f} ({seeds} seeds)")
    return {
        "seeds": seeds,
        "top1": {"mean": round(mean[0], 4), "deviation": round(deviation[0], 4)},
        "loss": {"mean": round(mean[1], 4), "deviation": round(deviation[1], 4)},
        "versions": {"vitrail": vitrail.__version__, "torch": torch.__version__},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(TRAININGS), help=f"some of {', '.join(TRAININGS)}")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    bands = json.loads(FILE.read_text()) if FILE.exists() else {}
    bands |= {name: measure(name, options.seeds) for name in options.names}
    atomic_write(FILE, lambda temporary: temporary.write_text(json.dumps(bands, indent=1) + "\n"))


if __name__ == "__main__":
    main()
