"""State dicts of EfficientNet-Lite, which can be a teacher."""

from pathlib import Path

import torch
from torch import Tensor

from vitrail.checkpoints.readers import Checkpoint
from vitrail.errors import UserError
from vitrail.models.efficientnet import EfficientNet, infer
from vitrail.models.preprocessing import Preprocessing

MARK = "_blocks.0._depthwise_conv.weight"
TITLE = "EfficientNet-Lite"


def load_efficientnet(checkpoint: Checkpoint, path: str | Path) -> tuple[EfficientNet, Preprocessing] | None:
    """The network of a checkpoint and its preprocessing; None if its tensor names are not those of one."""
    if MARK not in checkpoint.tensors:
        return None
    tensors = {key: tensor for key, tensor in checkpoint.tensors.items() if not key.endswith("num_batches_tracked")}
    try:
        with torch.device("meta"):
            network = EfficientNet(infer({key: tuple(tensor.shape) for key, tensor in tensors.items()}))
    except KeyError as error:
        raise UserError(f"{path}: the tensor {error.args[0]!r} of an {TITLE} is missing.") from None
    except (ValueError, TypeError, IndexError, ZeroDivisionError, RuntimeError, AssertionError, OverflowError):
        raise UserError(f"{path} has the names of an {TITLE}, but its shapes do not match one.") from None
    load_tensors(network, tensors, str(path))
    size = network.config.size
    return network, Preprocessing((size, size), size / (size + 32), mean=(127 / 255,) * 3, std=(128 / 255,) * 3)


def load_tensors(network: EfficientNet, tensors: dict[str, Tensor], path: str) -> None:
    """Load a state dict; missing, surplus and mismatched tensors are errors."""
    expected = {key: value for key, value in network.state_dict().items() if not key.endswith("num_batches_tracked")}
    missing, surplus = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing:
        raise UserError(f"{path}: the tensor {missing[0]!r} of an {TITLE} is missing.")
    if surplus:
        raise UserError(f"{path}: {len(surplus)} tensors do not belong to an {TITLE}, such as {surplus[0]!r}.")
    for key, value in expected.items():
        if tensors[key].shape != value.shape:
            raise UserError(
                f"{path}: the tensor {key!r} has shape {tuple(tensors[key].shape)}, which does not match the other tensors."
            )
        if not tensors[key].is_floating_point():
            raise UserError(f"{path}: the tensor {key!r} has dtype {tensors[key].dtype}, not a floating point dtype.")
    counters = {key: torch.tensor(0) for key in network.state_dict() if key.endswith("num_batches_tracked")}
    network.load_state_dict({key: tensors[key].float().clone() for key in expected} | counters, assign=True)
