"""The training loop, top to bottom: next batch, forward and backward, optimizer step, log, validate, save.

Everything random is a function of (seed, step, image) and the order of the images a function of the step; only dropout draws
from a generator, which is seeded for each micro-batch. The state is therefore weights, optimizer, EMA, the task's own state and
the step; a run that is resumed from it continues bit for bit.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from vitrail.data.image_loader import ImageLoader
from vitrail.data.loader import Batch
from vitrail.data.sampler import EpochSampler
from vitrail.data.source import Source
from vitrail.layers.fused import optimize_for_training
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes.schema import Recipe, ScheduleConfig
from vitrail.training.batch_norm import BatchNormStatistics, frozen_norms, group_batch_norms
from vitrail.training.checkpointing import CheckpointManager, gather_weights, save_artifact, save_checkpoint
from vitrail.training.compile import compile_blocks
from vitrail.training.cuda_graphs import CapturedStep
from vitrail.training.device_metrics import PendingMetrics, PendingTensor
from vitrail.training.distributed import Devices, Sharding, gradient_sync, wrap_module
from vitrail.training.drop_path_noise import DropPathNoise
from vitrail.training.ema import ModelEma
from vitrail.training.metrics import MetricsWriter, as_json
from vitrail.training.optimizers import clip_gradients, make_optimizer, parameter_groups, set_lr
from vitrail.training.schedules import duration_to_steps, lr_at, total_steps
from vitrail.training.signals import handle_stop_signals
from vitrail.training.task import Position, Targets, Task
from vitrail.training.throughput import Throughput

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# On the device: sums of loss and gradient norm, steps summed, steps skipped, the first step with NaN or Inf (-1: none).
LOSS, NORM, STEPS, SKIPPED, FIRST_BAD, LOGS = 0, 1, 2, 3, 4, 5


@dataclass(frozen=True)
class Options:
    """Settings that change the speed of a training and not its results."""

    sharding: Sharding = "none"
    compile: bool | None = None  # None: on a GPU
    recompute: bool = False  # gradient checkpointing: activations of blocks are recomputed in the backward pass
    save_seconds: float = 120.0
    save_steps: int = 0  # also save every so many steps
    keep: int = 2  # checkpoints on disk
    log_steps: int = 0  # 0: about twenty times an epoch, at most every 50 steps
    on_nan: Literal["stop", "skip"] = "stop"


class Stopped(Exception):
    """The user requested a stop; a checkpoint has been saved."""


class NonFiniteLoss(Exception):
    """The loss or a gradient was NaN or Inf; the weights are those before that step."""

    def __init__(self, step: int) -> None:
        self.step = step


class ProgressDisplay(Protocol):
    """What the trainer needs of the display."""

    def step(self, step: int, values: Mapping[str, float]) -> None: ...

    def log_validation(self, epoch: float, values: Mapping[str, Any]) -> None: ...

    def show_activity(self, activity: str) -> None: ...

    def warn(self, message: str) -> None: ...


@dataclass
class Trainer:
    """One training in progress: the model, its task, the optimizer and the step."""

    recipe: Recipe
    model: VisionTransformer
    task: Task  # attached to the model
    source: Source  # the training images
    devices: Devices
    folder: Path  # the run directory
    options: Options = Options()
    validation: ImageLoader | None = None
    step: int = 0
    best: dict[str, Any] = field(default_factory=dict)
    skipped: int = 0
    seconds: float = 0.0  # spent in `run`, over all interruptions

    def __post_init__(self) -> None:
        recipe, device, options = self.recipe, self.devices.device, self.options
        label = self.source.label
        self.sampler = EpochSampler(
            len(self.source),
            recipe.batch_size,
            recipe.seed,
            repeats=recipe.data.repeats,
            round_to=recipe.data.round_to,
            group_size=recipe.images_per_group,
            labels=label.values if recipe.data.class_balanced and label else None,
        )
        self.log_every = options.log_steps or min(max(self.sampler.steps // 20, 1), 50)
        self.set_schedule(recipe.schedule)
        self.model.to(device)
        self.task.module.to(device)
        self.model.recompute = options.recompute
        group_batch_norms(self.task.module, recipe, self.devices)
        self.drop_path_noise = DropPathNoise(self.task.module, recipe.seed, recipe.batch_size, recipe.images_per_group)
        if options.compile:
            for network in self.task.module.modules():
                if isinstance(network, VisionTransformer):
                    compile_blocks(optimize_for_training(network))
        self.module = wrap_module(self.task.module, self.model, self.devices, options.sharding)
        self.head_parameters = head_parameters(self.task, self.model)
        self.parameters = [*self.model.parameters(), *self.head_parameters.values()]
        self.optimizer = make_optimizer(self._parameter_groups(), recipe.optimizer, recipe.lr)
        self.ema = ModelEma(self.model, recipe.ema.decay) if recipe.ema.decay else None
        self.scaler = torch.amp.GradScaler(device.type) if recipe.precision == "fp16" else None
        self.checkpoints = CheckpointManager(self.folder / "checkpoints", options.keep)
        self.frozen_norms = frozen_norms(self.model, self.task.module)
        self.set_mode(recipe.init.mode == "train")
        self.statistics = BatchNormStatistics(self.task.module, self.devices, self.frozen_norms)
        buffers = [*self.task.module.buffers(), *self.statistics.total]
        self.compute = (
            CapturedStep(self.forward_backward, self.task.module, buffers, device)
            if self._may_capture()
            else self.forward_backward
        )
        window = [0.0, 0.0, 0.0, 0.0, -1.0, *(0.0 for _ in self.task.logs)]
        self.window = torch.tensor(window, dtype=torch.float64, device=device)
        self.pending_metrics: list[PendingMetrics] = []

    def set_schedule(self, schedule: ScheduleConfig) -> None:
        """Set `schedule` of the recipe; not possible after the first step."""
        self.recipe = self.task.recipe = dataclasses.replace(self.recipe, schedule=schedule)
        self.total = total_steps(schedule, self.sampler.steps)
        self.validate_every = max(duration_to_steps(self.recipe.validation.every, self.sampler.steps, self.total), 1)

    @property
    def highest(self) -> dict[str, Any]:
        """`best` with metric, loss and step of the highest validation, where `validation.select_by=latest` chose a later one."""
        best, name = self.best, self.task.metric.name
        if "highest" not in best:
            return best
        loss = best.get("highest_loss", best.get("loss"))  # older checkpoints do not have it
        return best | {name: best["highest"], "step": best["highest_step"], "loss": loss}

    @property
    def stopped_early(self) -> bool:
        """Whether the last `validation.patience` validations were not better than the best.

        This follows from `step` and `best`, which are the same on all processes and in checkpoints.
        """
        patience, every = self.recipe.validation.patience, self.validate_every
        if not patience or not self.best or self.step == self.total:
            return False
        return self.step // every - int(self.highest["step"]) // every >= patience

    @property
    def finished(self) -> bool:
        return self.step == self.total or self.stopped_early

    def run(self, loader: ImageLoader, display: ProgressDisplay, metrics: MetricsWriter | None, throughput: Throughput) -> None:
        """Train from `step` to the end. Raises Stopped on request and NonFiniteLoss where the loss is NaN or Inf."""
        stream = loader.train_loader(self.sampler, self.devices.own_micro_batches, self.devices.micro_batches)
        saved = time.monotonic()
        started = saved - self.seconds
        message = f"Stopped at once; `vitrail resume {self.folder}` continues from the last checkpoint."
        with handle_stop_signals(message) as requested, closing(stream.iterate_steps(self.step, self.total)) as batches:  # type: ignore[type-var]
            if self.step == 0 and self.recipe.validation.at_start:
                display.show_activity("validating")
                throughput.exclude(lambda: self._validate(display, metrics))
            while not self.finished:
                self.train_step(lambda: throughput.measure_data_wait(lambda: next(batches)))
                throughput.count(self.recipe.batch_size)
                last = self.step == self.total
                logging = last or self.step % self.log_every == 0
                if logging:
                    self._start_log(throughput)
                    self._report_capture(display)
                # With several processes the log is read at once: a step that stops one of them stops all, at the same step.
                self._write_logs(display, metrics, wait=logging and self.devices.world_size > 1)
                if last or self.step % self.validate_every == 0:
                    self._write_logs(display, metrics, wait=True)
                    display.show_activity("validating")
                    throughput.exclude(lambda: self._validate(display, metrics))
                # A request to stop that one process receives stops all of them, at the same step.
                overdue = time.monotonic() - saved > self.options.save_seconds
                stop, due = self.devices.all_reduce_max([requested["stop"], overdue])
                self.seconds = time.monotonic() - started
                if stop or due or self.finished or (self.options.save_steps and self.step % self.options.save_steps == 0):
                    self._write_logs(display, metrics, wait=True)
                    if metrics:
                        metrics.sync()
                    throughput.exclude(self.save)
                    saved = time.monotonic()
                if stop:
                    raise Stopped

    def train_step(self, next_batch: Callable[[], Batch]) -> None:
        """One optimizer step over the global batch."""
        recipe, step, devices = self.recipe, self.step, self.devices
        if self.task.module.training != (recipe.init.mode == "train"):  # setting the mode visits all modules
            self.set_mode(recipe.init.mode == "train")
        set_lr(self.optimizer, lr_at(recipe.schedule, recipe.lr, step, self.sampler.steps))
        self.statistics.start_step()
        values = torch.zeros(1 + len(self.task.logs), device=devices.device)
        for micro_batch in devices.own_micro_batches:
            batch = next_batch().to(devices.device)
            position = self.position(micro_batch, len(batch.index))
            images, targets = self.task.prepare_batch(batch, position)
            seed_generators(micro_batch_seed(recipe.seed, step, micro_batch), devices.device)
            last = micro_batch == devices.own_micro_batches[-1]
            with self.drop_path_noise.applied(batch.position, position), gradient_sync(self.module, last):
                values += self.compute(images, targets)
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        self.task.before_optimizer_step(self.optimizer, self.position())
        own_clip = recipe.optimizer.kind == "lamb"
        norm = clip_gradients(self.parameters, 0.0 if own_clip else recipe.optimizer.clip_grad_norm)
        skip = self._add_to_window(devices.all_reduce_sum(values) / devices.world_size, norm)
        self.statistics.finish_step(skip=skip)
        self.optimizer.found_inf = skip  # type: ignore[attr-defined]  # a step with it set changes nothing
        self.optimizer.step()
        if self.scaler:
            self.scaler.update()
        if self.ema:
            self.ema.update(skip, step if recipe.ema.warmup else math.inf)
        self.task.after_optimizer_step(self.position(), skip)
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def set_mode(self, training: bool) -> None:
        self.task.module.train(training)
        for norm in self.frozen_norms:
            norm.eval()

    def forward_backward(self, images: Tensor, targets: Targets) -> Tensor:
        """Loss and logs [1 + L] of one micro-batch, divided by the accumulation steps; gradients are added to the parameters'."""
        with self.statistics.micro_batch_forward(), self.autocast():
            values: Tensor = self.module(images, targets).reshape(-1) / self.devices.accumulation
        loss = values[0]
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        return values.detach()

    def position(self, micro_batch: int = 0, images: int = 0) -> Position:
        """The position of a micro-batch of so many images, or of the step."""
        epoch, step_in_epoch = divmod(self.step, self.sampler.steps)
        first = micro_batch * self.sampler.groups // self.devices.micro_batches
        count, rest = divmod(images, self.recipe.images_per_group)
        groups = tuple(range(first, first + (1 if rest else max(count, 1))))  # step timing uses other sizes
        return Position(self.step, self.total, epoch, step_in_epoch, groups)

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Those of the model under their own names, those of the task's heads with the prefix `task.`."""
        heads = {f"task.{name}": parameter for name, parameter in self.head_parameters.items()}
        return dict(self.model.named_parameters()) | heads

    def _parameter_groups(self) -> list[dict[str, Any]]:
        """Those of the model, and one for the matrices and one for the vectors of the task's heads."""
        config = self.recipe.optimizer
        groups = parameter_groups(self.model, config)
        for decay, matrices in ((config.weight_decay, True), (0.0, False)):
            own = [p for p in self.head_parameters.values() if p.requires_grad and (p.ndim > 1) == matrices]
            if own:
                groups.append({"params": own, "weight_decay": decay, "lr_scale": 1.0})
        return groups

    def _add_to_window(self, values: Tensor, norm: Tensor) -> Tensor:
        """Add to the sums of the log; returns 1.0 where this step must be skipped. The host does not wait for the device.

        Loss and norm are those of all processes, so that all decide alike. With `on_nan="stop"` the first NaN or Inf also
        blocks all later steps, so that the weights stay as they were before it. Gradients that overflow in float16 are
        expected: the scale is reduced and the step skipped.
        """
        loss = values[0]
        overflow = ~torch.isfinite(norm)
        bad = ~torch.isfinite(loss) if self.scaler else ~torch.isfinite(loss) | overflow
        if self.options.on_nan == "stop":
            bad = bad | (self.window[FIRST_BAD] >= 0)
            first = torch.where(bad & (self.window[FIRST_BAD] < 0), float(self.step), self.window[FIRST_BAD])
            self.window[FIRST_BAD] = first
        skip = bad | overflow
        loss, norm, *logs = (torch.where(skip, torch.zeros_like(loss), value) for value in (loss, norm.to(loss), *values[1:]))
        self.window[:FIRST_BAD] += torch.stack([loss, norm, ~skip, bad]).double()
        if logs:
            self.window[LOGS:] += torch.stack(logs).double()
        return skip.float()

    def _start_log(self, throughput: Throughput) -> None:
        """Start copying the sums to the host and reset them; the host does not wait for the device."""
        lr = lr_at(self.recipe.schedule, self.recipe.lr, self.step - 1, self.sampler.steps)
        self.pending_metrics.append(PendingMetrics(self.step, lr, throughput.measure(), PendingTensor(self.window)))
        self.window[:FIRST_BAD].zero_()  # the first bad step stays and blocks later ones
        self.window[LOGS:].zero_()

    def _report_capture(self, display: ProgressDisplay) -> None:
        """Say once that a step cannot be captured as a CUDA graph, which makes small models slower."""
        if isinstance(self.compute, CapturedStep) and self.compute.failure is not None:
            reason = str(self.compute.failure).strip().split("\n")[0]
            display.warn(f"steps run without a CUDA graph: {reason}")
            self.compute = self.forward_backward

    def _write_logs(self, display: ProgressDisplay, metrics: MetricsWriter | None, wait: bool = False) -> None:
        """Write the logs that have arrived, with `wait` all of them; raises NonFiniteLoss if a step was NaN or Inf."""
        while self.pending_metrics and (wait or self.pending_metrics[0].sums.ready()):
            note = self.pending_metrics.pop(0)
            sums = note.sums.read()
            if sums[FIRST_BAD] >= 0:
                raise NonFiniteLoss(int(sums[FIRST_BAD]))
            self.skipped += int(sums[SKIPPED])
            count = sums[STEPS]
            loss, norm, *logs = (total / count if count else math.nan for total in (sums[LOSS], sums[NORM], *sums[LOGS:]))
            values = {"loss": loss, "gradient_norm": norm, "lr": note.lr} | dict(zip(self.task.logs, logs, strict=True))
            if self.skipped:
                values["skipped"] = float(self.skipped)
            values |= note.throughput
            if metrics:
                metrics.write("train", note.step, note.step / self.sampler.steps, values)
            display.step(note.step, values)

    def _check_finite(self) -> None:
        bad = float(self.window[FIRST_BAD])
        if bad >= 0:
            raise NonFiniteLoss(int(bad))

    def _validate(self, display: ProgressDisplay, metrics: MetricsWriter | None) -> None:
        self._check_finite()
        values, epoch, metric = self.evaluate(), self.step / self.sampler.steps, self.task.metric
        highest = self.highest
        better = not highest or self.task.is_better(values, highest)
        if better:
            self.best = {"step": self.step, "epoch": epoch} | {name: as_json(value) for name, value in values.items()}
            if self.recipe.validation.select_by == "latest" and highest and values[metric.name] <= highest[metric.name]:
                self.best |= {
                    "highest": highest[metric.name],
                    "highest_step": highest["step"],
                    "highest_loss": highest.get("loss"),
                }
            with self.evaluated_weights():
                weights = gather_weights(self.model, self.options.sharding)
                if self.devices.is_main:  # before it is printed: what was printed is on disk, whatever happens next
                    save_artifact(self.folder / "best.safetensors", self.model, self.recipe, self.best, weights)
        if metrics:
            metrics.write("validation", self.step, epoch, values)
        display.log_validation(epoch, values | {"best": better})
        problem = self.task.diagnose(values, epoch)
        if problem:
            display.warn(problem)

    def evaluate(self) -> dict[str, Any]:
        """The task's metrics on the validation images, with the EMA weights if the recipe evaluates those."""
        assert self.validation is not None
        self.task.module.eval()
        batch_size = max(self.recipe.batch_size // self.devices.micro_batches, 1)
        with self.evaluated_weights(), self.autocast():
            return self.task.evaluate(self.model, self.validation, batch_size, self.devices)

    def _may_capture(self) -> bool:
        """Whether a step is one micro-batch of one process, whose gradients a CUDA graph can write anew each time."""
        options, alone = self.options, self.devices.world_size == self.devices.micro_batches == 1
        plain = options.sharding == "none" and not options.recompute and self.scaler is None
        return bool(options.compile) and self.devices.device.type == "cuda" and alone and plain

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """The EMA weights in the model, where the recipe evaluates and saves them, or those that the task evaluates."""
        if self.ema and self.recipe.ema.evaluate:
            return self.ema.applied(self.model)
        return self.task.evaluated_weights(self.model)

    def autocast(self) -> AbstractContextManager[None]:
        dtype = DTYPES.get(self.recipe.precision)
        return torch.autocast(self.devices.device.type, dtype) if dtype else nullcontext()

    def save(self) -> None:
        """Write a checkpoint; the best weights so far are on disk already."""
        self._check_finite()
        save_checkpoint(self)


def head_parameters(task: Task, model: VisionTransformer) -> dict[str, torch.nn.Parameter]:
    """The task's own parameters by name: those of its module that do not belong to the model."""
    own = set(model.parameters())
    return {name: parameter for name, parameter in task.module.named_parameters() if parameter not in own}


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed what dropout draws from. `torch.manual_seed` would take milliseconds."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)


def micro_batch_seed(seed: int, step: int, micro_batch: int) -> int:
    """One 63-bit number for each micro-batch of each step."""
    value = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + micro_batch * 0x94D049BB133111EB + 1) & (2**64 - 1)
    value ^= value >> 31
    return (value * 0xD6E8FEB86659FD93) & (2**63 - 1)
