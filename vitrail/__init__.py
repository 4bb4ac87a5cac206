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
    from vitrail.training.trainer import Options

__all__ = [
    "Architecture",
    "Options",
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
MODULES = dict.fromkeys(("Architecture", "VisionTransformer", "build", "create", "list_models"), "vitrail.models")
MODULES |= dict.fromkeys(("load", "save"), "vitrail.checkpoints")
MODULES |= dict.fromkeys(("resume", "train"), "vitrail.runs.train")
MODULES["push"] = "vitrail.checkpoints.hub_upload"
MODULES["export"] = "vitrail.deploy.export"
MODULES["load_optimized"] = "vitrail.deploy.saved_optimized"
MODULES["optimize"] = "vitrail.deploy.optimize"
MODULES["explain"] = "vitrail.interpret.explanation"
MODULES["detect"] = "vitrail.evaluation.detected_images"
MODULES["predict"] = "vitrail.evaluation.predict"
MODULES |= dict.fromkeys(("index_images", "search_images"), "vitrail.evaluation.image_search")
MODULES["segment"] = "vitrail.evaluation.segmented_images"
MODULES["Recipe"] = "vitrail.recipes"
MODULES["Options"] = "vitrail.training.trainer"


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return getattr(importlib.import_module(MODULES[name]), name)
    raise AttributeError(f"module 'vitrail' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
