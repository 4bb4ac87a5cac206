"""What a training is at one moment, to disk and back: as one file, or sharded in torch's distributed format."""

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from vitrail.aliases import upgrade_checkpoint_key, upgrade_run
from vitrail.atomic_files import Unwritten, flush, write_aside
from vitrail.atomic_files import reason as why
from vitrail.checkpoints.model_io import save_tensors
from vitrail.checkpoints.training_checkpoints import (
    CLOSING,
    DAMAGE,
    LAYOUT,
    State,
    check_parts,
    grouped,
    problem,
    read_checkpoint,
    sum_of,
)
from vitrail.errors import UserError
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes.schema import Recipe
from vitrail.training.checkpointing import optimizer_tensors, restore_optimizer
from vitrail.training.distributed import Devices
from vitrail.training.gradient_norm import is_sharded

if TYPE_CHECKING:
    from vitrail.training.trainer import Trainer

Result = TypeVar("Result")


def save_state(training: "Trainer") -> None:
    """Write a checkpoint; every process takes part."""
    if training.options.sharding == "none":
        if training.devices.is_main:
            training.checkpoints.save(training.step, groups_of(training), facts_of(training))
        training.devices.barrier()
    else:
        save_sharded(training, facts_of(training))


def groups_of(training: "Trainer") -> dict[str, dict[str, Tensor]]:
    groups = {"model": training.model.state_dict(), "loop": {"window": training.window}}
    groups["optimizer"] = optimizer_tensors(training.model, training.optimizer)
    if training.average:
        groups["ema"] = training.average.state_dict()
    return groups


def facts_of(training: "Trainer") -> dict[str, Any]:
    """What is not a tensor. Recipe and units say whose state this is."""
    facts: dict[str, Any] = {
        "recipe": plain(training.recipe),
        "micro_batches": training.devices.micro_batches,
        "best": training.best,
        "skipped": training.skipped,
        "seconds": training.seconds,
    }
    return facts | ({"scaler": training.scaler.state_dict()} if training.scaler else {})


def plain(recipe: Recipe) -> dict[str, Any]:
    """A recipe as it comes back from JSON."""
    return json.loads(json.dumps(recipe.to_dict()))


def load_state(training: "Trainer", say: Callable[[str], None]) -> bool:
    """Go back to the newest whole checkpoint; False if there is none."""
    devices, folder = training.devices, training.checkpoints.folder
    names = [path.name for path in training.checkpoints.all()]
    known = devices.broadcast(names)
    with devices.sync_errors():
        if names != known:
            raise UserError(f"Not all processes see the same checkpoints: {folder} must be a folder that all machines share.")

    def read(path: Path) -> State:
        return read_sharded(training, path) if path.suffix == ".sharded" else jointly(devices, lambda: read_checkpoint(path))

    found = training.checkpoints.newest(say, read)
    if found is None:
        return False
    step, groups, facts = found
    put_back(training, step, spread(training, groups) if training.options.sharding != "none" else groups, facts)
    if step == training.total and devices.is_main:
        training.checkpoints.tidy(step)  # nothing will be saved any more, which would tidy too
    return True


def put_back(training: "Trainer", step: int, groups: dict[str, dict[str, Tensor]], facts: dict[str, Any]) -> None:
    """Make the training what it was."""
    check_owner(training, step, facts)
    training.step = step
    training.best, training.skipped, training.seconds = facts["best"], facts["skipped"], facts["seconds"]
    if training.scaler:
        training.scaler.load_state_dict(facts["scaler"])
    training.model.load_state_dict(groups["model"])
    restore_optimizer(training.model, training.optimizer, groups.get("optimizer", {}))
    if training.average:
        training.average.load_state_dict(groups["ema"])
    training.window.copy_(groups["loop"]["window"])


def check_owner(training: "Trainer", step: int, facts: dict[str, Any]) -> None:
    """Refuses the state of another training: tensors may fit by chance, numbers would not."""
    where = f"The checkpoint of step {step} in {training.checkpoints.folder}"
    # A recipe of an older version has fewer leaves; reading it gives the others their usual values.
    theirs, ours = Recipe.from_dict(facts["recipe"]).leaves(), Recipe.from_dict(plain(training.recipe)).leaves()
    differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if differing:
        name = differing[0]
        raise UserError(
            f"{where} belongs to another training, with {name}={theirs.get(name)} instead of {ours.get(name)}: move it away."
        )
    if facts["micro_batches"] != training.devices.micro_batches:
        raise UserError(
            f"{where} cuts the batch into {facts['micro_batches']} parts, not {training.devices.micro_batches}: move it away."
        )


def save_sharded(training: "Trainer", facts: dict[str, Any]) -> None:
    """Each process writes its own part into a folder that gets its name when all are done."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    devices, folder = training.devices, training.checkpoints.folder
    name = f"step-{training.step:09d}.sharded"
    side = folder / f".{name}.part"
    with devices.sync_errors():
        if devices.is_main:
            shutil.rmtree(side, ignore_errors=True)
            try:
                side.mkdir(parents=True)
            except OSError as error:
                raise Unwritten(f"{side} cannot be written, {why(error)}", "make room there") from None
    try:
        dcp.save(flatten(groups_of(training)), checkpoint_id=side)
    except CheckpointException as error:
        raise Unwritten(f"{folder / name} could not be written, {reason(error)}", "make room there") from None
    mine = {path.name: sum_of(path) for path in share_of(side, devices)}
    sums = {name: found for part in devices.all_gather(mine) for name, found in part.items()}
    with devices.sync_errors():
        if devices.is_main:
            text = json.dumps({"layout": LAYOUT, "step": training.step, "facts": facts, "sums": sums})
            write_aside(side / CLOSING, lambda path: path.write_text(text))
            flush(side)
            shutil.rmtree(folder / name, ignore_errors=True)
            side.rename(folder / name)
            flush(folder)
            training.checkpoints.tidy(training.step)


def read_sharded(training: "Trainer", path: Path) -> State:
    """Each process reads what it needs, also of parts that another number of processes has written."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    closing, blank = jointly(training.devices, lambda: open_sharded(training, path))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it reads alone is what one process means to do
            dcp.load(blank, checkpoint_id=path, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise ValueError(reason(error)) from None
    return closing["step"], grouped(blank), upgrade_run(closing["facts"])


def open_sharded(training: "Trainer", path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What the closing file says, and room for every tensor, sharded like the one that it is to become."""
    from torch.distributed.checkpoint import FileSystemReader

    closing = json.loads((path / CLOSING).read_text())
    if closing["layout"] <= LAYOUT:
        check_owner(training, closing["step"], upgrade_run(closing["facts"]))
    check_parts(path, closing, share_of(path, training.devices))
    blank, counterpart = {}, counterparts(training)
    entries: Mapping[str, Any] = FileSystemReader(path).read_metadata().state_dict_metadata
    for key, entry in entries.items():
        like, kind = counterpart(upgrade_checkpoint_key(key)), entry.properties.dtype
        fits = like is not None and like.shape == entry.size
        blank[key] = torch.empty_like(like, dtype=kind) if fits else torch.empty(entry.size, dtype=kind)
    return closing, blank


def share_of(folder: Path, devices: Devices) -> list[Path]:
    """The files of a checkpoint that this process looks at."""
    return sorted(path for path in folder.iterdir() if path.name != CLOSING)[devices.rank :: devices.world_size]


def jointly(devices: Devices, read: Callable[[], Result]) -> Result:
    """What one process cannot read none reads, so that all go back to the same checkpoint."""
    found: list[Result] = []
    trouble = None
    with devices.sync_errors():
        try:
            found.append(read())
        except DAMAGE as error:
            trouble = problem(error)
    trouble = next((each for each in devices.all_gather(trouble) if each), None)
    if trouble:
        raise ValueError(trouble)
    return found[0]


def reason(error: Any) -> str:
    """What the first process to fail says; torch wraps it in a report."""
    cause = next(iter(error.failures.values()))[0] if error.failures else error
    return problem(cause)


def flatten(groups: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{group}:{name}": tensor for group, members in groups.items() for name, tensor in members.items()}


def counterparts(training: "Trainer") -> Callable[[str], Any]:
    """From the key of a saved tensor to the training's that it belongs to; what the optimizer keeps belongs to a parameter."""
    live = flatten(groups_of(training))

    def find(key: str) -> Any:
        group, name = key.split(":", 1)
        return training.model.get_parameter(name.rsplit("/", 1)[0]).detach() if group == "optimizer" else live.get(key)

    return find


def spread(training: "Trainer", groups: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Whole tensors, which every process has read, cut like those of a sharded training."""
    from torch.distributed.tensor import distribute_tensor

    counterpart = counterparts(training)

    def cut(key: str, tensor: Tensor) -> Tensor:
        like = counterpart(key)
        if is_sharded(tensor) or not is_sharded(like) or like.shape != tensor.shape:
            return tensor
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)

    return {
        group: {name: cut(f"{group}:{name}", tensor) for name, tensor in members.items()} for group, members in groups.items()
    }


def gather(model: VisionTransformer, sharding: str) -> dict[str, Tensor]:
    """The whole weights on this process (on the first only, where they are sharded)."""
    return model.state_dict() if sharding == "none" else whole(model.state_dict())


def whole(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Sharded tensors put together, one after the other, in the memory of the first process; the others have none."""
    import torch.distributed as dist

    found = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if is_sharded(tensor) else tensor
        if dist.get_rank() == 0:
            found[name] = full.cpu()
    return found


def save_artifact(
    path: Path, model: VisionTransformer, recipe: Recipe, measured: dict[str, Any], weights: dict[str, Tensor]
) -> None:
    """One file that needs nothing else: weights, architecture, class names, preprocessing, recipe, metrics."""
    notes = {"recipe": json.dumps(recipe.to_dict()), "metrics": json.dumps(measured)}
    save_tensors(path, model, weights, notes)
    flush(path.parent)
