"""A second task, defined outside the package: predict the mean color of masked patches.

It has a head of its own, a log besides the loss, state that every step updates, and a metric of which lower is better.
`python -m tests.tasks.color_regression ARGUMENTS` is the command line with this task registered. With KILL_AT_STEP=N in the
environment the process kills itself in step N.
"""

import os
import signal
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.data.rng import sample_key, uniform
from vitrail.data.transforms.pipeline import augment
from vitrail.tasks import register_task
from vitrail.training.task import Metric, Task

NAME = "color_regression"
DEFAULTS = {"mask_ratio": 0.5, "momentum": 0.9}


class ColorTargets(NamedTuple):
    mask: Tensor  # bool [B, N]
    colors: Tensor  # [B, N, 3]


class ColorModule(nn.Module):
    def __init__(self, model) -> None:
        super().__init__()
        self.model = model
        self.mask_token = nn.Parameter(torch.zeros(model.architecture.width))
        self.project = nn.Linear(model.architecture.width, 3)

    def forward(self, images: Tensor, targets: ColorTargets) -> Tensor:
        patches, layout = self.model.embed(images)
        patches = torch.where(targets.mask[..., None], self.mask_token, patches)
        tokens = self.model.read(*self.model.encode(patches, layout)).tokens
        error = (self.project(tokens).float() - targets.colors) * targets.mask[..., None]
        count = targets.mask.sum() * 3
        return torch.stack([error.square().sum() / count, error.abs().sum() / count])


class ColorRegression(Task):
    metric = Metric("mse", "color error", higher_is_better=False)
    logs = ("mae",)

    def __init__(self, recipe, source, device) -> None:
        super().__init__(recipe, source, device)
        self.settings = DEFAULTS | recipe.task_options
        self.mean_color = torch.zeros(3, device=device)
        self.messages.append(f"{self.settings['mask_ratio']:g} of the patches are masked")

    def build_module(self, model):
        self.grid = model.grid
        return ColorModule(model)

    def targets_of(self, images, keys):
        colors = F.adaptive_avg_pool2d(images, self.grid).flatten(2).transpose(1, 2)
        patches = colors.shape[1]
        rank = uniform(keys, "mask", patches).argsort(1).argsort(1)
        return ColorTargets(rank < round(self.settings["mask_ratio"] * patches), colors)

    def prepare_batch(self, batch, position):
        keys = sample_key(self.recipe.seed, position.epoch, batch.index, batch.repeat)
        images = augment(batch.pixels, batch.sizes, keys, self.recipe.augmentation).images
        return images, self.targets_of(images, keys)

    def after_optimizer_step(self, position, skipped):
        color = self.module.project.bias.detach()
        self.mean_color.lerp_(color, (1 - self.settings["momentum"]) * (1 - skipped))
        if position.step == int(os.environ.get("KILL_AT_STEP", -1)):
            os.kill(os.getpid(), signal.SIGKILL)

    def state_dict(self):
        return {"mean_color": self.mean_color}

    def load_state_dict(self, state):
        self.mean_color.copy_(state["mean_color"])

    @torch.no_grad()
    def evaluate(self, model, loader, batch_size, devices):
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in loader.iterate(batch_size, devices.rank, devices.world_size):
            keys = sample_key(0, 0, batch.index, batch.repeat)
            images = model.preprocessing.apply(batch.pixels, batch.sizes)
            loss = self.module(images, self.targets_of(images, keys))[0]
            total += torch.stack([loss * len(images), torch.tensor(float(len(images)), device=loss.device)]).double()
        error, count = devices.all_reduce_sum(total).tolist()
        return {"mse": error / count, "images": int(count)}


register_task(NAME, ColorRegression)

if __name__ == "__main__":
    from vitrail.cli.main import main

    main()
