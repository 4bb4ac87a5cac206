"""Inference by CUDA graphs, one for each shape of images."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from vitrail.training.cuda_graphs import CudaGraph

MAX_GRAPH_BATCH = 32  # images; in larger batches most kernels run longer than their launch takes
MAX_GRAPHS = 8  # each has its own memory


class InferenceGraph:
    """One captured forward pass, which may be called from several streams."""

    def __init__(self, compute: Callable[[Tensor], Tensor], image: Tensor):
        with torch.no_grad():
            self.graph = CudaGraph(compute, [image])
        self.done = torch.cuda.Event()
        self.done.record(torch.cuda.current_stream(image.device))

    def __call__(self, image: Tensor) -> Tensor:
        stream = torch.cuda.current_stream(self.graph.inputs[0].device)
        stream.wait_event(self.done)  # the previous call may have used another stream
        output: Tensor = self.graph.replay([image]).clone()
        self.done.record(stream)
        return output


class GraphCache:
    """`compute(image)` by CUDA graphs, captured at the first call of a shape; without a graph where that is not possible.

    Graphs are used for batches of up to MAX_GRAPH_BATCH images, or of exactly `batch` images.
    """

    def __init__(self, compute: Callable[[Tensor], Tensor], batch: int | None = None):
        self.compute, self.batch = compute, batch
        self.known: dict[tuple[torch.Size, torch.dtype, torch.device, torch.dtype | None], InferenceGraph | None] = {}
        self.lock = threading.Lock()

    def __call__(self, image: Tensor) -> Tensor:
        fits = len(image) <= MAX_GRAPH_BATCH if self.batch is None else len(image) == self.batch
        if not image.is_cuda or not fits or torch.cuda.is_current_stream_capturing():
            return self.compute(image)
        with self.lock, torch.cuda.device(image.device):
            graph = self._graph(image)
            if graph is not None:
                return graph(image)
        return self.compute(image)

    def _graph(self, image: Tensor) -> InferenceGraph | None:
        autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        key = (image.shape, image.dtype, image.device, autocast)
        if key not in self.known and len(self.known) < MAX_GRAPHS:
            try:
                self.known[key] = InferenceGraph(self.compute, image)
            except RuntimeError:  # it synchronizes with the device, or there is not enough memory
                self.known[key] = None
                torch.cuda.synchronize(image.device)
        return self.known.get(key)

    @property
    def captured(self) -> int:
        """The number of graphs."""
        return sum(graph is not None for graph in self.known.values())

    def clear(self) -> None:
        with self.lock:
            self.known.clear()
