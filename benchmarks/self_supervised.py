"""One training step of DINO, ours and as the authors' code computes it, timed in turns in one process; prints a Markdown table.

    python benchmarks/self_supervised.py                                    # ViT-S/16, 2 x 224 + 6 x 96 pixels, batch size 64
    python benchmarks/self_supervised.py --model resmlp_s12 --batch-size 128 --ours
    python benchmarks/self_supervised.py --device cpu --batch-size 2 --size 32 --local-size 16 --depth 1 --outputs 64 --rounds 1

Ours is `Trainer.train_step` as in a training: compiled and captured as a CUDA graph on a GPU, with the views made from decoded
images on the device. The other rows are the step of `main_dino.py` (facebookresearch/dino), written from reading it, with views
that are ready: a forward pass for each resolution, attention with explicit softmax, the loss pair by pair, norms read one by one
to clip each parameter, torch's default AdamW, an EMA in a loop, and a loss that is read in every step. It runs as it is, with its
networks compiled, and with compiled networks and fused attention. All use bfloat16 (autocast), where the authors used float16
with a loss scale, and the drop-path rate of the paper.
"""

import argparse
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from arguments import positive, run_program
from timing import machine, time_rounds
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.bench.timing import summarize, time_run
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.loader import Batch
from vitrail.data.source import Subset
from vitrail.devices import choose_device, use_device
from vitrail.errors import UserError
from vitrail.recipes import lookup
from vitrail.runs.initial_model import build_initial
from vitrail.tasks.registry import find_task
from vitrail.training.distributed import Devices
from vitrail.training.trainer import Options, Trainer

DECODED = (375, 500)  # a typical photograph of ImageNet
TEACHER_TEMPERATURE, STUDENT_TEMPERATURE, CENTER_MOMENTUM, MOMENTUM, CLIP, DROP_PATH = 0.04, 0.1, 0.9, 0.996, 3.0, 0.1


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v)
        else:
            out = (q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5).softmax(-1) @ v
        return self.proj(out.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, drop_path: float, fused: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width, 1e-6), Attention(width, heads, fused)
        self.norm2 = nn.LayerNorm(width, 1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop_path = drop_path

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))

    def drop(self, x: Tensor) -> Tensor:
        if not self.drop_path or not self.training:
            return x
        kept = (1 - self.drop_path + torch.rand(len(x), 1, 1, dtype=x.dtype, device=x.device)).floor_()
        return x.div(1 - self.drop_path) * kept


class Vit(nn.Module):
    """The ViT of the released code: class token, learned positions, resampled for smaller images."""

    def __init__(self, size: int, patch: int, width: int, depth: int, heads: int, drop_path: float, fused: bool) -> None:
        super().__init__()
        self.patch, self.side = patch, size // patch
        self.stem = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 1 + self.side**2, width) * 0.02)
        rates = torch.linspace(0, drop_path, depth).tolist()
        self.blocks = nn.ModuleList(Block(width, heads, rate, fused) for rate in rates)
        self.norm = nn.LayerNorm(width, 1e-6)

    def forward(self, images: Tensor) -> Tensor:
        side = images.shape[-1] // self.patch
        x = torch.cat([self.token.expand(len(images), -1, -1), self.stem(images).flatten(2).transpose(1, 2)], 1)
        positions = self.positions
        if side != self.side:
            table = positions[:, 1:].unflatten(1, (self.side, self.side)).permute(0, 3, 1, 2)
            table = F.interpolate(table, size=(side, side), mode="bicubic")
            positions = torch.cat([positions[:, :1], table.flatten(2).transpose(1, 2)], 1)
        x = x + positions
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, 0]


class Head(nn.Module):
    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        sizes = (width, 2048, 2048, 256)
        layers: list[nn.Module] = []
        for inputs, out in pairwise(sizes):
            layers += [nn.Linear(inputs, out), nn.GELU()]
        self.mlp = nn.Sequential(*layers[:-1])
        self.weight_v = nn.Parameter(torch.randn(outputs, 256) / 16)
        self.weight_g = nn.Parameter(torch.ones(outputs, 1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.normalize(self.mlp(x), dim=-1), torch._weight_norm(self.weight_v, self.weight_g, 0))


class MultiCrop(nn.Module):
    """Views of the same size pass through the backbone as one batch, all features through the head."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, views: list[Tensor]) -> Tensor:
        sizes = sorted({view.shape[-1] for view in views}, reverse=True)
        features = [self.backbone(torch.cat([view for view in views if view.shape[-1] == size])) for size in sizes]
        return self.head(torch.cat(features))


class AuthorsStep:
    """A step of `train_one_epoch` of the released code."""

    def __init__(self, options: argparse.Namespace, device: torch.device, compiled: bool, fused: bool) -> None:
        size, local, outputs = options.size, options.local_size, options.outputs
        width, depth, heads = 384, options.depth or 12, 6
        self.device = device

        def make(drop_path: float) -> MultiCrop:
            return MultiCrop(Vit(size, options.patch, width, depth, heads, drop_path, fused), Head(width, outputs)).to(device)

        self.student, self.teacher = make(DROP_PATH), make(0.0)
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
        for parameter in self.student.parameters():
            if parameter.requires_grad:
                groups[parameter.ndim == 1].append(parameter)
        self.optimizer = torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}], lr=1e-4)
        self.center = torch.zeros(1, outputs, device=device)
        shapes = [(options.batch_size, 3, size, size)] * 2 + [(options.batch_size, 3, local, local)] * options.local_crops
        self.views = [torch.randn(shape, device=device) for shape in shapes]
        self.networks: list[Callable[..., Tensor]] = [self.student, self.teacher]
        if compiled:
            self.networks = [torch.compile(network) for network in self.networks]

    def __call__(self) -> None:
        student, teacher = self.networks
        with torch.autocast(self.device.type, torch.bfloat16):
            expected = teacher(self.views[:2])
            loss = self.loss(student(self.views), expected)
        if not math.isfinite(loss.item()):
            raise UserError("The loss of the authors' step is not finite.")
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.student.parameters():
            if parameter.grad is not None:
                norm = parameter.grad.norm(2)
                norm.item()
                factor = CLIP / (norm + 1e-6)
                if factor < 1:
                    parameter.grad.mul_(factor)
        self.optimizer.step()
        with torch.no_grad():
            for own, average in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                average.mul_(MOMENTUM).add_((1 - MOMENTUM) * own.detach())
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        loss.item()

    def loss(self, outputs: Tensor, expected: Tensor) -> Tensor:
        views = (outputs / STUDENT_TEMPERATURE).chunk(len(self.views))
        targets = F.softmax((expected - self.center) / TEACHER_TEMPERATURE, -1).detach().chunk(2)
        terms = [
            torch.sum(-target * F.log_softmax(view, -1), -1).mean()
            for first, target in enumerate(targets)
            for second, view in enumerate(views)
            if first != second
        ]
        with torch.no_grad():
            mean = expected.sum(0, keepdim=True) / len(expected)
            self.center = self.center * CENTER_MOMENTUM + mean * (1 - CENTER_MOMENTUM)
        total: Tensor = sum(terms) / len(terms)  # type: ignore[assignment]
        return total


class OurStep:
    """A step of the trainer on images that are decoded and on the device."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        changes = {
            "model": options.model,
            "batch_size": options.batch_size,
            "augmentation.image_size": [options.size, options.size],
            "architecture.drop_path": DROP_PATH,
            "task_options.local_crops": options.local_crops,
            "task_options.local_size": options.local_size,
            "task_options.outputs": options.outputs,
            "task_options.freeze_last_layer": 0.0,  # as in most of a training
        }
        changes |= {"architecture.depth": options.depth} if options.depth else {}
        if options.patch != 16:
            changes["architecture.patch_size"] = options.patch
        recipe = lookup("dino_vit_small_100ep").set(changes)
        digits = open_splits("digits").train
        source = Subset(digits, np.arange(options.batch_size * 100) % len(digits))
        self.task = find_task("dino")(recipe, source, device)
        self.task.attach(build_initial(recipe, self.task.class_names, None))
        self.trainer = Trainer(
            recipe, self.task.module.model, self.task, source, Devices(device), Path(), Options(compile=device.type == "cuda")
        )
        count = options.batch_size
        index = torch.arange(count, device=device)
        pixels = torch.randint(0, 256, (count, *DECODED, 3), dtype=torch.uint8, device=device).permute(0, 3, 1, 2)
        sizes = torch.tensor([DECODED] * count, device=device)
        self.batch = Batch(pixels, sizes, index, torch.zeros_like(index), index, None, {}, None)

    def __call__(self) -> None:
        self.trainer.train_step(lambda: self.batch)

    def make_views(self) -> None:
        self.task.prepare_batch(self.batch, self.trainer.position())


class Candidate(NamedTuple):
    title: str
    run: Callable[[], None]
    memory: int  # peak bytes, weights and optimizer included


def prepare(title: str, make: Callable[[], Callable[[], None]], device: torch.device) -> Candidate:
    """Build a step and run it a few times, which compiles it and measures its memory."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if cuda else 0
    run = make()
    time_run(run, device, 5 if cuda else 1)
    return Candidate(title, run, torch.cuda.max_memory_allocated(device) - before if cuda else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_small_patch16", help="of ours; the others are ViT-S")
    parser.add_argument("--batch-size", type=positive, default=64)
    parser.add_argument("--size", type=positive, default=224)
    parser.add_argument("--local-size", type=positive, default=96)
    parser.add_argument("--local-crops", type=positive, default=6)
    parser.add_argument("--patch", type=positive, default=16)
    parser.add_argument("--outputs", type=positive, default=65_536)
    parser.add_argument("--depth", type=int, default=0, help="blocks; 0: the model's")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--repeats", type=positive, default=20, help="steps in a round")
    parser.add_argument("--ours", action="store_true", help="only ours")
    parser.add_argument("--device", default=None)
    options = parser.parse_args()
    device = use_device(choose_device(options.device))
    torch.manual_seed(0)
    print(f"{machine(device.type)}; n = {options.rounds} rounds in turns of {options.repeats} steps; ", end="")
    print(
        f"batch size {options.batch_size}, 2 x {options.size} + {options.local_crops} x {options.local_size} pixels", flush=True
    )
    candidates = [prepare("ours, views made on the device", lambda: OurStep(options, device), device)]
    ours = candidates[0].run
    assert isinstance(ours, OurStep)
    if not options.ours:
        rows = [("as the authors' code", False, False)]
        if device.type == "cuda":
            rows += [("the same, compiled", True, False), ("the same, compiled, fused attention", True, True)]
        for title, compiled, fused in rows:
            try:
                candidates.append(prepare(title, lambda c=compiled, f=fused: AuthorsStep(options, device, c, f), device))
            except RuntimeError as error:
                print(f"{title}: {str(error).splitlines()[0]}")
    runs = {candidate.title: candidate.run for candidate in candidates} | {"of ours: making the views": ours.make_views}
    times = time_rounds(runs, device.type, options.rounds, options.repeats)
    print("\n| step | ms | images/s | speedup of ours (min to max) | peak memory, GB |\n| --- | ---: | ---: | ---: | ---: |")
    own = times[candidates[0].title]
    memory = {candidate.title: candidate.memory for candidate in candidates}
    for title, seconds in times.items():
        summary = summarize(seconds)
        ratios = sorted(theirs / each for theirs, each in zip(seconds, own, strict=True))
        compared = f"{ratios[len(ratios) // 2]:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})" if title in memory else ""
        used = f"{memory[title] / 1e9:.2f}" if memory.get(title) else ""
        rate = f"{options.batch_size / summary.median:.0f}" if title in memory else ""
        print(f"| {title} | {1e3 * summary.median:.4g} ±{summary.spread:.1%} | {rate} | {compared} | {used} |")


if __name__ == "__main__":
    run_program(main)
