"""Vitrail: train, distill, adapt, evaluate, interpret and deploy vision transformers."""

import importlib
from typing import TYPE_CHECKING, Any

from vitrail.errors import UserError
from vitrail.version import __version__

if TYPE_CHECKING:
    from vitrail.checkpoints import load, save
    from vitrail.checkpoints.hub_upload import push
    from vitrail.deploy.export import export
    from vitrail.deploy.optimize import optimize
    from vitrail.deploy.saved_optimized import load_optimized
    from vitrail.evaluation.detected_images import detect
    from vitrail.evaluation.image_search import index_images, search_images
    from vitrail.evaluation.predict import predict
    from vitrail.evaluation.segmented_images import segment
    from vitrail.interpret.explanation import explain
    from vitrail.models import Architecture, VisionTransformer, build, create, list_models
    from vitrail.recipes import Recipe
    from vitrail.runs.train import resume, train

__all__ = [
    "Architecture",
    "Recipe",
    "UserError",
    "VisionTransformer",
    "__version__",
    "build",
    "create",
    "detect",
    "explain",
    "export",
    "index_images",
    "list_models",
    "load",
    "load_optimized",
    "optimize",
    "predict",
    "push",
    "resume",
    "save",
    "search_images",
    "segment",
    "train",
]

# Loaded at first use, so that `vitrail --help` does not import torch.
HOMES = dict.fromkeys(("Architecture", "VisionTransformer", "build", "create", "list_models"), "vitrail.models")
HOMES |= dict.fromkeys(("load", "save"), "vitrail.checkpoints")
HOMES |= dict.fromkeys(("resume", "train"), "vitrail.runs.train")
HOMES["push"] = "vitrail.checkpoints.hub_upload"
HOMES["export"] = "vitrail.deploy.export"
HOMES["load_optimized"] = "vitrail.deploy.saved_optimized"
HOMES["optimize"] = "vitrail.deploy.optimize"
HOMES["explain"] = "vitrail.interpret.explanation"
HOMES["detect"] = "vitrail.evaluation.detected_images"
HOMES["predict"] = "vitrail.evaluation.predict"
HOMES |= dict.fromkeys(("index_images", "search_images"), "vitrail.evaluation.image_search")
HOMES["segment"] = "vitrail.evaluation.segmented_images"
HOMES["Recipe"] = "vitrail.recipes"


def __getattr__(name: str) -> Any:
    if name in HOMES:
        return getattr(importlib.import_module(HOMES[name]), name)
    raise AttributeError(f"module 'vitrail' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
