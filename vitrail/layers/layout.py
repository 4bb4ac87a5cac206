"""Where the tokens of a sequence lie in the image."""

from typing import NamedTuple, Protocol, runtime_checkable


@runtime_checkable
class OnGrid(Protocol):
    """A part with a table tied to the patch grid, which it can resample for another one."""

    def resize(self, grid: tuple[int, int]) -> None: ...


class Layout(NamedTuple):
    """`prefix` tokens first, then `height` x `width` patches in raster order."""

    height: int
    width: int
    prefix: int = 0

    @property
    def grid(self) -> tuple[int, int]:
        return self.height, self.width

    @property
    def patches(self) -> int:
        return self.height * self.width
