"""The Rosetta stone: every checkpoint format in and out, and the project's own single-file artefact."""

from vitrail.checkpoints.load import FORMATS, load, save

__all__ = ["FORMATS", "load", "save"]
