"""What the way from files to batches costs.

    python benchmarks/data.py decode                        # pictures made on the spot, 500 x 375 to 4000 x 3000
    python benchmarks/data.py decode --pictures photos/     # your own, all of them once per round

`decode`: decoding plus resizing the shorter side to `--at-least`, in pictures per second of one core (processor time),
Vitrail with and without simplejpeg beside plain Pillow and OpenCV, each round all of them in turn on the same files.
"""

import argparse
import io
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from vitrail.data import decode as decoder

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
    light, *colours = (layer / layer.std() for layer in layers)
    pixels = np.stack([light * 50 + 20 * colours[0], light * 50, light * 50 + 20 * colours[1]], axis=2)
    pixels += 127 + rng.normal(0, 2, pixels.shape)
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def resized(size: tuple[int, int], shorter: int) -> tuple[int, int]:
    scale = shorter / min(size)
    return max(round(size[0] * scale), 1), max(round(size[1] * scale), 1)


def runs(at_least: int) -> dict[str, Run]:
    """What is compared: name -> bytes to a resized picture."""

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
    print(
        f"{os.cpu_count()}-core CPU; one thread; n = {options.rounds} rounds; at_least = {options.at_least}; "
        f"simplejpeg {'no' if decoder.simplejpeg is None else decoder.simplejpeg.__version__}"
    )
    if options.pictures:
        paths = sorted(path for path in options.pictures.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp"))
        compare(str(options.pictures), [path.read_bytes() for path in paths], options.at_least, options.rounds)
        return
    for width, height in SIZES:
        files = [photograph(width, height, seed) for seed in range(options.files)]
        compare(f"{width} x {height}", files, options.at_least, options.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("decode", help="decoding and resizing beside plain Pillow and OpenCV")
    command.add_argument("--pictures", type=Path, help="a folder of pictures; made on the spot if not given")
    command.add_argument("--at-least", type=int, default=256)
    command.add_argument("--rounds", type=int, default=7)
    command.add_argument("--files", type=int, default=6, help="how many are made of each size")
    command.set_defaults(run=decode)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
