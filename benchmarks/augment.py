"""Images per second of the augmentation: in batches on a device, and of timm and torchvision picture by picture on CPU cores.

    python benchmarks/augment.py                    # a GPU, timm and torchvision beside it
    python benchmarks/augment.py --device cpu --batch 64 --rounds 3 --no-others

Stored pictures are 256 x 256 uint8, outputs 224 x 224 normalised float32, mixed where the recipe mixes. The share is that of one
compiled bfloat16 training step of DeiT-S at the same batch.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import numpy as np
import torch

import vitrail
from vitrail.data.augment import mixing
from vitrail.data.augment.pipeline import Augmentation, augment
from vitrail.data.randomness import sample_key

PIPELINES = {
    "deit": (Augmentation(policy="rand", erasing=0.25), 0.8, 1.0),
    "deit3": (Augmentation(policy="three", jitter=(0.3, 0.3, 0.3, 0.0)), 0.8, 1.0),
    "deit3_21k": (Augmentation(crop="simple", policy="three", jitter=(0.3, 0.3, 0.3, 0.0)), 0.0, 1.0),
    "lvvit": (Augmentation(policy="rand", erasing=0.25), 0.0, 0.0),
    "plain": (Augmentation(), 0.0, 0.0),
}


def clock(run, device: str, repeats: int) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def rounds(run, options: argparse.Namespace) -> list[float]:
    for _ in range(3):
        run()
    return [clock(run, options.device, options.repeats) for _ in range(options.rounds)]


def ours(name: str, options: argparse.Namespace, compiled: bool) -> list[float]:
    how, mixup, cutmix = PIPELINES[name]
    pixels = torch.randint(0, 256, (options.batch, 3, 256, 256), dtype=torch.uint8, device=options.device)
    sizes = torch.full((options.batch, 2), 256, device=options.device)
    index = torch.arange(options.batch, device=options.device)
    step = torch.compile(lambda *a: augment(*a, how).images, dynamic=False) if compiled else lambda *a: augment(*a, how).images
    count = 0

    def run():
        nonlocal count
        count += 1
        images = step(pixels, sizes, sample_key(0, count, index, index))
        mixing.mix_pictures(images, mixing.draw_mix(0, count, 0, 0, how.size, mixup, cutmix))

    return rounds(run, options)


def training_step(options: argparse.Namespace) -> list[float]:
    model = vitrail.create("deit_small_patch16").to(options.device).train()
    forward = torch.compile(model)
    image = torch.randn(options.batch, 3, 224, 224, device=options.device)
    optimiser = torch.optim.AdamW(model.parameters(), fused=options.device == "cuda")

    def run():
        with torch.autocast(options.device, torch.bfloat16):
            output = forward(image)
        output.float().logsumexp(-1).mean().backward()
        optimiser.step()
        optimiser.zero_grad()

    return rounds(run, options)


class Pictures(torch.utils.data.Dataset):
    """Decoded pictures in memory, so that only the transform is timed."""

    def __init__(self, transform, count: int):
        from PIL import Image

        rng = np.random.default_rng(0)
        self.images = [Image.fromarray(rng.integers(0, 256, (256, 256, 3), dtype=np.uint8)) for _ in range(64)]
        self.transform, self.count = transform, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.transform(self.images[index % 64])


def others(workers: int) -> dict[str, float]:
    from timm.data import create_transform
    from torchvision.transforms import v2

    rand = create_transform(224, is_training=True, auto_augment="rand-m9-mstd0.5-inc1", interpolation="bicubic", re_prob=0.25)
    normal = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    crop = [v2.RandomResizedCrop(224, interpolation=v2.InterpolationMode.BICUBIC), v2.RandomHorizontalFlip()]
    blur = v2.RandomChoice([v2.Grayscale(3), v2.RandomSolarize(128, p=1.0), v2.GaussianBlur(9, (0.1, 2.0))])
    pipelines = {
        "timm, deit": rand,
        "torchvision v2, deit": v2.Compose([*crop, v2.RandAugment(), *normal, v2.RandomErasing(0.25)]),
        "torchvision v2, deit3": v2.Compose([*crop, blur, v2.ColorJitter(0.3, 0.3, 0.3), *normal]),
    }
    rates = {}
    for name, transform in pipelines.items():
        loader = torch.utils.data.DataLoader(Pictures(transform, 256 * 24), 256, num_workers=workers, persistent_workers=True)
        for _ in loader:
            pass
        start = time.perf_counter()
        for _ in loader:
            pass
        rates[name] = 256 * 24 / (time.perf_counter() - start)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(PIPELINES))
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--no-others", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {os.cpu_count()} cores"
    print(f"{device}; torch {torch.__version__}; batch {options.batch}; n = {options.rounds} rounds of {options.repeats}")
    rows: list[dict] = []
    step = None if options.device == "cpu" else statistics.median(training_step(options))
    if step:
        print(f"DeiT-S training step: {step * 1e3:.2f} ms")
    for name in options.names:
        for compiled in (False,) if options.no_compile else (False, True):
            times = ours(name, options, compiled)
            middle = statistics.median(times)
            row = {"pipeline": name, "compiled": compiled, "rate": options.batch / middle, "ms": middle * 1e3}
            row |= {"spread": (max(times) - min(times)) / middle / 2, "share": middle / step if step else None}
            rows.append(row)
            share = f", {row['share']:.1%} of a DeiT-S step" if step else ""
            kind = "compiled" if compiled else "eager"
            print(f"{name:10} {kind:8} {row['rate']:9.0f}/s ±{row['spread']:.1%} ({row['ms']:.2f} ms{share})", flush=True)
            if options.out:
                options.out.write_text(json.dumps({"device": device, "step": step, "rows": rows}, indent=1))
    if not options.no_others:
        workers = os.cpu_count() or 1
        for name, rate in others(workers).items():
            rows.append({"pipeline": name, "rate": rate, "workers": workers})
            print(f"{name:24} {rate:9.0f}/s on {workers} cores", flush=True)
    if options.out:
        options.out.write_text(json.dumps({"device": device, "step": step, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
