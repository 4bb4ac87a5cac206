"""The passes of `passes.py`, which says what they do, and random numbers, as Triton kernels.

A program works on some pixels of one image and branches on what that image drew, so that an image costs what it needs: half
of them leave a RandAugment layer as a copy. Launches go to the current device, which has to be that of the tensors
(`torch.cuda.set_device`). Only this folder and `layers/kernels` import Triton.
"""

from vitrail.data.transforms.kernels.normalize import finish
from vitrail.data.transforms.kernels.operations import operate
from vitrail.data.transforms.kernels.resize import blur, render
from vitrail.data.transforms.kernels.rng import bits, fold, uniform

__all__ = ["bits", "blur", "finish", "fold", "operate", "render", "uniform"]
