"""Concatenation of sources."""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from vitrail.data.source import Encoded, Source


class ConcatSource(Source):
    """The images of several sources one after the other, without labels."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)
        self.name = sources[0].name
        self.label = sources[0].label if len(sources) == 1 else None
        self.extra = {}
        self._starts: list[int] = np.cumsum([0] + [len(source) for source in sources]).tolist()

    def __len__(self) -> int:
        return self._starts[-1]

    def encoded(self, index: int) -> Encoded:
        source, local = self._find(index)
        return source.encoded(local)

    def location(self, index: int) -> str:
        source, local = self._find(index)
        return source.location(local)

    @property
    def classes(self) -> list[str]:
        return self.sources[0].classes

    def _find(self, index: int) -> tuple[Source, int]:
        number = bisect_right(self._starts, index) - 1
        return self.sources[number], index - self._starts[number]


def join(sources: Sequence[Source]) -> Source:
    return sources[0] if len(sources) == 1 else ConcatSource(sources)
