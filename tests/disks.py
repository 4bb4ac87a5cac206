"""Disks so small that they fill."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Callable[[str], None]]:
    """A disk of `size` (400k, 4m) at `place`; gives what makes it another size. Skips where none can be mounted."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no small disk can be mounted here")
    try:
        yield lambda size: subprocess.run(["mount", "-o", f"remount,size={size}", str(place)], check=True)
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)  # a test that fails may hold files open
