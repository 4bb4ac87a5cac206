"""`VisionTransformer`, its `Architecture`, and one module per paper with its models."""

from vitrail.models.config import Architecture
from vitrail.models.registry import build, create, list_models
from vitrail.models.vision_transformer import Features, Outputs, Trace, VisionTransformer

__all__ = ["Architecture", "Features", "Outputs", "Trace", "VisionTransformer", "build", "create", "list_models"]
