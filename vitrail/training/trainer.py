"""The training loop. It reads from top to bottom: prepare a batch, compute the loss, step, look, save.

Everything random is a function of (seed, step, unit), everything about order a function of the step, so the state is: weights,
optimizer, running mean, step. What is written to disk at step n and read back goes on as if nothing had happened.
"""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail.data.feed import Feed
from vitrail.data.loader import Batch
from vitrail.data.rng import sample_key
from vitrail.data.sampler import Order
from vitrail.data.transforms.mixup import draw_mix, mix_images
from vitrail.data.transforms.pipeline import augment
from vitrail.evaluation.accuracy import Accuracy, count_hits, summarize, test_view
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes.schema import Recipe
from vitrail.runs.display import Display
from vitrail.tasks.classification import Supervised
from vitrail.tasks.supervision import Guide
from vitrail.tasks.targets import Targets
from vitrail.training.batch_norm import Statistics
from vitrail.training.checkpointing import Checkpoints
from vitrail.training.compile import compile_blocks, for_compiling
from vitrail.training.cuda_graphs import Captured
from vitrail.training.device_metrics import Answer, Note
from vitrail.training.distributed import Devices, Sharding, without_reduction, wrap
from vitrail.training.ema import ModelEma
from vitrail.training.metrics import Metrics, as_json, merit
from vitrail.training.optimizers import clip_gradients, make_optimizer, set_rate
from vitrail.training.schedules import rate_at, span_steps, total_steps
from vitrail.training.signals import listening
from vitrail.training.throughput import Speed
from vitrail.training.training_state import gather, save_artifact, save_state

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Options:
    """What changes the speed of a training, not its numbers."""

    sharding: Sharding = "none"
    compile: bool = False
    recompute: bool = False  # blocks forget their activations and compute them again (gradient checkpointing)
    save_seconds: float = 120.0
    save_steps: int = 0  # also save every so many steps
    keep: int = 2
    log_steps: int = 0  # 0: about twenty times an epoch, at most every 50 steps
    on_nan: Literal["stop", "skip"] = "stop"


class Stopped(Exception):
    """The user asked to stop; the state is saved."""


class NonFiniteLoss(Exception):
    """A loss or a gradient was not a number; the weights are those before that step."""

    def __init__(self, step: int) -> None:
        self.step = step


@dataclass
class Trainer:
    """One training in progress."""

    recipe: Recipe
    model: VisionTransformer
    devices: Devices
    train: Feed
    validation: Feed
    folder: Path
    options: Options = Options()
    guide: Guide | None = None
    step: int = 0
    best: dict[str, Any] = field(default_factory=dict)
    skipped: int = 0
    seconds: float = 0.0  # spent in `run`, over all interruptions

    def __post_init__(self) -> None:
        recipe, device = self.recipe, self.devices.device
        label = self.train.source.label
        self.order = Order(
            len(self.train.source),
            recipe.batch_size,
            recipe.seed,
            repeats=recipe.data.repeats,
            round_to=recipe.data.round_to,
            labels=label.values if recipe.data.class_balanced and label else None,
        )
        self.total = total_steps(recipe.schedule, self.order.steps)
        self.test_every = max(span_steps(recipe.validation.every, self.order.steps, self.total), 1)
        self.log_every = self.options.log_steps or min(max(self.order.steps // 20, 1), 50)
        self.model.to(device)
        self.model.recompute = self.options.recompute
        if self.options.compile:
            compile_blocks(for_compiling(self.model))
        self.guide = self.guide or Guide(recipe, self.model, self.train.source, device)
        task = Supervised(self.model, recipe)
        self.module = wrap(task, self.model, self.devices, self.options.sharding)
        self.parameters = list(self.model.parameters())
        self.optimizer = make_optimizer(self.model, recipe.optimizer, recipe.lr)
        self.average = ModelEma(self.model, recipe.ema.decay) if recipe.ema.decay else None
        self.scaler = torch.amp.GradScaler(device.type) if recipe.precision == "fp16" else None
        self.checkpoints = Checkpoints(self.folder / "checkpoints", self.options.keep)
        self.statistics = Statistics(self.model, self.devices)
        kept = [*self.model.buffers(), *self.statistics.total]
        self.compute = Captured(self.learn, self.model, kept, device) if self._may_capture() else self.learn
        # On the device: sums of loss and gradient norm, steps in them, steps not taken, the first step that was not finite.
        self.window = torch.tensor([0.0, 0.0, 0.0, 0.0, -1.0], dtype=torch.float64, device=device)
        self.notes: list[Note] = []
        self.best_weights: dict[str, Tensor] | None = None

    def run(self, display: Display, metrics: Metrics | None, speed: Speed) -> None:
        """From `step` to the end. Raises Stopped when asked to stop and NotFinite at a loss that is no number."""
        stream = self.train.stream(self.order, self.devices.own_micro_batches, self.devices.micro_batches)
        saved = time.monotonic()
        begun = saved - self.seconds
        at_once = f"Stopped at once; `vitrail resume {self.folder}` goes on from what was saved last."
        with listening(at_once) as asked, closing(stream.run(self.step, self.total)) as batches:  # type: ignore[type-var]
            while self.step < self.total:
                self._step(lambda: speed.waiting(lambda: next(batches)))
                speed.count(self.recipe.batch_size)
                ended = self.step == self.total
                logging = ended or self.step % self.log_every == 0
                if logging:
                    self._note(speed)
                # Several processes wait for their notes: a step that stops one of them must stop all, at the same place.
                self._tell(display, metrics, wait=logging and self.devices.world_size > 1)
                if ended or self.step % self.test_every == 0:
                    self._tell(display, metrics, wait=True)
                    display.doing("validating")
                    speed.pause(lambda: self._validate(display, metrics))
                # One process that is asked to stop stops all of them, at the same step.
                stop, due = self.devices.all_reduce_max([asked["stop"], time.monotonic() - saved > self.options.save_seconds])
                self.seconds = time.monotonic() - begun
                if stop or due or ended or (self.options.save_steps and self.step % self.options.save_steps == 0):
                    self._tell(display, metrics, wait=True)
                    if metrics:
                        metrics.sync()
                    speed.pause(self.save)
                    saved = time.monotonic()
                if stop:
                    raise Stopped

    def _step(self, next_batch: Callable[[], Batch]) -> None:
        """One step of the optimizer over the global batch."""
        recipe, step = self.recipe, self.step
        if self.model.training != (recipe.init.mode == "train"):  # walking through all modules takes its time
            self.model.train(not self.model.training)
        set_rate(self.optimizer, rate_at(recipe.schedule, recipe.lr, step, self.order.steps))
        self.statistics.begin()
        loss = torch.zeros((), device=self.devices.device)
        for micro_batch in self.devices.own_micro_batches:
            images, targets = self.prepare(next_batch(), step, micro_batch)
            seed_generators(micro_batch_seed(recipe.seed, step, micro_batch), self.devices.device)
            with without_reduction(self.module, micro_batch == self.devices.own_micro_batches[-1]):
                loss += self.compute(images, targets)
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        own_clip = recipe.optimizer.kind == "lamb"
        norm = clip_gradients(self.parameters, 0.0 if own_clip else recipe.optimizer.clip_grad_norm)
        bad = self._account(self.devices.all_reduce_sum(loss) / self.devices.world_size, norm)
        self.statistics.settle(skip=bad)
        self.optimizer.found_inf = bad  # type: ignore[attr-defined]  # a step with it set changes nothing
        self.optimizer.step()
        if self.scaler:
            self.scaler.update()
        if self.average:
            self.average.update(bad, self.step if recipe.ema.warmup else math.inf)
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def learn(self, images: Tensor, targets: Targets) -> Tensor:
        """Forward and backward pass of one unit: its share of the loss; gradients are added to the parameters'."""
        with self.statistics.of_micro_batch(), self.autocast():
            part = self.module(images, targets) / self.devices.accumulation
        (self.scaler.scale(part) if self.scaler else part).backward()
        return part.detach()

    def prepare(self, batch: Batch, step: int, micro_batch: int) -> tuple[Tensor, Targets]:
        """A batch of stored images to what the network sees and what it should say."""
        recipe, (epoch, within) = self.recipe, divmod(step, self.order.steps)
        batch = batch.to(self.devices.device)
        how, mixing = recipe.augmentation, recipe.mixing
        seen = augment(batch.pixels, batch.sizes, sample_key(recipe.seed, epoch, batch.index, batch.repeat), how)
        mix = draw_mix(recipe.seed, epoch, within, micro_batch, how.image_size, mixing.mixup, mixing.cutmix, mixing.switch_prob)
        images = mix_images(seen.images, mix)
        assert self.guide is not None
        return images, self.guide.targets(batch, seen, images, mix, epoch, within, micro_batch)

    def _account(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Add to the window; 1 where this step must not be taken. Nothing waits for the device. Loss and norm are those of all
        processes, so that all judge alike.

        With `on_nan="stop"` the first bad step also blocks all later ones, so that the weights stay as they were before it.
        Gradients that overflow in float16 are no such trouble: the scale goes down and the step is left out.
        """
        overflow = ~torch.isfinite(norm)
        bad = ~torch.isfinite(loss) if self.scaler else ~torch.isfinite(loss) | overflow
        if self.options.on_nan == "stop":
            bad = bad | (self.window[4] >= 0)
            self.window[4] = torch.where(bad & (self.window[4] < 0), float(self.step), self.window[4])
        skip = bad | overflow
        parts = [torch.where(skip, torch.zeros_like(loss), value) for value in (loss, norm.to(loss))]
        self.window[:4] += torch.stack([*parts, ~skip, bad]).double()
        return skip.float()

    def _note(self, speed: Speed) -> None:
        """Send the window's sums on their way to this side and begin anew; nobody waits for the device."""
        rate = rate_at(self.recipe.schedule, self.recipe.lr, self.step - 1, self.order.steps)
        self.notes.append(Note(self.step, rate, speed.measure(), Answer(self.window)))
        self.window[:4].zero_()  # the first bad step stays, and keeps later ones from being taken

    def _tell(self, display: Display, metrics: Metrics | None, wait: bool = False) -> None:
        """Show the notes that have come, with `wait` all of them; raises NotFinite if there is a step that has to stop all."""
        while self.notes and (wait or self.notes[0].sums.ready()):
            note = self.notes.pop(0)
            loss, norm, count, lost, bad = note.sums.read()
            if bad >= 0:
                raise NonFiniteLoss(int(bad))
            self.skipped += int(lost)
            loss, norm = (total / count if count else math.nan for total in (loss, norm))  # none at all if every step was skipped
            values = {"loss": loss, "gradient_norm": norm, "lr": note.rate}
            if self.skipped:
                values["skipped"] = float(self.skipped)
            values |= note.speed
            if metrics:
                metrics.write("train", note.step, note.step / self.order.steps, values)
            display.step(note.step, values)

    def _check(self) -> None:
        """Raises NotFinite if there is a step at which the training has to stop."""
        bad = float(self.window[4])
        if bad >= 0:
            raise NonFiniteLoss(int(bad))

    def _validate(self, display: Display, metrics: Metrics | None) -> None:
        self._check()
        result = self.evaluate()
        epoch = self.step / self.order.steps
        values = {name: value for name, value in result._asdict().items() if value is not None}
        better = not self.best or merit(values) > merit(self.best)
        if better:
            self.best = {"step": self.step, "epoch": epoch} | {name: as_json(value) for name, value in values.items()}
            with self.reported():
                self.best_weights = {
                    name: tensor.detach().clone() for name, tensor in gather(self.model, self.options.sharding).items()
                }
        if metrics:
            metrics.write("validation", self.step, epoch, values)
        display.validated(epoch, values | {"best": better})

    def evaluate(self) -> Accuracy:
        """The validation images with the weights that are reported."""
        self.model.eval()
        view = test_view(self.model.preprocessing)
        share = max(self.recipe.batch_size // self.devices.micro_batches, 1)
        with self.reported(), self.autocast():
            hits = count_hits(self.model, self.validation, view, share, self.devices.rank, self.devices.world_size)
            return summarize(self.devices.all_reduce_sum(hits), self.model.architecture.classes)

    def _may_capture(self) -> bool:
        """Whether a step is one unit of one process, whose gradients a graph can write anew each time."""
        options, alone = self.options, self.devices.world_size == self.devices.micro_batches == 1
        plain = options.sharding == "none" and not options.recompute and self.scaler is None
        return options.compile and self.devices.device.type == "cuda" and alone and plain

    def reported(self) -> AbstractContextManager:
        """The running mean in the model's place, where the recipe reports it."""
        return self.average.applied(self.model) if self.average and self.recipe.ema.evaluate else nullcontext()

    def autocast(self) -> AbstractContextManager:
        dtype = DTYPES.get(self.recipe.precision)
        return torch.autocast(self.devices.device.type, dtype) if dtype else nullcontext()

    def save(self) -> None:
        """The best weights so far as an artifact, then the state of this moment, which counts on the artifact being there."""
        self._check()
        if self.best_weights is not None and self.devices.is_main:
            save_artifact(self.folder / "best.safetensors", self.model, self.recipe, self.best, self.best_weights)
        self.best_weights = None
        save_state(self)


def seed_generators(seed: int, device: torch.device) -> None:
    """What dropout and drop-path draw from. `torch.manual_seed` would do it too, in milliseconds."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)


def micro_batch_seed(seed: int, step: int, micro_batch: int) -> int:
    """One 63-bit number for each unit of each step."""
    value = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + micro_batch * 0x94D049BB133111EB + 1) & (2**64 - 1)
    value ^= value >> 31
    return (value * 0xD6E8FEB86659FD93) & (2**63 - 1)
