"""The user's cache: downloaded weights, features, indexes of tar files, compiled kernels."""

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """The folder of one `kind` of files: in $VITRAIL_CACHE, or in vitrail/ in $XDG_CACHE_HOME or ~/.cache."""
    folder = os.environ.get("VITRAIL_CACHE")
    system = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return (Path(folder) if folder else Path(system) / "vitrail") / kind
