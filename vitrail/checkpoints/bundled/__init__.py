"""The weights included in the package, by name; `docs/weights.md` describes them."""

import hashlib
import os
import sys
from functools import cache
from pathlib import Path

from vitrail.aliases import upgrade_name
from vitrail.errors import UserError

# The SHA-256 of each file, which `tools/bundle_weights.py` prints.
NAMES = {"vitrail_tiny": "dac3fdae49d3f5707c1ebba1165e2dd3c60cce99c36a38a766dda1f196e80073"}

# Data and license, which are printed where the weights are used.
NOTICES = {
    "vitrail_tiny": (
        "vitrail_tiny: trained on Tiny ImageNet and photographs of COCO, with a teacher trained on ImageNet, whose images are "
        "for non-commercial research and education: use these weights for the same (docs/weights.md)"
    )
}


def find_bundled(path: str | Path) -> Path | None:
    """The file of bundled weights; None for other paths, and if the current folder contains a file or folder of that name."""
    name = upgrade_name(str(path))
    if name not in NAMES or os.path.exists(path):
        return None
    return verified_file(name)


def describe_bundled(path: str | Path) -> str | None:
    """Data and license of bundled weights; None for other paths."""
    return NOTICES[upgrade_name(str(path))] if find_bundled(path) is not None else None


@cache
def announce_bundled(path: str | Path) -> None:
    """Print data and license of bundled weights on standard error, once per process."""
    notice = describe_bundled(path)
    if notice is not None:
        print(notice, file=sys.stderr)


@cache
def verified_file(name: str) -> Path:
    """The file of bundled weights, after a check of its digest."""
    file = Path(__file__).with_name(f"{name}.safetensors")
    try:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        raise UserError(f"The weights {name} are missing from this installation: install Vitrail again.") from None
    if digest != NAMES[name]:
        raise UserError(f"The weights {name} of this installation are damaged: install Vitrail again.")
    return file
