"""ResNets and RegNets under the names of torchvision, timm and Hugging Face, and of ports of the CIFAR ResNets.

ResNets have the same names in torchvision and timm. Names of other origin are changed to those of timm when a file is read.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from vitrail.checkpoints.codecs import Hints, Pair, Shapes, UnsupportedByFormat, pair
from vitrail.errors import UserError
from vitrail.layers.convnet import ConvNetConfig, ConvNetStem
from vitrail.models.config import Architecture
from vitrail.models.preprocessing import Preprocessing
from vitrail.models.regnet import PREPROCESSING as REGNET_PREPROCESSING
from vitrail.models.resnet import PREPROCESSING as RESNET_PREPROCESSING
from vitrail.models.resnet import SMALL_PREPROCESSING, convnet
from vitrail.models.vision_transformer import VisionTransformer

Change = tuple[str, str | Callable[[re.Match[str]], str]]
Value = TypeVar("Value")

# CIFAR ResNets have other names for the classifier and the shortcuts.
RESNET: tuple[Change, ...] = ((r"^linear\.", "fc."), (r"\.shortcut\.", ".downsample."))
RESNET_HF: tuple[Change, ...] = (
    (r"^resnet\.", ""),
    (r"^embedder\.embedder\.convolution\.", "conv1."),
    (r"^embedder\.embedder\.normalization\.", "bn1."),
    (r"^encoder\.stages\.(\d+)\.layers\.", lambda match: f"layer{int(match[1]) + 1}."),
    (r"\.layer\.(\d)\.convolution\.", lambda match: f".conv{int(match[1]) + 1}."),
    (r"\.layer\.(\d)\.normalization\.", lambda match: f".bn{int(match[1]) + 1}."),
    (r"\.shortcut\.convolution\.", ".downsample.0."),
    (r"\.shortcut\.normalization\.", ".downsample.1."),
    (r"^classifier\.1\.", "fc."),
)
PART = {"a": "conv1", "b": "conv2", "c": "conv3", "0": "conv", "1": "bn"}
REGNET_TORCHVISION: tuple[Change, ...] = (
    (r"^stem\.([01])\.", lambda match: f"stem.{PART[match[1]]}."),
    (r"^trunk_output\.block(\d)\.block\d-(\d+)\.", lambda match: f"s{match[1]}.b{int(match[2]) + 1}."),
    (r"\.f\.([abc])\.([01])\.", lambda match: f".{PART[match[1]]}.{PART[match[2]]}."),
    (r"\.f\.se\.", ".se."),
    (r"\.proj\.([01])\.", lambda match: f".downsample.{PART[match[1]]}."),
    (r"^fc\.", "head.fc."),
)
REGNET_HF: tuple[Change, ...] = (
    (r"^regnet\.", ""),
    (r"^embedder\.embedder\.", "stem."),
    (
        r"^encoder\.stages\.(\d+)\.layers\.(\d+)\.",
        lambda match: f"s{int(match[1]) + 1}.b{int(match[2]) + 1}.",
    ),
    (r"\.layer\.2\.attention\.0\.", ".se.fc1."),
    (r"\.layer\.2\.attention\.2\.", ".se.fc2."),
    (r"\.layer\.3\.", ".conv3."),  # after the squeeze-and-excitation of a RegNetY
    (r"\.layer\.([012])\.", lambda match: f".conv{int(match[1]) + 1}."),
    (r"\.shortcut\.", ".downsample."),
    (r"\.convolution\.", ".conv."),
    (r"\.normalization\.", ".bn."),
    (r"^classifier\.1\.", "head.fc."),
)
# A tensor name, the format that has it, and the changes to the names of timm.
MARKS: tuple[tuple[str, str, tuple[Change, ...]], ...] = (
    ("layer1.0.conv1.weight", "timm", RESNET),
    ("resnet.embedder.embedder.convolution.weight", "hf", RESNET_HF),
    ("s1.b1.conv1.conv.weight", "timm", ()),
    ("trunk_output.block1.block1-0.f.a.0.weight", "torchvision", REGNET_TORCHVISION),
    ("regnet.embedder.embedder.convolution.weight", "hf", REGNET_HF),
)


def recognize(keys: Iterable[str]) -> str | None:
    """The format of a ResNet or RegNet; None for other networks."""
    names = set(keys)
    return next((format for mark, format, _ in MARKS if mark in names), None)


def rename(values: Mapping[str, Value]) -> dict[str, Value]:
    """Tensors, or their shapes, under the names of timm."""
    changes = next(changes for mark, _, changes in MARKS if mark in values)
    renamed = {}
    for key, value in values.items():
        for pattern, replacement in changes:
            key = re.sub(pattern, replacement, key)
        renamed[key] = value
    return renamed


def normalize(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names of timm, with the counters of batches that older files lack."""
    renamed = rename(tensors)
    counters = {key.replace("running_var", "num_batches_tracked"): torch.tensor(0) for key in renamed if "running_var" in key}
    return counters | renamed


def infer(shapes: Shapes, hints: Hints, config: dict[str, Any] | None) -> Architecture:
    """The architecture; `hints` may have fields of `ConvNetConfig` that a file does not contain."""
    shapes, config = rename(shapes), config or {}
    if config.get("hidden_act", "relu") != "relu":
        raise UserError("The configuration requires an activation other than ReLU, which convnets do not have here.")
    found = infer_resnet(shapes, config) if "layer1.0.conv1.weight" in shapes else infer_regnet(shapes, config)
    names = [field.name for field in dataclasses.fields(ConvNetConfig)]
    found = found.replace(**{name: hints[name] for name in names if name in hints})
    head = next((key.removesuffix(".bias") for key in ("fc.bias", "head.fc.bias") if key in shapes), None)  # a trunk has none
    changes = {"image_size": hints["image_size"]} if "image_size" in hints else {}
    channels = shapes[first_conv(shapes)][1]
    return convnet(found, classes=shapes[f"{head}.weight"][0] if head else 0, channels=channels, **changes)


def first_conv(shapes: Iterable[str]) -> str:
    return next(key for key in ("conv1.weight", "conv1.0.weight", "stem.conv.weight") if key in shapes)


def infer_resnet(shapes: Shapes, config: dict[str, Any]) -> ConvNetConfig:
    counts = [len({key.split(".")[1] for key in shapes if key.startswith(f"layer{stage}.")}) for stage in range(1, 17)]
    depths = tuple(count for count in counts if count)
    bottleneck = "layer1.0.conv3.weight" in shapes
    firsts = [f"layer{stage}.0" for stage in range(1, len(depths) + 1)]
    inner = tuple(shapes[f"{first}.conv2.weight"][0] for first in firsts)
    widths = tuple(shapes[f"{first}.conv{3 if bottleneck else 2}.weight"][0] for first in firsts)
    root = tuple(shapes[key][0] for key in shapes if re.fullmatch(r"conv1(\.\d)?\.weight", key) and len(shapes[key]) == 4)
    small = len(root) == 1 and shapes["conv1.weight"][2] == 3
    average = any(len(shapes.get(f"{first}.downsample.1.weight", ())) == 4 for first in firsts)
    pad = not any(".downsample." in key for key in shapes) and not (bottleneck or len(depths) == 1)
    return ConvNetConfig(
        depths=depths,
        widths=widths,
        inner_widths=inner,
        groups=tuple(size // shapes[f"{first}.conv2.weight"][1] for size, first in zip(inner, firsts, strict=True)),
        block="bottleneck" if bottleneck else "basic",
        root_widths=root,
        root_stride=1 if small else 4,
        first_stride=2 if config.get("downsample_in_first_stage") else 1,
        shortcut="average" if average else "pad" if pad else "conv",
        stride_in_1x1=bool(config.get("downsample_in_bottleneck")),
    )


def infer_regnet(shapes: Shapes, config: dict[str, Any]) -> ConvNetConfig:
    stages = sorted({key.split(".")[0] for key in shapes if re.match(r"s\d\.", key)})
    inner = tuple(shapes[f"{stage}.b1.conv2.conv.weight"][0] for stage in stages)
    return ConvNetConfig(
        depths=tuple(len({key.split(".")[1] for key in shapes if key.startswith(f"{stage}.")}) for stage in stages),
        widths=tuple(shapes[f"{stage}.b1.conv3.conv.weight"][0] for stage in stages),
        inner_widths=inner,
        groups=tuple(size // shapes[f"{stage}.b1.conv2.conv.weight"][1] for stage, size in zip(stages, inner, strict=True)),
        squeeze="s1.b1.se.fc1.weight" in shapes,
        root_widths=(shapes["stem.conv.weight"][0],),
        root_stride=2,
        first_stride=2 if config.get("downsample_in_first_stage", True) else 1,
    )


def to_pair(key: str, a: Architecture) -> Pair:
    """The name in timm, which is also that in torchvision for a ResNet."""
    config = plain_convnet(a)
    return pair(key, regnet_name(key, config) if is_regnet(config) else resnet_name(key, config))


def to_torchvision_pair(key: str, a: Architecture) -> Pair:
    config = plain_convnet(a)
    if config.shortcut == "average" or len(config.root_widths) > 1:
        raise UnsupportedByFormat("torchvision has no ResNet-D: use the format timm")
    if not is_regnet(config):
        return to_pair(key, a)
    match regnet_name(key, config).split("."):
        case ["stem", part, leaf]:
            name = f"stem.{CONV_OR_NORM[part]}.{leaf}"
        case ["head", "fc", leaf]:
            name = f"fc.{leaf}"
        case [stage, block, *path]:
            root = f"trunk_output.block{stage[1:]}.block{stage[1:]}-{int(block[1:]) - 1}"
            name = f"{root}.{torchvision_path(path)}"
        case _:
            raise UnsupportedByFormat(f"torchvision cannot represent {key}")
    return pair(key, name)


CONV_OR_NORM = {"conv": "0", "bn": "1"}


def torchvision_path(path: list[str]) -> str:
    match path:
        case ["se", *rest]:
            return ".".join(("f.se", *rest))
        case ["downsample", part, leaf]:
            return f"proj.{CONV_OR_NORM[part]}.{leaf}"
    conv, part, leaf = path
    return f"f.{'abc'[int(conv[-1]) - 1]}.{CONV_OR_NORM[part]}.{leaf}"


def plain_convnet(a: Architecture) -> ConvNetConfig:
    """The convnet of an architecture that is nothing else."""
    if a.convnet is None or a.depth or a.pooling != "mean" or a.final_norm or a.pre_logits or a.dense_head:
        raise UnsupportedByFormat(f"it has only models that are one convnet, not stem={a.stem}, depth={a.depth}")
    return a.convnet


def is_regnet(config: ConvNetConfig) -> bool:
    if config.squeeze and config.root_stride != 2:
        raise UnsupportedByFormat("no ResNet has squeeze=true")
    return config.root_stride == 2


def position(index: str, config: ConvNetConfig) -> tuple[int, int]:
    """Stage and position in it of a block, both counted from 0."""
    ends = list(accumulate(config.depths))
    stage = next(number for number, end in enumerate(ends) if int(index) < end)
    return stage, int(index) - ends[stage] + config.depths[stage]


def resnet_name(key: str, config: ConvNetConfig) -> str:
    match key.split("."):
        case ["stem", "root", name, leaf]:
            layer, number = name[:-1], int(name[-1])
            if number == len(config.root_widths) and layer == "norm":
                return f"bn1.{leaf}"
            return f"conv1.{leaf}" if len(config.root_widths) == 1 else f"conv1.{3 * number - 3 + (layer == 'norm')}.{leaf}"
        case ["stem", "blocks", index, *path]:
            stage, place = position(index, config)
            root = f"layer{stage + 1}.{place}"
            if path[0] == "shortcut":
                first = 1 if config.shortcut == "average" else 0
                return f"{root}.downsample.{first + (path[1] == 'norm')}.{path[2]}"
            return f"{root}.{path[0].replace('norm', 'bn')}.{path[1]}"
        case ["head", leaf]:
            return f"fc.{leaf}"
    raise UnsupportedByFormat(f"a ResNet has no {key}")


def regnet_name(key: str, config: ConvNetConfig) -> str:
    match key.split("."):
        case ["stem", "root", name, leaf]:
            return f"stem.{'conv' if name == 'conv1' else 'bn'}.{leaf}"
        case ["stem", "blocks", index, *path]:
            stage, place = position(index, config)
            root = f"s{stage + 1}.b{place + 1}"
            match path:
                case ["squeeze", layer, leaf]:
                    return f"{root}.se.{layer}.{leaf}"
                case ["shortcut", name, leaf]:
                    return f"{root}.downsample.{'conv' if name == 'conv' else 'bn'}.{leaf}"
            name, leaf = path
            return f"{root}.conv{name[-1]}.{'conv' if name.startswith('conv') else 'bn'}.{leaf}"
        case ["head", leaf]:
            return f"head.fc.{leaf}"
    raise UnsupportedByFormat(f"a RegNet has no {key}")


def default_preprocessing(a: Architecture) -> Preprocessing:
    """The preprocessing of weights without a description of it."""
    assert a.convnet is not None
    known = {1: SMALL_PREPROCESSING, 2: REGNET_PREPROCESSING, 4: RESNET_PREPROCESSING}[a.convnet.root_stride]
    return known._replace(image_size=a.image_size)


def variance_exceeds_preprocessing(model: VisionTransformer) -> bool:
    """Whether the statistics of the first batch norm of a ResNet are too large for its assumed preprocessing."""
    stem = model.stem
    if not isinstance(stem, ConvNetStem) or is_regnet(stem.config) or len(stem.config.root_widths) > 1:
        return False
    weight, variance = stem.root.get_parameter("conv1.weight").detach(), stem.root.get_buffer("norm1.running_var")
    squared_norm = weight.square().sum((1, 2, 3))
    # The variance of values between 0 and 1 is at most 1/4; that of a weighted sum at most the product of the sums of squared
    # weights and of variances.
    bound = weight[0, 0].numel() * sum(0.25 / std**2 for std in model.preprocessing.std)
    nonzero = squared_norm > 0
    return bool(nonzero.any()) and float((variance[nonzero] / squared_norm[nonzero]).median()) > bound
