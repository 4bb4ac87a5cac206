"""Short trainings of a tokenizer and of BEiT on the digits.

`python -m tests.tasks.beit_trainings FOLDER` trains both in the processes that torchrun's variables describe;
`... FOLDER tokenizer` or `... FOLDER beit` trains one of them in two micro-batches and is killed before step 6.
"""

import json
import sys
from pathlib import Path

import numpy as np

import vitrail
from tests.training.processes import kill_before, one_process, run
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.image_loader import ImageLoader
from vitrail.data.source import Subset
from vitrail.recipes import lookup
from vitrail.recipes.schema import Recipe
from vitrail.runs.initial_model import build_initial
from vitrail.tasks.registry import find_task
from vitrail.training.checkpointing import load_checkpoint
from vitrail.training.distributed import init_distributed
from vitrail.training.trainer import Options, Trainer

CODES = 16
SHARED = {
    "batch_size": 16,
    "precision": "fp32",
    "augmentation.image_size": [8, 8],
    "architecture.width": 16,
    "architecture.depth": 1,
    "architecture.patch_size": 2,
    "optimizer.eps": 1e-5,  # larger than gradients that are only rounding error (those of key biases)
    "schedule.length": "8 steps",
    "schedule.warmup": "2 steps",
    "validation.every": "4 steps",
}
TOKENIZER = lookup("tokenizer_small").set(
    SHARED | {"task_options.codes": CODES, "task_options.width": 8, "task_options.temperature_end": 0.5}
)
BEIT = Recipe(name="tiny", task="beit", model="vit_tiny_patch16_12x1_ls_hmlp_ln").set(
    SHARED
    | {
        "architecture.heads": 2,
        "architecture.pos_embed": "relative_bias",
        "architecture.pos_embed_place": "shared",
        "architecture.drop_path": 0.1,
        "augmentation.scale": [0.5, 1.0],
    }
)


def write_tokenizer(path: Path, **changes) -> Path:
    """An untrained tokenizer, whose codes are as good as any for a test."""
    model = vitrail.create("vitrail_mini", CODES, (8, 8), **{"patch_size": 2, "width": 16, "depth": 1} | changes)
    model.notes["recipe"] = json.dumps({"task": "tokenizer"})
    return vitrail.save(model, path)


def make(recipe, folder, devices, options=None):
    """A trainer, with a few validation images."""
    splits = open_splits("digits")
    task = find_task(recipe.task)(recipe, splits.train, devices.device)
    model = build_initial(recipe, task.class_names, None)
    task.attach(model)
    training = Trainer(recipe, model, task, splits.train, devices, Path(folder), options or Options())
    training.validation = ImageLoader(Subset(splits.validation, np.arange(20)), devices.device, 0)
    return training


def trained(recipe, folder, devices, killed_before=None):
    """A trainer that has run to its end, from its checkpoint if there is one; it saves one after 5 steps."""
    training = make(recipe, folder, devices, Options(save_steps=5))
    load_checkpoint(training, print)
    kill_before(training, killed_before)
    run(training)
    return training


def with_tokenizer(path):
    return BEIT.set({"task_options.tokenizer": str(path)})


if __name__ == "__main__":
    folder, only = Path(sys.argv[1]), sys.argv[2:]
    recipes = {"tokenizer": TOKENIZER, "beit": with_tokenizer(folder / "tokenizer.safetensors")}
    if only:
        trained(recipes[only[0]], folder / only[0], one_process(2), killed_before=6)
    with init_distributed("cpu") as devices:
        for name, recipe in recipes.items():
            trained(recipe, folder / name, devices)
