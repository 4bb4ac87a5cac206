"""Small models of several papers, trained for seconds on the built-in digits."""

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
}


@cache
def digits(count=256):
    """Normalized images [count, 3, 24, 24] and labels."""
    source = open_source("digits", "train")
    count = min(count, len(source))
    pixels = torch.stack([torch.from_numpy(decode(source.encoded(index)).copy()) for index in range(count)])
    images = F.interpolate(pixels.permute(0, 3, 1, 2) / 255, (24, 24), mode="bilinear")
    return (images - 0.5) / 0.5, torch.from_numpy(source.label.values[:count]).long()


@cache
def trained(kind):
    """A model after 30 steps, in evaluation mode."""
    torch.manual_seed(0)
    name, changes = MODELS[kind]
    model = vitrail.create(name, classes=10, image_size=(24, 24), **{"width": 32, "depth": 3, "patch_size": 4} | changes)
    model.preprocessing = model.preprocessing._replace(crop_ratio=1.0, mean=(0.5,) * 3, std=(0.5,) * 3)
    images, labels = digits()
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for step in range(30):
        rows = torch.arange(32 * step, 32 * step + 32) % len(images)
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()
