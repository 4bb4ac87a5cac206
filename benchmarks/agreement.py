"""Agreement of the predictions in bf16, int8 and fp8 with those in float32, for a trained model on its data; a Markdown table.

    python benchmarks/agreement.py digits/best.safetensors --data digits
    python benchmarks/agreement.py vitrail_tiny --data tiny-imagenet/ --device cuda --max-images 10000

The networks are made by `vitrail.optimize`: on a CPU in bfloat16 and in int8, calibrated on 128 training images or on synthetic
ones; on a Hopper GPU in bfloat16 and float8. The images are up to `--max-images` of the test or validation split.
"""

import argparse
from typing import Any

import torch
from arguments import positive, run_program
from torch import Tensor

import vitrail
from vitrail.data.datasets.lookup import open_splits
from vitrail.devices import choose_device, use_device
from vitrail.errors import UserError
from vitrail.evaluation.evaluate import HeldOut, open_evaluation_data, open_loader
from vitrail.models.vision_transformer import VisionTransformer

BATCH_SIZE = 64


def load_images(model: VisionTransformer, source: Any, max_images: int) -> tuple[Tensor, Tensor]:
    """Up to `max_images` preprocessed images, and their labels."""
    images: list[Tensor] = []
    labels: list[Tensor] = []
    with open_loader(model, source, 0) as image_loader:
        for batch in image_loader.iterate(BATCH_SIZE):
            images.append(model.preprocessing.apply(batch.pixels, batch.sizes))
            assert batch.labels is not None
            labels.append(batch.labels)
            if sum(map(len, images)) >= max_images:
                break
    return torch.cat(images)[:max_images], torch.cat(labels)[:max_images]


def compute_logits(network: Any, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.cat([network(part.to(dtype)).float() for part in images.split(BATCH_SIZE)])


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights")
    parser.add_argument("--data", required=True)
    parser.add_argument("--max-images", type=positive, default=4000)
    parser.add_argument("--device", default=None)
    options = parser.parse_args()
    device = use_device(choose_device(options.device))
    model = vitrail.load(options.weights).eval()
    part = open_evaluation_data(options.data, held_out=HeldOut([]))
    if model.class_names != part.source.classes:
        raise UserError(
            f"{options.weights} was trained on other classes than those of {options.data}; use the data that it was trained on."
        )
    images, labels = load_images(model, part.source, options.max_images)
    example, _ = load_images(model, open_splits(options.data).train, 128)
    images, labels, example, model = images.to(device), labels.to(device), example.to(device), model.to(device)
    variants: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {}}
    variants |= {"fp8": {}} if device.type == "cuda" else {"int8": {"example": example}, "int8, synthetic images": {}}
    print(f"{model.name}, {len(images):,} images of {part.source.name}; torch {torch.__version__}, {device.type}")
    print("\n| precision | accuracy | same top-1 prediction as float32 | mean difference of logits / standard deviation |")
    print("| --- | --- | --- | --- |")
    with torch.inference_mode():
        exact = compute_logits(model, images)
        for name, arguments in variants.items():
            precision = name.partition(",")[0]
            fast = vitrail.optimize(model, "throughput", precision=precision, **arguments)
            dtype = torch.bfloat16 if device.type == "cuda" and precision != "fp32" else torch.float32
            logits = compute_logits(fast, images, dtype)
            accuracy, same = ((logits.argmax(1) == other).double().mean() for other in (labels, exact.argmax(1)))
            print(f"| {name} | {accuracy:.2%} | {same:.2%} | {(logits - exact).abs().mean() / exact.std():.1e} |", flush=True)


if __name__ == "__main__":
    run_program(main)
