"""The flight recorder: when a loss or a gradient is not a number, what was the state, which images, where did it begin?

A bundle is a folder with the state before the step (`state.safetensors`) and what was found (`bundle.json`). `replay` computes
the step again from them, module by module.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.atomic_files import write_aside
from vitrail.checkpoints.training_checkpoints import DAMAGE, problem, read_checkpoint
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.feed import Feed
from vitrail.errors import UserError
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes import Recipe
from vitrail.tasks.classification import Supervised
from vitrail.training.checkpointing import write_checkpoint
from vitrail.training.distributed import Devices, choose_device
from vitrail.training.gradient_norm import total_norm
from vitrail.training.trainer import Options, Trainer, micro_batch_seed, seed_generators
from vitrail.training.training_state import facts_of, groups_of, put_back, whole

STATE, FINDINGS = "state.safetensors", "bundle.json"


def record(training: Trainer, step: int, run: dict[str, Any]) -> Path:
    """Write the bundle of a step that was not finite; the training's weights are those before it."""
    training.step = step
    training.window[3:] = torch.tensor([0.0, -1.0])  # as it was before the step: nothing wrong so far
    sharded = training.options.sharding != "none"
    bundle = training.folder / f"not-finite-{step:09d}"
    groups = {name: whole(tensors) if sharded else tensors for name, tensors in groups_of(training).items()}
    if training.devices.is_main:
        write_checkpoint(bundle / STATE, step, groups, facts_of(training))
        # Shared weights compute only where all processes do; `replay` puts them together.
        content = {"step": step, "run": run, "found": None if sharded else examine(training)}
        text = json.dumps(content, indent=1, allow_nan=False)
        write_aside(bundle / FINDINGS, lambda side: side.write_text(text))
    training.devices.barrier()
    return bundle


def replay(bundle: str | Path, device: str | None = None) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """What the bundle says was found (None if nobody looked), and what computing the step again finds."""
    from vitrail.runs.prepare import rebuild
    from vitrail.runs.run_directory import fingerprint

    folder = Path(bundle)
    if not (folder / FINDINGS).is_file():
        raise UserError(f"{bundle} is not a whole bundle of a step that was not finite: give the folder that the training named.")
    try:
        content = json.loads((folder / FINDINGS).read_text())
        step, groups, facts = read_checkpoint(folder / STATE)
        run, found = content["run"], content["found"]
        recipe, source, data = Recipe.from_dict(run["recipe"]), run["source"], run["data"]["fingerprint"]
        micro_batches, bad = run["micro_batches"], run["unreadable"]
    except DAMAGE as error:
        raise UserError(f"{bundle} is not a whole bundle of a step that was not finite: {problem(error)}.") from None
    try:
        splits = open_splits(source, held_out=recipe.data.validation_fraction)
    except UserError as error:
        raise UserError(f"The images that {bundle} was recorded with cannot be opened: {error}") from None
    if fingerprint(splits) != data:
        raise UserError(f"The images at {source} are not those that {bundle} was recorded with.")
    devices = Devices(choose_device(device), micro_batches=micro_batches)
    at_least = round(max(recipe.augmentation.image_size) * recipe.data.decode_scale) or None
    feed = Feed(splits.train, devices.device, 0, at_least, bad)
    training = Trainer(recipe, rebuild(run, recipe, splits.train), devices, feed, feed, folder, Options())
    put_back(training, step, groups, facts)
    return found, examine(training)


def examine(training: Trainer) -> dict[str, Any]:
    """Compute the step at hand unit by unit without taking it, and look at every module's output and every gradient."""
    recipe, model, step = training.recipe, training.model, training.step
    micro_batches = training.devices.micro_batches
    task = Supervised(model, recipe)
    model.train(recipe.init.mode == "train")
    found: dict[str, Any] = {
        "step": step,
        "seed": recipe.seed,
        "first_bad_module": None,
        "first_bad_gradient": None,
        "micro_batches": [],
    }
    found["bad_weights"] = [name for name, value in model.state_dict().items() if not finite(value)]
    found["largest_weights"] = largest(model)
    batches = training.train.stream(training.order, range(micro_batches), micro_batches).run(step, step + 1)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    for micro_batch, batch in enumerate(batches):
        images, targets = training.prepare(batch, step, micro_batch)
        seed_generators(micro_batch_seed(recipe.seed, step, micro_batch), training.devices.device)
        # Compiled blocks would not call the hooks.
        with torch.compiler.set_stance("force_eager"), Backward(model) as backward:
            with Watch(model) as watch, training.autocast():
                loss = task(images, targets)
            loss.backward()
        if watch.first_bad is None and not finite(loss):
            watch.first_bad = "loss"
        gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
        found["first_bad_module"] = found["first_bad_module"] or watch.first_bad
        found["first_bad_gradient"] = found["first_bad_gradient"] or backward.first_bad
        found["micro_batches"].append(
            {
                "loss": number(loss),
                "gradient_norm": number(total_norm(list(gradients.values()))),
                "input_finite": finite(images),
                "images": batch.index.tolist(),
                "repeats": batch.repeat.tolist(),
                "seed": micro_batch_seed(recipe.seed, step, micro_batch),
                "blocks": watch.blocks,
                "bad_gradients": [name for name, gradient in gradients.items() if not finite(gradient)],
            }
        )
        model.zero_grad(set_to_none=True)
    for name, value in model.named_buffers():
        value.copy_(buffers[name])
    return found


class Watch:
    """Statistics of every block's output, and the first module that made numbers which are not finite out of finite ones."""

    def __init__(self, model: VisionTransformer) -> None:
        self.model = model
        self.first_bad: str | None = None
        self.blocks: list[dict[str, Any]] = []
        self.calls = ["model"]  # the modules that are computing, the innermost last; the model's own arithmetic is around all
        self.hooks = ExitStack()

    def __enter__(self) -> "Watch":
        for name, module in list(self.model.named_modules())[1:]:
            before, after = self._looks(name, name.startswith("blocks.") and name.count(".") == 1)
            self.hooks.callback(module.register_forward_pre_hook(before).remove)
            self.hooks.callback(module.register_forward_hook(after).remove)
        return self

    def __exit__(self, *problem: object) -> None:
        self.hooks.close()

    def _looks(self, name: str, is_block: bool) -> tuple[Callable, Callable]:
        def before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            # Every module has been looked at, so that it is the caller's own arithmetic that made this.
            if self.first_bad is None and not all(finite(value) for value in inputs):
                self.first_bad = self.calls[-1]
            self.calls.append(name)

        def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            self.calls.pop()
            if self.first_bad is None and not finite(output):
                self.first_bad = name
            if is_block and isinstance(output, Tensor):
                value = output.detach().float()
                self.blocks.append({"block": name, "largest": number(value.abs().max()), "deviation": number(value.std())})

        return before, after


class Backward:
    """The first parameter whose gradient is not finite, in the order in which the backward pass meets them."""

    def __init__(self, model: VisionTransformer) -> None:
        self.model = model
        self.first_bad: str | None = None
        self.hooks = ExitStack()

    def __enter__(self) -> "Backward":
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                self.hooks.callback(parameter.register_post_accumulate_grad_hook(self._look(name)).remove)
        return self

    def __exit__(self, *problem: object) -> None:
        self.hooks.close()

    def _look(self, name: str) -> Callable[[Tensor], None]:
        def look(parameter: Tensor) -> None:
            if self.first_bad is None and not finite(parameter.grad):
                self.first_bad = name

        return look


def finite(value: Any) -> bool:
    """Of a tensor, all of it. Leaves no trace in a graph, which blocks that are computed again would trip over."""
    return not isinstance(value, Tensor) or bool(torch.isfinite(value.detach()).all())


def largest(model: nn.Module, count: int = 5) -> list[list[Any]]:
    """The parameters with the largest entries: where an explosion shows."""
    sizes = sorted(
        ((number(value.detach().abs().max()), name) for name, value in model.named_parameters()), key=rank, reverse=True
    )
    return [[name, size] for size, name in sizes[:count]]


def rank(entry: tuple[float | str, str]) -> float:
    return entry[0] if isinstance(entry[0], float) else float("inf")


def number(value: Tensor) -> float | str:
    """A float that JSON can hold."""
    plain = float(value.detach())
    return plain if abs(plain) < float("inf") else str(plain)
