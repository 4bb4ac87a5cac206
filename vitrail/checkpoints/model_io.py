"""`load` and `save`: from any checkpoint to a model and back, strict about every tensor."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from vitrail.aliases import upgrade_name, upgrade_tensor
from vitrail.atomic_files import write_aside
from vitrail.checkpoints.codecs import SAME, CannotHold, Known, Pair, Shapes
from vitrail.checkpoints.formats import deit, google, huggingface, timm
from vitrail.checkpoints.readers import Checkpoint, read
from vitrail.errors import UserError
from vitrail.models.config import TRAINING_ONLY, Architecture, as_size, check_fields
from vitrail.models.preprocessing import Preprocessing
from vitrail.models.registry import build
from vitrail.models.vision_transformer import VisionTransformer
from vitrail.version import __version__

FORMATS = ("vitrail", "deit", "timm", "hf", "npz")
TITLES = {"deit": "DeiT", "timm": "timm", "hf": "Hugging Face", "npz": "Google npz", "vitrail": "Vitrail"}
TO_PAIR: dict[str, Callable[[str, Architecture], Pair]] = {
    "deit": deit.to_pair,
    "timm": timm.to_pair,
    "hf": huggingface.to_pair,
    "npz": google.to_pair,
}
# What a model does at its own size does not depend on how it would be resized.
NO_MATTER = {"pos_embed_resample"}
NUMERICS = {"activation", "norm_eps", "stem_eps", "fusion"}  # what `approximate` may lose
SUFFIXES = {
    "vitrail": (".safetensors",),
    "npz": (".npz",),
    "deit": (".pth", ".pt", ".bin", ".tar"),
    "timm": (".safetensors", ".pth", ".pt", ".bin"),
}
LAYOUT = 1  # version of the metadata's layout
DELTA = "vitrail_delta"  # the metadata entry of a file that holds only what differs from other weights


def load(
    path: str | Path,
    image_size: int | tuple[int, int] | None = None,
    ema: bool = False,
    device: torch.device | str | None = None,
    delta: str | Path | None = None,
    **overrides: Any,
) -> VisionTransformer:
    """A model from a checkpoint of any known kind, told apart by its content; in evaluation mode, float32.

    `image_size` says the size of a foreign file whose position table is not square; Vitrail's own files are resized to it.
    `overrides` replace what was inferred (`heads=12`); `ema=True` takes the averaged weights of a training file. `delta` is a
    file of what a training has changed in these weights; the path "base+delta" says the same.
    """
    from vitrail.checkpoints.training_checkpoints import is_state, read_state  # which writes the header of an artifact

    check_fields(overrides)
    size = as_size(image_size) if image_size is not None else None
    known = overrides | ({"image_size": size} if size else {})
    base, delta = split_path(path) if delta is None else (path, delta)
    if delta is not None:
        from vitrail.checkpoints.delta import load_changed  # which loads its base by this very function

        model = load_changed(base, delta, ema, overrides)
        if size and size != model.architecture.image_size:
            model.resize(*size)
        return model.to(device) if device is not None else model
    checkpoint = read_state(path, ema) if is_state(path) else read(path, ema)
    if DELTA in checkpoint.metadata:
        raise UserError(f"{path} holds only what a training has changed: give the weights it was made for too, as BASE+{path}.")
    if "vitrail" in checkpoint.metadata:
        model = load_artifact(checkpoint, path, overrides)
        if size and size != model.architecture.image_size:
            model.resize(*size)
    else:
        try:
            kind, tensors = recognize(checkpoint, path)
            architecture = infer(kind, shapes_of(tensors), known, checkpoint.config).replace(**overrides)
        except KeyError as error:
            raise UserError(f"{path} looks like a vision transformer but lacks the tensor {error.args[0]!r}.") from None
        except (ValueError, TypeError, IndexError, ZeroDivisionError):
            raise UserError(
                f"{path} looks like a vision transformer, but its tensors (or its config.json) do not fit one."
            ) from None
        model = assemble(architecture, tensors, TO_PAIR[kind], path)
        model.notes["format"] = kind
        try:
            describe(model, kind, checkpoint)
        except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
            raise UserError(f"The configuration beside {path} is damaged ({error!r}).") from None
    model = model.eval()
    return model.to(device) if device is not None else model


def split_path(path: str | Path) -> tuple[str | Path, str | Path | None]:
    """ "base.pth+delta.safetensors" to its parts; a file with a plus in its name is that file."""
    text = str(path)
    if os.path.exists(text):
        return path, None
    for place in (place for place in range(len(text) - 1, 0, -1) if text[place] == "+"):
        if os.path.isfile(text[place + 1 :]):
            return text[:place], text[place + 1 :]
    base, _, delta = text.partition("+")
    if delta and os.path.exists(base):
        raise UserError(f"There is no file {delta}.")
    return path, None


def recognize(checkpoint: Checkpoint, path: str | Path = "the checkpoint") -> tuple[str, dict[str, Tensor]]:
    """The format, and the tensors under that format's plain names."""
    tensors = checkpoint.tensors
    keys = list(tensors)
    if google.recognizes(keys):
        return "npz", google.normalize(tensors)
    if huggingface.recognizes(keys):
        names = huggingface.plain_names(keys)
        return "hf", {names[key]: tensor for key, tensor in tensors.items()}
    shapes = shapes_of(tensors)
    if "blocks.0.attn.relative_position_bias_table" in shapes or "rel_pos_bias.relative_position_bias_table" in shapes:
        raise UserError("This is a BEiT checkpoint, whose attention is not one of the mixers here.")
    if timm.recognizes(shapes):
        return "timm", tensors
    if any(key.startswith("patch_embed.") for key in keys):
        return "deit", tensors
    first = f"(the first is {keys[0]!r})"
    raise UserError(f"None of the {len(keys)} tensors of {path} {first} is that of a known vision transformer.")


def infer(kind: str, shapes: Shapes, known: Known | None = None, config: dict[str, Any] | None = None) -> Architecture:
    match kind:
        case "npz":
            return google.infer(shapes, known)
        case "hf":
            return huggingface.infer(shapes, known, config)
        case "timm":
            return timm.infer(shapes, known)
    return deit.infer(shapes, known)


def shapes_of(tensors: dict[str, Tensor]) -> Shapes:
    return {key: tuple(tensor.shape) for key, tensor in tensors.items()}


def assemble(architecture: Architecture, tensors: dict[str, Tensor], to_pair: Callable, path: str | Path) -> VisionTransformer:
    """Build on the meta device and put every tensor in its place; one too few or too many is an error."""
    model = build(architecture, device="meta")
    state, used = {}, set()
    for key, expected in model.state_dict().items():
        pair = to_pair(key, architecture)
        missing = [name for name in pair.theirs if name not in tensors]
        if missing:
            raise UserError(f"{path} lacks the tensor {missing[0]!r} of a {model.name or 'vision transformer'}.")
        try:
            tensor = pair.codec.read([tensors[name] for name in pair.theirs])
        except (RuntimeError, IndexError):
            tensor = None
        whole = sum(tensors[name].numel() for name in pair.theirs) == expected.numel()
        if tensor is None or tensor.shape != expected.shape or not whole:
            shape = tuple(tensors[pair.theirs[0]].shape)
            raise UserError(f"{path}: the tensor {pair.theirs[0]!r} has the shape {shape}, which does not fit the rest.")
        used.update(pair.theirs)
        if expected.is_floating_point() and not tensor.is_floating_point():
            raise UserError(f"{path}: the tensor {pair.theirs[0]!r} has the type {tensor.dtype}, not one for weights.")
        tensor = tensor.to(expected.dtype)
        state[key] = tensor.contiguous().clone() if tensor._is_view() or len(pair.theirs) == 1 else tensor
    surplus = sorted(set(tensors) - used)
    if surplus:
        raise UserError(
            f"{path} has {len(surplus)} tensors with no place in a {model.name or 'known model'}, such as {surplus[0]!r}."
        )
    model.load_state_dict(state, assign=True)
    for parameter, made in zip(model.parameters(), build_flags(model), strict=True):
        parameter.requires_grad_(made)
    return model


def build_flags(model: VisionTransformer) -> list[bool]:
    """Which parameters the architecture wants trained; assigning a state keeps the file's flags instead."""
    frozen = model.architecture.layerscale_frozen
    return [not (frozen and ".scale" in name) for name, _ in model.named_parameters()]


def describe(model: VisionTransformer, kind: str, checkpoint: Checkpoint) -> None:
    """Preprocessing and class names from a folder's configuration files; without them the paper's own are assumed."""
    config = checkpoint.config or {}
    if isinstance(config.get("pretrained_cfg"), dict):
        model.preprocessing = timm.read_preprocessing(config["pretrained_cfg"], model.architecture.image_size)
    elif not (kind == "hf" and checkpoint.preprocessor):
        model.notes["preprocessing"] = "assumed: the file does not say how its images were prepared"
    if kind == "hf" and checkpoint.preprocessor:
        model.preprocessing = huggingface.read_preprocessing(checkpoint.preprocessor, model.architecture.image_size)
    if kind == "hf" and checkpoint.config:
        model.class_names = huggingface.class_names(checkpoint.config, model.architecture.classes)


class Header(NamedTuple):
    """What an artifact says about its tensors."""

    name: str | None
    architecture: Architecture
    preprocessing: Preprocessing
    class_names: list[str] | None
    notes: dict[str, str]

    def put_on(self, model: VisionTransformer) -> VisionTransformer:
        model.name = model.name if self.name is None else self.name
        model.preprocessing, model.class_names, model.notes = self.preprocessing, self.class_names, self.notes
        return model


def read_header(text: str, path: str | Path, overrides: dict[str, Any]) -> Header:
    fixed = sorted(set(overrides) - TRAINING_ONLY)
    if fixed:
        raise UserError(f"{path} says itself what it is; {fixed[0]} cannot be replaced when loading it.")
    try:
        header = json.loads(text)
        if header["layout"] > LAYOUT:
            raise UserError(f"{path} was written by a newer Vitrail ({header['version']}); update to read it.")
        architecture = Architecture.from_dict(header["architecture"]).replace(**overrides)
        preprocessing = Preprocessing.from_dict(header["preprocessing"])
        names, notes = header.get("class_names"), {str(key): str(value) for key, value in (header.get("notes") or {}).items()}
        if names is not None and (len(names) != architecture.classes or not all(isinstance(name, str) for name in names)):
            raise ValueError("class names")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} has a damaged Vitrail header ({error!r}).") from None
    name = upgrade_name(str(header["name"])) if "name" in header else None
    return Header(name, architecture, preprocessing, names, notes)


def load_artifact(checkpoint: Checkpoint, path: str | Path, overrides: dict[str, Any]) -> VisionTransformer:
    header = read_header(checkpoint.metadata["vitrail"], path, overrides)
    tensors = {upgrade_tensor(key): tensor for key, tensor in checkpoint.tensors.items()}
    return header.put_on(assemble(header.architecture, tensors, lambda key, _: Pair(key, (key,), SAME), path))


def save(model: VisionTransformer, path: str | Path, format: str = "vitrail", approximate: bool = False) -> Path:
    """Write a model in one of the formats, to the side first and then renamed.

    A format that cannot hold the model exactly is refused with the part that it cannot hold; `approximate=True` writes
    anyway when only numerics differ (the form of GELU, an epsilon, the fusion of two heads).
    """
    path = Path(path)
    if format not in FORMATS:
        raise UserError(f"The format {format!r} is not known; choose from {', '.join(FORMATS)}.")
    suffixes = SUFFIXES.get(format, ())
    if suffixes and path.suffix not in suffixes:
        raise UserError(f"A file in the {TITLES[format]} format ends in {' or '.join(suffixes)}, not {path.name!r}.")
    if not isinstance(getattr(model, "_orig_mod", model), VisionTransformer):
        raise UserError("save takes a model of vitrail.create or vitrail.load; of an optimized one, save what it was made from.")
    model = check_whole(getattr(model, "_orig_mod", model))  # a compiled model hides the one it was made from
    if format == "vitrail":
        write_aside(path, lambda side: write_safetensors(model.state_dict(), side, artifact_header(model)))
        return path
    tensors = export(model, format, approximate)
    if format == "hf":
        write_folder(model, tensors, path)
    elif format == "npz":
        write_aside(path, lambda side: write_npz(tensors, side))
    elif format == "timm" and path.suffix == ".safetensors":
        write_aside(path, lambda side: write_safetensors(tensors, side, {"format": "pt"}))
    else:
        content = {"model": tensors} if format == "deit" else tensors
        write_aside(path, lambda side: torch.save(content, side))
    return path


def check_whole(model: VisionTransformer) -> VisionTransformer:
    """The model's tensors are those of its architecture; a head replaced by hand would give a file that nobody can read."""
    expected = {key: tensor.shape for key, tensor in build(model.architecture, name="-", device="meta").state_dict().items()}
    found = {key: tensor.shape for key, tensor in model.state_dict().items()}
    wrong = sorted(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))
    if wrong:
        raise UserError(
            f"The model's {wrong[0]} is not that of its architecture; create it with the right parts and load into that."
        )
    names = model.class_names
    if names is not None and len(names) != model.architecture.classes:
        raise UserError(f"The model has {len(names)} class names for {model.architecture.classes} classes.")
    return model


def export(model: VisionTransformer, format: str, approximate: bool = False) -> dict[str, Tensor]:
    """A model's tensors under another format's names, after a check that reading them gives the same model."""
    a = model.architecture
    title = TITLES[format]
    tensors: dict[str, Tensor] = {}
    try:
        for key, tensor in model.state_dict().items():
            pair = TO_PAIR[format](key, a)
            tensors |= dict(zip(pair.theirs, pair.codec.write(tensor.detach().cpu()), strict=True))
        config = huggingface.write_config(a, model.class_names) if format == "hf" else None
        back = read_back(format, shapes_of(tensors), config, a.image_size)
    except CannotHold as error:
        raise CannotHold(f"The {title} format cannot hold this model: {error}.") from None
    except (KeyError, UserError) as error:
        raise CannotHold(
            f"The {title} format cannot hold this model: what it would read back is not a model ({error})."
        ) from None
    # The size is not part of a file without position tables, and a floored size is read back as the covered part.
    back = (
        back.replace(image_size=a.image_size)
        if model.stem.grid(*back.image_size) == model.grid or a.pos_embed == "none"
        else back
    )
    lost = [name for name in a.differences(back) if name not in NO_MATTER]
    if lost and not (approximate and set(lost) <= NUMERICS):
        parts = ", ".join(f"{name}={getattr(a, name)} (it would be read as {getattr(back, name)})" for name in lost)
        hint = "; approximate=True (--approximate) writes it anyway" if set(lost) <= NUMERICS else ""
        raise CannotHold(f"The {title} format cannot hold {parts}{hint}.")
    prefix = {"hf": "deit." if a.distillation else "vit."}.get(format, "")
    if prefix and a.classes:
        tensors = {key if "classifier" in key else prefix + key: tensor for key, tensor in tensors.items()}
    return {key: tensor.contiguous().clone() for key, tensor in tensors.items()}


def read_back(format: str, shapes: Shapes, config: dict[str, Any] | None, size: tuple[int, int]) -> Architecture:
    """What a reader without hints infers; only where the file leaves the size open does the reader have to say it."""
    try:
        return infer(format, shapes, {}, config)
    except UserError as error:
        if "image_size" not in str(error):
            raise
    return infer(format, shapes, {"image_size": size}, config)


def save_tensors(path: Path, model: VisionTransformer, tensors: dict[str, Tensor], notes: dict[str, str]) -> None:
    """An artifact of other weights than the model holds at this moment, such as the best or the averaged ones."""
    header = artifact_header(model, notes)
    write_aside(path, lambda side: write_safetensors(tensors, side, header))


def artifact_header(model: VisionTransformer, notes: dict[str, str] | None = None) -> dict[str, str]:
    header = {
        "layout": LAYOUT,
        "version": __version__,
        "name": model.name,
        "architecture": model.architecture.to_dict(),
        "preprocessing": model.preprocessing.to_dict(),
        "class_names": model.class_names,
        "notes": model.notes | (notes or {}),
    }
    return {"vitrail": json.dumps(header)}


def write_safetensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    ready = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    safetensors.torch.save_file(ready, path, metadata=metadata)


def write_npz(tensors: dict[str, Tensor], path: Path) -> None:
    with path.open("wb") as file:
        arrays: dict[str, Any] = {
            key: (tensor.float() if tensor.is_floating_point() else tensor).numpy() for key, tensor in tensors.items()
        }
        np.savez(file, **arrays)


def write_folder(model: VisionTransformer, tensors: dict[str, Tensor], path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} exists and is a file; the Hugging Face format is a folder.")
    a = model.architecture
    files = {
        "config.json": huggingface.write_config(a, model.class_names),
        "preprocessor_config.json": huggingface.write_preprocessing(model.preprocessing),
    }
    write_aside(path / "model.safetensors", lambda side: write_safetensors(tensors, side, {"format": "pt"}))
    for name, content in files.items():
        text = json.dumps(content, indent=2) + "\n"
        write_aside(path / name, lambda side, text=text: side.write_text(text))  # type: ignore[misc]
