"""DINO (arXiv 2104.14294): a student predicts, from one view of an image, what its teacher outputs for another view.

The teacher is an EMA of the student. Its outputs are centered and sharpened, so that neither one output nor the uniform
distribution fits all images. Global views pass through both networks as one batch, local views through the student as another.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from vitrail.data.loader import Batch
from vitrail.data.rng import bernoulli, hash32
from vitrail.data.sampler import EpochSampler
from vitrail.data.transforms.masks import MaskedPatches, block_mask, locate_masked
from vitrail.data.transforms.pipeline import augment_views
from vitrail.errors import UserError
from vitrail.evaluation.feature_health import entropy_of_sums
from vitrail.heads.masked_modeling import gather_patches
from vitrail.heads.projection import ProjectionHead
from vitrail.layers.layout import Layout
from vitrail.layers.token_mixers import PatchLinear
from vitrail.models.config import format_size
from vitrail.models.inputs import FIXED_GRID, has_fixed_grid
from vitrail.models.registry import build
from vitrail.models.vision_transformer import Features, VisionTransformer
from vitrail.recipes.task_options import DinoOptions
from vitrail.tasks.dino_collapse import SIMILAR_VIEWS, CollapseAlarm
from vitrail.tasks.self_supervised import SelfSupervised, Sums
from vitrail.training.compile import compile_function, is_compiled, static_shapes
from vitrail.training.ema import ModelEma, copy_into, named_tensors
from vitrail.training.gradient_norm import local_tensors
from vitrail.training.schedules import cosine, duration_to_steps, total_steps
from vitrail.training.task import Position

LOCAL_SHARE = 3 / 7  # of the image size: 96 of 224 pixels
SMALLEST_BLOCK = 4  # masked patches, as in iBOT
TEACHER_COST = 1 / 3  # of a forward pass, relative to forward and backward


class DinoTargets(NamedTuple):
    """What the module needs besides the global views [2B, 3, H, W]."""

    local: Tensor | None  # local views [n * B, 3, h, w], one view of all images after the other
    temperature: Tensor  # [] of the teacher
    mask: Tensor | None = None  # with iBOT's loss the `MaskedPatches` of the global views
    positions: Tensor | None = None
    masked: Tensor | None = None

    @property
    def patches(self) -> MaskedPatches | None:
        if self.mask is None or self.positions is None or self.masked is None:
            return None
        return MaskedPatches(self.mask, self.positions, self.masked)


class Network(nn.Module):
    """A model with a projection head."""

    def __init__(self, model: VisionTransformer, head: ProjectionHead) -> None:
        super().__init__()
        self.model, self.head = model, head

    def forward(self, images: Tensor) -> Tensor:
        """Images to outputs [B, K]."""
        out: Tensor = self.head(pool(self.model, images))
        return out


class DinoModule(nn.Module):
    """Student, teacher, the teacher's center, and the loss between their outputs."""

    center: Tensor
    output_sum: Tensor
    patch_center: Tensor
    patch_sum: Tensor
    temperature: Tensor

    def __init__(self, model: VisionTransformer, options: DinoOptions) -> None:
        super().__init__()
        o = self.options = options
        sizes = (model.architecture.width, o.outputs, o.hidden, o.bottleneck, o.head_layers)
        self.model, self.head = model, ProjectionHead(*sizes, fixed_gain=o.norm_last_layer)
        self.teacher = Network(copy_without_noise(model), copy.deepcopy(self.head)).requires_grad_(False)
        self.register_buffer("center", torch.zeros(o.outputs))
        # The teacher's outputs, summed over the micro-batches of a step.
        self.register_buffer("output_sum", torch.zeros(o.outputs), persistent=False)
        if o.patch_weight:
            self.mask_token = nn.Parameter(torch.zeros(model.architecture.width))
            self.register_buffer("patch_center", torch.zeros(o.outputs))
            self.register_buffer("patch_sum", torch.zeros(o.outputs + 1), persistent=False)  # and the sum of their weights
        self.register_buffer("temperature", torch.tensor(o.teacher_temperature_start))  # of the latest step, for the validation

    @property
    def student(self) -> Network:
        """Model and head, under the names of those of the teacher."""
        return Network(self.model, self.head)

    def forward(self, images: Tensor, targets: DinoTargets) -> Tensor:
        """Loss, entropy of the teacher, KL divergence, standard deviation of global and of local views, and iBOT's loss."""
        compiled = is_compiled(self.model)
        sharpen_outputs = compile_function(sharpen) if compiled else sharpen
        compare_outputs = compile_function(compare_view) if compiled else compare_view
        patches, mask_token = targets.patches, self.mask_token if targets.patches else None
        with static_shapes(self.model):
            with torch.no_grad():
                known = read(self.teacher.model, images, patches is not None)
                sharpened = sharpen_outputs(self.teacher.head(known.pooled), self.center, targets.temperature)
                self.output_sum += sharpened.total
            own = read(self.model, images, patches is not None, patches, mask_token)
            features = own.pooled
            if targets.local is not None:
                features = torch.cat([features, pool(self.model, targets.local)])
        size = len(images) // 2
        projected = self.head.project(features)
        logits = self.head.compare(projected).unflatten(0, (-1, size))
        probabilities = sharpened.probabilities.unflatten(0, (2, size))
        loss = ViewCrossEntropy.apply(logits, probabilities, self.options.student_temperature, compare_outputs)  # type: ignore[no-untyped-call]
        entropy = sharpened.entropy.mean()
        with torch.no_grad():
            deviations = projected.unflatten(0, (-1, size)).std(1, correction=0).mean(1) * math.sqrt(projected.shape[1])
            parts = [part.mean() for part in (deviations[:2], deviations[2:]) if len(part)]
        kl = loss.detach() - entropy
        if patches:
            patch_loss = self.compare_patches(own.tokens, known.tokens, patches, targets.temperature)
            loss, parts = loss + self.options.patch_weight * patch_loss, [*parts, patch_loss.detach()]
        return torch.stack([loss, entropy, kl, *parts])

    def compare_patches(self, own: Tensor, known: Tensor, patches: MaskedPatches, temperature: Tensor) -> Tensor:
        """iBOT's loss []: the cross-entropy between the teacher's and the student's outputs for each masked patch.

        The mean over all global views of the mean over their masked patches, of tokens [2B, N, D].
        """
        weights = patches.masked / patches.masked.sum(1, keepdim=True).clamp(min=1.0) / len(own)
        with torch.no_grad():
            outputs = promote(self.teacher.head(gather_patches(known, patches.positions)))
            expected = F.softmax((outputs - self.patch_center) / temperature, -1)
            self.patch_sum[:-1] += (outputs * weights[..., None]).sum((0, 1))
            self.patch_sum[-1] += weights.sum()
        logits = promote(self.head(gather_patches(own, patches.positions))) / self.options.student_temperature
        return -(weights * (expected * F.log_softmax(logits, -1)).sum(-1)).sum()


def pool(model: VisionTransformer, images: Tensor) -> Tensor:
    """The pooled features [B, D]. The size of the images is not checked: the weights may be interpolated to it."""
    return read(model, images, False).pooled


def read(
    model: VisionTransformer, images: Tensor, tokens: bool, patches: MaskedPatches | None = None, mask_token: Tensor | None = None
) -> Features:
    """Features of images, with patch tokens if `tokens`; where a patch is masked the model sees the mask token [D] instead."""
    layout, x = Layout(*model.stem.grid(*images.shape[-2:])), model.stem(images)
    if patches is not None and mask_token is not None:
        x = torch.where(patches.mask[..., None], mask_token.to(x.dtype), x)
    return model.read(*model.encode(x, layout), patches=tokens)


def copy_without_noise(model: VisionTransformer) -> VisionTransformer:
    """A copy of a model without dropout and stochastic depth."""
    noise = dict.fromkeys(("drop_path", "dropout", "attention_dropout"), 0.0)
    plain = build(model.architecture.replace(**noise), model.name, device="meta")
    if model.task_head is not None:
        with torch.device("meta"):
            plain.set_task_head(model.task_head.config)
    plain.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    return plain


class Sharpened(NamedTuple):
    """Output distributions of a teacher."""

    probabilities: Tensor  # [B, K]
    entropy: Tensor  # [B]
    total: Tensor  # [K] sum of the outputs


def sharpen(outputs: Tensor, center: Tensor, temperature: Tensor) -> Sharpened:
    """The distributions softmax((outputs - center) / temperature) of outputs [B, K]."""
    outputs = promote(outputs)
    scaled = (outputs - center) / temperature
    normalizer = scaled.logsumexp(1, keepdim=True)
    probabilities = (scaled - normalizer).exp()
    entropy = normalizer[:, 0] - (probabilities * scaled).sum(1)
    return Sharpened(probabilities, entropy, outputs.sum(0))


def compare_view(logits: Tensor, target: Tensor, pairs: float, temperature: float, scale: float) -> tuple[Tensor, Tensor]:
    """The cross-entropy [] between distributions, summed over images and times `scale`, and its gradient [B, K].

    `target` [B, K] is the sum of `pairs` distributions, to each of which softmax(logits / temperature) is compared.
    """
    scaled = promote(logits) / temperature
    normalizer = scaled.logsumexp(1, keepdim=True)
    loss = pairs * normalizer.sum() - (target * scaled).sum()
    gradient = (scaled - normalizer).exp() * pairs - target
    return loss * scale, gradient * (scale / temperature)


def promote(values: Tensor) -> Tensor:
    """Half precision as float32; other values as they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


class ViewCrossEntropy(torch.autograd.Function):
    """The cross-entropy between every view of the teacher and every other view of the student, the mean over pairs and images.

    The student's logits [V, B, K] are by far the largest tensor of a step. The gradient is computed together with the loss and
    replaces them in memory, one view at a time, so that no copy of them in float32 exists.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float, compare: Callable[..., Any]) -> Tensor:
        """`targets` [2, B, K]: the teacher's distributions of the first two views."""
        views, size = logits.shape[:2]
        scale = 1.0 / (size * (2 * views - 2))
        # In float16 small gradients would become zero before the loss scale multiplies them.
        gradient = torch.empty_like(logits, dtype=torch.float32) if logits.dtype == torch.float16 else logits.detach()
        both = targets[0] + targets[1] if views > 2 else targets[0]
        loss = targets.new_zeros(())
        for view in range(views):
            target, pairs = (targets[1 - view], 1.0) if view < 2 else (both, 2.0)
            term, own = compare(logits[view], target, pairs, temperature, scale)
            loss = loss + term
            gradient[view].copy_(own)
        ctx.gradient = gradient
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.mul_(grad), None, None, None


class Dino(SelfSupervised):
    """Self-distillation between views; see `DinoOptions` for the settings. The evaluated model is the teacher."""

    options_kind = DinoOptions
    options: DinoOptions
    module: DinoModule

    def build_module(self, model: VisionTransformer) -> DinoModule:
        self.options, size = self._choose_views(model), model.architecture.image_size
        o, first = self.options, self.recipe.augmentation
        second = dataclasses.replace(first, blur=o.second_blur, solarize=o.second_solarize)
        local = dataclasses.replace(first, image_size=self.local_size, scale=o.local_scale, blur=o.local_blur)
        self.views = [(first, 1), (second, 1), *([(local, o.local_crops)] if o.local_crops else [])]
        self.logs = ("teacher_entropy", "kl", "global_std", *(["local_std"] if o.local_crops else []))  # type: ignore[misc]
        if o.patch_weight:
            self.logs += ("patch_loss",)  # type: ignore[misc]
            self.grid, patches = model.grid, model.grid[0] * model.grid[1]
            self.masked = round(o.masked * patches)
            if not 0 < self.masked < patches or min(model.grid) < 2:
                raise UserError(
                    f"task_options.masked={o.masked:g} of {model.grid[0]} x {model.grid[1]} patches is {self.masked}: choose "
                    "another share or larger images, or set task_options.patch_weight=0."
                )
        others = f"{o.local_crops} local of {format_size(self.local_size)}" if o.local_crops else "none local"
        self.messages.append(f"views of an image: 2 global of {format_size(size)} pixels, {others}")
        model.pre_logits.requires_grad_(False)  # not used; all trained parameters need a gradient
        self.ema: ModelEma | None = None
        self.swapped = False
        self.alarm = CollapseAlarm(o, self.recipe.optimizer.lr)
        return DinoModule(model, o)

    def _choose_views(self, model: VisionTransformer) -> DinoOptions:
        """The options for this model; sets `local_size`."""
        o, a = self.options, model.architecture
        if a.pooling == "per_class":
            raise UserError("DINO compares one vector per image, and this model has one per class: choose another pooling.")
        if self.recipe.optimizer.weight_decay == 0 and o.weight_decay_end > 0:
            raise UserError(
                f"task_options.weight_decay_end={o.weight_decay_end:g} needs an optimizer.weight_decay above 0 to start from: "
                "set both above 0, or both to 0."
            )
        height, width = a.image_size
        if o.local_size:
            self.local_size = (o.local_size, o.local_size)
        else:
            cells = [max(round(LOCAL_SHARE * side / a.patch_size), 1) for side in (height, width)]
            self.local_size = (cells[0] * a.patch_size, cells[1] * a.patch_size)
        if max(self.local_size[0] - height, self.local_size[1] - width) > 0:
            raise UserError(
                f"task_options.local_size={o.local_size} is larger than the images of {format_size(a.image_size)} pixels: give "
                f"at most {min(height, width)}, or 0 for 3/7 of the image size."
            )
        rest = o.local_size % a.patch_size
        if rest:
            below = max(o.local_size - rest, a.patch_size)
            raise UserError(
                f"task_options.local_size={o.local_size} is not a multiple of the patch size {a.patch_size}: give {below}, or 0 "
                "for 3/7 of the image size."
            )
        return self._adapt_to_grid(model) if has_fixed_grid(a) else o

    def _adapt_to_grid(self, model: VisionTransformer) -> DinoOptions:
        """The options for a model with weights for each patch."""
        o, a = self.options, model.architecture
        if not o.local_crops or self.local_size == a.image_size:
            return o
        reason = (
            f"{a.mixer if a.mixer in FIXED_GRID else a.pooling} layers have weights for {model.grid[0]} x {model.grid[1]} patches"
        )
        if o.fixed_grid == "none":
            self.messages.append(f"no local crops: {reason}")
            return dataclasses.replace(o, local_crops=0)
        if o.fixed_grid == "resize":
            self.messages.append(f"local crops are enlarged to {format_size(a.image_size)} pixels: {reason}")
            self.local_size = a.image_size
            return o
        if a.mixer != "linear" or a.pooling in FIXED_GRID:
            raise UserError("task_options.fixed_grid=interpolate is for linear mixers alone: use resize or none.")
        self.messages.append(f"weights are interpolated for local crops: {reason}")
        for module in model.modules():
            if isinstance(module, PatchLinear):
                module.interpolate = True
        return o

    @property
    def relative_cost(self) -> float:
        height, width = self.recipe.augmentation.image_size
        local = self.local_size[0] * self.local_size[1] / (height * width)
        return 2 * (1 + TEACHER_COST) + self.options.local_crops * local

    # Training

    def prepare_batch(self, batch: Batch, position: Position) -> tuple[Tensor, DinoTargets]:
        images, (local, patches) = super().prepare_batch(batch, position)
        return images, DinoTargets(local, torch.full((), self.temperature_at(position.epoch), device=images.device), *patches)

    def make_views(self, pixels: Tensor, sizes: Tensor, keys: Tensor) -> tuple[Tensor, tuple[Tensor | None, tuple[Tensor, ...]]]:
        first, second, *local = (view.images for view in augment_views(pixels, sizes, keys, self.views))
        patches: tuple[Tensor, ...] = self.draw_masks(keys) if self.options.patch_weight else ()
        return torch.cat([first, second]), (local[0] if local else None, patches)

    def draw_masks(self, keys: Tensor) -> MaskedPatches:
        """Blocks in half of the first and second views of the images with these keys."""
        keys = torch.cat([keys, hash32(keys)])
        mask = block_mask(keys, self.grid, self.masked, min(SMALLEST_BLOCK, self.masked)).flatten(1)
        return locate_masked(mask & bernoulli(keys, "masked", 0.5)[:, None], self.masked)

    def temperature_at(self, epoch: int) -> float:
        """The teacher's temperature: linear over the epochs of the warmup, the last of which has the final value."""
        o = self.options
        if epoch >= o.teacher_temperature_warmup:
            return o.teacher_temperature
        share = min(epoch / (o.teacher_temperature_warmup - 1), 1.0) if o.teacher_temperature_warmup > 1 else 0.0
        return o.teacher_temperature_start + share * (o.teacher_temperature - o.teacher_temperature_start)

    def before_optimizer_step(self, optimizer: Optimizer, position: Position) -> None:
        """Weight decay of this step; clipped gradients; no gradient of the last layer in the first epochs."""
        o, module = self.options, self.module
        decay = between(self.recipe.optimizer.weight_decay, o.weight_decay_end, position)
        for group in optimizer.param_groups:
            if group.setdefault("decayed", group["weight_decay"] > 0):
                group["weight_decay"] = decay
        if o.clip_grad:
            clip_each(module, o.clip_grad)  # the teacher has no gradients
        if position.step < o.freeze_last_layer * self._steps_per_epoch():
            module.head.direction.grad = module.head.gain.grad = None

    def _steps_per_epoch(self) -> int:
        recipe = self.recipe
        return EpochSampler(len(self.source), recipe.batch_size, repeats=recipe.data.repeats, round_to=recipe.data.round_to).steps

    @torch.no_grad()
    def after_optimizer_step(self, position: Position, skipped: Tensor) -> None:
        o, module = self.options, self.module
        if self.ema is None:  # created here: the weights have been moved to the device since `build_module`
            # Without buffers: the statistics of the teacher's BatchNorm are those of its own inputs, the global views.
            self.ema = ModelEma(module.student, 0.0, into=dict(module.teacher.named_parameters()))
        self.ema.decay = between(o.momentum, 1.0, position)
        self.ema.update(skipped)
        self._update_center(module.center, module.output_sum, 2 * self.recipe.batch_size, skipped)
        if o.patch_weight:
            self._update_center(module.patch_center, module.patch_sum, None, skipped)
        module.temperature.fill_(self.temperature_at(position.epoch))

    def _update_center(self, center: Tensor, total: Tensor, count: int | None, skipped: Tensor) -> None:
        """Move a center towards the mean of the outputs of a step, and reset their sum; its last value is the count, if None."""
        if dist.is_initialized():
            dist.all_reduce(total)
        mean = total / count if count else total[:-1] / total[-1].clamp(min=1e-6)
        rate = 1 - self.options.center_momentum
        skipped = (skipped > 0) if count else (skipped > 0) | (total[-1] == 0)
        center.copy_(torch.where(skipped, center, center * self.options.center_momentum + mean * rate))
        total.zero_()

    def hint_for_nan(self) -> str:
        return "A lower optimizer.lr, a lower task_options.clip_grad or a longer schedule.warmup often helps"

    # Validation

    @contextmanager
    def evaluated_weights(self, model: VisionTransformer) -> Iterator[None]:
        """The teacher's weights in the model, and the student's in the teacher, with which it is compared."""
        live = named_tensors(model)
        of_teacher = dict(self.module.teacher.model.named_parameters()) | dict(self.module.teacher.model.named_buffers())
        teacher = {name: of_teacher[name] for name in live}
        swap(live, teacher)
        self.swapped = True
        try:
            yield
        finally:
            self.swapped = False
            swap(live, teacher)

    def measure(self, model: VisionTransformer, batch: Batch, images: Tensor) -> Sums:
        if not self.swapped:  # weights of another epoch than the heads'
            return {}
        module = self.module
        outputs = promote(module.teacher.head(pool(model, images)))
        teacher = sharpen(outputs, module.center, module.temperature)
        logits = promote(module.head(pool(module.teacher.model, images))) / self.options.student_temperature
        gap = -(teacher.probabilities * F.log_softmax(logits, 1)).sum(1) - teacher.entropy
        count = torch.full((), float(len(images)), device=images.device)
        scaled = (outputs - module.center) / module.temperature
        return {
            "entropy": teacher.entropy.sum(),
            "probabilities": teacher.probabilities.sum(0),
            "outputs": scaled.sum(0),
            "squares": scaled.square().sum(),
            "gap": gap.sum(),
            "count": count,
        }

    def summarize(self, sums: Sums) -> dict[str, float]:
        count = float(sums["count"])
        entropy = entropy_of_sums(sums["entropy"], sums["probabilities"], count)
        mean = sums["outputs"] / count
        variance = float(sums["squares"] / (count * len(mean)) - mean.mean() ** 2)
        return {
            "output_entropy": entropy.mean,
            "mean_output_entropy": entropy.of_mean,
            "information": entropy.information,
            "common_output": float(mean.var(correction=0)) / max(variance, 1e-12),
            "teacher_student_gap": float(sums["gap"]) / count,
        }

    def find_collapse(self, values: Mapping[str, Any], epoch: float) -> str:
        problem = super().find_collapse(values, epoch)
        if "information" not in values:
            return problem
        schedule, steps = self.recipe.schedule, self._steps_per_epoch()
        warmed_up = epoch * steps > duration_to_steps(schedule.warmup, steps, total_steps(schedule, steps))
        step = round(epoch * steps)
        temperature = self.temperature_at(max(step - 1, 0) // steps)  # of the latest step before the validation
        found = self.alarm.check(values, temperature, step, warmed_up)
        return problem or found

    def hint_for_collapse(self) -> str:
        return f"lower optimizer.lr={self.recipe.optimizer.lr:g} or task_options.teacher_temperature, or {SIMILAR_VIEWS}"


def between(start: float, end: float, position: Position) -> float:
    """A value that goes from `start` at the first step to `end` after the last along a cosine."""
    return end + (start - end) * cosine(position.step / position.total_steps)


def clip_each(module: nn.Module, limit: float) -> None:
    """Clip the gradient of every parameter to a norm of `limit` of its own; the device is not synchronized."""
    gradients = local_tensors([parameter.grad for parameter in module.parameters() if parameter.grad is not None])
    norms = torch.stack(torch._foreach_norm(gradients))
    factors = (limit / (norms + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, list(factors.to(gradients[0].dtype).unbind()))


def swap(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    """Exchange the values of tensors of the same names."""
    kept = {name: tensor.clone() for name, tensor in first.items()}
    copy_into(first, second)
    copy_into(second, kept)
