"""A tokenizer of images: a discrete variational autoencoder, whose encoder gives each patch one of a few thousand codes.

The encoder is a `VisionTransformer` with mean pooling whose classifier is applied to every patch: its classes are the codes. The
artifact is that encoder; the decoder is in the checkpoints.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.checkpoints import load
from vitrail.data.image_loader import ImageLoader
from vitrail.data.loader import Batch, Problem
from vitrail.data.rng import uniform
from vitrail.data.source import Source, Splits
from vitrail.data.transforms.pipeline import augment
from vitrail.errors import UserError
from vitrail.evaluation.confusion import thumbnail
from vitrail.evaluation.features import readable_batches
from vitrail.evaluation.model import decode_side
from vitrail.heads.pixel_decoder import PixelDecoder
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.recipes.schema import Recipe
from vitrail.recipes.task_options import TokenizerOptions
from vitrail.tasks.self_supervised import SelfSupervised, Sums
from vitrail.training.distributed import Devices
from vitrail.training.metrics import Metric
from vitrail.training.task import Position

USAGE_DECAY = 0.95  # of the EMA of the codes' usage
MIN_USAGE = 0.01  # relative to equal usage; below, a code does not become more attractive
MIN_USED = 0.1  # of the codes, or of the validation patches if they are fewer; a tokenizer that uses fewer codes is reported
SHOWN = 8  # images in the report
MAX_DRAWN = 1 << 30  # random numbers at a time: their kernel counts in 32 bits
NEEDS_TOKENIZER = "run `vitrail tokenizer train photos/ --out tok.safetensors` and give --tokenizer tok.safetensors"


class TokenizerTargets(NamedTuple):
    keys: Tensor  # int64 [B]: the noise of an image is drawn from its key
    temperature: Tensor  # []


class TokenizerModule(nn.Module):
    """Encoder and decoder; forward returns the loss, the reconstruction error and the perplexity of the codes."""

    usage: Tensor  # EMA of the share of the patches with each code [K]
    step_usage: Tensor  # numbers of patches of this step with each code, and of all patches [K + 1]

    def __init__(self, model: VisionTransformer, options: TokenizerOptions) -> None:
        super().__init__()
        self.model, self.usage_weight, self.codes = model, options.usage_weight, options.codes
        self.decoder = PixelDecoder(options.codes, options.width, model.architecture.patch_size)
        self.register_buffer("usage", torch.full((options.codes,), 1.0 / options.codes))
        self.register_buffer("step_usage", torch.zeros(options.codes + 1))

    def forward(self, images: Tensor, targets: TokenizerTargets) -> Tensor:
        logits = compute_code_logits(self.model, images)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        noise = gumbel_noise(targets.keys, logits.shape[1:]).to(logits.dtype)
        weights = ((logits + noise) / targets.temperature.to(logits.dtype)).softmax(-1)
        error = reconstruction_errors(self.decoder(weights, self.model.grid), images).mean()
        # Codes that were used often become less probable, and the others more: the gradient of sum(u log u) at the usage u, with
        # the probabilities of the codes in place of the choices. A mean over images, so that their division does not matter.
        usage_loss = (logits.softmax(-1).mean((0, 1)) * (self.usage * self.codes).clamp(min=MIN_USAGE).log()).sum()
        chosen = logits.detach().argmax(-1).flatten()
        counts = torch.zeros_like(self.usage).scatter_add_(0, chosen, torch.ones_like(chosen, dtype=self.usage.dtype))
        self.step_usage += F.pad(counts, (0, 1), value=chosen.numel())
        perplexity = torch.special.entr(self.usage).sum().exp()
        return torch.stack([error + self.usage_weight * usage_loss, error.detach(), perplexity.to(error.dtype)])

    @torch.no_grad()
    def update_usage(self, skipped: Tensor) -> None:
        """Add this step to the usage, unless `skipped` [] is 1."""
        if dist.is_initialized():
            dist.all_reduce(self.step_usage)
        mean = self.step_usage[:-1] / self.step_usage[-1].clamp(min=1.0)
        self.usage.copy_(torch.where(skipped > 0, self.usage, torch.lerp(mean, self.usage, USAGE_DECAY)))
        self.step_usage.zero_()


class TokenizerTraining(SelfSupervised):
    """Learns codes from which images can be reconstructed. The latest weights are kept: encoder and decoder belong together."""

    options_kind = TokenizerOptions
    metric = Metric("reconstruction", "reconstruction error", higher_is_better=False)
    logs = ("reconstruction", "perplexity")
    options: TokenizerOptions
    module: TokenizerModule

    def __init__(self, recipe: Recipe, source: Source, device: torch.device) -> None:
        super().__init__(recipe, source, device)
        self.metric = type(self).metric  # type: ignore[misc]  # with or without labels

    @classmethod
    def describe(cls, recipe: Recipe) -> list[str]:
        return []

    @property
    def class_names(self) -> list[str]:
        return [str(code) for code in range(self.options.codes)]

    def build_module(self, model: VisionTransformer) -> TokenizerModule:
        check_tokenizer(model, self.recipe.model)
        patch, grid = model.architecture.patch_size, model.grid
        size = model.architecture.image_size
        if (grid[0] * patch, grid[1] * patch) != size:
            raise UserError(
                f"A tokenizer reconstructs all pixels: give an image size that is a multiple of the patch size {patch}, not "
                f"{size[0]} x {size[1]}."
            )
        return TokenizerModule(model, self.options)

    def prepare_batch(self, batch: Batch, position: Position) -> tuple[Tensor, TokenizerTargets]:
        images, keys = super().prepare_batch(batch, position)
        start, end = self.options.temperature, self.options.temperature_end
        temperature = start * (end / start) ** (position.step / max(position.total_steps, 1))
        return images, TokenizerTargets(keys, torch.full((), temperature, device=images.device))

    def make_views(self, pixels: Tensor, sizes: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        return augment(pixels, sizes, keys, self.recipe.augmentation).images, keys

    def after_optimizer_step(self, position: Position, skipped: Tensor) -> None:
        self.module.update_usage(skipped)

    # Validation

    @torch.no_grad()
    def evaluate(self, model: VisionTransformer, loader: ImageLoader, batch_size: int, devices: Devices) -> dict[str, Any]:
        sums: Sums = {
            "error": torch.zeros((), dtype=torch.float64, device=devices.device),
            "images": torch.zeros((), dtype=torch.float64, device=devices.device),
            "codes": torch.zeros(self.options.codes, dtype=torch.float64, device=devices.device),
        }
        for batch in loader.iterate(batch_size, devices.rank, devices.world_size):
            images = model.preprocessing.apply(batch.pixels, batch.sizes)
            codes = compute_codes(model, images)
            sums["error"] += reconstruction_errors(self._decode(codes), images).sum().double()
            sums["images"] += len(images)
            sums["codes"] += torch.bincount(codes.flatten(), minlength=self.options.codes)
        total = {name: devices.all_reduce_sum(sums[name]) for name in sorted(sums)}
        count = int(total["images"])
        if not count:
            raise UserError(f"No image of {loader.source.name} could be read.")
        return {"reconstruction": float(total["error"]) / count, **describe_usage(total["codes"]), "images": count}

    def _decode(self, codes: Tensor) -> Tensor:
        """Codes [B, N] to images [B, 3, height, width]."""
        images: Tensor = self.module.decoder(F.one_hot(codes, self.options.codes).float(), self.module.model.grid)
        return images

    def is_better(self, values: Mapping[str, Any], best: Mapping[str, Any]) -> bool:
        return True

    def find_collapse(self, values: Mapping[str, Any], epoch: float) -> str:
        used, codes = int(values["codes_used"]), self.options.codes
        rows, columns = self.module.model.grid
        if used >= MIN_USED * min(codes, rows * columns * int(values["images"])):  # few patches cannot have all codes
            return ""
        return f"only {used} of {codes} codes are used: raise task_options.usage_weight or lower task_options.codes."

    @torch.no_grad()
    def report(self, model: VisionTransformer, loader: ImageLoader, splits: Splits, batch_size: int) -> dict[str, Any]:
        """Some validation images beside their reconstructions."""
        found: list[dict[str, str]] = []
        mean, std = (torch.tensor(values)[:, None, None] for values in (model.preprocessing.mean, model.preprocessing.std))
        for batch in loader.iterate(min(batch_size, SHOWN)):
            images = model.preprocessing.apply(batch.pixels, batch.sizes)
            pairs = torch.cat([images, self._decode(compute_codes(model, images))], 3).float().cpu() * std + mean
            pixels = (pairs.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy()
            for index, pair in zip(batch.index.tolist(), pixels, strict=True):
                found.append({"image": thumbnail(np.asarray(pair), 2 * 96), "location": splits.validation.location(index)})
            if len(found) >= SHOWN:
                break
        return {"reconstructions": found[:SHOWN]}

    def suggest_next(self, model: VisionTransformer, folder: Path, source: str) -> str:
        command = shlex.join(["vitrail", "train", source, "--recipe", "beit_small", "--tokenizer", str(folder)])
        return f"next: `{command}` trains a network that predicts these codes"

    def hint_for_nan(self) -> str:
        return "A lower optimizer.lr or a higher task_options.temperature_end often helps"


def open_tokenizer(path: str, device: torch.device) -> VisionTransformer:
    """The frozen tokenizer in a file that `vitrail tokenizer train` has written."""
    model = load(path, device=device)
    try:
        task = json.loads(model.notes["recipe"])["task"]
    except (KeyError, TypeError, ValueError):
        task = ""
    if task != "tokenizer":
        raise UserError(f"{path} is not a tokenizer: {NEEDS_TOKENIZER}.")
    check_tokenizer(model, path)
    return model.eval().requires_grad_(False)


def check_tokenizer(model: VisionTransformer, name: str) -> None:
    """Raise UserError unless the classifier of the model can be applied to its patches."""
    a = model.architecture
    if a.pooling != "mean" or a.pool_norm or a.pre_logits or a.dense_head or a.distillation:
        raise UserError(f"{name} cannot be a tokenizer, which has pooling=mean and one linear classifier for all patches.")


def compute_code_logits(model: VisionTransformer, images: Tensor) -> Tensor:
    """The classifier of a tokenizer, applied to every patch: [B, N, codes]."""
    out: Tensor = model.head(model.features(images).tokens)
    return out


@torch.no_grad()
def compute_codes(model: VisionTransformer, images: Tensor) -> Tensor:
    """The most probable code of every patch, int64 [B, N]."""
    return compute_code_logits(model, images).argmax(-1)


@torch.no_grad()
def count_codes(
    model: VisionTransformer, source: Source, batch_size: int, workers: int | None, advance: Callable[[int], None]
) -> tuple[Tensor, list[Problem]]:
    """The number of patches with each code over all images of a source, float64 [K], and the images that cannot be read."""
    device = next(model.parameters()).device
    problems: list[Problem] = []
    counts = torch.zeros(model.architecture.classes, dtype=torch.float64, device=device)
    for batch in readable_batches(source, device, decode_side(model), batch_size, workers, problems):
        codes = compute_codes(model, model.preprocessing.apply(batch.pixels, batch.sizes))
        counts += torch.bincount(codes.flatten(), minlength=len(counts))
        advance(len(codes))
    return counts, problems


def reconstruction_errors(found: Tensor, images: Tensor) -> Tensor:
    """The mean squared error of each image [B], over normalized pixels, in at least float32."""
    found = found.to(torch.promote_types(found.dtype, torch.float32))
    return (found - images).square().mean((1, 2, 3))


def gumbel_noise(keys: Tensor, shape: torch.Size) -> Tensor:
    """Gumbel noise [B, *shape] as a function of the keys [B]."""
    parts = [uniform(some, "gumbel", shape.numel()) for some in keys.split(max(MAX_DRAWN // shape.numel(), 1))]
    drawn = (torch.cat(parts) if len(parts) > 1 else parts[0]).clamp(min=2.0**-24)
    out: Tensor = (-(-drawn.log()).log()).unflatten(1, shape)
    return out


def describe_usage(counts: Tensor) -> dict[str, float]:
    """From the numbers of patches with each code [K]: how many codes are used, and the perplexity of their distribution."""
    shares = counts.double() / counts.sum().clamp(min=1)
    return {"codes_used": int((counts > 0).sum()), "perplexity": float(torch.special.entr(shares).sum().exp())}
