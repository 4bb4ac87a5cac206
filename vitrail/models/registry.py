"""Models by name: names of the pages, names of other projects, name patterns."""

import difflib
import fnmatch
import re
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from vitrail.aliases import upgrade_name
from vitrail.devices import check_device
from vitrail.errors import UserError
from vitrail.models import cait, defaults, deit, deit3, lvvit, patchconvnet, regnet, resmlp, resnet, three_things, vit
from vitrail.models.config import Architecture
from vitrail.models.preprocessing import Preprocessing
from vitrail.models.vision_transformer import VisionTransformer

PAGES: tuple[ModuleType, ...] = (vit, deit, cait, resmlp, patchconvnet, deit3, three_things, lvvit, resnet, regnet, defaults)
SIZE = re.compile(r"_(\d{3,4})$")
DATA = re.compile(r"\.[\w.]+$|_in2[12]k$|_in2[12]ft1k$")  # timm's tags of the training data
FILES = (".pth", ".pt", ".tar", ".bin", ".ckpt", ".npz", ".safetensors")
NUMERICS = ("activation", "norm_eps", "pos_embed_resample", "stem_eps")


@cache
def model_pages() -> dict[str, ModuleType]:
    """The page of each model."""
    return {name: page for page in PAGES for name in page.MODELS}


def list_models(pattern: str = "*") -> list[str]:
    """Names that match a shell pattern, or contain a text without wildcards; in the order of the papers."""
    names = list(model_pages())
    if not any(character in pattern for character in "*?["):
        pattern = f"*{pattern}*"
    return [name for name in names if fnmatch.fnmatch(name, pattern.lower())]


def lookup(name: str) -> tuple[str, Architecture]:
    """The registered name and the architecture for a name in any accepted spelling."""
    if not isinstance(name, str):
        raise UserError(f"A model is given by its name, such as 'deit_small_patch16', not by {name!r}.")
    aliases = {alias: target for page in PAGES for alias, target in page.ALIASES.items()}
    lower = {alias.lower(): target for alias, target in reversed(aliases.items())}  # the first of two that differ in case wins
    if Path(name).suffix.lower() in FILES:
        if Path(name).exists():
            raise UserError(f"{name} is a weight file, not the name of a model: use vitrail.load, or train from it with --from.")
        raise UserError(f"There is no file {name}.")
    text, size = DATA.sub("", upgrade_name(name)), None
    for _ in range(3):
        plain = text.lower()
        if text not in aliases:
            architecture = model_pages()[plain].MODELS[plain] if plain in model_pages() else three_things.parse(plain)
            if architecture is not None:
                return plain, architecture.replace(image_size=size) if size else architecture
        text = aliases.get(text, lower.get(plain, text))
        suffix = SIZE.search(text)
        if suffix and text.lower() not in model_pages():
            size, text = size or int(suffix[1]), text[: suffix.start()]
    raise unknown_model(name, list(model_pages()) + list(aliases))


def unknown_model(name: str, names: list[str]) -> UserError:
    by_lower = {candidate.lower(): candidate for candidate in reversed(names)}
    near = difflib.get_close_matches(name.lower(), by_lower, n=4, cutoff=0.4)
    hint = ", ".join(by_lower[candidate] for candidate in near)
    nearest = f"; the nearest are {hint}" if hint else ""
    return UserError(f"There is no model {name!r}{nearest} (`vitrail models` lists all).")


def create(
    name: str,
    classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    device: torch.device | str | None = None,
    **overrides: Any,
) -> VisionTransformer:
    """A model by name, with newly initialized weights.

    >>> model = vitrail.create("deit3_small_patch16", classes=10, image_size=(192, 256), drop_path=0.1)

    `overrides` replace fields of its `Architecture`. The weights are initialized on `device`, by default that of a surrounding
    `with torch.device(...)`, else the CPU; on "meta" no memory is allocated.
    """
    if classes is not None:
        overrides["classes"] = classes
    if image_size is not None:
        overrides["image_size"] = image_size
    plain, known = lookup(name)
    architecture = known.replace(**overrides)
    changed = [
        field for field in known.differences(architecture) if field in overrides and field not in ("classes", "image_size")
    ]
    model = build(architecture, plain, device)
    if changed:
        parts = ("another convnet" if field == "convnet" else f"{field}={getattr(architecture, field)}" for field in changed)
        model.name += " with " + ", ".join(parts)
    return model


def build(architecture: Architecture, name: str = "", device: torch.device | str | None = None) -> VisionTransformer:
    """A model from an architecture, with newly initialized weights, on `device` or in the context of `with torch.device(...)`."""
    with nullcontext() if device is None else check_device(device):
        model = VisionTransformer(architecture)
    model.name = name or name_of(architecture)
    model.preprocessing = preprocessing_of(model.name)._replace(image_size=architecture.image_size)
    return model


def preprocessing_of(name: str) -> Preprocessing:
    if name in ("lvvit_m", "lvvit_l"):
        return lvvit.LARGE_PREPROCESSING
    if name in ("resnet18_cifar", "resnet50_cifar"):
        return resnet.SMALL_PREPROCESSING
    page = model_pages().get(name, three_things if three_things.PATTERN.fullmatch(name) else None)
    return page.PREPROCESSING if page else Preprocessing()


def name_of(architecture: Architecture) -> str:
    """The registered name of an architecture, or "". Classes, image size and training-only fields are ignored.

    A model that differs from a registered one in numerics only (form of GELU, epsilon) has the same name.
    """
    near = ""
    for name, page in model_pages().items():
        known = page.MODELS[name]
        if any(getattr(known, field) != getattr(architecture, field) for field in ("width", "depth", "patch_size")):
            continue  # checked first: `replace` would raise for images smaller than a patch
        known = known.replace(classes=architecture.classes or known.classes, image_size=architecture.image_size)
        differences = set(known.differences(architecture)) - {"classes", "pre_logits", "pre_logits_kind"}
        if not differences:
            return name
        if differences <= set(NUMERICS) and not near:
            near = name
    return near or three_things.name_for(architecture)
