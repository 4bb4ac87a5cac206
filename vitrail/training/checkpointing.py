"""Checkpoints of a training: save, load, and keep the newest ones.

A checkpoint holds weights, optimizer state, EMA, loss window, step and run metadata. It is one safetensors file
(`step-000000012.safetensors`) with a checksum over all of its content, written atomically. A sharded training writes a folder in
torch's distributed format instead (`step-000000012.sharded`); its last file, `complete.json`, holds the checksums of the others.
A damaged checkpoint is detected when it is loaded, and the one before it is used.
"""

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitrail.aliases import upgrade_checkpoint_key, upgrade_run
from vitrail.atomic_files import WriteError, atomic_write, atomic_write_text, describe_error, fsync_path, reject_links
from vitrail.checkpoints.artifact import save_tensors, write_safetensors
from vitrail.checkpoints.readers import TRAINING_HEADER
from vitrail.checkpoints.training_checkpoints import (
    COMPLETE,
    LAYOUT,
    READ_ERRORS,
    TrainingState,
    canonical_json,
    checksum,
    file_checksum,
    list_files,
    read_checkpoint,
    read_complete,
    short_message,
    split_groups,
)
from vitrail.errors import UserError
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes.schema import Recipe
from vitrail.training.distributed import Devices
from vitrail.training.gradient_norm import is_sharded

if TYPE_CHECKING:
    from vitrail.checkpoints.sharded_reader import ShardedCheckpoint
    from vitrail.training.trainer import Trainer

Result = TypeVar("Result")
TensorGroups = dict[str, dict[str, Tensor]]  # "model", "optimizer", "ema", "loop" -> tensors by name

NAME = re.compile(r"step-(\d{9})(\.safetensors|\.sharded)")
# Temporary names of the files that `atomic_write` writes in a run directory.
UNFINISHED = re.compile(r"\.(step-\d{9}|best|last|run|recipe|metrics|report|state|bundle)\.[a-z]+(\.\d+)?\.part")
LOCK = ".lock"
# Names of the files and folders that a training writes, or several of them with different seeds.
WRITTEN = re.compile(
    r"(run|seeds|bundle)\.json|recipe\.yaml|metrics\.jsonl|(best|last|state)\.safetensors|report\.(html|png)|\.lock"
    r"|checkpoints|tensorboard|seed--?\d+|not-finite-\d+|" + NAME.pattern
)


class CheckpointManager:
    """The checkpoints in one folder; the newest `keep` are kept."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep

    def all(self) -> list[Path]:
        """All checkpoints from the oldest to the newest, including damaged ones."""
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if NAME.fullmatch(path.name))

    def save(self, step: int, groups: TensorGroups, metadata: dict[str, Any]) -> Path:
        """Write a checkpoint as one file and remove the oldest ones."""
        path = self.folder / f"step-{step:09d}.safetensors"
        write_checkpoint_file(path, step, groups, metadata)
        self.prune(step)
        return path

    def prune(self, step: int) -> None:
        """Remove all checkpoints but the newest `keep`; `step` is the newest valid one.

        Checkpoints after `step` are damaged, since training resumed from `step`: they are removed and do not count.
        """
        paths = self.all()
        valid = [path for path in paths if step_of(path) <= step]
        for path in {*paths} - {*valid[-max(self.keep, 1) :]}:
            remove(path)

    def load_newest(self, log: Callable[[str], None], read: Callable[[Path], TrainingState]) -> TrainingState | None:
        """Step, tensors and metadata of the newest valid checkpoint; None if there are no checkpoints."""
        paths = self.all()
        for path in reversed(paths):
            try:
                return read(path)
            except READ_ERRORS as error:
                log(f"{path.name} is damaged ({short_message(error)}); loading the checkpoint before it.")
        if paths:
            count = f"All {len(paths)} checkpoints in {self.folder} are" if len(paths) > 1 else f"{paths[0]} is"
            raise UserError(f"{count} damaged, so the run cannot be resumed: start a new training in another folder.")
        return None


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint."""
    match = NAME.fullmatch(path.name)
    assert match
    return int(match[1])


def remove(path: Path) -> None:
    """Remove a file or a folder. Errors are ignored: a leftover file must not stop a training."""
    with contextlib.suppress(OSError):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextlib.contextmanager
def lock_run_directory(folder: Path, enabled: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on a run directory and remove the temporary files of an interrupted process.

    The files must not be links to others: they are overwritten, and the run directory may come from someone else.
    """
    with contextlib.ExitStack() as stack:
        if enabled:
            subfolders = (folder, folder / "checkpoints", *folder.glob("not-finite-*"))
            try:
                folder.mkdir(parents=True, exist_ok=True)
                for subfolder in subfolders:
                    reject_links(subfolder, WRITTEN)
                lock(stack.enter_context((folder / LOCK).open("a")), folder)
            except OSError as error:
                raise UserError(f"{folder} cannot be written: {describe_error(error)}.") from None
            for subfolder in subfolders:
                for path in subfolder.glob(".*.part"):
                    if UNFINISHED.fullmatch(path.name):
                        remove(path)
        yield


def lock(file: IO[str], folder: Path) -> None:
    """Lock an open file; the operating system releases the lock when this process ends, however it ends."""
    try:
        import fcntl
    except ImportError:
        return  # this system has no such locks
    try:
        # A lock of the process (lockf), not of the open file (flock): data loader processes that outlive a killed training for a
        # moment must not hold it.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # which of the two depends on the system
        raise UserError(f"Another process is training in {folder}: wait until it has finished, or stop it first.") from None
    except OSError:
        pass  # a network file system without locks


def save_checkpoint(trainer: "Trainer") -> None:
    """Write a checkpoint of the current step; every process must call this."""
    if trainer.options.sharding == "none":
        if trainer.devices.is_main:
            trainer.checkpoints.save(trainer.step, training_tensors(trainer), training_metadata(trainer))
        trainer.devices.barrier()
    else:
        save_sharded(trainer, training_metadata(trainer))


def load_checkpoint(trainer: "Trainer", log: Callable[[str], None]) -> bool:
    """Restore the newest valid checkpoint; False if there is none. Every process must call this."""
    devices, folder = trainer.devices, trainer.checkpoints.folder
    names = [path.name for path in trainer.checkpoints.all()]
    main_names = devices.broadcast(names)
    with devices.sync_errors():
        if names != main_names:
            raise UserError(f"Not all processes see the same checkpoints: {folder} must be a folder that all machines share.")

    def read(path: Path) -> TrainingState:
        if path.suffix == ".sharded":
            return read_sharded(trainer, path)
        return read_on_all_processes(devices, lambda: read_checkpoint(path))

    state = trainer.checkpoints.load_newest(log, read)
    if state is None:
        return False
    step, groups, metadata = state
    if trainer.options.sharding != "none":
        groups = shard_tensors(trainer, groups)
    restore_training(trainer, step, groups, metadata)
    if trainer.finished and devices.is_main:
        trainer.checkpoints.prune(step)  # otherwise the next save does this
    return True


def training_tensors(trainer: "Trainer") -> TensorGroups:
    """The tensors of a checkpoint. Not copies."""
    groups = {"model": trainer.model.state_dict(), "loop": {"window": trainer.window}}
    groups["optimizer"] = optimizer_state(trainer.named_parameters(), trainer.optimizer)
    if trainer.ema:
        groups["ema"] = trainer.ema.state_dict()
    heads = {name: tensor for name, tensor in trainer.task.module.state_dict().items() if not name.startswith("model.")}
    task = {f"module.{name}": tensor for name, tensor in heads.items()}
    task |= {f"state.{name}": tensor for name, tensor in trainer.task.state_dict().items()}
    return groups | ({"task": task} if task else {})


def training_metadata(trainer: "Trainer") -> dict[str, Any]:
    """The JSON part of a checkpoint. Recipe and number of micro-batches identify the training."""
    metadata: dict[str, Any] = {
        "recipe": to_json(trainer.recipe),
        "micro_batches": trainer.devices.micro_batches,
        "best": trainer.best,
        "skipped": trainer.skipped,
        "seconds": trainer.seconds,
    }
    return metadata | ({"scaler": trainer.scaler.state_dict()} if trainer.scaler else {})


def restore_training(trainer: "Trainer", step: int, groups: TensorGroups, metadata: dict[str, Any]) -> None:
    """Set the trainer to the state of a checkpoint; UserError if it is the state of something else."""
    try:
        check_same_training(trainer, step, metadata)
        restore_state(trainer, step, groups, metadata)
    except torch.OutOfMemoryError:
        raise
    except READ_ERRORS as error:
        place = f"The checkpoint of step {step} in {trainer.checkpoints.folder}"
        raise UserError(f"{place} does not fit the training: {short_message(error)}.") from None


def restore_state(trainer: "Trainer", step: int, groups: TensorGroups, metadata: dict[str, Any]) -> None:
    best, needed = metadata["best"], {"epoch", trainer.task.metric.name}
    if type(best) is not dict or (best and not needed <= best.keys()) or type(metadata["skipped"]) is not int:
        raise ValueError("its metadata is damaged")
    trainer.step = step
    trainer.best, trainer.skipped, trainer.seconds = metadata["best"], metadata["skipped"], metadata["seconds"]
    if trainer.scaler:
        trainer.scaler.load_state_dict(metadata["scaler"])
    trainer.model.load_state_dict(groups["model"])
    task = groups.get("task", {})
    heads = {name.removeprefix("module."): tensor for name, tensor in task.items() if name.startswith("module.")}
    if heads:
        trainer.task.module.load_state_dict(heads, strict=False)
    state = {name.removeprefix("state."): tensor for name, tensor in task.items() if name.startswith("state.")}
    if state:
        trainer.task.load_state_dict(state)
    restore_optimizer(trainer.named_parameters(), trainer.optimizer, groups.get("optimizer", {}))
    if trainer.ema:
        trainer.ema.load_state_dict(groups["ema"])
    trainer.window.copy_(groups["loop"]["window"])


def check_same_training(trainer: "Trainer", step: int, metadata: dict[str, Any]) -> None:
    """Raise if the checkpoint belongs to another training, even if its tensors have the right shapes."""
    checkpoint = f"The checkpoint of step {step} in {trainer.checkpoints.folder}"
    # The recipe of an older version lacks newer keys; `Recipe.from_dict` fills in their defaults.
    recipe = metadata["recipe"]
    if "group_size" not in recipe:  # a group was a micro-batch
        recipe = recipe | {"group_size": recipe["batch_size"] // metadata["micro_batches"]}
    saved, current = Recipe.from_dict(recipe).leaves(), Recipe.from_dict(to_json(trainer.recipe)).leaves()
    differing = sorted(key for key in current.keys() | saved.keys() if current.get(key) != saved.get(key))
    if differing:
        key = differing[0]
        raise UserError(
            f"{checkpoint} belongs to another training, with {key}={saved.get(key)} instead of {current.get(key)}: move it away."
        )


def optimizer_state(parameters: dict[str, nn.Parameter], optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as "parameter name/state name" -> tensor."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    return {
        f"{names[parameter]}/{key}": value if isinstance(value, Tensor) else torch.tensor(value)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def restore_optimizer(parameters: dict[str, nn.Parameter], optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    """Load what `optimizer_state` returned; `load_state_dict` moves each tensor to its device."""
    state: dict[int, dict[str, Tensor]] = {}
    order = {parameter: index for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    for path, tensor in tensors.items():
        name, key = path.rsplit("/", 1)
        state.setdefault(order[parameters[name]], {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def to_json(recipe: Recipe) -> dict[str, Any]:
    """A recipe as it is read back from JSON: tuples become lists."""
    values: dict[str, Any] = json.loads(json.dumps(recipe.to_dict()))
    return values


def write_checkpoint_file(path: Path, step: int, groups: TensorGroups, metadata: dict[str, Any]) -> None:
    """Write a checkpoint as one safetensors file; `metadata` must be JSON-serializable."""
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in flatten(groups).items()}
    control = checksum(tensors, canonical_json(step, metadata))
    header = json.dumps({"layout": LAYOUT, "step": step, "checksum": control, "facts": metadata})
    atomic_write(path, lambda temporary: write_safetensors(tensors, temporary, {TRAINING_HEADER: header}))
    for folder in (path.parent, path.parent.parent):  # the folder may have been created for this file
        fsync_path(folder)


def flatten(groups: TensorGroups) -> dict[str, Tensor]:
    """The tensors of all groups by "group:name"."""
    return {f"{group}:{name}": tensor for group, members in groups.items() for name, tensor in members.items()}


def read_on_all_processes(devices: Devices, read: Callable[[], Result]) -> Result:
    """Call `read` on every process. If it fails on one process it fails on all, so that all load the same checkpoint."""
    results: list[Result] = []
    failure = None
    with devices.sync_errors():
        try:
            results.append(read())
        except READ_ERRORS as error:
            failure = short_message(error)
    failure = next((each for each in devices.all_gather(failure) if each), None)
    if failure:
        raise ValueError(failure)
    return results[0]


def save_sharded(trainer: "Trainer", metadata: dict[str, Any]) -> None:
    """Write a sharded checkpoint: each process writes its part, and the folder gets its name when all are complete."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from vitrail.checkpoints.sharded_reader import first_failure

    devices, folder = trainer.devices, trainer.checkpoints.folder
    name = f"step-{trainer.step:09d}.sharded"
    temporary = folder / f".{name}.part"
    with devices.sync_errors():
        if devices.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            try:
                temporary.mkdir(parents=True)
            except OSError as error:
                raise WriteError(f"{temporary} cannot be written, {describe_error(error)}", "free disk space") from None
    try:
        dcp.save(flatten(training_tensors(trainer)), checkpoint_id=temporary)
    except CheckpointException as error:
        raise WriteError(f"{folder / name} could not be written, {first_failure(error)}", "free disk space") from None
    own_sums = {path.name: file_checksum(path) for path in assigned_files(temporary, devices)}
    sums = {name: value for part in devices.all_gather(own_sums) for name, value in part.items()}
    with devices.sync_errors():
        if devices.is_main:
            text = json.dumps({"layout": LAYOUT, "step": trainer.step, "facts": metadata, "sums": sums})
            atomic_write_text(temporary / COMPLETE, text)
            fsync_path(temporary)
            shutil.rmtree(folder / name, ignore_errors=True)
            temporary.rename(folder / name)
            fsync_path(folder)
            trainer.checkpoints.prune(trainer.step)


def read_sharded(trainer: "Trainer", path: Path) -> TrainingState:
    """Read a sharded checkpoint, also one that another number of processes wrote; each process reads what it needs."""
    import torch.distributed as dist

    complete, checkpoint, tensors = read_on_all_processes(trainer.devices, lambda: open_for_training(trainer, path))
    checkpoint.load(tensors, no_dist=not dist.is_initialized())
    return complete["step"], split_groups(tensors), upgrade_run(complete["facts"])


def open_for_training(trainer: "Trainer", path: Path) -> "tuple[dict[str, Any], ShardedCheckpoint, dict[str, Tensor]]":
    """The content of `complete.json`, the open checkpoint, and an empty tensor for each saved one, sharded like the trainer's."""
    from vitrail.checkpoints.sharded_reader import open_sharded

    complete = read_complete(path)
    check_same_training(trainer, complete["step"], upgrade_run(complete["facts"]))
    checkpoint = open_sharded(path, complete, assigned_files(path, trainer.devices))
    tensors, find_tensor = {}, matching_tensors(trainer)
    for key, entry in checkpoint.tensors.items():
        like, dtype = find_tensor(upgrade_checkpoint_key(key)), entry.properties.dtype
        matches = like is not None and like.shape == entry.size
        tensors[key] = torch.zeros_like(like, dtype=dtype) if matches else torch.zeros(entry.size, dtype=dtype)
    return complete, checkpoint, tensors


def assigned_files(folder: Path, devices: Devices) -> list[Path]:
    """The files of a sharded checkpoint whose checksums this process computes."""
    return list_files(folder)[devices.rank :: devices.world_size]


def matching_tensors(trainer: "Trainer") -> Callable[[str], Any]:
    """A function from the key of a saved tensor to the trainer's tensor; for optimizer state that is the parameter."""
    live = flatten(training_tensors(trainer))

    def find(key: str) -> Any:
        group, name = key.split(":", 1)
        return trainer.named_parameters()[name.rsplit("/", 1)[0]].detach() if group == "optimizer" else live.get(key)

    return find


def shard_tensors(trainer: "Trainer", groups: TensorGroups) -> TensorGroups:
    """Shard full tensors, which every process has read, like the trainer's."""
    from torch.distributed.tensor import distribute_tensor

    find_tensor = matching_tensors(trainer)

    def shard(key: str, tensor: Tensor) -> Tensor:
        like = find_tensor(key)
        if is_sharded(tensor) or not is_sharded(like) or like.shape != tensor.shape:
            return tensor
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)

    return {
        group: {name: shard(f"{group}:{name}", tensor) for name, tensor in members.items()} for group, members in groups.items()
    }


def gather_weights(model: VisionTransformer, sharding: str) -> dict[str, Tensor]:
    """The full weights on this process; if they are sharded, on rank 0 only and empty elsewhere."""
    return model.state_dict() if sharding == "none" else gather_tensors(model.state_dict())


def gather_tensors(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Gather sharded tensors one by one into the CPU memory of rank 0; the result is empty on other ranks."""
    import torch.distributed as dist

    gathered = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if is_sharded(tensor) else tensor
        if dist.get_rank() == 0:
            gathered[name] = full.cpu()
    return gathered


def save_artifact(
    path: Path, model: VisionTransformer, recipe: Recipe, metrics: dict[str, Any], weights: dict[str, Tensor]
) -> None:
    """Write weights, architecture, class names, preprocessing, recipe and metrics as one file that `load` reads."""
    notes = {"recipe": json.dumps(recipe.to_dict()), "metrics": json.dumps(metrics)}
    save_tensors(path, model, weights, notes)
    fsync_path(path.parent)
