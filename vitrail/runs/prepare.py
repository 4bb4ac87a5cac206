"""From a request to a trainer: recipe, data, pre-trained weights, task, model, memory and time, each built once.

`vitrail.runs.train` runs what `prepare` returns, `vitrail.runs.plan` prints it, and `prepare_resumed` builds the same from the
run.json of a run that was interrupted.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.data.datasets.lookup import open_splits
from vitrail.data.source import Splits
from vitrail.devices import adapt_threads, set_threads
from vitrail.errors import UserError
from vitrail.layers.fused import SubsetDropPath
from vitrail.models.config import Architecture, format_size
from vitrail.models.flops import cost_of
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes import Recipe
from vitrail.recipes.duration import set_total
from vitrail.runs.budget import choose_length
from vitrail.runs.initial_model import (
    build_initial,
    open_pretrained,
    rebuild,
)
from vitrail.runs.memory import MemoryPlan, cached_bytes, check_disk_space, plan_memory
from vitrail.runs.request import Log, TrainRequest, describe_pretrained, open_data, split_arguments, time_budget
from vitrail.runs.run_directory import check_dependencies, check_weights, describe_run, fingerprint, read_run
from vitrail.runs.step_timing import forecast, measure_pace
from vitrail.tasks.registry import find_task
from vitrail.training.batch_norm import has_batch_norm, is_synchronized
from vitrail.training.checkpointing import CheckpointManager
from vitrail.training.distributed import Devices, check_shardable, choose_micro_batches, is_launched
from vitrail.training.precision import choose_precision
from vitrail.training.schedules import fit_warmup
from vitrail.training.task import Task
from vitrail.training.trainer import Options, Trainer


@dataclass(frozen=True)
class Prepared:
    """A training before its first step, or before its next one."""

    trainer: Trainer
    splits: Splits
    run: dict[str, Any]  # the content of run.json
    workers: int | None = None
    memory: MemoryPlan | None = None  # None if resumed
    resumed: bool = False


def prepare(
    request: TrainRequest, recipe: Recipe, devices: Devices, log: Log, folder: Path | None = None, others: Sequence[float] = ()
) -> Prepared:
    """Everything up to the first step, with messages on the way. Nothing is written; `folder` is the run directory to be.

    `others` are the trainings that follow, as multiples of the time of this one.
    """
    for message in adapt_threads(devices.device):
        log(message)
    options = request.options or Options()
    if options.compile is None:
        options = dataclasses.replace(options, compile=devices.device.type == "cuda")
    with devices.sync_errors():
        data = open_data(request, recipe, devices.device)
        recipe, messages = choose_precision(data.recipe, devices.device, request.explicit_keys)
    splits = data.splits
    recipe = dataclasses.replace(recipe, precision=devices.broadcast(recipe.precision))
    with devices.sync_errors():
        task = find_task(recipe.task)(recipe, splits.train, devices.device)
        messages = [*data.messages, *messages, *task.messages]
        if data.pretrained is not None:
            messages += describe_pretrained(data.pretrained, recipe, task.class_names)
        for message in messages:
            log(message)
        model = build_initial(recipe, task.class_names, data.pretrained)
        model.recompute = options.recompute
        if options.sharding != "none":
            check_shardable(model)
            if not task.shardable:
                raise UserError(f"--shard does not support the task {recipe.task}: train without it.")
        shown = len(task.messages)
        task.attach(model)
        if folder is not None:
            check_disk_space(folder, model, task, options.keep)
        sharded_over = devices.world_size if options.sharding != "none" else 1
        cached = cached_bytes(splits, recipe, devices.device)
        memory = plan_memory(model, task, devices.device, recipe.batch_size // devices.world_size, sharded_over, cached)
    devices, recipe = divide_batch(devices, task, memory, request.micro_batch_size, log)
    task.recipe = recipe
    price = cost_of(model)
    with_head, without = (" with the head", " without it") if model.task_head is not None else ("", "")
    cost = f"{price.parameters:,} parameters{with_head}, {price.macs / 1e9:.2f} G multiply-adds per image{without}"
    log(f"{model.name}: {cost}" + (f"; run {folder}" if folder is not None else ""))
    for message in (*task.messages[shown:], *describe_grid(model), devices.describe(recipe.batch_size)):
        log(message)
    trainer = Trainer(recipe, model, task, splits.train, devices, folder or Path(), options)
    pace = measure_pace(trainer, splits, request.workers)
    minutes = time_budget(request, recipe, devices.device)
    if minutes:
        length = devices.broadcast(choose_length(trainer, pace, minutes))
        trainer.set_schedule(recipe.set(set_total(recipe.schedule, length)).schedule)
    if "schedule.warmup" not in request.explicit_keys:
        shorten_warmup(trainer, log)
    for message in forecast(trainer, memory, pace, request.source, others, minutes):
        log(message)
    run = describe_run(request.source, splits, trainer, request.unreadable)
    return Prepared(trainer, splits, run, request.workers, memory)


def shorten_warmup(trainer: Trainer, log: Log) -> None:
    """Replace a warmup that takes more than half of the training, which is shorter than that of the recipe."""
    before = trainer.recipe.schedule
    fitted = fit_warmup(before, trainer.sampler.steps)
    if fitted != before:
        log(f"schedule.warmup set to {fitted.warmup}: {before.warmup} are more than half of the training")
        trainer.set_schedule(fitted)


def prepare_resumed(
    folder: Path, devices: Devices, options: Options | None, workers: int | None, changed: dict[str, Any]
) -> Prepared:
    """A trainer at step 0 of a run that has been started; `changed` are options that differ from the run's from now on."""
    with devices.sync_errors():
        run = read_run(folder)
        try:
            recipe, saved, data = Recipe.from_dict(run["recipe"]), Options(**run["options"]), run["data"]["fingerprint"]
            classes = list(run["data"].get("classes") or ())
        except (KeyError, TypeError) as error:
            raise UserError(f"{folder / 'run.json'} does not describe a training that can be resumed: {error}.") from None
        splits = open_splits(run["source"], class_order=classes, **split_arguments(recipe))
        if fingerprint(splits) != data:
            raise UserError(f"The images at {run['source']} are not those that {folder} was started with.")
        find_task(recipe.task).complete_data(recipe, splits)
        set_threads(run.get("machine", {}).get("threads"))
        check_dependencies(recipe, run.get("teachers"), folder)
        task = find_task(recipe.task)(recipe, splits.train, devices.device)
        if CheckpointManager(folder / "checkpoints").all() and "architecture" in run:
            architecture = Architecture.from_dict(run["architecture"])
            model = rebuild(architecture, str(run.get("model", {}).get("name", "")), recipe, task.class_names)
        else:
            check_weights(recipe, run.get("weights"), folder)
            pretrained = open_pretrained(recipe) if recipe.init.weights else None
            model = build_initial(recipe, task.class_names, pretrained)
        task.attach(model)
        micro_batches = run["micro_batches"]
        if is_synchronized(task.module, recipe, micro_batches):  # any number of processes can compute a group together
            micro_batches = devices.world_size
        if micro_batches % devices.world_size or recipe.batch_size % micro_batches:
            raise UserError(
                f"{folder} divides its batch of {recipe.batch_size} images into {micro_batches} micro-batches, which "
                f"{devices.world_size} processes cannot share evenly."
            )
    devices = dataclasses.replace(devices, micro_batches=micro_batches)
    options = options or dataclasses.replace(
        saved,
        compile=saved.compile and devices.device.type == "cuda",
        sharding=saved.sharding if is_launched() else "none",  # a single process holds all weights itself
        **changed,
    )
    TrainRequest(workers=workers, options=options)  # checks the numbers
    trainer = Trainer(recipe, model, task, splits.train, devices, folder, options)
    return Prepared(trainer, splits, run, workers, resumed=True)


def divide_batch(
    devices: Devices, task: Task, memory: MemoryPlan, micro_batch_size: int | None, log: Log
) -> tuple[Devices, Recipe]:
    """The global batch divided into micro-batches, as large as memory allows or as requested.

    The statistics of BatchNorm need whole groups. A recipe that leaves the group size open gets the size of the micro-batch.
    """
    recipe = task.recipe
    # Processes measure different amounts of free memory and must divide alike: the smallest counts.
    memory = dataclasses.replace(memory, max_images=int(-devices.all_reduce_max([-memory.max_images])[0]))
    wanted = micro_batch_size or memory.max_images
    if wanted < 1:
        memory.check(1)
    sizes, group_size = (recipe.batch_size, devices.world_size), recipe.images_per_group
    if recipe.group_size and group_size != min(recipe.group_size, recipe.batch_size):
        log(f"groups of {group_size} images: {recipe.group_size} do not divide the batch size {recipe.batch_size}")
    rates = [module.rate for module in task.module.modules() if isinstance(module, SubsetDropPath)]
    norms, pairs = has_batch_norm(task.module) and recipe.init.mode == "train", recipe.mixes_images or bool(rates)
    try:
        micro_batches = choose_micro_batches(*sizes, wanted, group_size, pairs, whole_groups=norms or bool(rates))
    except UserError:
        if norms and recipe.group_size:
            raise
        # Without whole groups no image is skipped, which takes more memory than was measured.
        wanted = micro_batch_size or int(memory.max_images * (1.0 - max(rates, default=0.0)))
        micro_batches = choose_micro_batches(*sizes, wanted, group_size, pairs)
        if norms:
            recipe = dataclasses.replace(recipe, group_size=recipe.batch_size // micro_batches)
            log(f"group_size set to {recipe.group_size}, the size of a micro-batch: BatchNorm needs whole groups")
    memory.check(recipe.batch_size // micro_batches)
    return dataclasses.replace(devices, micro_batches=micro_batches), recipe


def describe_grid(model: VisionTransformer) -> list[str]:
    """A message on pixels outside the patch grid, or on a grid of one position: allowed, and rarely intended."""
    image_size, patch = model.architecture.image_size, model.architecture.patch_size
    if model.architecture.convnet and model.grid == (1, 1):
        return [
            f"the last feature map has a single position for images of {format_size(image_size)} pixels: larger images, or a "
            "model for small ones such as resnet18_cifar, keep more details"
        ]
    lost = [side - cells * patch for side, cells in zip(image_size, model.grid, strict=True)]
    if max(lost) <= 0:
        return []
    return [f"{format_size(image_size)} pixels are not a multiple of the patch size {patch}: the last {max(lost)} are ignored"]
