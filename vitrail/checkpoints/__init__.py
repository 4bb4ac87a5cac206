"""Checkpoints of all supported formats, and Vitrail's single-file artifact."""

from vitrail.checkpoints.model_io import load, save

__all__ = ["load", "save"]
