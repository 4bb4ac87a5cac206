"""Choice of the device that a model runs on."""

import os

import torch

from vitrail.errors import UserError


def choose_device(name: str | None, local_rank: int = 0) -> torch.device:
    """The device of this name; by default the GPU of this local rank if there is one, otherwise the CPU."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"Unknown device {name!r}: give cpu, cuda or cuda:1.") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"Device {name!r} is not supported: give cpu, cuda or cuda:1.")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError("No CUDA device is available: give --device cpu.")
        if device.index is not None and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
            raise UserError(f"Each process uses a GPU of its own: give --device cuda, not {name}.")
        index, count = local_rank if device.index is None else device.index, torch.cuda.device_count()
        if index >= count:
            error = UserError(f"There is no GPU {index}: this machine has {count}.")
            # Of the processes without a GPU the first reports the error; those with one are not affected by it.
            error.report_here = index == count if device.index is None else None
            raise error
        return torch.device("cuda", index)
    return device


def check_device(device: torch.device | str) -> torch.device:
    """The device, on which a tensor can be created."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, TypeError, AssertionError, ImportError):
        raise UserError(f"Device {str(device)!r} is not available: give cpu, or cuda on a machine with a GPU.") from None


def use_device(device: torch.device) -> torch.device:
    """Make this the current CUDA device; returns it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
