"""Eight bits: which range of numbers a product is given, learned from images, and weights rounded channel by channel."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

CODES = 256
BINS = 4096  # of the histogram that a range is chosen from
SHARES = [share / 40 for share in range(40, 7, -1)]  # of the range that was seen: what is outside is cut off
AT_ONCE = 16  # images


class Steps(NamedTuple):
    """A number x is kept as round(x / size) + zero, between 0 and 255."""

    size: float
    zero: int

    @property
    def code(self) -> tuple[float, float]:
        """Factor and shift before rounding."""
        return 1 / self.size, float(self.zero)

    def encode(self, x: Tensor) -> Tensor:
        """To eight bits; what lies outside is cut off."""
        return x.float().mul(1 / self.size).add_(self.zero + 0.5).clamp_(0, CODES - 1).to(torch.uint8)  # cut: half goes up


class Seen:
    """What a layer was given: extremes in the first pass over the images, a histogram between them in the second."""

    def __init__(self) -> None:
        self.low, self.high = 0.0, 0.0
        self.counts: Tensor | None = None

    def look(self, x: Tensor) -> None:
        low, high = torch.aminmax(x)
        self.low, self.high = min(self.low, float(low)), max(self.high, float(high))

    def count(self, x: Tensor) -> None:
        if self.high > self.low:
            found = torch.histc(x, BINS, self.low, self.high)
            self.counts = found if self.counts is None else self.counts + found

    def steps(self) -> Steps:
        """The range whose rounding and cutting cost least, squared and summed."""
        if self.counts is None:
            return Steps(1.0, 0)
        width = (self.high - self.low) / BINS
        centres = self.low + width * (torch.arange(BINS, dtype=torch.float32) + 0.5)
        best: tuple[float, Steps] | None = None
        for share in SHARES:
            size = max(share * (self.high - self.low) / (CODES - 1), 1e-12)
            steps = Steps(size, min(max(round(-share * self.low / size), 0), CODES - 1))
            back = (steps.encode(centres).float() - steps.zero) * size
            cost = float(((back - centres).square() * self.counts).sum())
            if best is None or cost < best[0]:
                best = cost, steps
        assert best is not None
        return best[1]


def learn_steps(network: nn.Module, watched: list[nn.Module], images: Tensor) -> list[Steps]:
    """Steps for what these parts of a network are given, from images [B, K, height, width] like those it will be given."""
    seen = {part: Seen() for part in watched}
    for look in (Seen.look, Seen.count):
        with watching(seen, look), torch.no_grad():
            for few in images.split(AT_ONCE):
                network(few)
    return [each.steps() for each in seen.values()]


@contextmanager
def watching(seen: dict[nn.Module, Seen], look: Callable[[Seen, Tensor], None]) -> Iterator[None]:
    def watch(part: nn.Module, given: tuple[Tensor, ...]) -> None:
        look(seen[part], given[0])

    handles = [part.register_forward_pre_hook(watch) for part in seen]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def round_weights(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[D, K] as whole numbers of at most 127 and a factor for each of the D channels."""
    weight = weight.float()
    factors = weight.abs().amax(1).clamp(min=1e-12) / 127
    return (weight / factors[:, None]).round().to(torch.int8), factors
