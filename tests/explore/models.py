"""Small models for the tests of the explorer."""

import torch

import vitrail
from vitrail.explore.explored_model import ExploredModel

CLASSES = ["red", "green", "blue"]


def small_model(name="deit_tiny_patch16", seed=0, **changes):
    """A model of 4 x 4 patches with three classes, random weights and distinct attention."""
    torch.manual_seed(seed)
    sizes = {"depth": 3, "width": 32, "heads": 2, "image_size": 32, "patch_size": 8} if "patch16" in name else {"image_size": 32}
    model = vitrail.create(name, classes=len(CLASSES), **{**sizes, **changes}).eval()
    for parameter, values in model.named_parameters():
        if "qkv.weight" in parameter:
            values.data *= 30  # otherwise all attention weights are nearly equal
    model.class_names = ["blue", "red", "green"]  # with which some predictions are right
    return model


def explored(name="deit_tiny_patch16", title="small", **changes):
    return ExploredModel(small_model(name, **changes), title)
