"""Miniature trainings on the data that ships, and how far they get: `python -m tests.training.guard` measures the bands again.

`digits` trains a network from nothing with every part that the house recipes have: crops, mixup and cutmix, erasing, smoothing,
warm-up and cosine, clipping, weight decay, stochastic depth, a running mean that is what is tested. `pets` adapts the attention
of the bundled weights: photographs, mirror images, a new classifier, rates by depth.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import vitrail
from vitrail.atomic_files import write_aside
from vitrail.cli.demo import ADAPTED, SHARED
from vitrail.runs.run_directory import read_run

FILE = Path(__file__).with_suffix(".json")
SEEDS = 6
WIDTH = 4.0  # deviations on either side of the mean


class Trainer(NamedTuple):
    source: str
    recipe: str
    changes: dict[str, Any]


TRAININGS = {
    "digits": Trainer(
        "digits",
        "laptop",
        {
            "precision": "fp32",  # on every machine
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
    "pets": Trainer(
        "pets",
        "finetune",
        SHARED | ADAPTED | {"schedule.length": "1 epochs", "validation.every": "1 epochs", "mixing.mixup": 0.1},
    ),
}


class Reached(NamedTuple):
    """Of the last weights: top-1 on the test images, loss on the validation images."""

    top1: float
    loss: float


def reach(name: str, seed: int, folder: Path) -> Reached:
    training = TRAININGS[name]
    run = vitrail.train(
        training.source, training.recipe, None, folder, training.changes | {"seed": seed}, device="cpu", workers=0
    )
    return Reached(read_run(run.folder)["test"]["top1"], run.best["loss"])


def measure(name: str, seeds: int) -> dict[str, Any]:
    """Mean and standard deviation over seeds 0, 1, …"""
    found = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            found.append(reach(name, seed, Path(folder) / "run"))
        print(f"{name}, seed {seed}: test top-1 {found[-1].top1:.4f}, validation loss {found[-1].loss:.4f}", flush=True)
    columns = np.array(found)
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
    given = parser.parse_args()
    torch.set_num_threads(1)
    bands = json.loads(FILE.read_text()) if FILE.exists() else {}
    bands |= {name: measure(name, given.seeds) for name in given.names}
    write_aside(FILE, lambda side: side.write_text(json.dumps(bands, indent=1) + "\n"))


if __name__ == "__main__":
    main()
