"""`open_teacher`: a teacher from a file, a folder, a name or a module."""

import difflib
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.checkpoints.artifact import HEADER
from vitrail.checkpoints.export_metadata import ExportMetadata
from vitrail.checkpoints.hub import find_named, is_built_by_timm
from vitrail.checkpoints.model_io import load
from vitrail.checkpoints.readers import check_regular_file, read_weights
from vitrail.errors import UserError
from vitrail.models.config import as_size
from vitrail.models.preprocessing import Preprocessing
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.teachers.fixed_shape import FixedShapeNetwork, first_line
from vitrail.teachers.network import ConvNetwork, ModuleNetwork, Network, Size, TimmNetwork, TransformerNetwork
from vitrail.teachers.sidecar import read_sidecar
from vitrail.teachers.teacher import Teacher

KINDS = ("checkpoint", "resnet_keras", "exported", "onnx")
# The first ResNets of Keras, in Caffe's convention: BGR, values 0 to 255, only the mean subtracted; here as of RGB, 0 to 1.
KERAS = Preprocessing(
    interpolation="bilinear", mean=(123.68 / 255, 116.779 / 255, 103.939 / 255), std=(1 / 255, 1 / 255, 1 / 255)
)
KERAS_HINTS = {"stride_in_1x1": True, "eps": 1e-3}
EXTRA = ("order", "range")  # keys of a preprocessing dictionary that are not fields of `Preprocessing`

NO_PREPROCESSING = "{} does not contain its preprocessing: give preprocessing (image_size, mean, std)."
PreprocessingLike = Preprocessing | Mapping[str, Any]


def open_teacher(
    teacher: str | Path | nn.Module,
    device: torch.device | str | None = None,
    classes: Sequence[str] | int | None = None,
    preprocessing: PreprocessingLike | None = None,
    kind: str | None = None,
    size: int | Size | None = None,
) -> Teacher:
    """A teacher from one of

    * a path or name that `vitrail.load` accepts: artifacts, run directories, published vision transformers;
    * the state dict of a ResNet, RegNet or EfficientNet-Lite, or a Hugging Face folder of the first two;
    * an exported program (`.pt2`) or an ONNX file (`.onnx`), with its `preprocessing`;
    * weights by name: `deit3_small`, `timm:NAME`, `hf://owner/name`, which are downloaded;
    * `timm:NAME` of a network that only timm implements, or `timm:NAME@weights.safetensors`, if timm is installed;
    * a module from images to logits, with its `preprocessing`; it is frozen and not copied.

    `classes` are the names (or the number) of the classes of a teacher without class names. `preprocessing` replaces the stored
    or default preprocessing; as a dictionary it may contain some of the fields, and `order` ("bgr") and `range` (255) of `mean`
    and `std`. `kind` is needed for files that cannot be recognized: "resnet_keras" for weights of Keras's first ResNets. Images
    are resized to `size`. A sidecar file (`sidecar.py`) may contain all of these; arguments take precedence.

    >>> teacher = open_teacher("regnety_160-a5fe301d.pth", device="cuda")
    >>> logits = teacher(images, mean=student.preprocessing.mean, std=student.preprocessing.std)
    """
    path = teacher if isinstance(teacher, str | Path) and not is_built_by_timm(str(teacher)) else None
    named = find_named(path) if path is not None else None
    sidecar = read_sidecar(path) if path is not None and named is None else {}
    kind = sidecar.get("kind") if kind is None else kind
    classes = sidecar.get("classes") if classes is None else classes
    size = sidecar.get("size") if size is None else size
    changes = [each for each in (sidecar.get("preprocessing"), preprocessing) if each is not None]
    if kind is not None and kind not in KINDS:
        raise UserError(f"Unknown kind of teacher {kind!r}: choose from {', '.join(KINDS)}, or omit it.")
    try:
        device = torch.device(device) if device is not None else None
    except RuntimeError as error:
        raise UserError(f"{device!r} is not a device ({first_line(error)}).") from None
    if isinstance(teacher, VisionTransformer):
        opened = from_model(teacher)
    elif isinstance(teacher, nn.Module):
        opened = from_module(teacher, preprocessing)
    elif path is None:
        opened = from_timm(str(teacher).removeprefix("timm:"), classes)
    else:
        opened = from_path(named or Path(teacher).expanduser(), kind, device, bool(changes))
    for change in changes:
        opened.preprocessing, opened.channel_order = update_preprocessing(opened.preprocessing, opened.channel_order, change)
    if size is not None:
        opened.size = check_size(opened.network, as_size(size))
    if device is not None:
        move(opened, device)
    if not opened.classes:
        opened.classes = count_classes(opened)
    return name_classes(opened, classes)


def from_path(path: Path, kind: str | None, device: torch.device | None, has_preprocessing: bool) -> Teacher:
    """The teacher in a file or folder; `has_preprocessing`: an argument or the sidecar file contains it."""
    if not path.exists():
        raise UserError(f"There is no file {path}.")
    if kind is None and path.suffix in (".onnx", ".pt2"):
        kind = "onnx" if path.suffix == ".onnx" else "exported"
    if kind in ("onnx", "exported"):
        check_regular_file(path)
        if kind == "exported" and not has_preprocessing:
            raise UserError(NO_PREPROCESSING.format(path))
        network = open_program(path, kind, device)
        if (metadata := getattr(network, "metadata", None)) is not None:
            return from_export(network, metadata, path)
        if not has_preprocessing:
            raise UserError(NO_PREPROCESSING.format(path))
        return Teacher(network, Preprocessing(image_size=network.fixed_size or (224, 224)), 0, name=path.name)
    checkpoint = read_weights(path)
    if HEADER in checkpoint.metadata:
        return from_model(load(path), str(path))
    from vitrail.checkpoints.conversion import assemble_foreign, load_foreign, recognize
    from vitrail.checkpoints.formats.efficientnet_lite import load_efficientnet

    if efficientnet := load_efficientnet(checkpoint, path):
        convnet, preprocessing = efficientnet
        return Teacher(ConvNetwork(convnet), preprocessing, convnet.config.classes, name=path.name)
    try:
        recognize(checkpoint)
    except UserError:
        raise UserError(
            f"{path} is not a supported vision transformer, ResNet, RegNet or EfficientNet-Lite (its first tensor is "
            f"{next(iter(checkpoint.tensors))!r}): open it as timm:NAME@{path}, or give its network as a module."
        ) from None
    if kind == "resnet_keras":
        opened = from_model(assemble_foreign(checkpoint, path, KERAS_HINTS, {}), str(path))
        opened.preprocessing, opened.channel_order = KERAS, "bgr"
        return opened
    read = assemble_foreign if kind == "checkpoint" or has_preprocessing else load_foreign
    return from_model(read(checkpoint, path, {}, {}), str(path))


def open_program(path: Path, kind: str, device: torch.device | None) -> FixedShapeNetwork:
    if kind == "onnx":
        from vitrail.teachers.onnx import OnnxNetwork

        return OnnxNetwork(path, device)
    from vitrail.teachers.torch_export import ExportedNetwork

    return ExportedNetwork(path)


def from_export(network: Network, metadata: ExportMetadata, path: Path) -> Teacher:
    """A file of `vitrail.export`, with its own preprocessing and class names."""
    metadata.require_classes(path)
    teacher = Teacher(network, metadata.preprocessing, 0, metadata.class_names, name=metadata.name or path.name)
    teacher.decode_side = metadata.decode_side
    teacher.classes = count_classes(teacher)
    if metadata.class_names is not None and len(metadata.class_names) != teacher.classes:
        raise UserError(f"{path} has {teacher.classes} logits and {len(metadata.class_names)} class names: export it again.")
    return teacher


def from_model(model: VisionTransformer, path: str = "This model") -> Teacher:
    if not model.architecture.classes:
        raise UserError(f"{path} has no classifier: use a teacher that was trained to classify.")
    convnet = model.architecture.convnet
    return Teacher(
        TransformerNetwork(model),
        model.preprocessing,
        model.architecture.classes,
        model.class_names,
        "rgb",
        model.name or Path(path).name,
        # A convnet for small images does not generalize to larger ones.
        model.architecture.image_size if convnet is not None and convnet.root_stride == 1 else None,
    )


def from_module(module: nn.Module, preprocessing: PreprocessingLike | None) -> Teacher:
    if preprocessing is None:
        raise UserError("A module needs its preprocessing: preprocessing=Preprocessing(image_size=…, mean=…, std=…).")
    return Teacher(wrap(module), Preprocessing(), 0, name=type(module).__name__)


def wrap(module: nn.Module) -> Network:
    if isinstance(module, Network):
        return module
    from vitrail.models.efficientnet import EfficientNet

    if isinstance(module, EfficientNet):
        return ConvNetwork(module)
    is_timm = hasattr(module, "forward_features") and hasattr(module, "forward_head")
    return TimmNetwork(module) if is_timm else ModuleNetwork(module)


def from_timm(name: str, classes: Sequence[str] | int | None) -> Teacher:
    """A model of timm by name, with the weights of a file or the pretrained weights of timm."""
    name, _, weights = name.partition("@")
    try:
        timm = importlib.import_module("timm")
        data = importlib.import_module("timm.data")
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"timm:{name} needs timm, which cannot be imported ({first_line(error)}): install it, or give hf://timm/{name}, "
            "which needs no timm if it is a ResNet, RegNet or EfficientNet-Lite."
        ) from None
    # With pretrained weights, timm would replace the classifier to change the number of classes.
    options = {} if classes is None or not weights else {"num_classes": classes if isinstance(classes, int) else len(classes)}
    tensors = read_weights(Path(weights).expanduser()).tensors if weights else None
    try:
        module = timm.create_model(name, pretrained=tensors is None, **options)
        config = data.resolve_data_config({}, model=module)
    except Exception as error:  # timm, the hub or the connection can raise any exception
        raise UserError(f"timm cannot create {name} ({first_line(error)}).") from None
    if tensors is not None:
        try:
            module.load_state_dict(tensors)
        except RuntimeError as error:
            detail = str(error).strip().splitlines()[-1].strip().rstrip(".")[:200]
            raise UserError(f"{weights} does not match timm's {name} ({detail}): if its classes differ, give them.") from None
    if getattr(module, "num_classes", None) == 0:
        raise UserError(f"timm's {name} has no classifier: use a teacher that was trained to classify.")
    from vitrail.checkpoints.formats.timm import read_preprocessing

    height, width = config["input_size"][-2:]
    return Teacher(wrap(module), read_preprocessing(config, (height, width)), 0, name=name)


def update_preprocessing(known: Preprocessing, order: str, change: PreprocessingLike) -> tuple[Preprocessing, str]:
    """The changed preprocessing, of RGB images with values from 0 to 1, and the channel order.

    Entries that a dictionary does not contain keep their values.
    """
    if isinstance(change, Preprocessing):
        return change, order
    if not isinstance(change, Mapping):
        raise UserError(f"preprocessing must be a Preprocessing or a dictionary with image_size, mean, std, …, not {change!r}.")
    names = (*Preprocessing._fields, *EXTRA)
    for key in change:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, 1, 0.0)
            raise UserError(f"preprocessing has no {key!r}; did you mean {near[0]}?")
    order, max_value = str(change.get("order", order)), change.get("range", 1)
    values = dict(known.to_dict()) | {key: value for key, value in change.items() if key not in EXTRA}
    try:
        values["image_size"] = as_size(values["image_size"])
        for key in ("mean", "std"):
            if key in change:
                channels = [float(value) / float(max_value) for value in change[key]]
                values[key] = tuple(channels[::-1] if order == "bgr" else channels)
        result = Preprocessing.from_dict(values)
        if "mean" in change and "range" not in change and max(result.mean) > 1:
            raise UserError('preprocessing has a mean above 1: give the range of the values too, "range": 255.')
        valid = min(result.std) > 0 and order in ("rgb", "bgr") and len(result.std) == len(result.mean)
    except (TypeError, ValueError, ZeroDivisionError):
        valid = False
    if not valid:
        raise UserError(
            "preprocessing needs an image_size, a mean and a std with one value per channel (std above 0), an order of rgb or "
            "bgr, and a range of 1 or 255."
        )
    result.check()
    return result, order


def check_size(network: Network, size: Size) -> Size:
    if network.fixed_size is not None and size != network.fixed_size:
        height, width = network.fixed_size
        raise UserError(f"This teacher supports only images of {height} x {width}: omit its size.")
    return size


def move(teacher: Teacher, device: torch.device) -> None:
    try:
        teacher.to(device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"The teacher cannot be moved to {device} ({first_line(error)}).") from None
    if device.type == "cuda" and not isinstance(teacher.network, FixedShapeNetwork):  # which may need their own strides
        # torch's stubs lack the memory format of a module.
        teacher.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def count_classes(teacher: Teacher) -> int:
    """The number of logits of a forward pass."""
    tensor = next(iter(teacher.network.parameters()), torch.empty(0))
    shape = (2, len(teacher.preprocessing.mean), *teacher.preprocessing.image_size)
    try:
        logits: Tensor = teacher(torch.zeros(shape, device=tensor.device))
    except UserError:
        raise
    except Exception as error:  # a foreign module can raise any exception
        raise UserError(
            f"{teacher.name} fails on images of shape {shape} ({first_line(error)}): check its preprocessing."
        ) from None
    if logits.dim() != 2 or len(logits) != shape[0]:
        raise UserError(f"{teacher.name} returns shape {tuple(logits.shape)} for two images, not logits [2, classes]: wrap it.")
    return logits.shape[1]


def name_classes(teacher: Teacher, classes: Sequence[str] | int | None) -> Teacher:
    if classes is None:
        return teacher
    count = classes if isinstance(classes, int) else len(classes)
    if count != teacher.classes:
        raise UserError(f"{teacher.name} has {teacher.classes} classes, but {count} were given: give all of them, in its order.")
    if not isinstance(classes, int):
        teacher.class_names = [str(name) for name in classes]
    return teacher
