"""Static int8 quantization: input ranges calibrated on images, weights quantized per channel."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

CODES = 256
BINS = 4096  # of the histogram that a range is chosen from
SHARES = [share / 40 for share in range(40, 7, -1)]  # of the observed range that are tried: values outside are clipped
BATCH_SIZE = 16  # of calibration


class QuantParams(NamedTuple):
    """x is stored as round(x / scale) + zero_point, between 0 and 255."""

    scale: float
    zero_point: int

    @property
    def affine(self) -> tuple[float, float]:
        """Factor and offset that are applied before rounding."""
        return 1 / self.scale, float(self.zero_point)

    def quantize(self, x: Tensor) -> Tensor:
        """x as uint8; values outside of the range are clipped."""
        x = x.float().mul(1 / self.scale).add_(self.zero_point + 0.5)  # the cast truncates, so that halves are rounded up
        return x.clamp_(0, CODES - 1).to(torch.uint8)


class RangeObserver:
    """Inputs of a layer: their range in the first pass over the images, a histogram in the second."""

    def __init__(self) -> None:
        self.low, self.high = 0.0, 0.0
        self.counts: Tensor | None = None

    def observe_range(self, x: Tensor) -> None:
        low, high = torch.aminmax(x)
        self.low, self.high = min(self.low, float(low)), max(self.high, float(high))

    def observe_histogram(self, x: Tensor) -> None:
        if self.high > self.low:
            counts = torch.histc(x, BINS, self.low, self.high)
            self.counts = counts if self.counts is None else self.counts + counts

    def params(self) -> QuantParams:
        """The range with the least squared error of rounding and clipping."""
        if self.counts is None:
            return QuantParams(1.0, 0)
        width = (self.high - self.low) / BINS
        centers = self.low + width * (torch.arange(BINS, dtype=torch.float32) + 0.5)
        best: tuple[float, QuantParams] | None = None
        for share in SHARES:
            scale = max(share * (self.high - self.low) / (CODES - 1), 1e-12)
            params = QuantParams(scale, min(max(round(-share * self.low / scale), 0), CODES - 1))
            dequantized = (params.quantize(centers).float() - params.zero_point) * scale
            error = float(((dequantized - centers).square() * self.counts).sum())
            if best is None or error < best[0]:
                best = error, params
        assert best is not None
        return best[1]


def calibrate(network: nn.Module, modules: list[nn.Module], images: Tensor) -> list[QuantParams]:
    """Quantization parameters of the inputs of these modules, from representative images [B, K, height, width]."""
    observers = {module: RangeObserver() for module in modules}
    for observe in (RangeObserver.observe_range, RangeObserver.observe_histogram):
        with observe_inputs(observers, observe), torch.no_grad():
            for batch in images.split(BATCH_SIZE):
                network(batch)
    return [observer.params() for observer in observers.values()]


@contextmanager
def observe_inputs(observers: dict[nn.Module, RangeObserver], observe: Callable[[RangeObserver, Tensor], None]) -> Iterator[None]:
    """Call `observe` with the first input of each module whenever the module runs."""

    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        observe(observers[module], inputs[0])

    handles = [module.register_forward_pre_hook(hook) for module in observers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def quantize_weights(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[D, K] as int8 between -127 and 127, and one scale for each of the D output channels."""
    weight = weight.float()
    scales = weight.abs().amax(1).clamp(min=1e-12) / 127
    return (weight / scales[:, None]).round().to(torch.int8), scales
