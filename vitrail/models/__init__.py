"""The one trunk, and one page per paper: a table of parts and sizes."""

from vitrail.models.config import Architecture
from vitrail.models.registry import build, create, list_models
from vitrail.models.vision_transformer import Features, Outputs, Trace, VisionTransformer

__all__ = ["Architecture", "Features", "Outputs", "Trace", "VisionTransformer", "build", "create", "list_models"]
