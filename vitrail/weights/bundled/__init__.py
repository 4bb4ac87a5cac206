"""The weights that come with the package, by name; `docs/weights.md` says what they are."""

import os
from pathlib import Path

NAMES = ("house_tiny",)


def find_bundled(path: str | Path) -> Path | None:
    """The file behind a bundled name; None for anything else, and where something by that name lies in the current folder."""
    name = str(path)
    if name not in NAMES or os.path.exists(name):
        return None
    return Path(__file__).with_name(f"{name}.safetensors")
