"""Where the student's classes lie among the teacher's."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from vitrail.data.source import Source
from vitrail.errors import UserError
from vitrail.evaluation.class_matching import match, read_ids

ADVICE = 'say which is which with mapping={"student\'s class": "teacher\'s class"}, or give WordNet ids with ids={…}'


class Classes(Protocol):
    """What is asked of a teacher, or of a store of its answers."""

    @property
    def classes(self) -> int: ...

    @property
    def class_names(self) -> list[str] | None: ...


class Chosen(NamedTuple):
    """Those of a teacher's classes that are the data's, in the data's order."""

    numbers: Tensor  # int64 [data's classes]: which of the teacher's
    names: list[str]  # as the data calls them
    how: str  # they were found, in words


def match_teacher(
    teacher: Classes,
    student_classes: Sequence[str],
    mapping: Mapping[str, Any] | None = None,
    ids: Mapping[str, str] | None = None,
) -> Tensor:
    """int64 [student's classes]: `teacher(images)[:, index]` are logits in the student's order.

    Classes are found by equal lists, by name or WordNet id, or in the order given where the teacher has no names for as many;
    `mapping` says for some of the student's classes which of the teacher's they are, by name or number; `ids` are WordNet ids of
    the student's classes.
    """
    return _choose(teacher, student_classes, "the student", mapping, ids, ADVICE).numbers


def match_data(teacher: Classes, source: Source, advice: str, data: str = "the data") -> Chosen:
    """The classes of a source among the teacher's, with the WordNet ids that lie beside the data."""
    return _choose(teacher, source.classes, data, None, read_ids(source.name), advice)


def _choose(
    teacher: Classes,
    wanted: Sequence[str],
    data: str,
    mapping: Mapping[str, Any] | None,
    ids: Mapping[str, str] | None,
    advice: str,
) -> Chosen:
    found = match(teacher.class_names, teacher.classes, wanted, data, mapping, ids, advice)
    index = []
    for name, answer in zip(wanted, found.answer.tolist(), strict=True):
        group = found.groups[answer] if answer >= 0 else []
        if len(group) != 1:
            raise UserError(f"The map gives the student's class {name!r} {len(group)} classes of the teacher; give it one.")
        index.append(group[0])
    twice = next((place for place in index if index.count(place) > 1), None) if len(set(index)) < len(index) else None
    if twice is not None:
        both = [name for name, place in zip(wanted, index, strict=True) if place == twice]
        raise UserError(
            f"The map gives {both[0]!r} and {both[1]!r} the same class {twice} of the teacher, which cannot tell them apart."
        )
    return Chosen(torch.tensor(index, dtype=torch.int64), list(wanted), found.how)
