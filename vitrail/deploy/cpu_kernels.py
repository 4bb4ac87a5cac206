"""Python interface of `cpu_kernels.cpp`, which is compiled for this CPU at first use and cached; optional.

The library is not linked with OpenMP: it uses torch's OpenMP runtime, because a second thread pool would compete for the cores.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.atomic_files import atomic_write
from vitrail.cache import cache_folder
from vitrail.errors import UserError

SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-std=c++17", "-w")
TIMEOUT = 120  # seconds for a compiler call
LANES = 16  # float32 values in a register: widths must be multiples


class Shape(ctypes.Structure):
    """The struct of the same name in cpu_kernels.cpp."""

    _fields_ = (
        *((name, c_int64) for name in ("batch_size", "heads", "queries", "keys", "head_dim")),
        *((name, c_int64) for name in ("query_row", "key_row", "query_image", "key_image")),
        *((name, c_float) for name in ("scale", "factor", "offset")),
        ("quantized", c_int32),
    )


class CpuKernels:
    """The compiled functions."""

    def __init__(self, path: Path):
        library = ctypes.CDLL(str(path))
        self.attention = {torch.float32: library.vitrail_attend_float32}
        if hasattr(library, "vitrail_attend_bfloat16"):  # CPUs with AVX512_BF16
            self.attention[torch.bfloat16] = library.vitrail_attend_bfloat16
        for function in self.attention.values():
            function.argtypes = [c_void_p] * 5 + [c_int]
        self.normalize = library.vitrail_norm_to_int8
        self.normalize.argtypes = [c_void_p] * 2 + [c_int64] * 3 + [c_float] * 3 + [c_int]
        self.normalize.restype = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "CpuKernels":
        return self

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, affine: tuple[float, float] | None = None
    ) -> Tensor:
        """softmax(scale q k) v [B, S, H * K] of query [B, S, H, K], key and value [B, T, H, K] with adjacent heads in memory.

        With `affine` = (factor, offset) the output is round(output * factor + offset) in uint8.
        """
        batch_size, queries, heads, head_dim = query.shape
        assert key.stride() == value.stride()
        assert all(x.stride()[2:] == (head_dim, 1) for x in (query, key))
        out = query.new_empty(batch_size, queries, heads * head_dim, dtype=torch.uint8 if affine else query.dtype)
        shape = Shape(
            batch_size, heads, queries, key.shape[1], head_dim, query.stride(1), key.stride(1), query.stride(0), key.stride(0),
            scale, *(affine or (1.0, 0.0)), int(affine is not None),
        )  # fmt: skip
        pointers = (query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr())
        if self.attention[query.dtype](ctypes.addressof(shape), *pointers, torch.get_num_threads()):
            raise MemoryError("out of memory in the attention kernel")
        return out

    def supports(self, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether there is an attention kernel for this dtype and head size."""
        return dtype in self.attention and head_dim % LANES == 0

    def norm_to_int8(self, x: Tensor, eps: float, factor: float, offset: float) -> Tensor:
        """x [..., D] in float32, each row normalized to mean 0 and deviation 1, then round(row * factor + offset) in uint8."""
        x = x.contiguous()
        out, width = torch.empty_like(x, dtype=torch.uint8), x.shape[-1]
        rows = x.numel() // width
        pointers = (x.data_ptr(), out.data_ptr())
        self.normalize(*pointers, rows, width, width, eps, factor, offset, torch.get_num_threads())
        return out


class KernelsUnavailable(Exception):
    """The kernels cannot be compiled on this machine."""


def load_cpu_kernels() -> CpuKernels | None:
    """The compiled kernels, or None if they are not available."""
    return load_or_reason()[0]


def unavailable_reason() -> str:
    """Why the kernels are not available; empty if they are."""
    return load_or_reason()[1]


@cache
def load_or_reason() -> tuple[CpuKernels | None, str]:
    try:
        return CpuKernels(compile_library()), ""
    except (KernelsUnavailable, OSError, AttributeError, subprocess.SubprocessError, UserError) as error:
        reason = str(error).strip().partition("\n")[0]
        return None, reason or type(error).__name__


def compile_library() -> Path:
    """The path of the library, compiled unless the cache has it for this CPU, compiler and version of the source."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        raise KernelsUnavailable("the CPU has no AVX-512")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not compiler:
        raise KernelsUnavailable("there is no C++ compiler (g++)")
    # The expansion of -march=native is part of the name: several machines may share a cache directory.
    macros = run_compiler([compiler, *FLAGS, "-dM", "-E", "-x", "c++", "/dev/null"])
    name = hashlib.sha256(macros + SOURCE.read_bytes() + repr(FLAGS).encode()).hexdigest()[:24]
    path = cache_folder("kernels") / f"cpu-kernels-{name}.so"
    if not path.is_file():
        atomic_write(path, lambda temporary: compile_to(compiler, temporary))
    return path


def compile_to(compiler: str, path: Path) -> None:
    objects = path.with_suffix(".o")
    try:
        run_compiler([compiler, *FLAGS, "-c", str(SOURCE), "-o", str(objects)])
        run_compiler([compiler, "-shared", str(objects), "-o", str(path)])
    finally:
        objects.unlink(missing_ok=True)


def run_compiler(command: list[str]) -> bytes:
    result = subprocess.run(command, capture_output=True, timeout=TIMEOUT, check=False)
    if result.returncode:
        message = result.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise KernelsUnavailable(f"{command[0]} failed: {message}")
    return result.stdout
