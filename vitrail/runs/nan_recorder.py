"""NaN recorder: saves the state before a step with a NaN or Inf loss or gradient, and finds the module where it first appears.

A bundle is a folder with the checkpoint before the step (`state.safetensors`) and the diagnosis (`bundle.json`). `replay`
computes the step again, module by module.
"""

import dataclasses
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.atomic_files import atomic_write_text
from vitrail.checkpoints.training_checkpoints import READ_ERRORS, read_checkpoint, short_message
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.image_loader import ImageLoader
from vitrail.data.loader import log_to_stderr
from vitrail.devices import choose_device
from vitrail.errors import UserError
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes import Recipe
from vitrail.runs.request import split_arguments
from vitrail.runs.run_json import check_run
from vitrail.tasks.registry import find_task
from vitrail.training.batch_norm import is_synchronized
from vitrail.training.checkpointing import (
    gather_tensors,
    restore_training,
    training_metadata,
    training_tensors,
    write_checkpoint_file,
)
from vitrail.training.distributed import Devices
from vitrail.training.gradient_norm import total_norm
from vitrail.training.trainer import Options, Trainer, micro_batch_seed, seed_generators

STATE, FINDINGS = "state.safetensors", "bundle.json"
PreHook = Callable[[nn.Module, tuple[Any, ...]], None]
Hook = Callable[[nn.Module, tuple[Any, ...], Any], None]


def record_step(trainer: Trainer, loader: ImageLoader, step: int, run: dict[str, Any]) -> Path:
    """Write the bundle of a step with a NaN or Inf; the trainer must have the weights before that step."""
    trainer.step = step
    trainer.window[3:5] = torch.tensor([0.0, -1.0])  # as before the step: no step skipped, no NaN
    sharded = trainer.options.sharding != "none"
    bundle = trainer.folder / f"not-finite-{step:09d}"
    groups = {name: gather_tensors(tensors) if sharded else tensors for name, tensors in training_tensors(trainer).items()}
    if trainer.devices.is_main:
        write_checkpoint_file(bundle / STATE, step, groups, training_metadata(trainer))
        # A sharded model and synchronized norms compute only on all processes together; `replay` diagnoses in one process.
        together = sharded or is_synchronized(trainer.task.module, trainer.recipe, trainer.devices.micro_batches)
        content = {"step": step, "run": run, "found": None if together else diagnose_step(trainer, loader)}
        atomic_write_text(bundle / FINDINGS, json.dumps(content, indent=1, allow_nan=False))
    trainer.devices.barrier()
    return bundle


def replay(bundle: str | Path, device: str | None = None) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The recorded diagnosis, and that of computing the step again.

    The first is None for a training that only all processes together can compute.
    """
    from vitrail.models.config import Architecture
    from vitrail.runs.initial_model import rebuild
    from vitrail.runs.run_directory import fingerprint

    folder = Path(bundle)
    if not (folder / FINDINGS).is_file():
        raise UserError(f"{bundle} is not a complete bundle of the NaN recorder: give the folder that the error message named.")
    try:
        content = json.loads((folder / FINDINGS).read_text())
        step, groups, metadata = read_checkpoint(folder / STATE)
        run, recorded = check_run(content["run"], folder / FINDINGS), content["found"]
        if recorded is not None and not ("first_bad_module" in recorded and "first_bad_gradient" in recorded):
            raise ValueError("it has no diagnosis")
        recipe, source, data = Recipe.from_dict(run["recipe"]), run["source"], run["data"]["fingerprint"]
        micro_batches, unreadable, classes = run["micro_batches"], run["unreadable"], list(run["data"].get("classes") or ())
        if recipe.batch_size % micro_batches:
            raise ValueError(f"{micro_batches} micro-batches do not divide its batch of {recipe.batch_size}")
        architecture = Architecture.from_dict(run["architecture"])
    except (*READ_ERRORS, RecursionError) as error:
        raise UserError(f"{bundle} is not a complete bundle of the NaN recorder: {short_message(error)}.") from None
    try:
        splits = open_splits(source, class_order=classes, **split_arguments(recipe))
    except UserError as error:
        raise UserError(f"The data of {bundle} cannot be opened: {error}") from None
    if fingerprint(splits) != data:
        raise UserError(f"The images at {source} are not those that {bundle} was recorded with.")
    devices = Devices(choose_device(device), micro_batches=micro_batches)
    kind, min_side = find_task(recipe.task), recipe.min_decode_side
    kind.complete_data(recipe, splits)
    targets = kind.reads_masks, kind.reads_objects
    loader = ImageLoader(splits.train, devices.device, 0, min_side, unreadable, log_to_stderr, *targets)
    task = kind(recipe, splits.train, devices.device)
    model = rebuild(architecture, str(run.get("model", {}).get("name", "")), recipe, task.class_names)
    task.attach(model)
    if is_synchronized(task.module, recipe, micro_batches):
        devices = dataclasses.replace(devices, micro_batches=1)
    trainer = Trainer(recipe, model, task, splits.train, devices, folder, Options())
    restore_training(trainer, step, groups, metadata)
    return recorded, diagnose_step(trainer, loader)


def diagnose_step(trainer: Trainer, loader: ImageLoader) -> dict[str, Any]:
    """Compute the current step without updating the weights, and check every module output and every gradient for NaN or Inf."""
    recipe, model, step = trainer.recipe, trainer.model, trainer.step
    micro_batches = trainer.devices.micro_batches
    module = trainer.task.module
    module.train(recipe.init.mode == "train")
    diagnosis: dict[str, Any] = {
        "step": step,
        "seed": recipe.seed,
        "first_bad_module": None,
        "first_bad_gradient": None,
        "micro_batches": [],
    }
    diagnosis["bad_weights"] = [name for name, value in model.state_dict().items() if not is_finite(value)]
    diagnosis["largest_weights"] = largest_weights(model)
    batches = loader.train_loader(trainer.sampler, range(micro_batches), micro_batches).iterate_steps(step, step + 1)
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    for micro_batch, batch in enumerate(batches):
        batch = batch.to(trainer.devices.device)
        position = trainer.position(micro_batch, len(batch.index))
        images, targets = trainer.task.prepare_batch(batch, position)
        seed_generators(micro_batch_seed(recipe.seed, step, micro_batch), trainer.devices.device)
        # Compiled blocks do not call hooks.
        with torch.compiler.set_stance("force_eager"), BackwardMonitor(model) as backward:
            noise = trainer.drop_path_noise.applied(batch.position, position)
            with noise:  # also while activations are recomputed
                with ForwardMonitor(model) as forward, trainer.autocast():
                    loss = module(images, targets).reshape(-1)[0]
                loss.backward()
        if forward.first_bad is None and not is_finite(loss):
            forward.first_bad = "loss"
        gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
        diagnosis["first_bad_module"] = diagnosis["first_bad_module"] or forward.first_bad
        diagnosis["first_bad_gradient"] = diagnosis["first_bad_gradient"] or backward.first_bad
        diagnosis["micro_batches"].append(
            {
                "loss": json_float(loss),
                "gradient_norm": json_float(total_norm(list(gradients.values()))),
                "input_finite": is_finite(images),
                "images": batch.index.tolist(),
                "repeats": batch.repeat.tolist(),
                "seed": micro_batch_seed(recipe.seed, step, micro_batch),
                "blocks": forward.blocks,
                "bad_gradients": [name for name, gradient in gradients.items() if not is_finite(gradient)],
            }
        )
        module.zero_grad(set_to_none=True)
    for name, value in module.named_buffers():
        value.copy_(buffers[name])
    return diagnosis


class ForwardMonitor:
    """Records statistics of every block's output, and the first module with NaN or Inf in its output but not in its inputs."""

    def __init__(self, model: VisionTransformer) -> None:
        self.model = model
        self.first_bad: str | None = None
        self.blocks: list[dict[str, Any]] = []
        self.calls = ["model"]  # names of the modules that are being called, innermost last
        self.hooks = ExitStack()

    def __enter__(self) -> "ForwardMonitor":
        blocks = self.model.layers
        for name, module in list(self.model.named_modules())[1:]:
            before, after = self._make_hooks(name, module in blocks)
            self.hooks.callback(module.register_forward_pre_hook(before).remove)
            self.hooks.callback(module.register_forward_hook(after).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self.hooks.close()

    def _make_hooks(self, name: str, is_block: bool) -> tuple[PreHook, Hook]:
        def before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            # The outputs of all modules so far were finite, so the calling module's own operations produced this.
            if self.first_bad is None and not all(is_finite(value) for value in inputs):
                self.first_bad = self.calls[-1]
            self.calls.append(name)

        def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            self.calls.pop()
            if self.first_bad is None and not is_finite(output):
                self.first_bad = name
            if is_block and isinstance(output, Tensor):
                value = output.detach().float()
                self.blocks.append(
                    {"block": name, "largest": json_float(value.abs().max()), "deviation": json_float(value.std())}
                )

        return before, after


class BackwardMonitor:
    """Finds the first parameter with a NaN or Inf gradient, in the order of the backward pass."""

    def __init__(self, model: VisionTransformer) -> None:
        self.model = model
        self.first_bad: str | None = None
        self.hooks = ExitStack()

    def __enter__(self) -> "BackwardMonitor":
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                self.hooks.callback(parameter.register_post_accumulate_grad_hook(self._make_hook(name)).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self.hooks.close()

    def _make_hook(self, name: str) -> Callable[[Tensor], None]:
        def check(parameter: Tensor) -> None:
            if self.first_bad is None and not is_finite(parameter.grad):
                self.first_bad = name

        return check


def is_finite(value: Any) -> bool:
    """Whether a tensor has no NaN or Inf; True for other values."""
    # Detached: activation checkpointing compares the saved tensors of both forward passes.
    return not isinstance(value, Tensor) or bool(torch.isfinite(value.detach()).all())


def largest_weights(model: nn.Module, count: int = 5) -> list[list[Any]]:
    """Names and largest absolute values of the parameters with the largest entries."""
    sizes = [(name, json_float(value.detach().abs().max())) for name, value in model.named_parameters()]
    sizes.sort(key=lambda entry: entry[1] if isinstance(entry[1], float) else float("inf"), reverse=True)
    return [list(entry) for entry in sizes[:count]]


def json_float(value: Tensor) -> float | str:
    """A float, or text for NaN and Inf, which JSON does not have."""
    plain = float(value.detach())
    return plain if abs(plain) < float("inf") else str(plain)
