"""Small models of several papers, trained for seconds on the built-in digits and photographs."""

from functools import cache

import torch
from torch.nn import functional as F

import vitrail
from vitrail.data.datasets.lookup import open_source
from vitrail.data.decode import decode

MODELS = {
    "cait": ("cait_xxs24", {"heads": 4, "pooling_heads": 4, "layerscale_init": 0.1}),
    "resmlp": ("resmlp_s12", {"layerscale_init": 0.1}),
    "patchconvnet": ("patchconvnet_s20_multi", {"stem": "linear", "layerscale_init": 0.1}),
    "distilled": ("deit_tiny_distilled_patch16", {"heads": 4}),
    "photographs": ("deit_tiny_patch16", {"heads": 4, "width": 64, "patch_size": 16}),
}


def read_images(name, indices, size):
    """Normalized images [len(indices), 3, size, size] of the training split of a built-in data set, and labels."""
    source = open_source(name, "train")
    pixels = torch.stack([torch.from_numpy(decode(source.encoded(index)).copy()) for index in indices])
    images = F.interpolate(pixels.permute(0, 3, 1, 2) / 255, (size, size), mode="bilinear", antialias=True)
    return (images - 0.5) / 0.5, torch.from_numpy(source.label.values[list(indices)]).long()


@cache
def digits():
    return read_images("digits", range(256), 24)


@cache
def photographs():
    return read_images("pets", range(0, 600, 2), 64)  # of all breeds


@cache
def trained(kind):
    """A model after 30 steps, in evaluation mode; "distilled" by the predictions of another one."""
    name, changes = MODELS[kind]
    images, labels = photographs() if kind == "photographs" else digits()
    targets = trained("resmlp")(images).argmax(1) if kind == "distilled" else None
    torch.manual_seed(0)
    classes, size = int(labels.max()) + 1, tuple(images.shape[-2:])
    model = vitrail.create(name, classes=classes, image_size=size, **{"width": 32, "depth": 3, "patch_size": 4} | changes)
    model.preprocessing = model.preprocessing._replace(crop_ratio=1.0, mean=(0.5,) * 3, std=(0.5,) * 3)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for step in range(30):
        rows = torch.arange(32 * step, 32 * step + 32) % len(images)
        outputs = model.outputs(images[rows])
        loss = F.cross_entropy(outputs.main, labels[rows])
        if targets is not None:  # DeiT's hard distillation
            loss = (loss + F.cross_entropy(outputs.distillation, targets[rows])) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()
