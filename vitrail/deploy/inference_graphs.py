"""A network's answer as CUDA graphs, one per shape of images: launching small kernels takes longer than running them."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor

ROUNDS = 3  # before the capture: compilers compile and libraries choose their kernels
LARGEST = 32  # images; above, most kernels are long enough to hide their launching
SHAPES = 8  # graphs kept: each has memory of its own


class Graph:
    """One captured call: images are copied in, the graph runs, the answer is copied out."""

    def __init__(self, compute: Callable[[Tensor], Tensor], image: Tensor):
        # A tensor made in inference mode could not be written to outside of it, and the next caller may be outside.
        with torch.inference_mode(False), torch.no_grad():
            self.image = torch.empty(image.shape, dtype=image.dtype, device=image.device).copy_(image)
            aside = torch.cuda.Stream(image.device)
            aside.wait_stream(torch.cuda.current_stream(image.device))
            with torch.cuda.stream(aside):
                for _ in range(ROUNDS):
                    compute(self.image)
            torch.cuda.current_stream(image.device).wait_stream(aside)
            torch.cuda.synchronize(image.device)
            self.graph = torch.cuda.CUDAGraph()
            # Other threads, such as loaders that pin memory, go on meanwhile.
            with torch.cuda.graph(self.graph, stream=aside, capture_error_mode="thread_local"):
                self.answer = compute(self.image)
        self.done = torch.cuda.Event()
        self.done.record(torch.cuda.current_stream(image.device))

    def __call__(self, image: Tensor) -> Tensor:
        stream = torch.cuda.current_stream(self.image.device)
        stream.wait_event(self.done)  # the previous caller may have used another stream
        self.image.copy_(image)
        self.graph.replay()
        answer = self.answer.clone()
        self.done.record(stream)
        return answer


class Graphs:
    """`compute(image)` by graphs: captured at the first call of a shape; what cannot be captured is computed as usual.

    Batches of up to LARGEST images, or those of the one size that `batch` says.
    """

    def __init__(self, compute: Callable[[Tensor], Tensor], batch: int | None = None):
        self.compute, self.batch = compute, batch
        self.known: dict[tuple, Graph | None] = {}
        self.lock = threading.Lock()

    def __call__(self, image: Tensor) -> Tensor:
        fits = len(image) <= LARGEST if self.batch is None else len(image) == self.batch
        if not image.is_cuda or not fits or torch.cuda.is_current_stream_capturing():
            return self.compute(image)
        with self.lock, torch.cuda.device(image.device):
            graph = self._graph(image)
            if graph is not None:
                return graph(image)
        return self.compute(image)

    def _graph(self, image: Tensor) -> Graph | None:
        cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        key = (image.shape, image.dtype, image.device, cast)
        if key not in self.known and len(self.known) < SHAPES:
            try:
                self.known[key] = Graph(self.compute, image)
            except RuntimeError:  # something waits for the device, or the memory is full
                self.known[key] = None
                torch.cuda.synchronize(image.device)
        return self.known.get(key)

    @property
    def captured(self) -> int:
        return sum(graph is not None for graph in self.known.values())

    def forget(self) -> None:
        with self.lock:
            self.known.clear()
