"""Segmentation of small data sets: ridge and linear heads, UperNet, and a U-Net of the same budget; prints Markdown tables.

    python benchmarks/segmentation.py heads DATA --sets camvid pets voc --from vitrail_tiny --seeds 3
    python benchmarks/segmentation.py trunks DATA --sets camvid --seeds 3                   # pre-trains on DATA/tiny-imagenet
    python benchmarks/segmentation.py heads DATA --sets camvid --epochs 1 --size 64 --seeds 1 --device cpu --limit 16

DATA contains camvid/, oxford-pets/ and voc2012/, with masks. `heads` compares, for each of the weights `--from`: ridge (in closed
form), a linear head and an UperNet on the frozen trunk, and the same trained with it; and a plain U-Net from scratch, which sees
as many crops. `trunks` compares small DeiT III, ResMLP and PatchConvNet trunks under the same UperNet: each is pre-trained
once, with the same images, then trained with every seed; ResMLP, whose weights for each patch fit one size, on crops and windows
of the size of its pre-training. All are evaluated by the same protocol: whole images (ResMLP: windows), one scale, logits
resized to the size of the masks, on the test split or, without one, the validation split, which is used for nothing else.

All methods learn from the same images: all of the training split, or nine tenths of it where a set has only one of the other two
splits. The last tenth, or the validation split, selects the best weights of a training; ridge and U-Net have one result only.
Every training is a process of its own, `--parallel` at a time; results and checkpoints are kept in `--out`, and the same command
continues. `--minutes 9` ends all of them within nine minutes. Below a table is the machine that computed its results; minutes
are those of the training, of ridge and U-Net with the evaluation.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arguments import positive, run_program
from jobs import (
    Jobs,
    add_options,
    describe_machine,
    describe_run,
    list_machines,
    locate,
    train_or_resume,
    weights_title,
    write_result,
)
from torch import Tensor, nn
from torch.nn import functional as F

import vitrail
from vitrail.data.datasets.lookup import open_sources, open_splits
from vitrail.data.image_loader import ImageLoader
from vitrail.data.mask_checks import complete_classes
from vitrail.data.sampler import EpochSampler
from vitrail.data.source import Source, Subset
from vitrail.devices import choose_device
from vitrail.errors import UserError
from vitrail.evaluation.dense_probe import attach_ridge, probe_config, read_labeled
from vitrail.evaluation.mean_iou import PixelCounts, summarize_pixels
from vitrail.evaluation.pixel_evaluation import count_split
from vitrail.evaluation.semantic_masks import Protocol, View, group_by_size, pad_to, segmentation_head, working_size
from vitrail.heads.upernet import ConvNormAct
from vitrail.recipes import lookup
from vitrail.tasks.segmentation import Segmentation, pixel_loss
from vitrail.training.task import Position

SETS = {"camvid": "camvid", "pets": "oxford-pets", "voc": "voc2012"}
SIZES = {"camvid": 352, "pets": 256, "voc": 448}
BATCH = 16
PRETRAINED = 128  # pixels of the pre-training of the trunks
# About 5.5 million parameters each.
TRUNKS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeiT III": ("deit3_tiny_patch16", {}),
    "ResMLP": ("resmlp_s12", {"architecture.width": 192, "architecture.depth": 18}),
    "PatchConvNet": ("patchconvnet_s20", {"architecture.width": 192, "architecture.depth": 52}),
}
METHODS = ("ridge", "frozen linear", "frozen UperNet", "linear", "UperNet", "U-Net")


def open_set(source: str, limit: int) -> tuple[Source, Source, str]:
    """The training images, those of the evaluation, and the name of their split."""
    splits = open_splits(source, validation_fraction=validation_fraction(source))
    tested = splits.validation if splits.test is None else splits.test
    train, test = (take(part, limit) for part in (splits.train, tested))
    complete_classes([train, test])
    return train, test, "test" if "test" in open_sources(source) else "validation"


def validation_fraction(source: str) -> float:
    """The share of the training images that selects weights where the validation split is evaluated; 0: the default."""
    sources = open_sources(source)
    return 0.1 if "validation" in sources and "test" not in sources else 0.0


def take(source: Source, limit: int) -> Source:
    return Subset(source, np.linspace(0, len(source) - 1, limit).astype(np.int64)) if 0 < limit < len(source) else source


class UNet(nn.Module):
    """A plain U-Net: four halvings with two convolutions each, skips by concatenation; 7.8 million parameters at width 32."""

    def __init__(self, classes: int, width: int = 32) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(5)]
        self.down = nn.ModuleList(double(before, after) for before, after in zip([3, *sizes], sizes, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * size, size, 2, stride=2) for size in reversed(sizes[:-1]))
        self.merge = nn.ModuleList(double(2 * size, size) for size in reversed(sizes[:-1]))
        self.classifier = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(skips[:-1]), strict=True):
            x = merge(torch.cat([skip, up(x)], 1))
        out: Tensor = self.classifier(x)
        return out


def double(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(ConvNormAct(inputs, outputs, 3), ConvNormAct(outputs, outputs, 3))


def train_unet(job: dict[str, Any], train: Source, test: Source, device: torch.device) -> dict[str, float]:
    """The same crops, batch size, number of steps and schedule; AdamW with lr 1e-3, without pre-training."""
    size = job["size"]
    recipe = lookup("segment").set(
        {"augmentation.image_size": [size, size], "seed": job["seed"], "batch_size": job["batch_size"]}
    )
    task, loader = Segmentation(recipe, train, device), ImageLoader(train, device, job["workers"], masks=True)
    sampler = EpochSampler(len(train), job["batch_size"], job["seed"])
    steps = max(round(job["epochs"] * sampler.steps), 1)
    torch.manual_seed(job["seed"])
    network = UNet(len(task.classes.names)).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3, weight_decay=0.05, fused=True)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    for step, batch in enumerate(loader.train_loader(sampler, (0,), 1).iterate_steps(0, steps)):
        epoch, within = divmod(step, sampler.steps)
        images, targets = task.prepare_batch(batch.to(device), Position(step, steps, epoch, within))
        warm = max(round(0.05 * steps), 1)
        optimizer.param_groups[0]["lr"] = 1e-3 * min((step + 1) / warm, (steps - step) / max(steps - warm, 1))
        with autocast:
            loss = pixel_loss(network(images), targets.masks)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    network.eval()
    counts = PixelCounts(len(task.classes.names), device=device)
    augmentation = recipe.augmentation
    mean, std = (torch.tensor(values, device=device)[:, None, None] * 255 for values in (augmentation.mean, augmentation.std))
    for batch in ImageLoader(test, device, masks=True).iterate(8):
        for rows, pixels in group_by_size(batch.pixels, batch.sizes):
            height, width = working_size(pixels.shape[-2:], size, 1.0)
            resized = F.interpolate(pixels.float(), (height, width), mode="bilinear", antialias=True, align_corners=False)
            padded = pad_to((resized - mean) / std, 16)
            with torch.no_grad(), autocast:
                view = View(network(padded).float(), (height / padded.shape[-2], width / padded.shape[-1]))
            scores = view.resize_rows(pixels.shape[-2:], torch.arange(pixels.shape[-2], device=pixels.device))
            assert batch.masks is not None
            counts.add(batch.masks[rows, : pixels.shape[-2], : pixels.shape[-1]], scores.argmax(1).to(torch.uint8))
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return summarize_pixels(counts.matrix.cpu()) | {"parameters": parameters}


def fit_in_closed_form(job: dict[str, Any], train: Source, test: Source, device: torch.device) -> dict[str, float]:
    model = vitrail.load(job["weights"], device=device)
    assert train.mask_classes is not None
    config = probe_config(model, train.mask_classes, job["size"])
    attach_ridge(model, config, read_labeled(model, train, config)[0])
    return evaluate(model, test, device)


def train_head(job: dict[str, Any], folder: Path, test: Source, device: torch.device) -> dict[str, Any]:
    """`vitrail train --recipe segment`, and its evaluation of the best weights on the test images."""
    linear, frozen = "linear" in job["method"], "frozen" in job["method"]
    changes: dict[str, Any] = {
        "augmentation.image_size": [job["size"], job["size"]],
        "schedule.length": f"{job['epochs']:g} epochs",
        "validation.every": f"{max(job['epochs'] / 4, 0.01):g} epochs",
        "data.validation_fraction": validation_fraction(job["source"]),
        "batch_size": job["batch_size"],
        "seed": job["seed"],
        "task_options.head": "linear" if linear else "upernet",
    } | job.get("changes", {})
    if linear:
        depth = vitrail.load(job["weights"]).architecture.depth
        changes["task_options.blocks"] = [max(round(depth * part / 3) - 1, 0) for part in (1, 2, 3)]
    if frozen:
        changes |= {"init.scope": "head", "optimizer.lr": 2e-3}
    where = {"device": str(device), "workers": job["workers"]}
    run = train_or_resume(
        folder / "run",
        lambda: vitrail.train(job["source"], "segment", from_=job["weights"], changes=changes, out=folder / "run", **where),
        **where,
    )
    model = vitrail.load(run.artifact, device=device)
    recorded: dict[str, float] | None = json.loads((folder / "run" / "run.json").read_text()).get("test")
    if recorded is None or job["limit"]:
        recorded = evaluate(model, test, device)
    return recorded | count_parameters(model) | describe_run(folder / "run")


def evaluate(model: vitrail.VisionTransformer, test: Source, device: torch.device) -> dict[str, float]:
    protocol = Protocol.of(segmentation_head(model).config)
    loader = ImageLoader(test, device, masks=True)
    counts, _ = count_split(model.eval(), loader, 8, protocol)
    loader.close()
    return summarize_pixels(counts.matrix.cpu()) | count_parameters(model)


def count_parameters(model: vitrail.VisionTransformer) -> dict[str, float]:
    return {"parameters": sum(each.numel() for each in model.parameters())}


def pretrain(job: dict[str, Any], folder: Path, device: torch.device) -> dict[str, Any]:
    """A classifier on Tiny ImageNet, whose weights are the start of a trunk's segmentations."""
    model, changes = TRUNKS[job["trunk"]]
    changes = changes | {"augmentation.image_size": [PRETRAINED, PRETRAINED], "architecture.drop_path": 0.05}
    epochs, where = job["epochs"], {"device": str(device), "workers": job["workers"]}
    run = train_or_resume(
        folder / "run",
        lambda: vitrail.train(job["source"], "small", model=model, epochs=epochs, changes=changes, out=folder / "run", **where),
        **where,
    )
    return {"top1": float(run.best["top1"])} | count_parameters(vitrail.load(run.artifact)) | describe_run(folder / "run")


def run_job(folder: Path) -> None:
    """Run the job in a folder and write its result."""
    job = json.loads((folder / "job.json").read_text())
    device, started = choose_device(job["device"]), time.monotonic()
    result: dict[str, Any]
    if job["kind"] == "pretrain":
        result = pretrain(job, folder, device)
    else:
        train, test, split = open_set(job["source"], job["limit"])
        if job["method"] == "U-Net":
            result = train_unet(job, train, test, device)
        elif job["method"] == "ridge":
            result = fit_in_closed_form(job, train, test, device)
        else:
            result = train_head(job, folder, test, device)
        result |= {"images": len(test), "split": split}
    # Minutes and machine of a training are those of its run, which may have been interrupted.
    result = {"minutes": (time.monotonic() - started) / 60} | describe_machine(device) | result
    write_result(folder, result)


def show_result(result: dict[str, Any]) -> str:
    return f"mIoU {100 * result['miou']:.1f} %" if "miou" in result else f"top-1 {100 * result['top1']:.1f} %"


def make_job(options: argparse.Namespace, name: str, method: str, weights: str, seed: int) -> dict[str, Any]:
    return {
        "kind": "segment",
        "source": str((options.data / SETS[name]).resolve()),
        "method": method,
        "weights": weights,
        "seed": seed,
        "epochs": options.epochs,
        "size": options.size or SIZES[name],
        "batch_size": options.batch_size,
        "limit": options.limit,
        "device": options.device,
        "changes": {"task_options.channels": options.channels, "task_options.auxiliary": options.channels // 2},
    }


def keep_grid(job: dict[str, Any]) -> None:
    """Crops and windows of the size of the pre-training, as in ResMLP's paper, of images at the scale of the other trunks."""
    scale = job["size"] / PRETRAINED
    job["changes"] |= {
        "augmentation.image_size": [PRETRAINED, PRETRAINED],
        "augmentation.factors": [0.5 * scale, 2 * scale],
        "task_options.short_side": job["size"],
        "task_options.window": PRETRAINED,
        "task_options.stride": round(PRETRAINED / 3),
    }


def compare_heads(options: argparse.Namespace, runner: Jobs) -> None:
    jobs: dict[str, dict[str, Any]] = {}
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name in options.sets:
        for weights in options.weights:
            for method in (each for each in options.methods if each != "U-Net"):
                for seed in range(1 if method == "ridge" else options.seeds):  # ridge has no random numbers
                    key = f"{name}-{weights_title(weights)}-{method.replace(' ', '_')}-{seed}"
                    jobs[key] = make_job(options, name, method, locate(weights), seed)
                    rows.setdefault((name, weights_title(weights), method), []).append(key)
        for seed in range(options.seeds if "U-Net" in options.methods else 0):
            key = f"{name}-unet-{seed}"
            jobs[key] = make_job(options, name, "U-Net", "", seed)
            rows.setdefault((name, "from scratch", "U-Net"), []).append(key)
    print_rows(("data", "weights", "method"), rows, runner.run(jobs))


def compare_trunks(options: argparse.Namespace, runner: Jobs) -> None:
    source = str((options.data / "tiny-imagenet").resolve())
    first = {
        f"pretrain-{trunk.replace(' ', '_')}": {
            "kind": "pretrain",
            "trunk": trunk,
            "source": source,
            "epochs": options.pretrain_epochs,
            "device": options.device,
        }
        for trunk in TRUNKS
    }
    pretrained = runner.run(first)
    for key, result in pretrained.items():
        print(f"{key}: {100 * result['top1']:.2f} % top-1 on Tiny ImageNet, {result['parameters'] / 1e6:.1f} M parameters")
    jobs: dict[str, dict[str, Any]] = {}
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name in options.sets:
        for trunk, start in zip(TRUNKS, first, strict=True):
            if start not in pretrained:
                continue
            for seed in range(options.seeds):
                key = f"{name}-{trunk.replace(' ', '_')}-{seed}"
                weights = str((options.out / start / "run" / "best.safetensors").resolve())
                jobs[key] = make_job(options, name, "UperNet", weights, seed)
                if trunk == "ResMLP":
                    keep_grid(jobs[key])
                rows.setdefault((name, trunk, "UperNet"), []).append(key)
    print_rows(("data", "trunk", "head"), rows, runner.run(jobs))


def print_rows(columns: tuple[str, ...], rows: dict[tuple[str, str, str], list[str]], results: dict[str, dict[str, Any]]) -> None:
    """A Markdown table with mean and standard deviation over the seeds."""
    print(f"\n| {' | '.join(columns)} | mIoU | pixel accuracy | n | parameters | minutes |")
    print(f"|{' --- |' * (len(columns) + 5)}")
    for row, keys in rows.items():
        found = [results[key] for key in keys if key in results]
        if not found:
            continue
        cells = [spread([each[name] for each in found]) for name in ("miou", "pixel_accuracy")]
        minutes = statistics.mean(each["minutes"] for each in found)
        parameters = f"{found[0]['parameters'] / 1e6:.1f} M"
        print(f"| {' | '.join(row)} | {' | '.join(cells)} | {len(found)} | {parameters} | {minutes:.1f} |")
    print(f"\n{list_machines(results.values())}")


def spread(values: list[float]) -> str:
    mean = f"{100 * statistics.mean(values):.1f}"
    return f"{mean} ± {100 * statistics.stdev(values):.1f} %" if len(values) > 1 else f"{mean} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("heads", "trunks", "job"))
    parser.add_argument("data", type=Path, help="the folder of the data sets")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["camvid"])
    parser.add_argument("--from", dest="weights", nargs="+", default=["vitrail_tiny"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--epochs", type=float, default=60.0)
    parser.add_argument("--pretrain-epochs", type=float, default=30.0)
    parser.add_argument("--size", type=positive, help="of the crops and of the shorter side in the evaluation")
    parser.add_argument("--batch-size", type=positive, default=BATCH)
    parser.add_argument("--channels", type=positive, default=256, help="of UperNet")
    parser.add_argument("--limit", type=int, default=0, help="images of the evaluation and of the closed form, for a short run")
    add_options(parser, "runs/segmentation", parallel=3)
    options = parser.parse_args()
    if options.command == "job":
        run_job(options.data)
        return
    missing = [name for name in options.sets if not (options.data / SETS[name]).is_dir()]
    if missing:
        raise UserError(f"{options.data} has no folder {SETS[missing[0]]}: give the folder of the data sets.")
    compare = compare_heads if options.command == "heads" else compare_trunks
    runner = Jobs(options, __file__, show_result)
    compare(options, runner)
    runner.exit_if_failed()


if __name__ == "__main__":
    run_program(main)
