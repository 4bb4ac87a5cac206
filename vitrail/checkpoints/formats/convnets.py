"""State dicts of convnets: the family is recognized by tensor names, the configuration inferred from shapes."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.checkpoints.formats import huggingface
from vitrail.checkpoints.readers import Checkpoint
from vitrail.errors import UserError
from vitrail.models.convnets import efficientnet, regnet, resnet
from vitrail.models.convnets.convnet import ConvNet, Shapes
from vitrail.models.preprocessing import Preprocessing

TITLES = {"resnet": "ResNet", "regnet": "RegNet", "efficientnet_lite": "EfficientNet-Lite"}
CIFAR_SIZE = 32
# The first ResNets of Keras, in Caffe's convention: BGR, values 0 to 255, only the mean subtracted; here as of RGB, 0 to 1.
KERAS = Preprocessing(
    interpolation="bilinear", mean=(123.68 / 255, 116.779 / 255, 103.939 / 255), std=(1 / 255, 1 / 255, 1 / 255)
)

Change = tuple[str, str | Callable[[re.Match[str]], str]]

# CIFAR ResNets have other names for the classifier and the shortcuts.
RESNET: tuple[Change, ...] = ((r"^linear\.", "fc."), (r"\.shortcut\.", ".downsample."))
RESNET_HF: tuple[Change, ...] = (
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


def recognize_family(keys: Iterable[str]) -> tuple[str, tuple[Change, ...]] | None:
    """The family of a state dict, and the changes to its names; None if it is not a supported convnet."""
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


def rename(key: str, changes: tuple[Change, ...]) -> str:
    for pattern, replacement in changes:
        key = re.sub(pattern, replacement, key)
    return key


class LoadedConvNet(NamedTuple):
    """A network with its preprocessing and classes."""

    network: ConvNet
    preprocessing: Preprocessing
    channel_order: str  # rgb or bgr
    classes: int
    class_names: list[str] | None


def load_convnet(checkpoint: Checkpoint, path: str | Path, kind: str | None) -> LoadedConvNet | None:
    """The convnet of a checkpoint; None if its tensor names are not those of one."""
    recognized = recognize_family(checkpoint.tensors)
    if recognized is None:
        return None
    family, changes = recognized
    tensors = {rename(key, changes): tensor for key, tensor in checkpoint.tensors.items()}
    tensors = {key: tensor for key, tensor in tensors.items() if not key.endswith("num_batches_tracked")}
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    try:
        with torch.device("meta"):
            loaded = BUILDERS[family](shapes, checkpoint.config or {}, kind)
    except KeyError as error:
        raise UserError(f"{path}: the tensor {error.args[0]!r} of a {TITLES[family]} is missing.") from None
    except (ValueError, TypeError, IndexError, ZeroDivisionError, RuntimeError, AssertionError, OverflowError):
        raise UserError(f"{path} has the names of a {TITLES[family]}, but its shapes do not match one.") from None
    load_tensors(loaded.network, tensors, str(path), TITLES[family])
    return read_description(loaded, checkpoint)


def build_resnet(shapes: Shapes, config: dict[str, Any], kind: str | None) -> LoadedConvNet:
    inferred = resnet.infer(shapes)
    reject(config.get("hidden_act", "relu") != "relu", "an activation other than ReLU")
    reject(bool(config.get("downsample_in_first_stage")), "a stride in the first stage")
    keras = kind == "resnet_keras"
    stride_in_1x1 = keras or bool(config.get("downsample_in_bottleneck"))
    network = resnet.ResNet(replace(inferred, stride_in_1x1=stride_in_1x1, eps=1e-3 if keras else inferred.eps))
    preprocessing = KERAS if keras else Preprocessing(interpolation="bilinear")
    if inferred.small_stem:
        preprocessing = preprocessing._replace(image_size=(CIFAR_SIZE, CIFAR_SIZE), crop_ratio=1.0)
    return LoadedConvNet(network, preprocessing, "bgr" if keras else "rgb", inferred.classes, None)


def build_regnet(shapes: Shapes, config: dict[str, Any], kind: str | None) -> LoadedConvNet:
    reject(config.get("hidden_act", "relu") != "relu", "an activation other than ReLU")
    reject(not config.get("downsample_in_first_stage", True), "a first stage without a stride")
    inferred = regnet.infer(shapes)
    return LoadedConvNet(regnet.RegNet(inferred), Preprocessing(), "rgb", inferred.classes, None)


def build_efficientnet(shapes: Shapes, config: dict[str, Any], kind: str | None) -> LoadedConvNet:
    inferred = efficientnet.infer(shapes)
    size = inferred.size
    preprocessing = Preprocessing((size, size), size / (size + 32), mean=(127 / 255,) * 3, std=(128 / 255,) * 3)
    return LoadedConvNet(efficientnet.EfficientNet(inferred), preprocessing, "rgb", inferred.classes, None)


BUILDERS: dict[str, Callable[[Shapes, dict[str, Any], str | None], LoadedConvNet]] = {
    "resnet": build_resnet,
    "regnet": build_regnet,
    "efficientnet_lite": build_efficientnet,
}


def reject(condition: bool, part: str) -> None:
    if condition:
        raise UserError(f"The configuration requires {part}, which is not supported: give the network as a module.")


def load_tensors(network: ConvNet, tensors: dict[str, Tensor], path: str, title: str) -> None:
    """Load a state dict; missing, surplus and mismatched tensors are errors."""
    expected = {key: value for key, value in network.state_dict().items() if not key.endswith("num_batches_tracked")}
    missing, surplus = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing:
        raise UserError(f"{path}: the tensor {missing[0]!r} of a {title} is missing.")
    if surplus:
        raise UserError(f"{path}: {len(surplus)} tensors do not belong to a {title}, such as {surplus[0]!r}.")
    for key, value in expected.items():
        if tensors[key].shape != value.shape:
            raise UserError(
                f"{path}: the tensor {key!r} has shape {tuple(tensors[key].shape)}, which does not match the other tensors."
            )
        if not tensors[key].is_floating_point():
            raise UserError(f"{path}: the tensor {key!r} has dtype {tensors[key].dtype}, not a floating point dtype.")
    counters = {key: torch.tensor(0) for key in network.state_dict() if key.endswith("num_batches_tracked")}
    network.load_state_dict({key: tensors[key].float().clone() for key in expected} | counters, assign=True)


def read_description(loaded: LoadedConvNet, checkpoint: Checkpoint) -> LoadedConvNet:
    """The network with class names and preprocessing from the configuration files of a folder."""
    try:
        if checkpoint.config:
            loaded = loaded._replace(class_names=huggingface.class_names(checkpoint.config, loaded.classes))
        if checkpoint.preprocessor:
            preprocessing = huggingface.read_preprocessing(checkpoint.preprocessor, loaded.preprocessing.image_size)
            if checkpoint.preprocessor.get("crop_pct"):  # of ConvNextImageProcessor
                preprocessing = preprocessing._replace(resize="shorter", crop_ratio=float(checkpoint.preprocessor["crop_pct"]))
            loaded = loaded._replace(preprocessing=preprocessing)
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise UserError(f"The configuration files next to the weights are damaged ({error!r}).") from None
    return loaded


def variance_exceeds_preprocessing(loaded: LoadedConvNet) -> bool:
    """Whether the statistics of the first batch norm of a ResNet are too large for its assumed preprocessing."""
    network = loaded.network
    if not isinstance(network, resnet.ResNet) or not isinstance(network.conv1, nn.Conv2d):
        return False
    weight, variance = network.conv1.weight.detach(), network.bn1.running_var
    assert isinstance(variance, Tensor)
    squared_norm = weight.square().sum((1, 2, 3))
    # The variance of values between 0 and 1 is at most 1/4; that of a weighted sum at most the product of the sums of squared
    # weights and of variances.
    bound = weight[0, 0].numel() * sum(0.25 / std**2 for std in loaded.preprocessing.std)
    nonzero = squared_norm > 0
    return bool(nonzero.any()) and float((variance[nonzero] / squared_norm[nonzero]).median()) > bound
