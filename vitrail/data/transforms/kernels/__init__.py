"""Triton implementations of the pixel operations in `reference.py` and of the random numbers in `data/rng.py`.

Each program works on some pixels of one image and branches on the operation drawn for that image, so an image without an
operation costs only a copy. Launches go to the current device, which must be that of the tensors (`torch.cuda.set_device`). Only
this package and `layers/kernels` import Triton.
"""

from vitrail.data.transforms.kernels.normalize import normalize
from vitrail.data.transforms.kernels.operations import apply_operations
from vitrail.data.transforms.kernels.resize import blur, crop_resize
from vitrail.data.transforms.kernels.rng import fold_keys, random_bits, uniform

__all__ = ["apply_operations", "blur", "crop_resize", "fold_keys", "normalize", "random_bits", "uniform"]
