"""CUDA graphs: launching the kernels of a small model one by one takes longer than running them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

WARMUP = 3  # calls before the capture, in which compilers compile and libraries choose their kernels
SAME_SHAPES = 4  # calls before a function is captured
MAX_GRAPHS = 4  # of one function, for inputs of different shapes


@contextmanager
def own_cublas_workspaces() -> Iterator[None]:
    """Context for a capture in which cuBLAS allocates its workspaces anew, in the memory of the graph.

    A graph that was captured with workspaces from outside would go on using them after another capture, such as that of
    torch.compile with mode="reduce-overhead", has freed them.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class CudaGraph:
    """A captured call of `function(*inputs)`; raises RuntimeError where the function cannot be captured.

    `inputs` are the tensors that the graph reads, copies of those given. `cleanup` is called after each warmup call.
    """

    def __init__(
        self, function: Callable[..., Any], inputs: Sequence[Tensor], cleanup: Callable[[], None] = lambda: None
    ) -> None:
        device, gradients = inputs[0].device, torch.is_grad_enabled()
        # A tensor made in inference mode could not be written to outside of it. Leaving that mode enables gradients.
        with torch.inference_mode(False), torch.set_grad_enabled(gradients):
            self.inputs = [torch.empty_like(tensor).copy_(tensor) for tensor in inputs]
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for _ in range(WARMUP):
                    function(*self.inputs)
                    cleanup()
            torch.cuda.current_stream(device).wait_stream(stream)
            torch.cuda.synchronize(device)
            self.graph = torch.cuda.CUDAGraph()
            # Other threads, such as loaders that pin memory, may use the device during the capture.
            with own_cublas_workspaces(), torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.output = function(*self.inputs)

    def replay(self, inputs: Sequence[Tensor]) -> Any:
        """The output for other inputs of the same shapes; the next call overwrites it."""
        for own, tensor in zip(self.inputs, inputs, strict=True):
            own.copy_(tensor)
        self.graph.replay()
        return self.output


class CapturedStep:
    """The forward and backward pass of a micro-batch as a CUDA graph, captured at the first call.

    `step(*arguments)` returns a loss and leaves gradients in the parameters of `model`, and so does a call of this; arguments are
    tensors or tuples of tensors and None. Inputs of other shapes than the first, and steps that cannot be captured because they
    synchronize with the device, run without a graph. The graph draws from torch's default generator, as `step` does.
    `preserved` are tensors that a step changes and the warmup must not.
    """

    def __init__(self, step: Callable[..., Tensor], model: nn.Module, preserved: Sequence[Tensor], device: torch.device) -> None:
        self.step, self.preserved, self.device = step, preserved, device
        self.parameters = list(model.parameters())
        self.graph: CudaGraph | None = None
        self.failure: RuntimeError | None = None  # why the step cannot be captured

    def __call__(self, *arguments: Any) -> Tensor:
        leaves, structure = pytree.tree_flatten(arguments)
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if self.graph is None and self.failure is None:
            self._capture(inputs, leaves, structure)
        if self.graph is None or [tensor.shape for tensor in inputs] != [tensor.shape for tensor in self.graph.inputs]:
            return self.step(*arguments)
        loss: Tensor = self.graph.replay(inputs)
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient  # the graph writes to the same memory each time
        return loss

    def _capture(self, inputs: Sequence[Tensor], leaves: Sequence[Any], structure: pytree.TreeSpec) -> None:
        generator = torch.cuda.default_generators[self.device.index]
        state, values = generator.get_state(), [tensor.clone() for tensor in self.preserved]

        def step(*tensors: Tensor) -> Tensor:
            remaining = iter(tensors)
            filled = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            return self.step(*pytree.tree_unflatten(filled, structure))

        try:
            self.graph = CudaGraph(step, inputs, self._clear_gradients)
            self.gradients = [parameter.grad for parameter in self.parameters]
        except RuntimeError as error:
            self.failure = error
            torch.cuda.synchronize()
        self._clear_gradients()
        with torch.no_grad():
            for tensor, value in zip(self.preserved, values, strict=True):
                tensor.copy_(value)
        generator.set_state(state)

    def _clear_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


class CapturedFunction:
    """A function of tensors that returns tensors (any tree of them), as a CUDA graph where that is possible.

    A graph is captured when `SAME_SHAPES` calls in a row have inputs of the same shapes, so that inputs whose shapes always
    differ, such as padded photographs, cost nothing; at most `MAX_GRAPHS` are kept. Calls on a CPU and functions that synchronize
    with the device run without a graph. The next call overwrites the output.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.graphs: dict[Any, CudaGraph] = {}
        self.previous: Any = None
        self.repeated = 0  # calls in a row with the shapes of `previous`
        self.failure: RuntimeError | None = None  # why the function cannot be captured

    def __call__(self, *inputs: Tensor) -> Any:
        if self.failure is not None or not inputs[0].is_cuda:
            return self.function(*inputs)
        key = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in inputs)
        self.repeated = self.repeated + 1 if key == self.previous else 1
        self.previous = key
        if key not in self.graphs and self.repeated == SAME_SHAPES and len(self.graphs) < MAX_GRAPHS:
            try:
                self.graphs[key] = CudaGraph(self.function, inputs)
            except RuntimeError as error:
                self.failure = error
                torch.cuda.synchronize()
        return self.graphs[key].replay(inputs) if key in self.graphs else self.function(*inputs)
