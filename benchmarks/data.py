"""Speed of image decoding and augmentation.

    python benchmarks/data.py decode                        # generated images, 500 x 375 to 4000 x 3000
    python benchmarks/data.py decode --images photos/     # your own images, once per round
    python benchmarks/data.py augment                       # on a GPU, compared with timm and torchvision
    python benchmarks/data.py augment deit --device cpu --batch-size 16 --rounds 3 --no-others

`decode`: decoding plus resizing the shorter side to `--min-side`, in images per second of one core (CPU time): Vitrail with and
without simplejpeg and at full size, plain Pillow and OpenCV, in turns on the same files in each round.

`augment`: from decoded images, 256 x 256 uint8, to 224 x 224 normalized float32, with mixup and CutMix where the recipe has
them, in batches on a device; timm and torchvision image by image on all CPU cores. "Alone" is the time of repeated
augmentation, relative to a compiled bfloat16 training step of DeiT-S on the same batch; "added" is the increase of the step
time with augmentation.
"""

import argparse
import io
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from arguments import check_file, positive, run_program
from PIL import Image
from timing import half_range, machine, time_rounds

import vitrail
from vitrail.atomic_files import atomic_write
from vitrail.data import decode as decoder
from vitrail.data.rng import sample_key
from vitrail.data.transforms.mixup import draw_mix, mix_images
from vitrail.data.transforms.pipeline import Augmentation, augment
from vitrail.devices import choose_device
from vitrail.errors import UserError

SIZES = [(500, 375), (1000, 750), (1500, 1000), (2000, 1500), (4000, 3000)]
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


def make_decoders(min_side: int) -> dict[str, Run]:
    """Functions to compare by name, from encoded bytes to a resized image."""

    def vitrail(encoded: bytes, reduced: bool = True) -> object:
        image = Image.fromarray(decoder.decode(encoded, min_side if reduced else None))
        return np.asarray(image.resize(resized(image.size, min_side), Image.Resampling.BILINEAR))

    fast = decoder.simplejpeg

    def without_simplejpeg(encoded: bytes) -> object:
        decoder.simplejpeg = None
        try:
            return vitrail(encoded)
        finally:
            decoder.simplejpeg = fast

    def pillow(encoded: bytes) -> object:
        image = Image.open(io.BytesIO(encoded)).convert("RGB")
        return np.asarray(image.resize(resized(image.size, min_side), Image.Resampling.BILINEAR))

    decoders: dict[str, Run] = {"pillow": pillow, "vitrail": vitrail, "vitrail, full size": partial(vitrail, reduced=False)}
    if fast is not None:
        decoders["vitrail, no simplejpeg"] = without_simplejpeg
    try:
        import cv2
    except ImportError:
        return decoders
    cv2.setNumThreads(1)

    def opencv(encoded: bytes) -> object:
        pixels = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR)
        pixels = cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)
        height, width = pixels.shape[:2]
        return cv2.resize(pixels, resized((width, height), min_side), interpolation=cv2.INTER_AREA)

    return {**decoders, "opencv": opencv}


def compare(title: str, files: list[bytes], min_side: int, rounds: int) -> None:
    decoders = make_decoders(min_side)
    rates: dict[str, list[float]] = {name: [] for name in decoders}
    for _ in range(rounds + 1):  # the first is the warmup
        for name, run in decoders.items():
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


def measure_decoding(options: argparse.Namespace) -> None:
    paths: list[Path] = []
    if options.images:
        paths = sorted(path for path in options.images.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp"))
        if not paths:
            raise UserError(f"{options.images} is not a directory with images (JPEG, PNG or WebP).")
    print(
        f"{os.cpu_count()}-core CPU; one thread; n = {options.rounds} rounds; min_side = {options.min_side}; "
        f"simplejpeg {'no' if decoder.simplejpeg is None else decoder.simplejpeg.__version__}"
    )
    if paths:
        compare(str(options.images), [path.read_bytes() for path in paths], options.min_side, options.rounds)
        return
    for width, height in SIZES:
        files = [photograph(width, height, seed) for seed in range(options.files)]
        compare(f"{width} x {height}", files, options.min_side, options.rounds)


JITTER = (0.3, 0.3, 0.3, 0.0)
PIPELINES = {  # augmentation, mixup, CutMix
    "deit": (Augmentation(policy="rand", random_erasing=0.25), 0.8, 1.0),
    "deit3": (Augmentation(policy="three", color_jitter=JITTER), 0.8, 1.0),
    "deit3_21k": (Augmentation(crop="simple", policy="three", color_jitter=JITTER), 0.0, 1.0),
    "lvvit": (Augmentation(policy="rand", crop_last=True, interpolation="random", random_erasing=0.25), 0.0, 0.0),
    "plain": (Augmentation(), 0.0, 0.0),
}


def stored_images(count: int) -> torch.Tensor:
    """uint8 [count, 3, 256, 256], channels last, as from a loader: 16 generated images, repeated."""
    generated = [np.asarray(Image.open(io.BytesIO(photograph(256, 256, seed)))) for seed in range(16)]
    return torch.from_numpy(np.stack([generated[index % 16] for index in range(count)])).permute(0, 3, 1, 2)


def make_augmenter(name: str, pixels: torch.Tensor, compiled: bool) -> Callable[[], torch.Tensor]:
    """A function that augments and mixes the same batch with other random keys in each call."""
    config, mixup, cutmix = PIPELINES[name]
    sizes = torch.full((len(pixels), 2), 256, device=pixels.device)
    index = torch.arange(len(pixels), device=pixels.device)
    transform = torch.compile(augment, dynamic=False) if compiled else augment
    epoch = 0

    def run() -> torch.Tensor:
        nonlocal epoch
        epoch += 1
        images = transform(pixels, sizes, sample_key(0, epoch, index, index), config).images
        return mix_images(images, [draw_mix(0, epoch, 0, 0, config.image_size, mixup, cutmix)])

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


class DecodedImages(torch.utils.data.Dataset):
    """Decoded images in memory, so that only the transform is timed."""

    def __init__(self, transform: Callable, count: int) -> None:
        self.images = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in stored_images(16)]
        self.transform, self.count = transform, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.transform(self.images[index % 16])


def make_transforms() -> dict[str, Callable]:
    """The same pipelines in timm and torchvision."""
    try:
        from timm.data import create_transform
        from torchvision.transforms import v2
    except (ImportError, RuntimeError) as error:
        raise UserError(f"timm and torchvision cannot be imported here ({error}): install them, or pass --no-others.") from None

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


COLUMNS = {"ms": ".2f", "alone": ".1%", "added": ".1%"}


def measure_augmentation(options: argparse.Namespace) -> None:
    device, rows = options.device, []
    unknown = next((name for name in options.names if name not in PIPELINES), None)
    if unknown is not None:
        raise UserError(f"There is no pipeline {unknown!r}: choose from {', '.join(PIPELINES)}.")
    choose_device(device)
    check_file(options.out)
    transforms = {} if options.no_others else make_transforms()
    print(f"{machine(device)}; batch size {options.batch_size}; n = {options.rounds} rounds of {options.repeats}", flush=True)
    pixels = stored_images(options.batch_size).to(device)
    step, alone = None, 0.0
    if device == "cuda":
        step, images = training_step(device), torch.randn(options.batch_size, 3, 224, 224, device=device)
        (times,) = time_rounds({"step": lambda: step(images)}, device, options.rounds, options.repeats).values()
        alone = statistics.median(times)
        print(f"compiled DeiT-S training step: {alone * 1e3:.2f} ms ±{half_range(times):.1%}", flush=True)
    print("| pipeline | device | images/s | ms | alone | added |\n| --- | --- | --- | --- | --- | --- |")

    def report(name: str, location: str, rate: float, spread: float | None = None, **more: float) -> None:
        rows.append({"pipeline": name, "location": location, "rate": rate, "spread": spread} | more)
        error = "" if spread is None else f" ±{spread:.1%}"
        columns = [f"{more[key]:{form}}" if key in more else "" for key, form in COLUMNS.items()]
        print(f"| {name} | {location} | {rate:,.0f}{error} | {' | '.join(columns)} |", flush=True)
        if options.out:
            text = json.dumps({"machine": machine(device), "batch_size": options.batch_size, "rows": rows}, indent=1)
            atomic_write(options.out, lambda temporary: temporary.write_text(text))

    for name in options.names:
        for compiled in (False,) if options.no_compile else (False, True):
            torch.compiler.reset()
            run = make_augmenter(name, pixels, compiled)
            runs = {"alone": run} | ({"both": lambda run=run: step(run())} if step else {})
            times = time_rounds(runs, device, options.rounds, options.repeats)
            seconds = statistics.median(times["alone"])
            shares = {"alone": seconds / alone, "added": statistics.median(times["both"]) / alone - 1} if step else {}
            location = f"{'compiled' if compiled else 'eager'}, {device}"
            report(name, location, options.batch_size / seconds, half_range(times["alone"]), ms=seconds * 1e3, **shares)
    for name, transform in transforms.items():
        workers = os.cpu_count() or 1
        dataset = DecodedImages(transform, 256 * workers)
        loader = torch.utils.data.DataLoader(dataset, 256, num_workers=workers, persistent_workers=True)
        passes = [timed_pass(loader) for _ in range(4)][1:]  # the first starts the workers
        report(name, f"{workers} CPU cores", len(dataset) / statistics.median(passes), half_range(passes))


def timed_pass(loader: torch.utils.data.DataLoader) -> float:
    start = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("decode", help="decoding and resizing, compared with Pillow and OpenCV")
    command.add_argument("--images", type=Path, help="a directory of images; default: generated images")
    command.add_argument("--min-side", type=positive, default=256)
    command.add_argument("--rounds", type=positive, default=7)
    command.add_argument("--files", type=positive, default=6, help="number of generated images of each size")
    command.set_defaults(run=measure_decoding)
    command = commands.add_parser("augment", help="augmentation on the device, compared with timm and torchvision on CPU cores")
    command.add_argument("names", nargs="*", default=list(PIPELINES))
    command.add_argument("--batch-size", type=positive, default=256)
    command.add_argument("--rounds", type=positive, default=5)
    command.add_argument("--repeats", type=positive, default=10)
    command.add_argument("--no-others", action="store_true")
    command.add_argument("--no-compile", action="store_true")
    command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    command.add_argument("--out", type=Path)
    command.set_defaults(run=measure_augmentation)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    run_program(main)
