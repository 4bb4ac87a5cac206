"""Vitrail: train, distil, adapt, measure, look into and ship vision transformers and their kin."""

from vitrail.errors import UserError
from vitrail.models import Architecture, Model, build, create, list_models
from vitrail.version import __version__
from vitrail.weights import load, save

__all__ = ["Architecture", "Model", "UserError", "__version__", "build", "create", "list_models", "load", "save"]
