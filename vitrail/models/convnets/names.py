"""Published names of convnets, brought to the ones that the networks here have."""

import re
from collections.abc import Callable, Iterable

Change = tuple[str, str | Callable[[re.Match], str]]

# CIFAR ResNets call the classifier and the shortcuts differently.
RESNET: tuple[Change, ...] = ((r"^linear\.", "fc."), (r"\.shortcut\.", ".downsample."))
RESNET_HF: tuple[Change, ...] = (
    (r"^embedder\.embedder\.convolution\.", "conv1."),
    (r"^embedder\.embedder\.normalization\.", "bn1."),
    (r"^encoder\.stages\.(\d+)\.layers\.", lambda found: f"layer{int(found[1]) + 1}."),
    (r"\.layer\.(\d)\.convolution\.", lambda found: f".conv{int(found[1]) + 1}."),
    (r"\.layer\.(\d)\.normalization\.", lambda found: f".bn{int(found[1]) + 1}."),
    (r"\.shortcut\.convolution\.", ".downsample.0."),
    (r"\.shortcut\.normalization\.", ".downsample.1."),
    (r"^classifier\.1\.", "fc."),
)
PART = {"a": "conv1", "b": "conv2", "c": "conv3", "0": "conv", "1": "bn"}
REGNET_TORCHVISION: tuple[Change, ...] = (
    (r"^stem\.([01])\.", lambda found: f"stem.{PART[found[1]]}."),
    (r"^trunk_output\.block(\d)\.block\d-(\d+)\.", lambda found: f"s{found[1]}.b{int(found[2]) + 1}."),
    (r"\.f\.([abc])\.([01])\.", lambda found: f".{PART[found[1]]}.{PART[found[2]]}."),
    (r"\.f\.se\.", ".se."),
    (r"\.proj\.([01])\.", lambda found: f".downsample.{PART[found[1]]}."),
    (r"^fc\.", "head.fc."),
)
REGNET_HF: tuple[Change, ...] = (
    (r"^embedder\.embedder\.", "stem."),
    (
        r"^encoder\.stages\.(\d+)\.layers\.(\d+)\.",
        lambda found: f"s{int(found[1]) + 1}.b{int(found[2]) + 1}.",
    ),
    (r"\.layer\.2\.attention\.0\.", ".se.fc1."),
    (r"\.layer\.2\.attention\.2\.", ".se.fc2."),
    (r"\.layer\.3\.", ".conv3."),  # behind the squeeze of a RegNetY
    (r"\.layer\.([012])\.", lambda found: f".conv{int(found[1]) + 1}."),
    (r"\.shortcut\.", ".downsample."),
    (r"\.convolution\.", ".conv."),
    (r"\.normalization\.", ".bn."),
    (r"^classifier\.1\.", "head.fc."),
)


def recognize(keys: Iterable[str]) -> tuple[str, tuple[Change, ...]] | None:
    """The family of a state dict, and what to change in its names; None if it is no convnet that is known here."""
    names = set(keys)
    if "layer1.0.conv1.weight" in names:
        return "resnet", RESNET
    if "resnet.embedder.embedder.convolution.weight" in names:
        return "resnet", ((r"^resnet\.", ""), *RESNET_HF)
    if "s1.b1.conv1.conv.weight" in names:
        return "regnet", ()
    if "trunk_output.block1.block1-0.f.a.0.weight" in names:
        return "regnet", REGNET_TORCHVISION
    if "regnet.embedder.embedder.convolution.weight" in names:
        return "regnet", ((r"^regnet\.", ""), *REGNET_HF)
    if "_blocks.0._depthwise_conv.weight" in names:
        return "efficientnet_lite", ()
    return None


def plain(key: str, changes: tuple[Change, ...]) -> str:
    for pattern, replacement in changes:
        key = re.sub(pattern, replacement, key)
    return key
