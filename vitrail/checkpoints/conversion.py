"""Models from and to the checkpoint formats of other projects."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.atomic_files import atomic_write, atomic_write_text
from vitrail.checkpoints.artifact import upgrade_notes, write_safetensors
from vitrail.checkpoints.assembly import ToPair, assemble
from vitrail.checkpoints.codecs import Hints, Shapes, UnknownFormat, UnsupportedByFormat
from vitrail.checkpoints.formats import beit, convnets, deit, google, huggingface, timm
from vitrail.checkpoints.readers import Checkpoint
from vitrail.errors import UserError
from vitrail.models.config import Architecture
from vitrail.models.preprocessing import GOOGLE, Preprocessing
from vitrail.models.vision_transformer import VisionTransformer

TITLES = {"deit": "DeiT", "timm": "timm", "torchvision": "torchvision", "hf": "Hugging Face", "npz": "Google npz"}
TO_PAIR: dict[str, ToPair] = {
    "deit": deit.to_pair,
    "timm": timm.to_pair,
    "torchvision": convnets.to_torchvision_pair,
    "hf": huggingface.to_pair,
    "npz": google.to_pair,
    "beit": beit.to_pair,  # read only
}
IGNORED = {"pos_embed_resample"}  # without effect at the model's own image size
DESCRIPTION = "vitrail_description"  # the metadata entry of a Hugging Face file with what its configuration files cannot hold
NUMERICS = {"activation", "norm_eps", "stem_eps", "fusion"}  # fields that `approximate` may lose


def load_foreign(checkpoint: Checkpoint, path: str | Path, hints: Hints, overrides: dict[str, Any]) -> VisionTransformer:
    """A model from a checkpoint of another project; `hints` and `overrides` are fields of the architecture."""
    model = assemble_foreign(checkpoint, path, hints, overrides)
    if "preprocessing" in model.notes and convnets.variance_exceeds_preprocessing(model):
        raise UserError(
            f"{path} was trained on other values than the usual ones of a ResNet, perhaps 0 to 255: give its kind "
            f"(resnet_keras) or its preprocessing, as an option or in {Path(path).name}.teacher.json."
        )
    return model


def assemble_foreign(checkpoint: Checkpoint, path: str | Path, hints: Hints, overrides: dict[str, Any]) -> VisionTransformer:
    """As `load_foreign`, whatever values the weights were trained on."""
    title = "convnet" if convnets.recognize(checkpoint.tensors) else "vision transformer"
    try:
        kind, tensors = recognize(checkpoint, path)
        architecture = infer(kind, shapes_of(tensors), hints, checkpoint.config).replace(**overrides)
    except KeyError as error:
        raise UserError(f"{path}: the tensor {error.args[0]!r} of a {title} is missing.") from None
    except (ValueError, TypeError, IndexError, ZeroDivisionError, RuntimeError):  # the last of torch, for shapes
        raise UserError(f"{path} has the names of a {title}, but its shapes (or its config.json) do not match one.") from None
    model = assemble(architecture, tensors, path, convnets.to_pair if architecture.convnet else TO_PAIR[kind])
    model.notes["format"] = kind
    try:
        read_description(model, kind, checkpoint)
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise UserError(f"The configuration files next to {path} are damaged ({error!r}).") from None
    return model


def recognize(checkpoint: Checkpoint, path: str | Path = "the checkpoint") -> tuple[str, dict[str, Tensor]]:
    """The format, and the tensors under the canonical names of that format."""
    tensors = checkpoint.tensors
    keys = list(tensors)
    if convnet := convnets.recognize(keys):
        return convnet, convnets.normalize(tensors)
    if google.recognizes(keys):
        return "npz", google.normalize(tensors)
    if beit.recognizes(keys):
        return "beit", beit.normalize(tensors)
    if huggingface.recognizes(keys):
        names = huggingface.plain_names(keys)
        return "hf", {names[key]: tensor for key, tensor in tensors.items()}
    shapes = shapes_of(tensors)
    if timm.recognizes(shapes):
        return "timm", tensors
    if any(key.startswith("patch_embed.") for key in keys):
        return "deit", tensors
    raise UnknownFormat(
        f"{path} is not a checkpoint of a supported vision transformer: none of its {len(keys)} tensor names is known (the first "
        f"is {keys[0]!r})."
    )


def infer(kind: str, shapes: Shapes, hints: Hints | None = None, config: dict[str, Any] | None = None) -> Architecture:
    if convnets.recognize(shapes):
        return convnets.infer(shapes, hints or {}, config)
    if kind == "hf":
        return huggingface.infer(shapes, hints, config)
    if kind == "beit":
        return beit.infer(shapes, hints, config)
    infer_others = {"npz": google.infer, "timm": timm.infer, "deit": deit.infer}
    return infer_others[kind](shapes, hints)


def shapes_of(tensors: dict[str, Tensor]) -> Shapes:
    return {key: tuple(tensor.shape) for key, tensor in tensors.items()}


def read_description(model: VisionTransformer, kind: str, checkpoint: Checkpoint) -> None:
    """Set preprocessing and class names from the configuration files of a folder; the defaults of the paper without them."""
    config = checkpoint.config or {}
    if model.architecture.convnet:
        model.preprocessing = convnets.default_preprocessing(model.architecture)
    if kind == "npz":
        model.preprocessing = GOOGLE._replace(image_size=model.architecture.image_size)  # also of a model without a name
    if kind == "beit":
        model.preprocessing = beit.PREPROCESSING._replace(image_size=model.architecture.image_size)
    if isinstance(config.get("pretrained_cfg"), dict):
        model.preprocessing = timm.read_preprocessing(config["pretrained_cfg"], model.architecture.image_size)
    elif not (kind in ("hf", "beit") and checkpoint.preprocessor):
        model.notes["preprocessing"] = "assumed: the file does not contain its preprocessing"
    if kind in ("hf", "beit") and checkpoint.preprocessor:
        model.preprocessing = huggingface.read_preprocessing(checkpoint.preprocessor, model.architecture.image_size)
        if checkpoint.preprocessor.get("crop_pct"):  # of ConvNextImageProcessor, which convnets have
            crop = float(checkpoint.preprocessor["crop_pct"])
            model.preprocessing = model.preprocessing._replace(resize="shorter", crop_ratio=crop)
    if kind in ("hf", "beit") and checkpoint.config:
        model.class_names = huggingface.class_names(checkpoint.config, model.architecture.classes)
    elif isinstance(names := config.get("label_names"), list) and len(names) == model.architecture.classes:  # of timm
        model.class_names = list(map(str, names))
    if DESCRIPTION in checkpoint.metadata:
        restore_description(model, json.loads(checkpoint.metadata[DESCRIPTION]), checkpoint.preprocessor)


def restore_description(model: VisionTransformer, description: dict[str, Any], preprocessor: dict[str, Any] | None) -> None:
    """Set name, notes and exact preprocessing of a model that Vitrail wrote, unless preprocessor_config.json was changed."""
    model.name = str(description["name"])
    model.notes |= upgrade_notes({str(name): str(text) for name, text in description["notes"].items()})
    exact = Preprocessing.from_dict(description["preprocessing"])
    exact.check()
    if preprocessor == json.loads(json.dumps(huggingface.write_preprocessing(exact))):
        model.preprocessing = exact


def save_foreign(model: VisionTransformer, path: Path, format: str, approximate: bool) -> None:
    tensors = export_tensors(model, format, approximate)
    if format == "hf":
        write_huggingface_folder(model, tensors, path)
    elif format == "npz":
        atomic_write(path, lambda temporary: write_npz(tensors, temporary))
    elif format in ("timm", "torchvision") and path.suffix == ".safetensors":
        atomic_write(path, lambda temporary: write_safetensors(tensors, temporary, {"format": "pt"}))
    else:
        content = {"model": tensors} if format == "deit" else tensors
        atomic_write(path, lambda temporary: torch.save(content, temporary))


def export_tensors(model: VisionTransformer, format: str, approximate: bool = False) -> dict[str, Tensor]:
    """A model's tensors under the names of another format, after a check that they are read as the same model."""
    a = model.architecture
    title = TITLES[format]
    tensors: dict[str, Tensor] = {}
    try:
        for key, tensor in model.state_dict().items():
            pair = TO_PAIR[format](key, a)
            tensors |= dict(zip(pair.theirs, pair.codec.write(tensor.detach().cpu()), strict=True))
        config = huggingface.write_config(a, model.class_names) if format == "hf" else None
        inferred = infer_without_hints(format, shapes_of(tensors), config, a.image_size)
    except UnsupportedByFormat as error:
        raise UnsupportedByFormat(f"This model cannot be written in the {title} format: {error}.") from None
    except (KeyError, UserError) as error:
        raise UnsupportedByFormat(
            f"This model cannot be written in the {title} format: it could not be read back ({error})."
        ) from None
    # The size is not part of a file without position tables, and of a rounded size only the covered part is read back.
    if model.stem.grid(*inferred.image_size) == model.grid or a.pos_embed == "none":
        inferred = inferred.replace(image_size=a.image_size)
    lost = [name for name in a.differences(inferred) if name not in IGNORED]
    if lost and not (approximate and set(lost) <= NUMERICS):
        parts = ", ".join(f"{name}={getattr(a, name)} (it would be read as {getattr(inferred, name)})" for name in lost)
        hint = "; approximate=True (--approximate) writes it anyway" if set(lost) <= NUMERICS else ""
        raise UnsupportedByFormat(f"The {title} format cannot represent {parts}{hint}.")
    prefix = {"hf": "deit." if a.distillation else "vit."}.get(format, "")
    if prefix and a.classes:
        tensors = {key if "classifier" in key else prefix + key: tensor for key, tensor in tensors.items()}
    return {key: tensor.contiguous().clone() for key, tensor in tensors.items()}


def infer_without_hints(format: str, shapes: Shapes, config: dict[str, Any] | None, size: tuple[int, int]) -> Architecture:
    """The inferred architecture; `size` is a hint only if the file does not determine the image size."""
    try:
        return infer(format, shapes, {}, config)
    except UserError as error:
        if "image_size" not in str(error):
            raise
    return infer(format, shapes, {"image_size": size}, config)


def write_npz(tensors: dict[str, Tensor], path: Path) -> None:
    with path.open("wb") as file:
        arrays: dict[str, Any] = {
            key: (tensor.float() if tensor.is_floating_point() else tensor).numpy() for key, tensor in tensors.items()
        }
        np.savez(file, **arrays)


def write_huggingface_folder(model: VisionTransformer, tensors: dict[str, Tensor], path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file: the Hugging Face format is a folder.")
    description = {"name": model.name, "notes": model.notes, "preprocessing": model.preprocessing.to_dict()}
    metadata = {"format": "pt", DESCRIPTION: json.dumps(description)}
    atomic_write(path / "model.safetensors", lambda temporary: write_safetensors(tensors, temporary, metadata))
    files = {
        "config.json": huggingface.write_config(model.architecture, model.class_names),
        "preprocessor_config.json": huggingface.write_preprocessing(model.preprocessing),
    }
    for name, content in files.items():
        atomic_write_text(path / name, json.dumps(content, indent=2) + "\n")
