"""Small models, and sharded training checkpoints made from the stored run of an earlier version."""

import json
import pickle
import shutil
import warnings
from pathlib import Path

import torch.distributed.checkpoint as dcp

import vitrail
from vitrail.checkpoints.training_checkpoints import COMPLETE, LAYOUT, SHARD_INDEX, file_checksum, read_checkpoint

RUN = Path(__file__).parents[1] / "old_files" / "interrupted_run"


def tiny_model(name="deit_tiny_patch16"):
    return vitrail.create(name, 3, 32, width=64, depth=1, heads=1).eval()


def write_sharded_run(folder):
    """A copy of the run whose only checkpoint is sharded; returns the folder of the checkpoint."""
    shutil.copytree(RUN, folder, ignore=shutil.ignore_patterns("checkpoints"))
    step, groups, metadata = read_checkpoint(RUN / "checkpoints" / "step-000000004.safetensors")
    path = folder / "checkpoints" / "step-000000004.sharded"
    tensors = {f"{group}:{name}": tensor for group, members in groups.items() for name, tensor in members.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about writing in a single process
        dcp.save(tensors, checkpoint_id=path, no_dist=True)
    (path / COMPLETE).write_text(json.dumps({"layout": LAYOUT, "step": step, "facts": metadata, "sums": {}}))
    write_sums(path)
    return path


def write_sums(path):
    """Correct the checksums after a change."""
    complete = json.loads((path / COMPLETE).read_text())
    complete["sums"] = {file.name: file_checksum(file) for file in path.iterdir() if file.name != COMPLETE and file.is_file()}
    (path / COMPLETE).write_text(json.dumps(complete))


def change_listing(path, change):
    """Apply `change` to the listing of the tensors and correct the checksums."""
    listing = pickle.loads((path / SHARD_INDEX).read_bytes())
    change(listing)
    (path / SHARD_INDEX).write_bytes(pickle.dumps(listing))
    write_sums(path)
