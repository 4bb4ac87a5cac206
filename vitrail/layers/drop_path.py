"""Stochastic depth."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

GOLDEN = 0.6180339887  # multiples of it, modulo 1, are spread evenly
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class DropPath(nn.Module):
    """Drops a residual branch for each image with probability `rate` and divides the others by the keep probability.

    The keep probability is a tensor: torch.compile makes one graph for all values of a tensor, but one for each value of a float.
    `scales` holds its inverse in every precision, so that eager mode has nothing to divide or to round.

    The trainer sets `noise`, uniform numbers [B] that depend on the image and not on the batch that it is computed in.
    """

    noise: Tensor | None = None

    def __init__(self, rate: float):
        super().__init__()
        self.rate, self.active = rate, rate > 0.0
        device = torch.get_default_device()
        self._move(torch.device("cpu") if device.type == "meta" else device)  # no buffers, which a meta device would not fill

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "DropPath":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._move(fn(self.keep_prob).device)  # moved with the weights, never cast
        return self

    def _move(self, device: torch.device) -> None:
        self.keep_prob = torch.tensor(1.0 - self.rate, device=device)
        self.scales = {dtype: (1.0 / self.keep_prob).to(dtype) for dtype in FLOATS}

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.active:
            return x
        if torch.compiler.is_compiling():  # one fused kernel, intermediate results are not rounded
            return x * (self.sample_mask(x) / self.keep_prob).to(x.dtype)
        return x * (self.sample_mask(x) * self.scales[x.dtype])

    def sample_mask(self, x: Tensor) -> Tensor:
        """Booleans [B, 1, ...] for a batch [B, ...]: which images keep the branch."""
        return self.uniform(x) < self.keep_prob

    def uniform(self, x: Tensor) -> Tensor:
        """Uniform numbers in [0, 1) for a batch [B, ...], [B, 1, ...]."""
        shape = (x.shape[0], *(1,) * (x.ndim - 1))
        if self.noise is None:
            return torch.rand(shape, device=x.device)
        views, rest = divmod(len(x), len(self.noise))
        if rest:
            raise RuntimeError(f"stochastic depth has random numbers for {len(self.noise)} images, not for {len(x)}")
        noise = self.noise
        if views > 1:  # several views of each image, one after the other
            noise = ((noise + GOLDEN * torch.arange(views, device=x.device)[:, None]) % 1.0).flatten()
        return noise.view(shape)

    def extra_repr(self) -> str:
        return f"{self.rate:g}"


def drop_path_rates(rate: float, depth: int, schedule: str) -> list[float]:
    """One rate per block: `uniform`, or `linear` from 0 at the first block to `rate` at the last."""
    if schedule == "uniform":
        return [rate] * depth
    return [rate * index / max(depth - 1, 1) for index in range(depth)]
