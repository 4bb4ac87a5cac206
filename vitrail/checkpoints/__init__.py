"""The Rosetta stone: every checkpoint format in and out, and the project's own single-file artifact."""

from vitrail.checkpoints.model_io import FORMATS, load, save

__all__ = ["FORMATS", "load", "save"]
