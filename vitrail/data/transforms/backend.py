"""Which implementation works on a tensor: plain torch anywhere, Triton kernels on a GPU (torch brings Triton along there)."""

from importlib.util import find_spec
from types import ModuleType

from torch import Tensor

HAS_TRITON = find_spec("triton") is not None


def kernels_for(tensor: Tensor) -> ModuleType | None:
    """The module `kernels` if the tensor lies on a GPU, else None."""
    if not (tensor.is_cuda and HAS_TRITON):
        return None
    from vitrail.data.transforms import kernels

    return kernels


def passes_for(pixels: Tensor) -> ModuleType:
    """The passes over pixels: the module `kernels` on a GPU, else `passes`, the reference."""
    from vitrail.data.transforms import reference

    kernels = kernels_for(pixels)
    return reference if kernels is None else kernels
