"""Matching of the student's classes with the teacher's."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from vitrail.data.class_matching import match_classes, read_wordnet_ids
from vitrail.data.source import Source
from vitrail.errors import UserError

ADVICE = 'give mapping={"student\'s class": "teacher\'s class"}, or WordNet ids with ids={…}'


class HasClasses(Protocol):
    """A teacher or a label store."""

    @property
    def classes(self) -> int: ...

    @property
    def class_names(self) -> list[str] | None: ...


class ClassSubset(NamedTuple):
    """The teacher's classes that are those of the data, in the order of the data."""

    indices: Tensor  # int64 [data's classes]: indices of the teacher's classes
    names: list[str]  # of the data
    method: str  # how they were matched, for messages


def match_teacher(
    teacher: HasClasses,
    student_classes: Sequence[str],
    mapping: Mapping[str, Any] | None = None,
    ids: Mapping[str, str] | None = None,
) -> Tensor:
    """int64 [student's classes]: `teacher(images)[:, index]` are logits in the student's order.

    Classes are matched by equal lists, by name or WordNet id, or by position if the teacher has as many classes without names.
    `mapping` gives the teacher's class, by name or index, for some of the student's; `ids` are WordNet ids of the student's
    classes.
    """
    return _match(teacher, student_classes, "the student", mapping, ids, ADVICE).indices


def match_source(teacher: HasClasses, source: Source, advice: str, data: str = "the data") -> ClassSubset:
    """The classes of a source among the teacher's, with the WordNet ids stored with the data."""
    return _match(teacher, source.classes, data, None, read_wordnet_ids(source.name), advice)


def _match(
    teacher: HasClasses,
    names: Sequence[str],
    data: str,
    mapping: Mapping[str, Any] | None,
    ids: Mapping[str, str] | None,
    advice: str,
) -> ClassSubset:
    matched = match_classes(teacher.class_names, teacher.classes, names, data, mapping, ids, advice)
    students: dict[int, str] = {}  # by the teacher's class
    for name, target in zip(names, matched.targets.tolist(), strict=True):
        group = matched.groups[target] if target >= 0 else []
        if len(group) != 1:
            raise UserError(f"The map gives the student's class {name!r} {len(group)} classes of the teacher: give exactly one.")
        if group[0] in students:
            both = f"{students[group[0]]!r} and {name!r}"
            raise UserError(f"The map gives {both} the same class {group[0]} of the teacher: give different ones.")
        students[group[0]] = name
    return ClassSubset(torch.tensor(list(students), dtype=torch.int64), list(names), matched.method)
