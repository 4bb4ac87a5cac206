"""What the way from files to what the network sees costs.

    python benchmarks/data.py decode                        # images made on the spot, 500 x 375 to 4000 x 3000
    python benchmarks/data.py decode --images photos/     # your own, all of them once per round
    python benchmarks/data.py augment                       # a GPU; timm and torchvision beside it
    python benchmarks/data.py augment deit --device cpu --batch 16 --rounds 3 --no-others

`decode`: decoding plus resizing the shorter side to `--at-least`, in images per second of one core (processor time),
Vitrail with and without simplejpeg beside plain Pillow and OpenCV, each round all of them in turn on the same files.

`augment`: from stored images, 256 x 256 uint8, to 224 x 224 normalized float32, mixed where the recipe mixes, in batches on a
device; timm and torchvision image by image on all CPU cores. "Alone" is the time of the augmentation back to back, as a share
of a compiled bfloat16 training step of DeiT-S on the same batch; "added" is by how much the step takes longer with it in front.
"""

import argparse
import io
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from asking import check_file, positive, run_program
from PIL import Image
from timing import half_spread, in_turns, machine

import vitrail
from vitrail.atomic_files import write_aside
from vitrail.data import decode as decoder
from vitrail.data.rng import sample_key
from vitrail.data.transforms.mixup import draw_mix, mix_images
from vitrail.data.transforms.pipeline import Augmentation, augment
from vitrail.errors import UserError
from vitrail.training.distributed import choose_device

SIZES = [(500, 375), (1000, 750), (2000, 1500), (4000, 3000)]
Run = Callable[[bytes], object]


def photograph(width: int, height: int, seed: int) -> bytes:
    """A JPEG of quality 90 with the spectrum of a photograph, 1 / frequency in every channel, and some sensor noise."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1
    layers = []
    for _ in range(3):
        phases = np.exp(2j * np.pi * rng.random(frequency.shape))
        layers.append(np.fft.irfft2(phases / frequency**1.2, s=(height, width)))
    light, *colors = (layer / layer.std() for layer in layers)
    pixels = np.stack([light * 50 + 20 * colors[0], light * 50, light * 50 + 20 * colors[1]], axis=2)
    pixels += 127 + rng.normal(0, 2, pixels.shape)
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def resized(size: tuple[int, int], shorter: int) -> tuple[int, int]:
    scale = shorter / min(size)
    return max(round(size[0] * scale), 1), max(round(size[1] * scale), 1)


def runs(at_least: int) -> dict[str, Run]:
    """What is compared: name -> bytes to a resized image."""

    def vitrail(encoded: bytes) -> object:
        image = Image.fromarray(decoder.decode(encoded, at_least))
        return np.asarray(image.resize(resized(image.size, at_least), Image.Resampling.BILINEAR))

    fast = decoder.simplejpeg

    def without_simplejpeg(encoded: bytes) -> object:
        decoder.simplejpeg = None
        try:
            return vitrail(encoded)
        finally:
            decoder.simplejpeg = fast

    def pillow(encoded: bytes) -> object:
        image = Image.open(io.BytesIO(encoded)).convert("RGB")
        return np.asarray(image.resize(resized(image.size, at_least), Image.Resampling.BILINEAR))

    found: dict[str, Run] = {"pillow": pillow, "vitrail": vitrail}
    if fast is not None:
        found["vitrail, no simplejpeg"] = without_simplejpeg
    try:
        import cv2
    except ImportError:
        return found
    cv2.setNumThreads(1)

    def opencv(encoded: bytes) -> object:
        pixels = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR)
        pixels = cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)
        height, width = pixels.shape[:2]
        return cv2.resize(pixels, resized((width, height), at_least), interpolation=cv2.INTER_AREA)

    return {**found, "opencv": opencv}


def compare(title: str, files: list[bytes], at_least: int, rounds: int) -> None:
    compared = runs(at_least)
    rates: dict[str, list[float]] = {name: [] for name in compared}
    for _ in range(rounds + 1):  # the first one warms up
        for name, run in compared.items():
            start = time.process_time()
            for encoded in files:
                run(encoded)
            rates[name].append(len(files) / (time.process_time() - start))
    base = statistics.median(rates["pillow"][1:])
    print(f"{title}: {len(files)} files, {sum(map(len, files)) / len(files) / 1e3:.0f} kB each on average")
    for name, values in rates.items():
        values = values[1:]
        median = statistics.median(values)
        print(f"  {name:24} {median:8.1f}/s  {min(values):.1f} ... {max(values):.1f}  {median / base:5.2f} x pillow")


def decode(options: argparse.Namespace) -> None:
    paths: list[Path] = []
    if options.images:
        paths = sorted(path for path in options.images.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp"))
        if not paths:
            raise UserError(f"{options.images} is not a folder with images in it (JPEG, PNG or WebP).")
    print(
        f"{os.cpu_count()}-core CPU; one thread; n = {options.rounds} rounds; at_least = {options.at_least}; "
        f"simplejpeg {'no' if decoder.simplejpeg is None else decoder.simplejpeg.__version__}"
    )
    if paths:
        compare(str(options.images), [path.read_bytes() for path in paths], options.at_least, options.rounds)
        return
    for width, height in SIZES:
        files = [photograph(width, height, seed) for seed in range(options.files)]
        compare(f"{width} x {height}", files, options.at_least, options.rounds)


JITTER = (0.3, 0.3, 0.3, 0.0)
PIPELINES = {  # what is done to an image, mixup, CutMix
    "deit": (Augmentation(policy="rand", random_erasing=0.25), 0.8, 1.0),
    "deit3": (Augmentation(policy="three", color_jitter=JITTER), 0.8, 1.0),
    "deit3_21k": (Augmentation(crop="simple", policy="three", color_jitter=JITTER), 0.0, 1.0),
    "lvvit": (Augmentation(policy="rand", crop_last=True, interpolation="random", random_erasing=0.25), 0.0, 0.0),
    "plain": (Augmentation(), 0.0, 0.0),
}


def stored_images(count: int) -> torch.Tensor:
    """uint8 [count, 3, 256, 256], channels last, as a loader gives them: 16 made images over and over."""
    made = [np.asarray(Image.open(io.BytesIO(photograph(256, 256, seed)))) for seed in range(16)]
    return torch.from_numpy(np.stack([made[place % 16] for place in range(count)])).permute(0, 3, 1, 2)


def augmenter(name: str, pixels: torch.Tensor, compiled: bool) -> Callable[[], torch.Tensor]:
    """Augments and mixes the same batch with other keys each time it is called."""
    how, mixup, cutmix = PIPELINES[name]
    sizes = torch.full((len(pixels), 2), 256, device=pixels.device)
    index = torch.arange(len(pixels), device=pixels.device)
    whole = torch.compile(augment, dynamic=False) if compiled else augment
    epoch = 0

    def run() -> torch.Tensor:
        nonlocal epoch
        epoch += 1
        images = whole(pixels, sizes, sample_key(0, epoch, index, index), how).images
        return mix_images(images, draw_mix(0, epoch, 0, 0, how.size, mixup, cutmix))

    return run


def training_step(device: str) -> Callable[[torch.Tensor], None]:
    model = vitrail.create("deit_small_patch16").to(device).train()
    forward = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=device == "cuda")

    def run(images: torch.Tensor) -> None:
        with torch.autocast(device, torch.bfloat16):
            output = forward(images)
        output.float().logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


class Images(torch.utils.data.Dataset):
    """Decoded images in memory, so that only the transform is timed."""

    def __init__(self, transform: Callable, count: int) -> None:
        self.images = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in stored_images(16)]
        self.transform, self.count = transform, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.transform(self.images[index % 16])


def others() -> dict[str, Callable]:
    """The same pipelines of timm and torchvision."""
    try:
        from timm.data import create_transform
        from torchvision.transforms import v2
    except (ImportError, RuntimeError) as error:
        raise UserError(f"timm and torchvision cannot be imported here ({error}): install them, or give --no-others.") from None

    tensor = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    crop, flip = v2.RandomResizedCrop(224, interpolation=v2.InterpolationMode.BICUBIC), v2.RandomHorizontalFlip()
    three = v2.RandomChoice([v2.Grayscale(3), v2.RandomSolarize(128, p=1.0), v2.GaussianBlur(9, (0.1, 2.0))])
    erasing = v2.RandomErasing(0.25)
    return {
        "timm, deit": create_transform(
            224, is_training=True, auto_augment="rand-m9-mstd0.5-inc1", interpolation="bicubic", re_prob=0.25
        ),
        "torchvision v2, deit": v2.Compose([crop, flip, v2.RandAugment(), *tensor, erasing]),
        "torchvision v2, deit3": v2.Compose([crop, flip, three, v2.ColorJitter(0.3, 0.3, 0.3), *tensor]),
        "torchvision v2, lvvit": v2.Compose([flip, v2.RandAugment(), crop, *tensor, erasing]),
    }


SHARES = {"ms": ".2f", "alone": ".1%", "added": ".1%"}


def augmentation(options: argparse.Namespace) -> None:
    device, rows = options.device, []
    unknown = next((name for name in options.names if name not in PIPELINES), None)
    if unknown is not None:
        raise UserError(f"There is no pipeline {unknown!r}: choose among {', '.join(PIPELINES)}.")
    choose_device(device)
    check_file(options.out)
    beside = {} if options.no_others else others()
    print(f"{machine(device)}; batch {options.batch}; n = {options.rounds} rounds of {options.repeats}", flush=True)
    pixels = stored_images(options.batch).to(device)
    step, alone = None, 0.0
    if device == "cuda":
        step, images = training_step(device), torch.randn(options.batch, 3, 224, 224, device=device)
        (times,) = in_turns({"step": lambda: step(images)}, device, options.rounds, options.repeats).values()
        alone = statistics.median(times)
        print(f"compiled DeiT-S training step: {alone * 1e3:.2f} ms ±{half_spread(times):.1%}", flush=True)
    print("| pipeline | where | images/s | ms | alone | added |\n| --- | --- | --- | --- | --- | --- |")

    def report(name: str, where: str, rate: float, spread: float | None = None, **more: float) -> None:
        rows.append({"pipeline": name, "where": where, "rate": rate, "spread": spread} | more)
        about = "" if spread is None else f" ±{spread:.1%}"
        columns = [f"{more[key]:{form}}" if key in more else "" for key, form in SHARES.items()]
        print(f"| {name} | {where} | {rate:,.0f}{about} | {' | '.join(columns)} |", flush=True)
        if options.out:
            text = json.dumps({"machine": machine(device), "batch": options.batch, "rows": rows}, indent=1)
            write_aside(options.out, lambda side: side.write_text(text))

    for name in options.names:
        for compiled in (False,) if options.no_compile else (False, True):
            torch.compiler.reset()
            run = augmenter(name, pixels, compiled)
            runs = {"alone": run} | ({"both": lambda run=run: step(run())} if step else {})
            times = in_turns(runs, device, options.rounds, options.repeats)
            seconds = statistics.median(times["alone"])
            shares = {"alone": seconds / alone, "added": statistics.median(times["both"]) / alone - 1} if step else {}
            where = f"{'compiled' if compiled else 'eager'}, {device}"
            report(name, where, options.batch / seconds, half_spread(times["alone"]), ms=seconds * 1e3, **shares)
    for name, transform in beside.items():
        workers = os.cpu_count() or 1
        raw = Images(transform, 256 * workers)
        loader = torch.utils.data.DataLoader(raw, 256, num_workers=workers, persistent_workers=True)
        passes = [timed_pass(loader) for _ in range(4)][1:]  # the first one starts the workers
        report(name, f"{workers} CPU cores", len(raw) / statistics.median(passes), half_spread(passes))


def timed_pass(loader: torch.utils.data.DataLoader) -> float:
    start = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("decode", help="decoding and resizing beside plain Pillow and OpenCV")
    command.add_argument("--images", type=Path, help="a folder of images; made on the spot if not given")
    command.add_argument("--at-least", type=positive, default=256)
    command.add_argument("--rounds", type=positive, default=7)
    command.add_argument("--files", type=positive, default=6, help="how many are made of each size")
    command.set_defaults(run=decode)
    command = commands.add_parser("augment", help="augmentation on the device beside timm and torchvision on CPU cores")
    command.add_argument("names", nargs="*", default=list(PIPELINES))
    command.add_argument("--batch", type=positive, default=256)
    command.add_argument("--rounds", type=positive, default=5)
    command.add_argument("--repeats", type=positive, default=10)
    command.add_argument("--no-others", action="store_true")
    command.add_argument("--no-compile", action="store_true")
    command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    command.add_argument("--out", type=Path)
    command.set_defaults(run=augmentation)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    run_program(main)
