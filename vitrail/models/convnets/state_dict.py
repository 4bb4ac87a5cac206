"""From a convnet's state dict to the network: recognized by its names, built from its shapes, every tensor in its place."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.checkpoints.codecs import Shapes
from vitrail.checkpoints.formats import huggingface
from vitrail.checkpoints.readers import Checkpoint
from vitrail.errors import UserError
from vitrail.models.convnets import efficientnet, regnet, resnet
from vitrail.models.convnets.names import plain, recognize
from vitrail.models.preprocessing import Preprocessing
from vitrail.teachers.network import ConvNet
from vitrail.teachers.sidecar import file_beside

TITLES = {"resnet": "ResNet", "regnet": "RegNet", "efficientnet_lite": "EfficientNet-Lite"}
SMALL = 32  # the side of CIFAR's images
# Keras's first ResNets, in Caffe's manner: blue first, 0 to 255, only the mean taken off, told as of red first and 0 to 1.
KERAS = Preprocessing(
    interpolation="bilinear", mean=(123.68 / 255, 116.779 / 255, 103.939 / 255), std=(1 / 255, 1 / 255, 1 / 255)
)


class Found(NamedTuple):
    """A network and what is known about it."""

    network: ConvNet
    preprocessing: Preprocessing
    order: str  # of colors: rgb or bgr
    classes: int
    names: list[str] | None


def open_convnet(checkpoint: Checkpoint, path: str | Path, kind: str | None) -> Found | None:
    """The convnet of a checkpoint, or None where its names are not those of one."""
    recognized = recognize(checkpoint.tensors)
    if recognized is None:
        return None
    family, changes = recognized
    tensors = {plain(key, changes): tensor for key, tensor in checkpoint.tensors.items()}
    tensors = {key: tensor for key, tensor in tensors.items() if not key.endswith("num_batches_tracked")}
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    try:
        found = MAKERS[family](shapes, checkpoint.config or {}, kind)
    except KeyError as error:
        raise UserError(f"{path} looks like a {TITLES[family]} but lacks the tensor {error.args[0]!r}.") from None
    except (ValueError, TypeError, IndexError, ZeroDivisionError, RuntimeError, AssertionError, OverflowError):
        raise UserError(f"{path} looks like a {TITLES[family]}, but its tensors do not fit one.") from None
    fill(found.network, tensors, f"{path}", TITLES[family])
    return describe(found, checkpoint)


def check_units(found: Found, path: str | Path) -> None:
    """Refuses weights whose first batch norm has seen more than the images that are assumed could have shown it."""
    network = found.network
    if not isinstance(network, resnet.ResNet) or not isinstance(network.conv1, nn.Conv2d):
        return
    weight, seen = network.conv1.weight.detach(), network.bn1.running_var
    assert isinstance(seen, Tensor)
    length = weight.square().sum((1, 2, 3))
    # No variance of values between 0 and 1 exceeds 1/4, nor that of a weighted sum the product of sums of squares and variances.
    most = weight[0, 0].numel() * sum(0.25 / deviation**2 for deviation in found.preprocessing.std)
    alive = length > 0
    if bool(alive.any()) and float((seen[alive] / length[alive]).median()) > most:
        raise UserError(
            f"{path} has learnt from images of other values than a ResNet's usual ones, perhaps 0 to 255: say its kind "
            f"(resnet_keras) or its preprocessing, as an option or in {file_beside(path)}."
        )


def make_resnet(shapes: Shapes, config: dict[str, Any], kind: str | None) -> Found:
    plan = resnet.infer(shapes)
    refuse(config.get("hidden_act", "relu") != "relu", "an activation other than ReLU")
    refuse(bool(config.get("downsample_in_first_stage")), "a first stage that shrinks")
    keras = kind == "resnet_keras"
    early = keras or bool(config.get("downsample_in_bottleneck"))
    plan = resnet.ResNetPlan(**(vars(plan) | {"early": early, "eps": 1e-3 if keras else plan.eps}))
    preprocessing = KERAS if keras else Preprocessing(interpolation="bilinear")
    if plan.small:
        preprocessing = preprocessing._replace(image_size=(SMALL, SMALL), crop_ratio=1.0)
    network = on_meta(lambda: resnet.ResNet(plan))
    return Found(network, preprocessing, "bgr" if keras else "rgb", plan.classes, None)


def make_regnet(shapes: Shapes, config: dict[str, Any], kind: str | None) -> Found:
    refuse(config.get("hidden_act", "relu") != "relu", "an activation other than ReLU")
    refuse(not config.get("downsample_in_first_stage", True), "a first stage that keeps the size")
    plan = regnet.infer(shapes)
    return Found(on_meta(lambda: regnet.RegNet(plan)), Preprocessing(), "rgb", plan.classes, None)


def make_efficientnet(shapes: Shapes, config: dict[str, Any], kind: str | None) -> Found:
    plan = efficientnet.infer(shapes)
    size = plan.size
    middle, half = (127 / 255,) * 3, (128 / 255,) * 3
    preprocessing = Preprocessing((size, size), size / (size + 32), mean=middle, std=half)
    return Found(on_meta(lambda: efficientnet.EfficientNet(plan)), preprocessing, "rgb", plan.classes, None)


MAKERS: dict[str, Callable[[Shapes, dict[str, Any], str | None], Found]] = {
    "resnet": make_resnet,
    "regnet": make_regnet,
    "efficientnet_lite": make_efficientnet,
}


def refuse(problem: bool, part: str) -> None:
    if problem:
        raise UserError(f"The configuration asks for {part}, which this network does not have; give it as a module.")


def on_meta(make: Callable[[], ConvNet]) -> ConvNet:
    with torch.device("meta"):
        return make()


def fill(network: ConvNet, tensors: dict[str, Tensor], path: str, title: str) -> None:
    """Every tensor in its place; one too few, too many or of another shape is an error."""
    expected = {key: value for key, value in network.state_dict().items() if not key.endswith("num_batches_tracked")}
    missing, surplus = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing:
        raise UserError(f"{path} lacks the tensor {missing[0]!r} of a {title}.")
    if surplus:
        raise UserError(f"{path} has {len(surplus)} tensors with no place in a {title}, such as {surplus[0]!r}.")
    for key, value in expected.items():
        if tensors[key].shape != value.shape:
            raise UserError(f"{path}: the tensor {key!r} has the shape {tuple(tensors[key].shape)}, which does not fit the rest.")
        if not tensors[key].is_floating_point():
            raise UserError(f"{path}: the tensor {key!r} has the type {tensors[key].dtype}, not one for weights.")
    counters = {key: torch.tensor(0) for key in network.state_dict() if key.endswith("num_batches_tracked")}
    network.load_state_dict({key: tensors[key].float().clone() for key in expected} | counters, assign=True)


def describe(found: Found, checkpoint: Checkpoint) -> Found:
    """Class names and preprocessing from the configuration files of a folder."""
    try:
        if checkpoint.config:
            found = found._replace(names=huggingface.class_names(checkpoint.config, found.classes))
        if checkpoint.preprocessor:
            size = found.preprocessing.image_size
            said = huggingface.read_preprocessing(checkpoint.preprocessor, size)
            if checkpoint.preprocessor.get("crop_pct"):  # of the processor that convnets share
                said = said._replace(resize="shorter", crop_ratio=float(checkpoint.preprocessor["crop_pct"]))
            found = found._replace(preprocessing=said)
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise UserError(f"The configuration beside the weights is damaged ({error!r}).") from None
    return found
