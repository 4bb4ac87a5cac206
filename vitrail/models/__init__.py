"""The one trunk, and one page per paper: a table of parts and sizes."""

from vitrail.models.architecture import Architecture
from vitrail.models.catalogue import build, create, list_models
from vitrail.models.model import Features, Model, Outputs, Trace

__all__ = ["Architecture", "Features", "Model", "Outputs", "Trace", "build", "create", "list_models"]
