"""Small disks that can be filled in a test."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[Callable[[str], None]]:
    """Mount a tmpfs of `size` (400k, 4m) at `path`; yields a function that resizes it. Skips the test without permission."""
    if os.geteuid() != 0:
        pytest.skip("mounting a disk needs root")
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("cannot mount a disk")
    try:
        yield lambda size: subprocess.run(["mount", "-o", f"remount,size={size}", str(path)], check=True)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)  # a failing test may leave files open
