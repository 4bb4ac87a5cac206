"""`open_teacher`: from a file, a folder, a name or a module to a teacher."""

import difflib
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitrail.checkpoints.bundled import find_bundled
from vitrail.checkpoints.formats.timm import read_preprocessing
from vitrail.checkpoints.model_io import load, recognize
from vitrail.checkpoints.readers import read
from vitrail.errors import UserError
from vitrail.models.config import as_size
from vitrail.models.convnets.state_dict import SMALL, check_units, open_convnet
from vitrail.models.preprocessing import Preprocessing
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.teachers.fixed_shape import Fixed, first_line
from vitrail.teachers.network import Network, Plain, Size, Timm, Transformer
from vitrail.teachers.onnx import Onnx
from vitrail.teachers.sidecar import read_beside
from vitrail.teachers.teacher import Teacher
from vitrail.teachers.torch_export import Exported

KINDS = ("checkpoint", "resnet_keras", "exported", "onnx")
EXTRA = ("order", "range")  # of a preprocessing that is given as a dictionary, beside the fields of `Preprocessing`

Prepared = Preprocessing | Mapping[str, Any]


def open_teacher(
    what: str | Path | nn.Module,
    device: torch.device | str | None = None,
    classes: Sequence[str] | int | None = None,
    preprocessing: Prepared | None = None,
    kind: str | None = None,
    size: int | Size | None = None,
) -> Teacher:
    """A teacher from any of

    * what `vitrail.load` opens: Vitrail's files and run folders, released vision transformers;
    * the state dict of a ResNet, a RegNet or an EfficientNet-Lite, told by its names; a Hugging Face folder of the first two;
    * an exported program (`.pt2`) or an ONNX file (`.onnx`), which do not say their `preprocessing`;
    * `timm:NAME` or `timm:NAME@weights.safetensors`, where timm is installed;
    * a module from images to logits, with its `preprocessing`; it is frozen and used itself, not copied.

    `classes` names (or counts) the classes of a teacher that does not. `preprocessing` replaces what is known about how its
    images are prepared; as a dictionary it may say `order` ("bgr") and `range` (255), in which `mean` and `std` are meant.
    What it does not say stays as it is. `kind` says what a file does not tell: "resnet_keras" for weights of Keras's first
    ResNets. Every image is brought to `size` before the teacher sees it. A JSON file beside a file, or in a folder, may say all
    this too (`beside`); arguments go first.

    >>> teacher = open_teacher("regnety_160-a5fe301d.pth", device="cuda")
    >>> logits = teacher(images, mean=student.preprocessing.mean, std=student.preprocessing.std)
    """
    path = what if isinstance(what, str | Path) and not str(what).startswith("timm:") else None
    bundled = find_bundled(path) if path is not None else None
    said = read_beside(path) if path is not None and bundled is None else {}
    kind = said.get("kind") if kind is None else kind
    classes = said.get("classes") if classes is None else classes
    size = said.get("size") if size is None else size
    told = [given for given in (said.get("preprocessing"), preprocessing) if given is not None]
    if kind is not None and kind not in KINDS:
        raise UserError(f"{kind!r} is no kind of teacher; choose from {', '.join(KINDS)}, or leave it out.")
    try:
        device = torch.device(device) if device is not None else None
    except RuntimeError as error:
        raise UserError(f"{device!r} is no device ({first_line(error)}).") from None
    if isinstance(what, VisionTransformer):
        teacher = from_model(what)
    elif isinstance(what, nn.Module):
        teacher = from_module(what, preprocessing)
    elif str(what).startswith("timm:"):
        teacher = from_timm(str(what).removeprefix("timm:"), classes)
    else:
        teacher = from_path(bundled or Path(what).expanduser(), kind, device, bool(told))
    for given in told:
        teacher.preprocessing, teacher.order = prepared(given, teacher.preprocessing, teacher.order)
    if size is not None:
        teacher.size = check_size(teacher.network, as_size(size))
    if device is not None:
        place(teacher, device)
    if not teacher.classes:
        teacher.classes = count_classes(teacher)
    return name_classes(teacher, classes)


def from_path(path: Path, kind: str | None, device: torch.device | None, is_prepared: bool) -> Teacher:
    """The teacher in a file or folder; `is_prepared` if somebody says how its images are prepared."""
    if not path.exists():
        raise UserError(f"There is no file {path}.")
    if kind is None and path.suffix in (".onnx", ".pt2"):
        kind = "onnx" if path.suffix == ".onnx" else "exported"
    if kind in ("onnx", "exported"):
        if not is_prepared:
            raise UserError(f"{path} does not say how its images are prepared; give its preprocessing (image_size, mean, std).")
        network: Fixed = Onnx(path, device) if kind == "onnx" else Exported(path, device)
        return Teacher(network, Preprocessing(image_size=network.only_size or (224, 224)), 0, name=path.name)
    checkpoint = read(path)
    if "vitrail" in checkpoint.metadata:
        return from_model(load(path), str(path))
    found = open_convnet(checkpoint, path, kind)
    if found is not None:
        if kind is None and not is_prepared:
            check_units(found, path)
        small = found.preprocessing.image_size == (SMALL, SMALL)  # of images so small nothing is learnt about larger ones
        return Teacher(
            found.network, found.preprocessing, found.classes, found.names, found.order, path.name, SMALL if small else None
        )
    try:
        recognize(checkpoint)
    except UserError:
        raise UserError(
            f"{path} is neither a vision transformer that Vitrail knows nor a ResNet, RegNet or EfficientNet-Lite (its first "
            f"tensor is {next(iter(checkpoint.tensors))!r}); open it as timm:NAME@{path}, or give its network as a module."
        ) from None
    return from_model(load(path), str(path))


def from_model(model: VisionTransformer, path: str = "This model") -> Teacher:
    if not model.architecture.classes:
        raise UserError(f"{path} has no classifier: it cannot teach classes; take one that was trained to classify.")
    return Teacher(
        Transformer(model),
        model.preprocessing,
        model.architecture.classes,
        model.class_names,
        "rgb",
        model.name or Path(path).name,
    )


def from_module(module: nn.Module, preprocessing: Prepared | None) -> Teacher:
    if preprocessing is None:
        raise UserError("Say how a module's images are prepared: preprocessing=Preprocessing(image_size=…, mean=…, std=…).")
    return Teacher(around(module), Preprocessing(), 0, name=type(module).__name__)


def around(module: nn.Module) -> Network:
    if isinstance(module, Network):
        return module
    return Timm(module) if hasattr(module, "forward_features") and hasattr(module, "forward_head") else Plain(module)


def from_timm(name: str, classes: Sequence[str] | int | None) -> Teacher:
    """timm's model of that name: with the weights of a file, or the ones that timm itself finds."""
    name, _, weights = name.partition("@")
    try:
        timm = importlib.import_module("timm")
        data = importlib.import_module("timm.data")
    except (ImportError, RuntimeError) as error:
        raise UserError(f"timm:{name} needs timm, which cannot be imported here ({first_line(error)}).") from None
    # timm would give weights of its own another number of classes by forgetting the classifier.
    count = {} if classes is None or not weights else {"num_classes": classes if isinstance(classes, int) else len(classes)}
    tensors = read(Path(weights).expanduser()).tensors if weights else None
    try:
        module = timm.create_model(name, pretrained=tensors is None, **count)
        config = data.resolve_data_config({}, model=module)
    except Exception as error:  # of whatever timm, the hub or a network connection may raise
        raise UserError(f"timm could not make {name} ({first_line(error)}).") from None
    if tensors is not None:
        try:
            module.load_state_dict(tensors)
        except RuntimeError as error:
            detail = str(error).strip().splitlines()[-1].strip().rstrip(".")[:200]
            raise UserError(f"{weights} does not fit timm's {name} ({detail}); if its classes are others, name them.") from None
    height, width = config["input_size"][-2:]
    teacher = Teacher(around(module), read_preprocessing(config, (height, width)), 0, name=name)
    if getattr(module, "num_classes", None) == 0:
        raise UserError(f"timm's {name} has no classifier: it cannot teach classes; take one that was trained to classify.")
    return teacher


def prepared(given: Prepared, known: Preprocessing, own: str = "rgb") -> tuple[Preprocessing, str]:
    """What a caller says about the images, told as of red first and values 0 to 1; and the order of colors.

    What he does not say stays as it is known, the network's `own` order of colors too.
    """
    if isinstance(given, Preprocessing):
        return given, own
    if not isinstance(given, Mapping):
        raise UserError(f"preprocessing is a Preprocessing or a dictionary with image_size, mean, std …, not {given!r}.")
    names = (*Preprocessing._fields, *EXTRA)
    for key in given:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, 1, 0.0)
            raise UserError(f"preprocessing has no {key!r}; did you mean {near[0]}?")
    order, most = str(given.get("order", own)), given.get("range", 1)
    values = dict(known.to_dict()) | {key: value for key, value in given.items() if key not in EXTRA}
    try:
        values["image_size"] = as_size(values["image_size"])
        for key in ("mean", "std"):
            if key in given:
                row = [float(value) / float(most) for value in given[key]]
                values[key] = tuple(row[::-1] if order == "bgr" else row)
        result = Preprocessing.from_dict(values)
        if "mean" in given and "range" not in given and max(result.mean) > 1:
            raise UserError('preprocessing has a mean above 1: say the range of the values that it is meant for, "range": 255.')
        good = min(result.std) > 0 and order in ("rgb", "bgr") and len(result.std) == len(result.mean)
    except (TypeError, ValueError, ZeroDivisionError):
        good = False
    if not good:
        raise UserError(
            "preprocessing needs an image_size, as many numbers in mean as in std (above 0), an order of rgb or bgr, "
            "and the range of the values (1 or 255) that mean and std are meant for."
        )
    return result, order


def check_size(network: Network, size: Size) -> Size:
    if network.only_size is not None and size != network.only_size:
        height, width = network.only_size
        raise UserError(f"This teacher takes images of {height} x {width} alone; leave its size out.")
    return size


def place(teacher: Teacher, device: torch.device) -> None:
    if isinstance(teacher.network, Exported):
        return  # it was moved as it was opened: its graph names devices
    try:
        teacher.to(device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"The teacher does not go onto {device} ({first_line(error)}).") from None
    if device.type == "cuda":
        # torch's stubs do not know the memory format of a module.
        teacher.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def count_classes(teacher: Teacher) -> int:
    """How many logits come out: the only way to know it of a network that one cannot look into."""
    tensor = next(iter(teacher.network.parameters()), torch.empty(0))
    image = torch.zeros(2, len(teacher.preprocessing.mean), *teacher.preprocessing.image_size, device=tensor.device)
    try:
        answer = teacher(image)
    except UserError:
        raise
    except Exception as error:  # a stranger's module may raise anything
        raise UserError(
            f"{teacher.name} fails on images of {tuple(image.shape)} ({first_line(error)}); is its preprocessing right?"
        ) from None
    if answer.dim() != 2 or len(answer) != len(image):
        raise UserError(f"{teacher.name} gives {tuple(answer.shape)} for two images, not two rows of logits; wrap it.")
    return answer.shape[1]


def name_classes(teacher: Teacher, classes: Sequence[str] | int | None) -> Teacher:
    if classes is None:
        return teacher
    count = classes if isinstance(classes, int) else len(classes)
    if count != teacher.classes:
        raise UserError(f"{teacher.name} has {teacher.classes} classes, but {count} were named; give them all, in its order.")
    if not isinstance(classes, int):
        teacher.class_names = [str(name) for name in classes]
    return teacher
