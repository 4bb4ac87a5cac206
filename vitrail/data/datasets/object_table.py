"""The objects of all images of a split, in arrays: what the formats with boxes have in common."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vitrail.data.instance_masks import Shape
from vitrail.data.objects import Objects, make_objects

Row = Mapping[str, Any]  # of an object: box, class, and optionally flag, area and shape; see `make_objects`


class ObjectTable:
    """Objects by image. An image whose objects could not be read has the reason instead, which is raised when it is used."""

    def __init__(
        self,
        images: Sequence[Sequence[Row] | str],
        classes: tuple[str, ...],
        sizes: Sequence[tuple[int, int] | None] = (),
        relative: bool = False,
        notes: Sequence[str] = (),
    ) -> None:
        self.classes, self.relative, self.notes = classes, relative, tuple(notes)
        self._sizes = tuple(sizes)
        self._errors = {index: rows for index, rows in enumerate(images) if isinstance(rows, str)}
        lists: list[Sequence[Row]] = [() if isinstance(rows, str) else rows for rows in images]
        self._starts = np.cumsum([0, *map(len, lists)])
        every = make_objects([row for rows in lists for row in rows])
        self._columns = (every.boxes, every.classes, every.flags, every.areas)
        self._shapes: tuple[Shape, ...] = every.shapes

    @property
    def has_shapes(self) -> bool:
        return bool(self._shapes)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def read(self, index: int) -> Objects:
        if index in self._errors:
            raise ValueError(self._errors[index])
        rows = slice(*self._starts[index : index + 2].tolist())
        size = self._sizes[index] if self._sizes else None
        boxes, classes, flags, areas = (column[rows] for column in self._columns)
        return Objects(boxes, classes, flags, areas, self._shapes[rows], size, self.relative)
