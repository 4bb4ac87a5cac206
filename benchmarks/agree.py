"""Do networks in fewer bits answer as the original in float32 does? A table in Markdown, for a trained model on its own data.

    python benchmarks/agree.py digits/best.safetensors --data digits
    python benchmarks/agree.py vitrail_tiny --data tiny-imagenet/ --device cuda --most 10000

`vitrail.optimize` makes them: on a processor bfloat16 and int8, which learns its ranges from 128 training images or from
made-up ones; on a Hopper GPU bfloat16 and float8. Compared are the images of the test or validation part, `--most` of them.
"""

import argparse
from typing import Any

import torch
from asking import positive, run_program
from torch import Tensor

import vitrail
from vitrail.data.datasets.lookup import open_splits
from vitrail.data.transforms.pipeline import augment
from vitrail.errors import UserError
from vitrail.evaluation.accuracy import test_view
from vitrail.evaluation.evaluate import feed_of, open_part
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.training.distributed import begin, choose_device

BATCH = 64


def load_images(model: VisionTransformer, source: Any, most: int) -> tuple[Tensor, Tensor]:
    """Up to `most` images as the model wants to see them, and their classes."""
    images: list[Tensor] = []
    labels: list[Tensor] = []
    with feed_of(model, source, 0) as feed:
        for found in feed.sweep(BATCH):
            view = test_view(model.preprocessing)
            images.append(augment(found.pixels, found.sizes, torch.zeros_like(found.index), view).images)
            assert found.labels is not None
            labels.append(found.labels)
            if sum(map(len, images)) >= most:
                break
    return torch.cat(images)[:most], torch.cat(labels)[:most]


def answers(network: Any, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.cat([network(few.to(dtype)).float() for few in images.split(BATCH)])


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights")
    parser.add_argument("--data", required=True)
    parser.add_argument("--most", type=positive, default=4000)
    parser.add_argument("--device", default=None)
    options = parser.parse_args()
    device = begin(choose_device(options.device))
    model = vitrail.load(options.weights).eval()
    part = open_part(options.data, None, trained_here=True)
    if model.class_names != part.source.classes:
        raise UserError(f"{options.weights} answers other classes than {options.data} has; take what it was trained with.")
    images, labels = load_images(model, part.source, options.most)
    example, _ = load_images(model, open_splits(options.data).train, 128)
    images, labels, example, model = images.to(device), labels.to(device), example.to(device), model.to(device)
    kinds: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {}}
    kinds |= {"fp8": {}} if device.type == "cuda" else {"int8": {"example": example}, "int8, made-up images": {}}
    print(f"{model.name}, {len(images):,} images of {part.source.name}; torch {torch.__version__}, {device.type}")
    print("\n| precision | accuracy | same first answer as float32 | mean difference of a logit, of their deviation |")
    print("| --- | --- | --- | --- |")
    with torch.inference_mode():
        exact = answers(model, images)
        for kind, more in kinds.items():
            precision = kind.partition(",")[0]
            fast = vitrail.optimize(model, "throughput", precision=precision, **more)
            dtype = torch.bfloat16 if device.type == "cuda" and precision != "fp32" else torch.float32
            found = answers(fast, images, dtype)
            right, same = ((found.argmax(1) == other).double().mean() for other in (labels, exact.argmax(1)))
            print(f"| {kind} | {right:.2%} | {same:.2%} | {(found - exact).abs().mean() / exact.std():.1e} |", flush=True)


if __name__ == "__main__":
    run_program(main)
