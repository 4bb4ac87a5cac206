"""Small run directories, as a training writes them."""

import json
import math

from vitrail.recipes.schema import Recipe
from vitrail.training.metrics import MetricsWriter

NAMES = ["cat", "<script>alert('x')</script>", "dog & co"]


def describe(seed=0, **changes):
    recipe = Recipe(name="little", seed=seed, batch_size=8).set({"schedule.length": "4 epochs"})
    return {
        "recipe": recipe.to_dict(),
        "model": {"name": "deit_tiny", "parameters": 5_717_416, "macs": 1_258_000_000},
        "data": {"name": "some/where/pets", "train": 200, "validation": 50, "classes": NAMES, "fingerprint": "abc"},
        "versions": {"vitrail": "0.1.0"},
        "command": "vitrail train pets --note '<b>'",
        "git": "0123abc",
        "started": "2026-01-01T00:00:00",
        "seconds": 65.0,
        "steps": 100,
        "machine": {"device": "CPU", "processes": 2},
    } | changes


def make_run(folder, seed=0, validations=(25, 50, 75, 100), last=100, shift=0.0, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    best = {}
    with MetricsWriter(folder) as metrics:
        for step in range(5, last + 1, 5):
            loss = 2 * math.exp(-step / 50) + 0.05 * math.sin(step * (seed + 1)) + shift
            metrics.write("train", step, step / 25, {"loss": loss, "lr": 1e-3, "images_per_second": 1000.0 + seed})
            if step in validations:
                values = {"loss": loss, "top1": step / 125 + seed / 1000, "top5": 0.99}
                metrics.write("validation", step, step / 25, values)
                best = {"epoch": step / 25, **values}
    (folder / "run.json").write_text(json.dumps(describe(seed, best=best) | changes))
    return folder
