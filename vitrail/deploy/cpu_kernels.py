"""`cpu_kernels.cpp`, compiled for this processor at first use and cached; without a compiler everything runs without it.

It is linked with no OpenMP library: it uses the threads that torch has started, and a second set would fight them for the cores.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from vitrail.atomic_files import write_aside
from vitrail.errors import UserError

SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-std=c++17", "-w")
SECONDS = 120  # a compiler that has not finished by then is not waited for
LANES = 16  # numbers in a register: widths must be whole multiples


class Shape(ctypes.Structure):
    """As in cpu_kernels.cpp."""

    _fields_ = (
        *((name, c_int64) for name in ("batch", "heads", "queries", "keys", "size")),
        *((name, c_int64) for name in ("query_row", "key_row", "query_image", "key_image")),
        *((name, c_float) for name in ("scale", "inverse", "zero")),
        ("bytes", c_int32),
    )


class Native:
    """The compiled functions."""

    def __init__(self, path: Path):
        library = ctypes.CDLL(str(path))
        self.attends = {torch.float32: library.vitrail_attend_single}
        if hasattr(library, "vitrail_attend_half"):  # processors that multiply bfloat16
            self.attends[torch.bfloat16] = library.vitrail_attend_half
        for function in self.attends.values():
            function.argtypes = [c_void_p] * 5 + [c_int]
        self.normalize = library.vitrail_norm_bytes
        self.normalize.argtypes = [c_void_p] * 2 + [c_int64] * 3 + [c_float] * 3 + [c_int]
        self.normalize.restype = None

    def __deepcopy__(self, memo: dict) -> "Native":
        return self

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, code: tuple[float, float] | None = None) -> Tensor:
        """query [B, S, H, K], key and value [B, T, H, K], heads side by side in memory: softmax(scale q k) v [B, S, H * K].

        With `code` = (inverse, zero) the answer is round(answer * inverse + zero) in eight bits.
        """
        batch, queries, heads, size = query.shape
        assert key.stride() == value.stride()
        assert all(x.stride()[2:] == (size, 1) for x in (query, key))
        out = query.new_empty(batch, queries, heads * size, dtype=torch.uint8 if code else query.dtype)
        shape = Shape(
            batch, heads, queries, key.shape[1], size, query.stride(1), key.stride(1), query.stride(0), key.stride(0),
            scale, *(code or (1.0, 0.0)), int(code is not None),
        )  # fmt: skip
        pointers = (query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr())
        if self.attends[query.dtype](ctypes.addressof(shape), *pointers, torch.get_num_threads()):
            raise MemoryError("no memory for attention")
        return out

    def attends_to(self, dtype: torch.dtype, size: int) -> bool:
        """Whether there is attention in this precision for heads of this size."""
        return dtype in self.attends and size % LANES == 0

    def norm_bytes(self, x: Tensor, epsilon: float, inverse: float, zero: float) -> Tensor:
        """x [..., D] in float32, each row to zero mean and unit deviation, then round(row * inverse + zero) in eight bits."""
        x = x.contiguous()
        out, width = torch.empty_like(x, dtype=torch.uint8), x.shape[-1]
        rows = x.numel() // width
        pointers = (x.data_ptr(), out.data_ptr())
        self.normalize(*pointers, rows, width, width, epsilon, inverse, zero, torch.get_num_threads())
        return out


class Missing(Exception):
    """Why there are no compiled functions on this machine."""


def native() -> Native | None:
    return outcome()[0]


def why_not() -> str:
    """Why there are none; empty where there are."""
    return outcome()[1]


@cache
def outcome() -> tuple[Native | None, str]:
    """The functions, or the reason why there are none."""
    try:
        return Native(compiled()), ""
    except (Missing, OSError, AttributeError, subprocess.SubprocessError, UserError) as error:
        said = str(error).strip().partition("\n")[0]
        return None, said or type(error).__name__


def compiled() -> Path:
    """The library's place; it is compiled if another processor, compiler or version has made what is there, or nobody."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        raise Missing("the processor has no AVX-512")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not compiler:
        raise Missing("there is no C++ compiler (g++)")
    # What -march=native means here is part of the name: a folder may be shared by several machines.
    meant = ask([compiler, *FLAGS, "-dM", "-E", "-x", "c++", "/dev/null"])
    name = hashlib.sha256(meant + SOURCE.read_bytes() + repr(FLAGS).encode()).hexdigest()[:24]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = home / "vitrail" / f"native-{name}.so"
    if not path.is_file():
        write_aside(path, lambda side: compile_to(compiler, side))
    return path


def compile_to(compiler: str, path: Path) -> None:
    objects = path.with_suffix(".o")
    try:
        ask([compiler, *FLAGS, "-c", str(SOURCE), "-o", str(objects)])
        ask([compiler, "-shared", str(objects), "-o", str(path)])
    finally:
        objects.unlink(missing_ok=True)


def ask(command: list[str]) -> bytes:
    done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise Missing(f"{command[0]} fails: {said}")
    return done.stdout
