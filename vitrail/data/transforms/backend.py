"""Selection of the implementation for a tensor: Triton kernels on GPUs, plain torch elsewhere."""

from importlib.util import find_spec
from types import ModuleType

from torch import Tensor

HAS_TRITON = find_spec("triton") is not None


def kernels_for(tensor: Tensor) -> ModuleType | None:
    """Return the module `kernels` if the tensor is on a GPU and Triton is installed, else None."""
    if not (tensor.is_cuda and HAS_TRITON):
        return None
    from vitrail.data.transforms import kernels

    return kernels


def backend_for(pixels: Tensor) -> ModuleType:
    """Return the module with the pixel operations for this tensor: `kernels` on a GPU, else `reference`."""
    from vitrail.data.transforms import reference

    kernels = kernels_for(pixels)
    return reference if kernels is None else kernels
