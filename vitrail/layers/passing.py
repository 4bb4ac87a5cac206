"""Calls that would change nothing, left out: to a host that launches small kernels one by one, a call costs more than asking."""

from torch import Tensor, nn


def watched(part: nn.Module) -> bool:
    """Whether somebody waits for this very module to be called."""
    return bool(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks)


def idle(part: nn.Module) -> bool:
    """Whether a part would give back what it is given, and nobody waits for the call."""
    kind = type(part)
    return (kind is nn.Identity or (kind is nn.Dropout and (part.p == 0.0 or not part.training))) and not watched(part)


def through(part: nn.Module, x: Tensor) -> Tensor:
    """part(x). A part that would give x back is called only where somebody waits for the call."""
    return x if idle(part) else part(x)
