"""Checkpoints of all supported formats, and Vitrail's single-file artifact."""

from vitrail.checkpoints.model_io import FORMATS, load, save

__all__ = ["FORMATS", "load", "save"]
