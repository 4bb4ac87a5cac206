"""A unit's forward and backward pass as one CUDA graph: launching a small network's kernels takes longer than running them."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from vitrail.tasks.targets import Targets

Compute = Callable[[Tensor, Targets], Tensor]
ROUNDS = 3  # before the capture: compilers compile and libraries choose their kernels


class Captured:
    """`compute(images, targets)` gives a loss and leaves gradients in the parameters; so does this, by a graph of its first call.

    Images of another shape than the first, and networks that cannot be captured (because they wait for the device), are
    computed as usual. The graph draws from torch's generator as the usual way does: seed it before each call. `kept` are tensors
    that computing changes, and trying must not.
    """

    def __init__(self, compute: Compute, model: nn.Module, kept: Sequence[Tensor], device: torch.device) -> None:
        self.compute, self.kept, self.device = compute, kept, device
        self.parameters = list(model.parameters())
        self.graph: torch.cuda.CUDAGraph | None = None
        self.possible = True

    def __call__(self, images: Tensor, targets: Targets) -> Tensor:
        given = [tensor for tensor in (images, *targets) if tensor is not None]
        if self.graph is None and self.possible:
            self._capture(images, targets)
        if self.graph is None or [tensor.shape for tensor in given] != [tensor.shape for tensor in self.inputs]:
            return self.compute(images, targets)
        for kept, tensor in zip(self.inputs, given, strict=True):
            kept.copy_(tensor)
        self.graph.replay()
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient  # the graph writes to the same memory each time
        return self.loss

    def _capture(self, images: Tensor, targets: Targets) -> None:
        generator = torch.cuda.default_generators[self.device.index]
        state, before = generator.get_state(), [tensor.clone() for tensor in self.kept]
        images, targets = images.clone(), targets.clone()
        self.inputs = [tensor for tensor in (images, *targets) if tensor is not None]
        graph = torch.cuda.CUDAGraph()
        aside = torch.cuda.Stream(self.device)
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(ROUNDS):
                self.compute(images, targets)
                forget(self.parameters)
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the graph keeps memory of its own for activations
        try:
            with torch.cuda.graph(graph):
                self.loss = self.compute(images, targets)
            self.graph, self.gradients = graph, [parameter.grad for parameter in self.parameters]
        except RuntimeError:
            self.possible = False
            torch.cuda.synchronize()
        forget(self.parameters)
        with torch.no_grad():
            for tensor, value in zip(self.kept, before, strict=True):
                tensor.copy_(value)
        generator.set_state(state)


def forget(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
